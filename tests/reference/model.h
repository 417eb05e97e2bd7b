#pragma once

#include "tests/reference/array.h"
#include "tests/reference/attention.h"
#include "tests/reference/rms_norm.h"
#include "tests/reference/rope.h"

namespace reference {

// Parameters in the order of the layer: q, k, v, with the norm q_norm and k_norm, o.
struct AttentionMixer {
  Attention attention;
  std::int64_t model_width;
  double theta;
  bool norm;

  Array forward(const Array& x, const std::vector<Array>& p) const {
    const std::int64_t q_width = attention.heads * attention.width;
    const std::int64_t kv_width = attention.key_value_heads * attention.width;
    Array q = linear(x, p[0], model_width, q_width);
    Array k = linear(x, p[1], model_width, kv_width);
    const Array v = linear(x, p[2], model_width, kv_width);
    if (norm) {
      q = rms_norm(q, p[3], 1e-6);
      k = rms_norm(k, p[4], 1e-6);
    }
    q = rope(q, attention.length, attention.heads, attention.width, theta);
    k = rope(k, attention.length, attention.key_value_heads, attention.width, theta);
    return linear(attention.forward(q, k, v), p.back(), q_width, model_width);
  }
};

inline double silu(double x) { return x / (1.0 + std::exp(-x)); }

// Parameters: gate, up [inner, width], down [width, inner].
inline Array swiglu(const Array& x, const std::vector<Array>& p, std::int64_t width,
                    std::int64_t inner) {
  Array gate = linear(x, p[0], width, inner);
  const Array up = linear(x, p[1], width, inner);
  for (std::size_t i = 0; i < gate.size(); ++i) gate[i] = silu(gate[i]) * up[i];
  return linear(gate, p[2], inner, width);
}

// Parameters: input norm, the mixer's, post norm, the feed-forward's.
inline Array block(const Array& x, const std::vector<Array>& p, const AttentionMixer& mixer,
                   std::int64_t inner, double epsilon) {
  const std::size_t mixer_parameters = mixer.norm ? 6 : 4;
  const auto first = p.begin() + 1;
  const auto post = first + static_cast<std::ptrdiff_t>(mixer_parameters);
  const Array middle = plus(mixer.forward(rms_norm(x, p[0], epsilon), {first, post}), x);
  return plus(
      swiglu(rms_norm(middle, *post, epsilon), {post + 1, p.end()}, mixer.model_width, inner),
      middle);
}

inline Array embedding(const Array& weight, const std::vector<std::uint32_t>& tokens,
                       std::int64_t width) {
  Array x;
  for (const std::uint32_t token : tokens) {
    for (std::int64_t i = 0; i < width; ++i) x.push_back(weight[at(token * width + i)]);
  }
  return x;
}

// The cross-entropy summed over the labels that aren't negative.
inline double head_loss(const Array& x, const Array& norm, const Array& weight,
                        const std::vector<std::int32_t>& labels, double epsilon) {
  const auto width = static_cast<std::int64_t>(norm.size());
  const std::int64_t vocabulary = static_cast<std::int64_t>(weight.size()) / width;
  const Array logits = linear(rms_norm(x, norm, epsilon), weight, width, vocabulary);
  double loss = 0.0;
  for (std::size_t r = 0; r < labels.size(); ++r) {
    if (labels[r] < 0) continue;
    const double* row = &logits[r * at(vocabulary)];
    double largest = row[0];
    for (std::int64_t i = 1; i < vocabulary; ++i) largest = std::max(largest, row[i]);
    double sum = 0.0;
    for (std::int64_t i = 0; i < vocabulary; ++i) sum += std::exp(row[i] - largest);
    loss += largest + std::log(sum) - row[labels[r]];
  }
  return loss;
}

}  // namespace reference
