"""PyTorch's side of train_step.py: the same stack as ours (RMSNorm, RoPE, causal SDPA, SwiGLU,
untied head), or GPT-2 (LayerNorm, GELU, learned positions, tied head). Each number on standard
input is that many training steps on random tokens, answered with "seconds peak_bytes loss"."""

import argparse
import contextlib
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        if hasattr(functional, "rms_norm"):
            return functional.rms_norm(x, self.weight.shape, self.weight, 1e-6)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def rotate(x, cosine, sine):
    """RoPE in halves: x [batch, heads, length, head width]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)


class Attention(nn.Module):
    def __init__(self, options, bias):
        super().__init__()
        self.heads = options.heads
        self.qkv = nn.Linear(options.width, 3 * options.width, bias=bias)
        self.out = nn.Linear(options.width, options.width, bias=bias)

    def forward(self, x, angles):
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, -1)
        )
        if angles is not None:
            q, k = rotate(q, *angles).to(v.dtype), rotate(k, *angles).to(v.dtype)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.gate = nn.Linear(options.width, options.feed_forward, bias=False)
        self.up = nn.Linear(options.width, options.feed_forward, bias=False)
        self.down = nn.Linear(options.feed_forward, options.width, bias=False)

    def forward(self, x):
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        gpt2 = options.model == "gpt2"
        norm = nn.LayerNorm if gpt2 else RMSNorm
        self.norm1, self.norm2 = norm(options.width), norm(options.width)
        self.attention = Attention(options, bias=gpt2)
        if gpt2:
            self.feed_forward = nn.Sequential(
                nn.Linear(options.width, 4 * options.width),
                nn.GELU(approximate="tanh"),
                nn.Linear(4 * options.width, options.width),
            )
        else:
            self.feed_forward = SwiGLU(options)

    def forward(self, x, angles):
        x = x + self.attention(self.norm1(x), angles)
        return x + self.feed_forward(self.norm2(x))


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        gpt2 = options.model == "gpt2"
        self.embedding = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.layers))
        self.norm = nn.LayerNorm(options.width) if gpt2 else RMSNorm(options.width)
        self.head = nn.Linear(options.width, options.vocabulary, bias=False)
        self.positions = None
        if gpt2:
            self.positions = nn.Parameter(0.02 * torch.randn(1024, options.width))
            self.head.weight = self.embedding.weight
        half = options.width // options.heads // 2
        frequency = 1e6 ** (-torch.arange(half) / half)
        angle = torch.arange(options.length)[:, None] * frequency
        self.register_buffer("cosine", angle.cos())
        self.register_buffer("sine", angle.sin())
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens, labels):
        x = self.embedding(tokens)
        angles = (self.cosine, self.sine)
        if self.positions is not None:
            x, angles = x + self.positions[: tokens.shape[1]], None
        for block in self.blocks:
            x = block(x, angles)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["same", "gpt2"], default="same")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    for name, value in [("width", 512), ("layers", 8), ("heads", 8), ("feed-forward", 1365),
                        ("vocabulary", 32000), ("batch", 4), ("length", 512)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    model = Model(options)
    if options.compile:
        model = torch.compile(model)
    # No clipping, though ours has it: the peer is given less to do.
    settings = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
    try:
        optimizer = torch.optim.AdamW(model.parameters(), fused=True, **settings)
    except RuntimeError:  # before 2.4 there is none on a CPU
        optimizer = torch.optim.AdamW(model.parameters(), **settings)
    loss = None
    for line in sys.stdin:
        start = time.monotonic()
        for _ in range(int(line)):
            tokens = torch.randint(options.vocabulary, (options.batch, options.length))
            with (torch.autocast("cpu", dtype=torch.bfloat16) if options.precision == "bf16"
                  else contextlib.nullcontext()):
                loss = model(tokens, tokens)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - start
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(seconds, peak, loss.item(), flush=True)


if __name__ == "__main__":
    main()
