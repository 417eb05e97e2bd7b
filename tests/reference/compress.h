#pragma once

#include <algorithm>
#include <functional>
#include <limits>

#include "tests/reference/array.h"

namespace reference {

// Overlapping blocks of a sequence: block i is the tokens [stride i, stride i + length).
struct Blocks {
  std::int64_t length, stride;
  std::int64_t count(std::int64_t tokens) const {
    return tokens < length ? 0 : (tokens - length) / stride + 1;
  }
  bool sees(std::int64_t i, std::int64_t t, std::int64_t segment) const {
    return stride * i >= segment && stride * i + length - 1 <= t;
  }
};

// SiLU(flatten(u + P) W_1) W_2 of every block u. rows [B, T, heads, width], p [length, width],
// w1 [inner, length*width], w2 [width, inner] -> [B, N, heads, width].
inline Array compress_blocks(const Array& rows, const Array& p, const Array& w1, const Array& w2,
                             Blocks blocks, std::int64_t batch, std::int64_t length,
                             std::int64_t heads, std::int64_t width) {
  const std::int64_t inner = static_cast<std::int64_t>(w2.size()) / width;
  Array flat;
  for (std::int64_t b = 0; b < batch; ++b) {
    for (std::int64_t i = 0; i < blocks.count(length); ++i) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t token = 0; token < blocks.length; ++token) {
          for (std::int64_t c = 0; c < width; ++c) {
            const std::int64_t row = (b * length + blocks.stride * i + token) * heads + h;
            flat.push_back(rows[at(row * width + c)] + p[at(token * width + c)]);
          }
        }
      }
    }
  }
  Array hidden = linear(flat, w1, blocks.length * width, inner);
  for (double& value : hidden) value /= 1 + std::exp(-value);
  return linear(hidden, w2, inner, width);
}

// Softmax attention over any keys. q [B, T, H, width], k, v [B, keys, Hk, width] -> [B, T, H,
// width]; which keys a position sees may depend on the sequence and the key head.
struct AnyAttention {
  std::int64_t batch, length, keys, heads, key_value_heads, width;
  std::function<bool(std::int64_t b, std::int64_t shared, std::int64_t t, std::int64_t j)> sees;

  Array probabilities(const Array& q, const Array& k, std::int64_t b, std::int64_t h,
                      std::int64_t t) const {
    const std::int64_t shared = h / (heads / key_value_heads);
    Array p(at(keys), 0.0);
    std::vector<std::int64_t> seen;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0.0;
    for (std::int64_t j = 0; j < keys; ++j) {
      if (!sees(b, shared, t, j)) continue;
      seen.push_back(j);
      for (std::int64_t c = 0; c < width; ++c) {
        p[at(j)] += q[at(((b * length + t) * heads + h) * width + c)] *
                    k[at(((b * keys + j) * key_value_heads + shared) * width + c)];
      }
      p[at(j)] /= std::sqrt(static_cast<double>(width));
      largest = std::max(largest, p[at(j)]);
    }
    for (const std::int64_t j : seen) sum += p[at(j)] = std::exp(p[at(j)] - largest);
    for (const std::int64_t j : seen) p[at(j)] /= sum;
    return p;
  }

  Array forward(const Array& q, const Array& k, const Array& v) const {
    Array out(q.size(), 0.0);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t t = 0; t < length; ++t) {
          const Array p = probabilities(q, k, b, h, t);
          for (std::int64_t j = 0; j < keys; ++j) {
            if (p[at(j)] == 0.0) continue;
            const std::int64_t value =
                ((b * keys + j) * key_value_heads + h / (heads / key_value_heads)) * width;
            for (std::int64_t c = 0; c < width; ++c) {
              out[at(((b * length + t) * heads + h) * width + c)] += p[at(j)] * v[at(value + c)];
            }
          }
        }
      }
    }
    return out;
  }
};

struct CompressedMixer {
  std::int64_t batch, length, model_width, heads, key_value_heads, width;
  Blocks blocks;
  std::vector<std::int32_t> segments;  // [B, T]

  AnyAttention attention() const {
    return {batch,
            length,
            blocks.count(length),
            heads,
            key_value_heads,
            width,
            [this](std::int64_t b, std::int64_t, std::int64_t t, std::int64_t i) {
              return blocks.sees(i, t, segments[at(b * length + t)]);
            }};
  }
  // p: W_k, W_v, then P, W_1, W_2 of the keys and of the values, from `first` on.
  Array branch(const Array& x, const Array& q, const std::vector<Array>& p,
               std::size_t first) const {
    const auto compressed = [&](std::size_t which) {
      const std::size_t phi = first + 2 + 3 * which;
      return compress_blocks(linear(x, p[first + which], model_width, key_value_heads * width),
                             p[phi], p[phi + 1], p[phi + 2], blocks, batch, length, key_value_heads,
                             width);
    };
    return attention().forward(q, compressed(0), compressed(1));
  }
  // p: W_q, the branch's, W_o.
  Array forward(const Array& x, const std::vector<Array>& p) const {
    const Array q = linear(x, p[0], model_width, heads * width);
    return linear(branch(x, q, p, 1), p.back(), heads * width, model_width);
  }
};

}  // namespace reference
