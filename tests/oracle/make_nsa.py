#!/usr/bin/env python3
"""Writes the values that tests/layers/oracle_test.cc compares nsa and compress with.

nsa_fla.json: compressed attention, choice and selected attention are the naive functions of
flash-linear-attention (fla.ops.nsa.naive, MIT licence), which agree with ours where compressed
blocks lie side by side and are as long as the selected ones. nsa.json and compress.json: written
here from the formulas with PyTorch's operators, overlapping blocks and documents. Everything in
float64, gradients by autograd. Needs torch, einops, flash-linear-attention and fla-core; run from
the top folder:

    python3 tests/oracle/make_nsa.py
"""
import importlib.metadata
import math

import torch
from fla.ops.nsa import naive
from make_layers import draw, rotate, write

# The naive functions compute in float32 whatever they get; here they shall keep float64.
torch.Tensor.float = lambda tensor: tensor.double() if tensor.is_floating_point() else tensor


def segments_of(length, starts):
    return torch.tensor([max(s for s in starts if s <= t) for t in range(length)])


def parameters(g, d, heads, kv, n, block, inner, nsa):
    def matrix(rows, columns):
        return draw(g, rows, columns, deviation=columns ** -0.5)
    p = {"q_proj.weight": matrix(heads * n, d)}
    prefix = ""
    if nsa:
        p["gate_proj.weight"] = matrix(3 * heads, d)
        for branch in ("selected", "sliding"):
            p[f"{branch}_k_proj.weight"] = matrix(kv * n, d)
            p[f"{branch}_v_proj.weight"] = matrix(kv * n, d)
        prefix = "compressed_"
    p[prefix + "k_proj.weight"] = matrix(kv * n, d)
    p[prefix + "v_proj.weight"] = matrix(kv * n, d)
    for which in ("k", "v"):
        p[f"{prefix}{which}_compression.position"] = draw(g, block, n, deviation=0.5)
        p[f"{prefix}{which}_compression.in_proj.weight"] = matrix(inner, block * n)
        p[f"{prefix}{which}_compression.out_proj.weight"] = matrix(n, inner)
    p["o_proj.weight"] = matrix(d, heads * n)
    return p


def heads_of(x, weight, n):
    return (x @ weight.T).unflatten(-1, (-1, n))  # [B, T, heads, n]


def compress(x, p, which, n, block, stride, prefix):
    rows = heads_of(x, p[f"{prefix}{which}_proj.weight"], n)
    name = f"{prefix}{which}_compression."
    blocks = rows.unfold(1, block, stride).permute(0, 1, 2, 4, 3) + p[name + "position"]
    hidden = torch.nn.functional.silu(blocks.flatten(3) @ p[name + "in_proj.weight"].T)
    return hidden @ p[name + "out_proj.weight"].T  # [B, N, heads, n]


def attend(q, k, v, visible):
    # visible: broadcast to [B, kv, T, keys]; rows that see nothing give 0
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("bthc,bjhc->bhtj", q, k) / math.sqrt(q.shape[-1])
    visible = visible.expand(q.shape[0], -1, -1, -1)
    if visible.shape[1] > 1:
        visible = visible.repeat_interleave(group, 1)
    any_visible = visible.any(-1, keepdim=True)
    scores = scores.masked_fill(~visible & any_visible, -math.inf)
    probabilities = torch.softmax(scores, -1) * any_visible
    return torch.einsum("bhtj,bjhc->bthc", probabilities, v), probabilities


def block_visible(length, blocks, block, stride, segment):
    t, i = torch.arange(length)[:, None], torch.arange(blocks)[None, :]
    return ((stride * i >= segment[:, None]) & (stride * i + block - 1 <= t))[None, None]


def choose(probabilities, kv, block, stride, selected, most, segment):
    # [B, kv, T, blocks]: which blocks each position attends to
    batch, heads, length, count = probabilities.shape
    blocks = -(-length // selected)
    tokens = torch.arange(count)[:, None] * stride + torch.arange(0, block, stride)[None, :]
    pieces = torch.nn.functional.one_hot(tokens // selected, blocks).sum(1).double()
    importance = (probabilities.detach() @ pieces).unflatten(1, (kv, -1)).sum(2)
    chosen = torch.zeros(batch, kv, length, blocks, dtype=torch.bool)
    for t in range(length):
        first, own = int(segment[t]) // selected, t // selected
        if own - first + 1 <= most:
            chosen[:, :, t, first:own + 1] = True
            continue
        forced = [first, own - 1, own]
        chosen[:, :, t, forced] = True
        inner = importance[:, :, t, first + 1:own - 1]
        order = torch.sort(inner, dim=-1, descending=True, stable=True).indices + first + 1
        chosen[:, :, t].scatter_(-1, order[..., :most - 3], True)
    return chosen


def text(d, heads, kv, n, block, stride, inner, selected=None, most=None, window=None):
    compression = (f"compression {{ block_length: {block} block_stride: {stride} "
                   f"inner_width: {inner} }}")
    head = f"heads: {heads} key_value_heads: {kv} head_width: {n}"
    if selected is None:
        return f"compress {{ {head} {compression} }}"
    return (f"nsa {{ attention {{ {head} rope_theta: 10000 }} {compression} "
            f"selected_block_length: {selected} selected_blocks: {most} window: {window} }}")


def versions():
    return {name: importlib.metadata.version(name)
            for name in ("flash-linear-attention", "fla-core", "einops")}


def make_nsa(name, seed, batch, length, d, heads, kv, n, block, stride, inner, selected, most,
             window, starts, fla):
    g = torch.Generator().manual_seed(seed)
    p = {"x": draw(g, batch, length, d), **parameters(g, d, heads, kv, n, block, inner, True)}
    x, theta = p["x"], 10000.0
    segment = segments_of(length, starts)
    q = heads_of(x, p["q_proj.weight"], n)
    keys, values = (compress(x, p, which, n, block, stride, "compressed_") for which in "kv")
    rotated = rotate(q, theta)
    branch = {b: (rotate(heads_of(x, p[f"{b}_k_proj.weight"], n), theta),
                  heads_of(x, p[f"{b}_v_proj.weight"], n)) for b in ("selected", "sliding")}
    t, j = torch.arange(length)[:, None], torch.arange(length)[None, :]
    causal = (j <= t) & (j >= segment[:, None])
    if fla:
        # One group of the choice's own kind: blocks side by side, each its own candidate.
        scale = n ** -0.5
        compressed, _ = naive.naive_nsa_compression(q, keys, values, block, scale)
        with torch.no_grad():
            indices = naive.naive_nsa_topk(q, keys, most, block, scale)
        chosen_out = naive.naive_nsa_selection(rotated, *branch["selected"], indices, block, scale)
    else:
        visible = block_visible(length, keys.shape[1], block, stride, segment)
        compressed, probabilities = attend(q, keys, values, visible)
        chosen = choose(probabilities, kv, block, stride, selected, most, segment)
        inside = chosen.repeat_interleave(selected, -1)[..., :length] & causal
        chosen_out, _ = attend(rotated, *branch["selected"], inside)
    sliding, _ = attend(rotated, *branch["sliding"], (causal & (t - j < window))[None, None])
    gates = torch.sigmoid(x @ p["gate_proj.weight"].T).unflatten(-1, (heads, 3))
    mixed = sum(gates[..., b, None] * o for b, o in enumerate((compressed, chosen_out, sliding)))
    out = mixed.flatten(2) @ p["o_proj.weight"].T
    write(name, {"batch": batch, "length": length, "width": d, "starts": starts, "type": "nsa",
                 "mixer": text(d, heads, kv, n, block, stride, inner, selected, most, window),
                 "parts": versions() if fla else {}},
          p, out, draw(g, *out.shape).detach())


def make_compress(name, seed, batch, length, d, heads, kv, n, block, stride, inner, starts):
    g = torch.Generator().manual_seed(seed)
    p = {"x": draw(g, batch, length, d), **parameters(g, d, heads, kv, n, block, inner, False)}
    x = p["x"]
    keys, values = (compress(x, p, which, n, block, stride, "") for which in "kv")
    visible = block_visible(length, keys.shape[1], block, stride, segments_of(length, starts))
    mixed, _ = attend(heads_of(x, p["q_proj.weight"], n), keys, values, visible)
    out = mixed.flatten(2) @ p["o_proj.weight"].T
    write(name, {"batch": batch, "length": length, "width": d, "starts": starts,
                 "type": "compress", "mixer": text(d, heads, kv, n, block, stride, inner)},
          p, out, draw(g, *out.shape).detach())


if __name__ == "__main__":
    make_nsa("nsa_fla", 11, 2, 160, 6, 4, 2, 4, 16, 16, 5, 16, 4, 11, [0], fla=True)
    # The flagship's sizes, long enough that a position has more than 16 blocks to choose from.
    make_nsa("nsa", 12, 1, 1280, 4, 2, 1, 4, 32, 16, 5, 64, 16, 512, [0, 70], fla=False)
    make_compress("compress", 13, 2, 131, 6, 4, 2, 4, 32, 16, 5, [0, 33])
