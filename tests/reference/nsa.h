#pragma once

#include <functional>

#include "tests/reference/compress.h"
#include "tests/reference/rms_norm.h"
#include "tests/reference/rope.h"

namespace reference {

// Native sparse attention with a choice of blocks that is given.
struct Nsa {
  CompressedMixer compressed;
  std::int64_t selected_block, selected_blocks, window;
  double theta;
  bool norm;
  std::vector<std::int32_t> choice;  // [B, Hk, T, selected_blocks], -1: none

  bool chosen(std::int64_t b, std::int64_t shared, std::int64_t t, std::int64_t block) const {
    const std::int64_t row = (b * compressed.key_value_heads + shared) * compressed.length + t;
    for (std::int64_t i = 0; i < selected_blocks; ++i) {
      if (choice[at(row * selected_blocks + i)] == block) return true;
    }
    return false;
  }

  // p: W_q, W_gate, W_k and W_v selected, W_k and W_v sliding, with the norm those of q, selected
  // and sliding k, then the compressed branch's, W_o.
  Array forward(const Array& x, const std::vector<Array>& p) const {
    const CompressedMixer& c = compressed;
    const Array q = linear(x, p[0], c.model_width, c.heads * c.width);
    const auto rotated = [&](const Array& rows, std::int64_t heads, std::size_t weight) {
      return rope(norm ? rms_norm(rows, p[weight], 1e-6) : rows, c.length, heads, c.width, theta);
    };
    const Array rotated_q = rotated(q, c.heads, 6);
    const auto branch = [&](std::size_t weights, std::size_t norm_weight, const auto& sees) {
      const AnyAttention attention = {c.batch,           c.length, c.length, c.heads,
                                      c.key_value_heads, c.width,  sees};
      const std::int64_t kv = c.key_value_heads * c.width;
      return attention.forward(
          rotated_q,
          rotated(linear(x, p[weights], c.model_width, kv), c.key_value_heads, norm_weight),
          linear(x, p[weights + 1], c.model_width, kv));
    };
    const auto in_document = [&](std::int64_t b, std::int64_t t, std::int64_t j) {
      return j <= t && j >= c.segments[at(b * c.length + t)];
    };
    const std::vector<Array> branches = {
        c.branch(x, q, p, norm ? 9 : 6),
        branch(2, 7,
               [&](std::int64_t b, std::int64_t shared, std::int64_t t, std::int64_t j) {
                 return in_document(b, t, j) && chosen(b, shared, t, j / selected_block);
               }),
        branch(4, 8, [&](std::int64_t b, std::int64_t, std::int64_t t, std::int64_t j) {
          return in_document(b, t, j) && t - j < window;
        })};
    const Array logits = linear(x, p[1], c.model_width, 3 * c.heads);
    Array mixed(q.size(), 0.0);
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      for (std::size_t b = 0; b < 3; ++b) {
        const std::size_t head = i / at(c.width);  // of a position
        mixed[i] += branches[b][i] / (1 + std::exp(-logits[3 * head + b]));
      }
    }
    return linear(mixed, p.back(), c.heads * c.width, c.model_width);
  }

  // The importance of the blocks for a position and key/value head: probability [head of the group,
  // compressed block] times the tokens shared, in units of the stride.
  Array importance(const std::vector<Array>& probabilities, std::int64_t blocks) const {
    Array sums(at(blocks), 0.0);
    const Blocks& of = compressed.blocks;
    for (const Array& p : probabilities) {
      for (std::int64_t i = 0; i < static_cast<std::int64_t>(p.size()); ++i) {
        for (std::int64_t token = of.stride * i; token < of.stride * i + of.length; ++token) {
          if (token / selected_block < blocks) {
            sums[at(token / selected_block)] += p[at(i)] / static_cast<double>(of.stride);
          }
        }
      }
    }
    return sums;
  }
};

}  // namespace reference
