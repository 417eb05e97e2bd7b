#!/usr/bin/env python3
"""Writes differential.json, which tests/layers/differential_test.cc compares the mixer with.

The values come from DiffLlama of the transformers package, in float64, by PyTorch's autograd. Its
heads are our maps: with n our head's width, its 2H query and 2Hk key heads have width n/2, head h
is our head h's first half and head H + h its second; its value heads h and Hk + h are the halves of
our value head h. So its weights are ours with the rows of each projection in another order. Needs
torch and transformers; run from the top folder:

    python3 tests/oracle/make_differential.py
"""
import json
import pathlib
import platform

import numpy
import torch
import transformers
from transformers.models.diffllama import modeling_diffllama as diffllama

FOLDER = pathlib.Path(__file__).parent
torch.set_default_dtype(torch.float64)


def draw(generator, *shape, deviation=1.0):
    values = deviation * torch.randn(*shape, generator=generator)
    return values.float().double().requires_grad_()


def stored(tensor, digits):
    return {"shape": list(tensor.shape),
            "values": [float(f"{v:.{digits}g}") for v in tensor.detach().flatten().tolist()]}


def halves_apart(weight, heads):
    # [heads, 2, n/2, d] -> [2, heads, n/2, d]
    rows, width = weight.shape
    return weight.view(heads, 2, rows // heads // 2, width).transpose(0, 1).reshape(rows, width)


def make(name, seed, batch, length, width, heads, key_value_heads, head_width, layer, starts):
    g = torch.Generator().manual_seed(seed)
    theta = 10000.0
    inputs = {"x": draw(g, batch, length, width),
              "q_proj.weight": draw(g, heads * head_width, width, deviation=width ** -0.5),
              "k_proj.weight": draw(g, key_value_heads * head_width, width,
                                    deviation=width ** -0.5),
              "v_proj.weight": draw(g, key_value_heads * head_width, width,
                                    deviation=width ** -0.5),
              "o_proj.weight": draw(g, width, heads * head_width,
                                    deviation=(heads * head_width) ** -0.5)}
    for vector in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
        inputs[vector] = draw(g, head_width // 2, deviation=0.3)
    config = diffllama.DiffLlamaConfig(
        hidden_size=width, num_attention_heads=2 * heads, num_key_value_heads=2 * key_value_heads,
        head_dim=head_width // 2, max_position_embeddings=length, rms_norm_eps=1e-5,
        attention_bias=False, attention_dropout=0.0, num_hidden_layers=layer + 1,
        rope_parameters={"rope_type": "default", "rope_theta": theta})
    config._attn_implementation = "eager"
    attention = diffllama.DiffLlamaAttention(config, layer_idx=layer).double().eval()
    weights = {"q_proj.weight": halves_apart(inputs["q_proj.weight"], heads),
               "k_proj.weight": halves_apart(inputs["k_proj.weight"], key_value_heads),
               "v_proj.weight": halves_apart(inputs["v_proj.weight"], key_value_heads),
               "o_proj.weight": inputs["o_proj.weight"],
               **{key: inputs[key] for key in inputs if key.startswith("lambda_")}}
    assert set(weights) == {key for key, _ in attention.named_parameters()}
    # The angles in float64: the package computes them in float32.
    frequencies = theta ** (-torch.arange(0, head_width // 2, 2) / (head_width // 2))
    angles = torch.outer(torch.arange(length).double(), frequencies).repeat(1, 2)[None]
    i, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    segment = torch.tensor([max(s for s in starts if s <= t) for t in range(length)])[:, None]
    mask = torch.zeros(1, 1, length, length)
    mask.masked_fill_(~((j <= i) & (j >= segment)), -torch.inf)
    # The softmax's float32 would be all that differs from float64.
    softmax = torch.nn.functional.softmax
    torch.nn.functional.softmax = lambda x, dim, dtype=None: softmax(x, dim=dim)
    out = torch.func.functional_call(
        attention, weights,
        (inputs["x"],), {"position_embeddings": (angles.cos(), angles.sin()),
                         "attention_mask": mask})[0]
    torch.nn.functional.softmax = softmax
    d_out = draw(g, *out.shape).detach()
    torch.autograd.backward(out, d_out)
    record = {"versions": {"torch": torch.__version__, "transformers": transformers.__version__,
                           "numpy": numpy.__version__, "python": platform.python_version()},
              "settings": {"batch": batch, "length": length, "width": width, "heads": heads,
                           "key_value_heads": key_value_heads, "head_width": head_width,
                           "theta": theta, "layer": layer, "starts": starts},
              "inputs": {key: stored(value, 9) for key, value in inputs.items()},
              "out": stored(out, 10), "d_out": stored(d_out, 9),
              "gradients": {key: stored(value.grad, 10) for key, value in inputs.items()}}
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps(record, separators=(",", ":")) + "\n")
    print(path, path.stat().st_size)


if __name__ == "__main__":
    make("differential", 8, 2, 13, 8, 4, 2, 8, 3, [0])
    make("differential_documents", 9, 1, 140, 6, 2, 1, 8, 17, [0, 50, 127])
