"""PyTorch's side of experts.py: a feed-forward of experts in the ways that we know for a CPU, from
the same formulas, forward and backward into the input and every parameter. Each number on standard
input is that many repetitions, answered with "seconds peak_bytes flops largest_load" as
experts.cc."""

import argparse
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional


def swiglu(gate_up):
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate) * up


class Experts(nn.Module):
    """Gate and up are one matrix: one product each way."""

    def __init__(self, options):
        super().__init__()
        self.experts, self.active, self.way = options.experts, options.active, options.way
        d, m, n = options.width, options.inner, options.experts
        row = options.latent or d

        def matrix(*shape):
            return nn.Parameter(0.02 * torch.randn(shape))

        self.router = matrix(n, d)
        self.gate_up, self.down = matrix(n, 2 * m, row), matrix(n, row, m)
        self.shared_in, self.shared_out = matrix(2 * options.shared, d), matrix(d, options.shared)
        self.latent = options.latent > 0
        if self.latent:
            self.latent_in, self.latent_out = matrix(row, d), matrix(d, row)
        self.capacity = 0

    def loop(self, rows, counts):
        parts = rows.split(counts.tolist())
        return torch.cat([functional.linear(swiglu(functional.linear(part, gate_up)), down)
                          for part, gate_up, down in zip(parts, self.gate_up, self.down)])

    def grouped(self, rows, counts):
        ends = counts.cumsum(0).to(torch.int32)
        hidden = swiglu(functional.grouped_mm(rows, self.gate_up.transpose(1, 2), offs=ends))
        return functional.grouped_mm(hidden, self.down.transpose(1, 2), offs=ends)

    def routed(self, x, weights, chosen):
        flat = chosen.flatten()
        counts = torch.bincount(flat, minlength=self.experts)
        if self.way == "dense":
            scale = torch.zeros(x.shape[0], self.experts, dtype=x.dtype)
            scale = scale.scatter(1, chosen, weights.to(x.dtype))
            hidden = swiglu(torch.einsum("td,nmd->ntm", x, self.gate_up))
            y = torch.einsum("ntm,ndm->td", hidden * scale.t()[..., None], self.down)
            return y, counts
        order = flat.argsort(stable=True)
        token = order // self.active
        if self.way == "bmm":
            if self.capacity == 0:  # once, so that shapes don't depend on data
                self.capacity = int(counts.max())
            most = self.capacity
            start = counts.cumsum(0) - counts
            expert = flat[order]
            place = expert * most + torch.arange(order.numel()) - start[expert]
            rows = torch.zeros(self.experts * most, x.shape[1], dtype=x.dtype)
            rows = rows.index_copy(0, place, x.index_select(0, token))
            hidden = swiglu(torch.bmm(rows.unflatten(0, (self.experts, most)),
                                      self.gate_up.transpose(1, 2)))
            out = torch.bmm(hidden, self.down.transpose(1, 2)).flatten(0, 1)
            out = out.index_select(0, place)
        else:
            out = getattr(self, self.way)(x.index_select(0, token), counts)
        out = out * weights.flatten()[order].to(x.dtype)[:, None]
        return torch.zeros_like(x).index_add(0, token, out), counts

    def forward(self, x):
        logits = functional.linear(x.float(), self.router)
        p = logits.softmax(-1)
        weights, chosen = p.topk(self.active, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        z = functional.linear(x, self.latent_in) if self.latent else x
        y, counts = self.routed(z, weights, chosen)
        if self.latent:
            y = functional.linear(y, self.latent_out)
        y = y + functional.linear(swiglu(functional.linear(x, self.shared_in)), self.shared_out)
        share = counts / chosen.numel()
        balance = self.experts * (share * p.mean(0)).sum()
        loss = 0.01 * balance + 1e-3 * logits.logsumexp(-1).square().mean()
        return y, loss, counts


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--way", choices=["loop", "grouped", "bmm", "dense"], default="loop")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="bf16")
    parser.add_argument("--threads", type=int, default=2)
    for name, value in [("length", 4096), ("width", 2048), ("experts", 25), ("active", 7),
                        ("inner", 640), ("shared", 1536), ("latent", 0)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    torch.set_flush_denormal(True)
    layer = Experts(options)
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    for name, parameter in layer.named_parameters():
        if name != "router":
            parameter.data = parameter.data.to(dtype)
    x = torch.randn(options.length, options.width, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        layer(x)
    run = torch.compile(layer) if options.compile else layer
    d_out = torch.randn(options.length, options.width, dtype=dtype)
    one = torch.ones(())
    row = options.latent or options.width
    flops = 2 * (options.experts * options.width + 3 * row * options.inner * options.active
                 + 3 * options.width * options.shared + 2 * options.width * options.latent)
    for line in sys.stdin:
        start = time.monotonic()
        for _ in range(int(line)):
            y, loss, counts = run(x)
            torch.autograd.backward((y, loss), (d_out, one))
            x.grad = None
            layer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - start
        print(seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
              3 * flops * options.length, float(counts.max() / counts.float().mean()), flush=True)


if __name__ == "__main__":
    main()
