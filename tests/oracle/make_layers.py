#!/usr/bin/python3
"""Writes the values that tests/layers/oracle_test.cc compares the layers with.

Each layer is written here from its formula with PyTorch's operators in float64, and PyTorch's
autograd gives the gradients: neither the forward nor the backward shares a line with ours.
Inputs are exact in float32. Needs PyTorch; run from the top folder:

    /usr/bin/python3 tests/oracle/make_layers.py
"""
import json
import math
import pathlib
import platform

import numpy
import torch

FOLDER = pathlib.Path(__file__).parent
torch.set_default_dtype(torch.float64)


def draw(generator, *shape, deviation=1.0, mean=0.0):
    values = mean + deviation * torch.randn(*shape, generator=generator)
    return values.float().double().requires_grad_()


def flat(tensor):
    return {"shape": list(tensor.shape),
            "values": [float(f"{v:.10g}") for v in tensor.detach().flatten().tolist()]}


def exact(tensor):
    # Inputs are float32 values: 9 digits bring them back exactly.
    return {"shape": list(tensor.shape),
            "values": [float(f"{v:.9g}") for v in tensor.detach().flatten().tolist()]}


def write(name, settings, inputs, out, d_out, extra=None):
    """inputs: name -> leaf. Stores them, the output, its gradient's seed and every gradient."""
    torch.autograd.backward(out, d_out)
    record = {"versions": {"torch": torch.__version__, "numpy": numpy.__version__,
                           "python": platform.python_version()},
              "settings": settings,
              "inputs": {key: exact(value) for key, value in inputs.items()},
              "out": flat(out),
              "d_out": exact(d_out),
              "gradients": {key: flat(value.grad) for key, value in inputs.items()}}
    record.update(extra or {})
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


def rms_norm(x, weight, epsilon=1e-6):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight


def rotate(x, theta):
    # x [B, T, H, n]
    length, width = x.shape[1], x.shape[3]
    frequencies = theta ** (-torch.arange(0, width, 2) / width)
    angles = torch.outer(torch.arange(length).double(), frequencies)
    angles = torch.cat([angles, angles], -1)[None, :, None, :]
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


def attention(x, p, heads, key_value_heads, width, theta, window, starts):
    batch, length, _ = x.shape
    q = (x @ p["q_proj.weight"].T).view(batch, length, heads, width)
    k = (x @ p["k_proj.weight"].T).view(batch, length, key_value_heads, width)
    v = (x @ p["v_proj.weight"].T).view(batch, length, key_value_heads, width)
    if "q_norm.weight" in p:
        q, k = rms_norm(q, p["q_norm.weight"]), rms_norm(k, p["k_norm.weight"])
    q, k = rotate(q, theta), rotate(k, theta)
    k = k.repeat_interleave(heads // key_value_heads, 2)
    v = v.repeat_interleave(heads // key_value_heads, 2)
    scores = torch.einsum("bihc,bjhc->bhij", q, k) / math.sqrt(width)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    segment = torch.tensor([max(s for s in starts if s <= t) for t in range(length)])[:, None]
    visible = (j <= i) & (i - j < window) & (j >= segment)
    probabilities = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
    o = torch.einsum("bhij,bjhc->bihc", probabilities, v).reshape(batch, length, heads * width)
    return o @ p["o_proj.weight"].T


def make_attention(name, seed, batch, length, width, heads, key_value_heads, head_width, window,
                   starts, norm):
    g = torch.Generator().manual_seed(seed)
    inputs = {"x": draw(g, batch, length, width),
              "q_proj.weight": draw(g, heads * head_width, width, deviation=width ** -0.5),
              "k_proj.weight": draw(g, key_value_heads * head_width, width, deviation=width ** -0.5),
              "v_proj.weight": draw(g, key_value_heads * head_width, width, deviation=width ** -0.5),
              "o_proj.weight": draw(g, width, heads * head_width,
                                    deviation=(heads * head_width) ** -0.5)}
    if norm:
        inputs["q_norm.weight"] = draw(g, head_width, deviation=0.3, mean=1.0)
        inputs["k_norm.weight"] = draw(g, head_width, deviation=0.3, mean=1.0)
    theta = 10000.0
    out = attention(inputs["x"], inputs, heads, key_value_heads, head_width, theta,
                    window or length, starts)
    write(name, {"batch": batch, "length": length, "width": width, "heads": heads,
                 "key_value_heads": key_value_heads, "head_width": head_width, "window": window,
                 "theta": theta, "starts": starts, "norm": norm},
          inputs, out, draw(g, *out.shape).detach())


def make_rms_norm():
    g = torch.Generator().manual_seed(1)
    inputs = {"x": draw(g, 7, 19), "weight": draw(g, 19, deviation=0.3, mean=1.0)}
    out = rms_norm(inputs["x"], inputs["weight"])
    write("rms_norm", {"rows": 7, "width": 19}, inputs, out, draw(g, *out.shape).detach())


def make_swiglu():
    g = torch.Generator().manual_seed(2)
    width, inner = 10, 27
    inputs = {"x": draw(g, 2, 9, width),
              "gate_proj.weight": draw(g, inner, width, deviation=width ** -0.5),
              "up_proj.weight": draw(g, inner, width, deviation=width ** -0.5),
              "down_proj.weight": draw(g, width, inner, deviation=inner ** -0.5)}
    x = inputs["x"]
    out = (torch.nn.functional.silu(x @ inputs["gate_proj.weight"].T)
           * (x @ inputs["up_proj.weight"].T)) @ inputs["down_proj.weight"].T
    write("swiglu", {"batch": 2, "length": 9, "width": width, "inner": inner}, inputs, out,
          draw(g, *out.shape).detach())


def make_ends():
    # Embedding, final norm, head and cross-entropy with some labels left out.
    g = torch.Generator().manual_seed(3)
    batch, length, width, vocabulary = 2, 11, 6, 23
    tokens = torch.randint(0, vocabulary, (batch, length), generator=g)
    labels = torch.randint(0, vocabulary, (batch, length), generator=g)
    labels[0, 3] = labels[1, 0] = labels[1, 10] = -1
    inputs = {"embedding": draw(g, vocabulary, width),
              "norm": draw(g, width, deviation=0.3, mean=1.0),
              "lm_head": draw(g, vocabulary, width, deviation=width ** -0.5)}
    x = torch.nn.functional.embedding(tokens, inputs["embedding"])
    x.retain_grad()
    logits = rms_norm(x, inputs["norm"]) @ inputs["lm_head"].T
    loss = torch.nn.functional.cross_entropy(logits.view(-1, vocabulary), labels.view(-1),
                                             ignore_index=-1, reduction="sum")
    write("ends", {"batch": batch, "length": length, "width": width, "vocabulary": vocabulary,
                   "tokens": tokens.flatten().tolist(), "labels": labels.flatten().tolist()},
          inputs, loss, torch.tensor(1.0))


if __name__ == "__main__":
    make_rms_norm()
    make_swiglu()
    make_ends()
    make_attention("full", 4, 2, 13, 8, 4, 2, 6, 0, [0], norm=False)
    make_attention("full_norm_documents", 5, 1, 140, 6, 4, 2, 4, 0, [0, 50, 127], norm=True)
    make_attention("sliding", 6, 2, 13, 8, 4, 2, 6, 4, [0, 7], norm=False)
    make_attention("sliding_long", 7, 1, 150, 6, 2, 1, 4, 9, [0], norm=False)
