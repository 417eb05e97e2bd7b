#pragma once

#include "tests/reference/attention.h"
#include "tests/reference/rms_norm.h"
#include "tests/reference/rope.h"

namespace reference {

// Differential attention without its output projection. attention: of one map, so of half the
// head's width, with values of the whole one.
struct Differential {
  Attention attention;
  std::int64_t model_width;
  double theta;
  bool norm;
  std::int64_t layer;

  double lambda_init() const { return 0.8 - 0.6 * std::exp(-0.3 * static_cast<double>(layer)); }

  // p: W_q, W_k, W_v, with the norm those of q and k, then lambda's vectors q1, k1, q2, k2; what
  // follows is not looked at.
  Array mix(const Array& x, const std::vector<Array>& p) const {
    const Attention& a = attention;
    const std::int64_t half = a.width, width = a.value_width;
    Array q = linear(x, p[0], model_width, a.heads * width);
    Array k = linear(x, p[1], model_width, a.key_value_heads * width);
    const Array v = linear(x, p[2], model_width, a.key_value_heads * width);
    if (norm) {
      q = rms_norm(q, p[3], 1e-6);
      k = rms_norm(k, p[4], 1e-6);
    }
    const std::size_t l = norm ? 5 : 3;
    const double lambda =
        std::exp(dot(p[l], p[l + 1])) - std::exp(dot(p[l + 2], p[l + 3])) + lambda_init();
    const auto map = [&](std::int64_t which) {
      const auto part = [&](const Array& all) {
        Array some;
        for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()); ++i) {
          if (i % width / half == which) some.push_back(all[at(i)]);
        }
        return some;
      };
      return a.forward(rope(part(q), a.length, a.heads, half, theta),
                       rope(part(k), a.length, a.key_value_heads, half, theta), v);
    };
    Array u = map(0);
    const Array second = map(1);
    for (std::size_t i = 0; i < u.size(); ++i) u[i] -= lambda * second[i];
    return rms_norm(u, Array(at(width), 1.0 - lambda_init()), 1e-5);
  }

  // With the output projection, which is p's last.
  Array forward(const Array& x, const std::vector<Array>& p) const {
    return linear(mix(x, p), p.back(), attention.heads * attention.value_width, model_width);
  }
};

}  // namespace reference
