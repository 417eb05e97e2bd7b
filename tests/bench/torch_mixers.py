"""PyTorch's side of mixers.py: each mixer written the fastest way that we know for a CPU, from the
same formulas, forward and backward into the input and every parameter. Each number on standard
input is that many repetitions, answered with "seconds peak_bytes"."""

import argparse
import resource
import sys
import time

import torch
from torch import nn
from torch.nn import functional

WINDOW, STRIDE, BLOCK, SELECTED, COUNT = 512, 16, 32, 64, 16
CHUNK = 64  # of 32, 64, 128 and 256 the fastest here


def linear(width_in, width_out):
    return nn.Linear(width_in, width_out, bias=False)


def rms_norm(x, weight=None, epsilon=1e-6):
    return functional.rms_norm(x, x.shape[-1:], weight, epsilon)


class Mixer(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.width, self.length = options.width, options.length
        self.heads, self.shared, self.head_width = options.heads, options.shared, options.head_width
        self.group = self.heads // self.shared

    def table(self, width):
        half = width // 2
        angle = torch.arange(self.length)[:, None] * 1e6 ** (-torch.arange(half) / half)
        return angle.cos(), angle.sin()

    def split(self, x, heads):
        return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

    @staticmethod
    def merge(x):
        return x.transpose(1, 2).flatten(2)

    @staticmethod
    def rotate(x, table):
        cosine, sine = table
        first, second = x.chunk(2, -1)
        turned = torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
        return turned.to(x.dtype)

    def attend(self, q, k, v, **more):
        return functional.scaled_dot_product_attention(q, k, v, enable_gqa=self.group > 1, **more)


class Softmax(Mixer):
    """full; with a window in blocks of that many queries, each of which sees two blocks of keys."""

    def __init__(self, options, window=None):
        super().__init__(options)
        inner = self.shared * self.head_width
        self.q = linear(self.width, self.heads * self.head_width)
        self.k, self.v = linear(self.width, inner), linear(self.width, inner)
        self.window = window
        self.angles = self.table(self.head_width)

    def attention(self, x):
        q = self.rotate(self.split(self.q(x), self.heads), self.angles)
        k = self.rotate(self.split(self.k(x), self.shared), self.angles)
        v = self.split(self.v(x), self.shared)
        if self.window is None:
            return self.merge(self.attend(q, k, v, is_causal=True))
        return self.merge(self.banded(q, k, v))

    def banded(self, q, k, v):
        w = self.window
        batch, _, length, width = q.shape
        blocks = length // w

        def pairs(x):  # [B * blocks, heads, 2 w, width]
            x = functional.pad(x, (0, 0, w, 0)).unflatten(2, (blocks + 1, w))
            x = torch.cat((x[:, :, :-1], x[:, :, 1:]), 3)
            return x.transpose(1, 2).flatten(0, 1)

        i, j = torch.arange(w)[:, None] + w, torch.arange(2 * w)
        seen = (j <= i) & (i - j < w)
        first = torch.arange(blocks)[:, None, None] > 0
        mask = (seen & (first | (j >= w))).repeat(batch, 1, 1)[:, None]
        q = q.unflatten(2, (blocks, w)).transpose(1, 2).flatten(0, 1)
        y = self.attend(q, pairs(k), pairs(v), attn_mask=mask)
        return y.unflatten(0, (batch, blocks)).transpose(1, 2).reshape(batch, -1, length, width)

    def forward(self, x):
        return self.attention(x)


class Differential(Mixer):
    """Both maps in one call of twice as many heads, keys padded to the values' width: so the fused
    kernel takes them."""

    def __init__(self, options):
        super().__init__(options)
        inner = self.shared * self.head_width
        self.q = linear(self.width, self.heads * self.head_width)
        self.k, self.v = linear(self.width, inner), linear(self.width, inner)
        self.vectors = nn.Parameter(0.1 * torch.randn(4, self.head_width // 2))
        self.angles = self.table(self.head_width // 2)
        self.start = 0.8 - 0.6 * 2.718281828 ** (-0.3 * options.layer)

    def forward(self, x):
        half = self.head_width // 2

        def halves(y, heads):  # [B, 2 heads, T, half], the first halves first
            y = y.unflatten(-1, (heads, 2, half)).permute(0, 3, 2, 1, 4).flatten(1, 2)
            return functional.pad(self.rotate(y, self.angles), (0, half))

        v = self.split(self.v(x), self.shared)
        y = self.attend(halves(self.q(x), self.heads), halves(self.k(x), self.shared),
                        torch.cat((v, v), 1), is_causal=True, scale=half ** -0.5)
        first, second = y.chunk(2, 1)
        a, b, c, d = self.vectors.float()
        scale = (a @ b).exp() - (c @ d).exp() + self.start
        return self.merge(rms_norm(first - scale * second, epsilon=1e-5) * (1 - self.start))


def scan(q, k, v, decay, step, chunk):
    """S_t = e^decay_t S_{t-1} + step_t k_t v_t', o_t = S_t' q_t, in chunks: q, k [B, T, G, n], v
    [B, T, H, p], decay (a logarithm), step [B, T, H]."""
    batch, length, heads, _ = v.shape
    chunks = length // chunk

    def cut(x):
        return x.unflatten(1, (chunks, chunk)).transpose(2, 3)

    q, k, v, decay, step = (cut(x) for x in (q, k, v, decay[..., None], step[..., None]))
    summed = decay[..., 0].cumsum(-1)  # [B, c, H, l]
    below = torch.ones(chunk, chunk, dtype=torch.bool).tril()
    within = (summed[..., :, None] - summed[..., None, :]).masked_fill(~below, -torch.inf).exp()
    scores = q @ k.transpose(-1, -2)  # [B, c, G, l, l]
    v = v * step.to(v.dtype)

    def wide(x):
        return x.repeat_interleave(heads // x.shape[2], 2) if heads != x.shape[2] else x

    y = (wide(scores) * within).to(v.dtype) @ v
    last = (summed[..., -1:] - summed).exp()[..., None]
    states = (wide(k) * last).to(v.dtype).transpose(-1, -2) @ v  # [B, c, H, n, p]
    total = functional.pad(summed[..., -1], (0, 0, 1, 0)).cumsum(1)  # [B, c + 1, H]
    carry = (total[:, :, None] - total[:, None])[:, :-1, 1:]
    past = torch.ones(chunks, chunks, dtype=torch.bool).tril(-1)
    carry = carry.masked_fill(~past[None, :, :, None], -torch.inf).exp()
    before = torch.einsum("bczh,bzhnp->bchnp", carry.to(states.dtype), states)
    y = y + (wide(q) @ before) * summed.exp()[..., None].to(v.dtype)
    return y.transpose(2, 3).flatten(1, 2)


class Linear(Mixer):
    def __init__(self, options):
        super().__init__(options)
        inner = self.shared * self.head_width
        self.q = linear(self.width, self.heads * self.head_width)
        self.k, self.v = linear(self.width, inner), linear(self.width, inner)
        self.g = linear(self.width, self.heads * self.head_width)
        self.dt = linear(self.width, self.heads)
        self.bias, self.rate = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(
            torch.zeros(self.heads))
        self.norm = nn.Parameter(torch.ones(self.head_width))

    def forward(self, x):
        heads = (self.heads, self.head_width)
        shared = (self.shared, self.head_width)
        q = functional.silu(self.q(x)).unflatten(-1, heads)
        k = functional.silu(self.k(x)).unflatten(-1, shared).repeat_interleave(self.group, 2)
        v = self.v(x).unflatten(-1, shared).repeat_interleave(self.group, 2)
        step = functional.softplus(self.dt(x).float() + self.bias)
        y = scan(q, k, v, -self.rate.exp() * step, step, CHUNK) * self.head_width ** -0.5
        gated = y * self.g(x).sigmoid().unflatten(-1, heads)
        return rms_norm(gated, self.norm.to(gated.dtype)).flatten(2)


class Mamba2(Mixer):
    def __init__(self, options):
        super().__init__(options)
        self.inner, self.state = 2 * self.width, 128
        self.own = self.inner // 64
        channels = self.inner + 2 * self.state
        self.into = linear(self.width, self.inner + channels + self.own)
        self.convolution = nn.Conv1d(channels, channels, 4, groups=channels, padding=3)
        self.bias, self.rate, self.skip = (nn.Parameter(torch.zeros(self.own)) for _ in range(3))
        self.norm = nn.Parameter(torch.ones(self.inner))

    def forward(self, x):
        z, mixed, step = self.into(x).split(
            [self.inner, self.inner + 2 * self.state, self.own], -1)
        mixed = functional.silu(self.convolution(mixed.transpose(1, 2))[..., :x.shape[1]])
        u, b, c = mixed.transpose(1, 2).split([self.inner, self.state, self.state], -1)
        u = u.unflatten(-1, (self.own, 64))
        step = functional.softplus(step.float() + self.bias)
        y = scan(c.unsqueeze(2), b.unsqueeze(2), u, -self.rate.exp() * step, step, CHUNK)
        y = (y + self.skip[:, None].to(u.dtype) * u).flatten(2) * functional.silu(z)
        return rms_norm(y, self.norm.to(y.dtype), 1e-5)


class Compression(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.places = nn.Parameter(0.02 * torch.randn(BLOCK, width))
        self.first, self.second = linear(BLOCK * width, 192), linear(192, width)

    def forward(self, u):  # [B, heads, T, width] -> [B, heads, blocks, width]
        blocks = u.unfold(2, BLOCK, STRIDE).transpose(-1, -2) + self.places.to(u.dtype)
        return self.second(functional.silu(self.first(blocks.flatten(-2))))


class Compress(Mixer):
    def __init__(self, options):
        super().__init__(options)
        inner = self.shared * self.head_width
        self.q = linear(self.width, self.heads * self.head_width)
        self.k, self.v = linear(self.width, inner), linear(self.width, inner)
        self.keys, self.values = Compression(self.head_width), Compression(self.head_width)
        ends = torch.arange((self.length - BLOCK) // STRIDE + 1) * STRIDE + BLOCK - 1
        self.seen = ends <= torch.arange(self.length)[:, None]

    def compressed(self, q, x):
        k = self.keys(self.split(self.k(x), self.shared))
        v = self.values(self.split(self.v(x), self.shared))
        # The first positions see nothing: they get a key of no account.
        y = self.attend(q[:, :, BLOCK - 1:], k, v, attn_mask=self.seen[BLOCK - 1:])
        return functional.pad(y, (0, 0, BLOCK - 1, 0)), k

    def forward(self, x):
        return self.merge(self.compressed(self.split(self.q(x), self.heads), x)[0])


class Nsa(Compress):
    """The selected blocks as a mask of one fused attention: on a CPU faster than gathering them."""

    def __init__(self, options):
        super().__init__(options)
        inner = self.shared * self.head_width
        self.gate = linear(self.width, 3 * self.heads)
        self.more = nn.ModuleList(linear(self.width, inner) for _ in range(4))
        self.angles = self.table(self.head_width)
        self.band = Softmax(options, WINDOW)
        del self.band.q, self.band.k, self.band.v
        position = torch.arange(self.length)
        self.causal = position <= position[:, None]
        self.own = position // SELECTED
        block = torch.arange(self.length // SELECTED)
        self.forced = ((block == 0) | (block >= self.own[:, None] - 1)) & (
            block <= self.own[:, None])
        self.candidates = block <= self.own[:, None]
        # Pieces of 16 tokens that compressed block i and selected block j share.
        i, j = torch.arange(self.seen.shape[1])[:, None] * STRIDE, block * SELECTED
        shared = (torch.minimum(i + BLOCK, j + SELECTED) - torch.maximum(i, j)).clamp(min=0)
        self.weights = (shared // STRIDE).float()

    @torch.no_grad()
    def chosen(self, q, k):
        q = q.unflatten(1, (self.shared, self.group))
        importance = 0
        for head in range(self.group):
            scores = (q[:, :, head].float() @ k.float().transpose(-1, -2)) * self.head_width ** -0.5
            p = scores.masked_fill(~self.seen, -torch.inf).softmax(-1).nan_to_num()
            importance = importance + p @ self.weights
        importance = importance.masked_fill(self.forced, torch.inf)
        importance = importance.masked_fill(~self.candidates, -torch.inf)
        top = importance.topk(min(COUNT, importance.shape[-1]), -1).indices
        mask = torch.zeros_like(importance, dtype=torch.bool).scatter_(-1, top, True)
        mask = mask.repeat_interleave(SELECTED, -1) & self.causal
        return mask.repeat_interleave(self.group, 1)

    def forward(self, x):
        q = self.split(self.q(x), self.heads)
        first, k = self.compressed(q, x)
        mask = self.chosen(q, k)
        turned = self.rotate(q, self.angles)
        k1, v1, k2, v2 = (self.split(map_(x), self.shared) for map_ in self.more)
        second = self.attend(turned, self.rotate(k1, self.angles), v1, attn_mask=mask)
        third = self.band.banded(turned, self.rotate(k2, self.angles), v2)
        gates = self.gate(x).sigmoid().unflatten(-1, (self.heads, 3)).transpose(1, 2)
        y = sum(gates[..., i, None] * branch for i, branch in enumerate((first, second, third)))
        return self.merge(y)


class Hybrid(Mixer):
    def __init__(self, options):
        super().__init__(options)
        self.nsa, self.differential = Nsa(options), Differential(options)
        self.gate = linear(self.width, self.heads)

    def forward(self, x):
        gate = self.gate(x).sigmoid().repeat_interleave(self.head_width, -1)
        return gate * self.nsa(x) + (1 - gate) * self.differential(x)


class Projected(nn.Module):
    def __init__(self, mixer, inner, width):
        super().__init__()
        self.mixer, self.out = mixer, linear(inner, width)

    def forward(self, x):
        return self.out(self.mixer(x))


TYPES = {
    "full": Softmax,
    "sliding": lambda options: Softmax(options, WINDOW),
    "differential": Differential,
    "linear": Linear,
    "mamba2": Mamba2,
    "nsa": Nsa,
    "compress": Compress,
    "hybrid": Hybrid,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--type", choices=TYPES, required=True)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--precision", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--threads", type=int, default=2)
    for name, value in [("width", 512), ("heads", 8), ("shared", 2), ("head-width", 64),
                        ("length", 2048), ("layer", 3)]:
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(1)
    torch.set_flush_denormal(True)
    inner = 2 * options.width if options.type == "mamba2" else options.heads * options.head_width
    mixer = Projected(TYPES[options.type](options), inner, options.width)
    if options.precision == "bf16":
        mixer = mixer.to(torch.bfloat16)
    run = torch.compile(mixer) if options.compile else mixer
    dtype = torch.bfloat16 if options.precision == "bf16" else torch.float32
    x = torch.randn(1, options.length, options.width, dtype=dtype, requires_grad=True)
    d_out = torch.randn(1, options.length, options.width, dtype=dtype)
    for line in sys.stdin:
        start = time.monotonic()
        for _ in range(int(line)):
            run(x).backward(d_out)
            x.grad = None
            mixer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - start
        print(seconds, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, flush=True)


if __name__ == "__main__":
    main()
