#!/usr/bin/python3
"""Writes adamw.json: what torch.optim.AdamW makes of a few steps, in float64.

Each case clips by global norm as torch.nn.utils.clip_grad_norm_ does, whose 1e-6 in the divisor is
far below the test's tolerance at the norms used here. Inputs are float32 values.

Usage: make_adamw.py [OUTPUT]
"""
import json
import os
import sys

import numpy
import torch

COUNT = 37
STEPS = 6
CASES = [
    # learning rates by step, betas, epsilon, weight decay, clip norm
    ([3e-3] * STEPS, (0.9, 0.95), 1e-8, 0.1, 1.0),
    ([1e-2 * (s + 1) / STEPS for s in range(STEPS)], (0.9, 0.999), 1e-8, 0.0, 0.0),
    ([5e-2, 4e-2, 3e-2, 2e-2, 1e-2, 5e-3], (0.8, 0.99), 1e-3, 0.5, 3.0),
    ([1e-3] * STEPS, (0.0, 0.0), 1e-6, 0.01, 0.0),
]


def run(case, random):
    rates, betas, epsilon, decay, clip = case
    weights = random.standard_normal(COUNT).astype(numpy.float32)
    size = 800 if clip > 0 else 8
    gradients = (size * random.standard_normal((STEPS, COUNT))).astype(numpy.float32)
    gradients[:, 3] = 0  # an element that never gets a gradient
    parameter = torch.nn.Parameter(torch.tensor(weights, dtype=torch.float64))
    optimizer = torch.optim.AdamW([parameter], lr=0, betas=betas, eps=epsilon, weight_decay=decay)
    steps = []
    for rate, gradient in zip(rates, gradients):
        parameter.grad = torch.tensor(gradient, dtype=torch.float64)
        norm = float(torch.linalg.vector_norm(parameter.grad))
        if clip > 0:
            torch.nn.utils.clip_grad_norm_([parameter], clip)
        optimizer.param_groups[0]["lr"] = rate
        optimizer.step()
        state = optimizer.state[parameter]
        steps.append({
            "learning_rate": rate,
            "norm": norm,
            "gradient": [float(g) for g in gradient],
            "weights": parameter.detach().tolist(),
            "first": state["exp_avg"].tolist(),
            "second": state["exp_avg_sq"].tolist(),
        })
    return {
        "beta1": betas[0], "beta2": betas[1], "epsilon": epsilon, "weight_decay": decay,
        "clip_norm": clip, "weights": [float(w) for w in weights], "steps": steps,
    }


def main():
    here = os.path.dirname(os.path.abspath(__file__))
    output = sys.argv[1] if len(sys.argv) > 1 else os.path.join(here, "adamw.json")
    random = numpy.random.Generator(numpy.random.PCG64(20260530))
    document = {
        "made_by": "tests/oracle/make_adamw.py",
        "versions": {"torch": torch.__version__, "numpy": numpy.__version__,
                     "python": sys.version.split()[0]},
        "cases": [run(case, random) for case in CASES],
    }
    with open(output, "w", encoding="utf-8") as file:
        json.dump(document, file, indent=0)
        file.write("\n")


if __name__ == "__main__":
    main()
