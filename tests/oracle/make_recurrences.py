#!/usr/bin/env python3
"""Writes the values that tests/layers/recurrence_oracle_test.cc compares mamba2, linear and the scan with.

mamba2 is transformers' Mamba2Mixer on the CPU, its path without kernels; the recurrence of linear is
flash-linear-attention's naive_recurrent_simple_gla under a gate and norm written here. Autograd gives
the gradients. Inputs are exact in float32. Needs torch, transformers and flash-linear-attention's
sources; run from the top folder:

    python3 tests/oracle/make_recurrences.py
"""
import importlib.metadata
import importlib.util
import json
import pathlib

import torch

FOLDER = pathlib.Path(__file__).parent
torch.set_default_dtype(torch.float64)


def draw(generator, *shape, deviation=1.0, mean=0.0):
    values = mean + deviation * torch.randn(*shape, generator=generator)
    return values.float().double().requires_grad_()


def flat(tensor, digits):
    return {"shape": list(tensor.shape),
            "values": [float(f"{v:.{digits}g}") for v in tensor.detach().flatten().tolist()]}


def write(name, packages, settings, inputs, out, d_out):
    torch.autograd.backward(out, d_out)
    record = {"versions": {p: importlib.metadata.version(p) for p in packages},
              "settings": settings,
              "inputs": {key: flat(value, 9) for key, value in inputs.items()},
              "out": flat(out, 10), "d_out": flat(d_out, 9),
              "gradients": {key: flat(value.grad, 10) for key, value in inputs.items()}}
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


def make_mamba2(name, seed, length, width, head_width, state_width, groups, chunk):
    from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer
    heads = 2 * width // head_width
    mixer = Mamba2Mixer(Mamba2Config(
        hidden_size=width, num_heads=heads, head_dim=head_width, state_size=state_width, expand=2,
        n_groups=groups, conv_kernel=4, use_conv_bias=True, use_bias=False, chunk_size=chunk,
        layer_norm_epsilon=1e-5, num_hidden_layers=1, time_step_limit=(0.0, float("inf"))), 0)
    mixer = mixer.double()
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": draw(g, 1, length, width)}
    for key, parameter in mixer.named_parameters():
        shape = parameter.shape
        mean, deviation = {"A_log": (0.0, 0.7), "dt_bias": (-1.5, 0.7), "D": (1.0, 0.3),
                           "norm.weight": (1.0, 0.3)}.get(key, (0.0, shape[-1] ** -0.5))
        if key == "conv1d.bias":
            deviation = 0.3
        with torch.no_grad():
            parameter.copy_(draw(g, *shape, deviation=deviation, mean=mean))
        inputs[key] = parameter
    out = mixer(inputs["x"])
    out = out[0] if isinstance(out, tuple) else out
    assert out.dtype == torch.float64
    write(name, ["torch", "transformers"],
          {"length": length, "width": width, "head_width": head_width, "state_width": state_width,
           "groups": groups, "chunk": chunk}, inputs, out, draw(g, *out.shape).detach())


def naive_recurrence():
    package = importlib.util.find_spec("fla").submodule_search_locations[0]
    path = pathlib.Path(package) / "ops" / "simple_gla" / "naive.py"
    spec = importlib.util.spec_from_file_location("naive", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.naive_recurrent_simple_gla


def make_linear(name, seed, length, width, heads, key_heads, n):
    recurrence = naive_recurrence()
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": draw(g, 1, length, width)}
    for key, rows in {"q_proj": heads * n, "k_proj": key_heads * n, "v_proj": key_heads * n,
                      "dt_proj": heads}.items():
        inputs[key + ".weight"] = draw(g, rows, width, deviation=width ** -0.5)
    inputs["A_log"] = draw(g, heads, deviation=0.7)
    inputs["dt_bias"] = draw(g, heads, deviation=0.7, mean=-1.5)
    inputs["g_proj.weight"] = draw(g, heads * n, width, deviation=width ** -0.5)
    inputs["norm.weight"] = draw(g, n, deviation=0.3, mean=1.0)
    inputs["o_proj.weight"] = draw(g, width, heads * n, deviation=(heads * n) ** -0.5)
    p, x, silu = inputs, inputs["x"], torch.nn.functional.silu
    group = heads // key_heads
    q = silu(x @ p["q_proj.weight"].T).view(1, length, heads, n)
    k = silu(x @ p["k_proj.weight"].T).view(1, length, key_heads, n).repeat_interleave(group, 2)
    v = (x @ p["v_proj.weight"].T).view(1, length, key_heads, n).repeat_interleave(group, 2)
    dt = torch.nn.functional.softplus(x @ p["dt_proj.weight"].T + p["dt_bias"])
    # It asks for float32, which would be no reference for float32.
    to_float, torch.Tensor.float = torch.Tensor.float, torch.Tensor.double
    o, _ = recurrence(q, k * dt.unsqueeze(-1), v, -p["A_log"].exp() * dt)
    torch.Tensor.float = to_float
    u = o * torch.sigmoid(x @ p["g_proj.weight"].T).view(1, length, heads, n)
    u = u * torch.rsqrt(u.pow(2).mean(-1, keepdim=True) + 1e-6) * p["norm.weight"]
    out = u.reshape(1, length, heads * n) @ p["o_proj.weight"].T
    write(name, ["torch", "flash-linear-attention"],
          {"length": length, "width": width, "heads": heads, "key_heads": key_heads,
           "head_width": n}, inputs, out, draw(g, *out.shape).detach())


if __name__ == "__main__":
    make_mamba2("mamba2", 11, 37, 8, 4, 5, 1, 16)
    make_mamba2("mamba2_long", 12, 270, 4, 4, 3, 2, 64)
    make_linear("linear", 13, 141, 6, 4, 2, 3)
