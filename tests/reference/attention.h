#pragma once

#include <algorithm>
#include <limits>

#include "tests/reference/array.h"

namespace reference {

// Key j stands for the tokens [stride j, stride j + block), complete blocks only; it is visible
// from i iff its last token is no later than i, its first one lies in i's segment and is less than
// `window` behind. Tokens themselves are blocks of 1.
struct Attention {
  std::int64_t batch, length, heads, key_value_heads, width, window;
  std::vector<std::int32_t> segments;  // [B, T]
  std::int64_t value_width = width;
  std::int64_t block = 1, stride = 1;

  std::int64_t keys() const { return length < block ? 0 : (length - block) / stride + 1; }
  bool sees(std::int64_t b, std::int64_t i, std::int64_t j) const {
    return stride * j + block - 1 <= i && i - stride * j < window &&
           stride * j >= segments[at(b * length + i)];
  }
  std::int64_t query(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return ((b * length + t) * heads + h) * width;
  }
  std::int64_t out(std::int64_t b, std::int64_t t, std::int64_t h) const {
    return ((b * length + t) * heads + h) * value_width;
  }
  std::int64_t key(std::int64_t b, std::int64_t j, std::int64_t h) const {
    return ((b * keys() + j) * key_value_heads + h / (heads / key_value_heads)) * width;
  }
  std::int64_t value(std::int64_t b, std::int64_t j, std::int64_t h) const {
    return key(b, j, h) / width * value_width;
  }

  // The probabilities of position i over all keys; zeros where it sees nothing.
  Array probabilities(const Array& q, const Array& k, std::int64_t b, std::int64_t h,
                      std::int64_t i) const {
    const std::int64_t count = keys();
    Array p(at(count), 0.0);
    double largest = -std::numeric_limits<double>::infinity();
    for (std::int64_t j = 0; j < count; ++j) {
      if (!sees(b, i, j)) continue;
      for (std::int64_t c = 0; c < width; ++c)
        p[at(j)] += q[at(query(b, i, h) + c)] * k[at(key(b, j, h) + c)];
      p[at(j)] /= std::sqrt(static_cast<double>(width));
      largest = std::max(largest, p[at(j)]);
    }
    double sum = 0.0;
    for (std::int64_t j = 0; j < count; ++j) {
      p[at(j)] = sees(b, i, j) ? std::exp(p[at(j)] - largest) : 0.0;
      sum += p[at(j)];
    }
    for (double& value : p) value = sum == 0.0 ? 0.0 : value / sum;
    return p;
  }

  // q [B, T, H, width], k [B, keys, Hk, width], v [B, keys, Hk, value_width] -> [B, T, H,
  // value_width]
  Array forward(const Array& q, const Array& k, const Array& v) const {
    Array o(at(batch * length * heads * value_width), 0.0);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < length; ++i) {
          const Array p = probabilities(q, k, b, h, i);
          for (std::int64_t j = 0; j < keys(); ++j) {
            for (std::int64_t c = 0; c < value_width; ++c) {
              o[at(out(b, i, h) + c)] += p[at(j)] * v[at(value(b, j, h) + c)];
            }
          }
        }
      }
    }
    return o;
  }

  // Adds to d_q, d_k, d_v, of the shapes of q, k, v.
  void backward(const Array& q, const Array& k, const Array& v, const Array& d_out, Array& d_q,
                Array& d_k, Array& d_v) const {
    const double scale = 1.0 / std::sqrt(static_cast<double>(width));
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        for (std::int64_t i = 0; i < length; ++i) {
          const Array p = probabilities(q, k, b, h, i);
          Array d_p(at(keys()), 0.0);
          double mean = 0.0;
          for (std::int64_t j = 0; j < keys(); ++j) {
            for (std::int64_t c = 0; c < value_width; ++c) {
              const double d = d_out[at(out(b, i, h) + c)];
              d_p[at(j)] += d * v[at(value(b, j, h) + c)];
              d_v[at(value(b, j, h) + c)] += p[at(j)] * d;
            }
            mean += p[at(j)] * d_p[at(j)];
          }
          for (std::int64_t j = 0; j < keys(); ++j) {
            const double d_score = p[at(j)] * (d_p[at(j)] - mean) * scale;
            for (std::int64_t c = 0; c < width; ++c) {
              d_q[at(query(b, i, h) + c)] += d_score * k[at(key(b, j, h) + c)];
              d_k[at(key(b, j, h) + c)] += d_score * q[at(query(b, i, h) + c)];
            }
          }
        }
      }
    }
  }
};

}  // namespace reference
