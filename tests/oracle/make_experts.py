#!/usr/bin/python3
"""Writes the values that tests/layers/experts_test.cc compares the mixture of experts with.

Written from its formulas with PyTorch's operators in float64: every expert sees every token and a
mask of weights decides what counts, which no line of ours does; PyTorch's autograd gives the
gradients of the output and of the router's own losses. Inputs are exact in float32. Needs
PyTorch; run from the top folder:

    /usr/bin/python3 tests/oracle/make_experts.py
"""
import json
import math
import pathlib
import platform

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)
PATH = pathlib.Path(__file__).parent / "experts.json"


def draw(generator, *shape, deviation=1.0, mean=0.0):
    values = mean + deviation * torch.randn(*shape, generator=generator)
    return values.float().double().requires_grad_()


def stored(tensor, digits):
    return {"shape": list(tensor.shape),
            "values": [float(f"{v:.{digits}g}") for v in tensor.detach().flatten().tolist()]}


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


def mixture(s, p):
    x = p["x"]
    log_probabilities = F.log_softmax(x @ p["router.weight"].T, -1)
    probabilities = log_probabilities.exp()
    score = probabilities.detach() + torch.tensor(s["bias"] or [0.0] * s["experts"])
    chosen = F.one_hot(score.topk(s["active"], -1).indices, s["experts"]).sum(-2)  # [B, T, N]
    weights = probabilities * chosen
    if s["renormalise"]:
        weights = weights / weights.sum(-1, keepdim=True)
    # A slot is taken while fewer than `capacity` earlier positions of the sequence took one.
    kept = chosen
    if s["capacity_factor"] > 0:
        capacity = math.ceil(s["capacity_factor"] * s["length"] * s["active"] / s["experts"])
        kept = chosen * (chosen.cumsum(1) <= capacity)
    weights = weights * kept

    z = x @ p["latent_down.weight"].T if s["latent"] else x
    out = torch.zeros_like(z)
    for e in range(s["experts"]):
        y = swiglu(z, *(p[f"experts.{name}_proj.weight"][e] for name in ("gate", "up", "down")))
        out = out + weights[..., e:e + 1] * y
    if s["norm"]:
        out = out * torch.rsqrt(out.pow(2).mean(-1, keepdim=True) + 1e-6)
        out = out * p["latent_norm.weight"]
    if s["latent"]:
        out = out @ p["latent_up.weight"].T
    if s["shared"]:
        out = out + swiglu(x, *(p[f"shared_expert.{name}_proj.weight"]
                                for name in ("gate", "up", "down")))

    share = chosen.double().mean(1) / s["active"]  # [B, N], no gradient
    auxiliary = s["experts"] * (share * probabilities.mean(1)).sum(-1)
    square = torch.logsumexp(x @ p["router.weight"].T, -1).pow(2)
    losses = (s["auxiliary"] * auxiliary.sum() / s["step_sequences"]
              + s["z"] * square.sum() / (s["step_sequences"] * s["length"]))
    entropy = -(probabilities * log_probabilities).sum()
    statistics = {"loads": chosen.sum((0, 1)).tolist(), "dropped": int((chosen - kept).sum()),
                  "auxiliary": float(auxiliary.detach().sum()),
                  "z": float(square.detach().sum()),
                  "entropy": float(entropy.detach())}
    return out, losses, statistics


def case(seed, **settings):
    s = {"batch": 2, "length": 11, "width": 8, "experts": 6, "active": 3, "inner": 5, "shared": 0,
         "latent": 0, "norm": False, "renormalise": True, "auxiliary": 0.7, "z": 0.3,
         "step_sequences": 3, "capacity_factor": 0.0, "bias": []} | settings
    generator = torch.Generator().manual_seed(seed)
    d, n, m, row = s["width"], s["experts"], s["inner"], s["latent"] or s["width"]

    def matrix(*shape):
        return draw(generator, *shape, deviation=shape[-1] ** -0.5)
    p = {"x": draw(generator, s["batch"], s["length"], d), "router.weight": matrix(n, d)}
    if s["latent"]:
        p["latent_down.weight"] = matrix(row, d)
        if s["norm"]:
            p["latent_norm.weight"] = draw(generator, row, deviation=0.3, mean=1.0)
        p["latent_up.weight"] = matrix(d, row)
    if s["shared"]:
        p["shared_expert.gate_proj.weight"] = matrix(s["shared"], d)
        p["shared_expert.up_proj.weight"] = matrix(s["shared"], d)
        p["shared_expert.down_proj.weight"] = matrix(d, s["shared"])
    p["experts.gate_proj.weight"] = matrix(n, m, row)
    p["experts.up_proj.weight"] = matrix(n, m, row)
    p["experts.down_proj.weight"] = matrix(n, row, m)
    d_out = draw(generator, s["batch"], s["length"], d)

    out, losses, statistics = mixture(s, p)
    ((out * d_out.detach()).sum() + losses).backward()
    return {"settings": s,
            "inputs": {key: stored(value, 9) for key, value in p.items()},
            "d_out": stored(d_out, 9),
            "out": stored(out, 10),
            "statistics": statistics,
            "gradients": {key: stored(value.grad, 10) for key, value in p.items()}}


record = {"versions": {"torch": torch.__version__, "python": platform.python_version()},
          "cases": {
              "mixture": case(1, shared=5),
              "one_expert_a_token": case(2, active=1, renormalise=False),
              "all_experts": case(3, experts=4, active=4, shared=6),
              "capacity": case(4, shared=5, capacity_factor=0.75),
              "bias": case(5, bias=[0.25, 0.0, -0.25, 0.125, -0.5, 0.0625]),
              "latent": case(6, latent=5, shared=4, renormalise=False),
              "latent_norm": case(7, latent=5, norm=True, shared=4),
              "latent_capacity": case(8, latent=5, norm=True, renormalise=False,
                                      capacity_factor=0.5)}}
PATH.write_text(json.dumps(record, separators=(",", ":")) + "\n")
print(PATH, PATH.stat().st_size)
