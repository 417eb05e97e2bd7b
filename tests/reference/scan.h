// The linear recurrence, position by position, and its derivative by the chain rule.
#pragma once

#include <algorithm>

#include "tests/reference/array.h"

namespace reference {

struct Scan {
  std::int64_t batch, length, heads, query_heads, key_heads, value_heads;
  std::int64_t n, p;                   // S is n x p
  std::vector<std::int32_t> segments;  // [B, T]

  bool starts(std::int64_t row) const { return segments[at(row)] == row % length; }
  std::int64_t q_at(std::int64_t row, std::int64_t h) const {
    return (row * query_heads + h / (heads / query_heads)) * n;
  }
  std::int64_t k_at(std::int64_t row, std::int64_t h) const {
    return (row * key_heads + h / (heads / key_heads)) * n;
  }
  std::int64_t v_at(std::int64_t row, std::int64_t h) const {
    return (row * value_heads + h / (heads / value_heads)) * p;
  }

  // S_t of one head of one sequence, [T, n, p].
  Array states(const Array& k, const Array& v, const Array& dt, const Array& log_decay,
               std::int64_t b, std::int64_t h) const {
    Array s(at(length * n * p), 0.0);
    for (std::int64_t t = 0; t < length; ++t) {
      const std::int64_t row = b * length + t;
      const double decay = starts(row) ? 0.0 : std::exp(log_decay[at(row * heads + h)]);
      for (std::int64_t i = 0; i < n; ++i) {
        for (std::int64_t j = 0; j < p; ++j) {
          double value =
              dt[at(row * heads + h)] * k[at(k_at(row, h) + i)] * v[at(v_at(row, h) + j)];
          if (decay != 0.0) value += decay * s[at(((t - 1) * n + i) * p + j)];
          s[at((t * n + i) * p + j)] = value;
        }
      }
    }
    return s;
  }

  // q [B, T, query_heads, n], k, v alike, dt, log_decay [B, T, heads], skip [heads] or empty
  // -> [B, T, heads, p]
  Array forward(const Array& q, const Array& k, const Array& v, const Array& dt,
                const Array& log_decay, const Array& skip) const {
    Array out(at(batch * length * heads * p), 0.0);
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const Array s = states(k, v, dt, log_decay, b, h);
        for (std::int64_t t = 0; t < length; ++t) {
          const std::int64_t row = b * length + t;
          for (std::int64_t j = 0; j < p; ++j) {
            double& o = out[at((row * heads + h) * p + j)];
            for (std::int64_t i = 0; i < n; ++i) {
              o += q[at(q_at(row, h) + i)] * s[at((t * n + i) * p + j)];
            }
            if (!skip.empty()) o += skip[at(h)] * v[at(v_at(row, h) + j)];
          }
        }
      }
    }
    return out;
  }

  struct Gradient {
    Array q, k, v, dt, log_decay, skip;
  };
  Gradient backward(const Array& q, const Array& k, const Array& v, const Array& dt,
                    const Array& log_decay, const Array& skip, const Array& d_out) const {
    Gradient g = {Array(q.size()),  Array(k.size()),         Array(v.size()),
                  Array(dt.size()), Array(log_decay.size()), Array(skip.size())};
    for (std::int64_t b = 0; b < batch; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        const Array s = states(k, v, dt, log_decay, b, h);
        Array d_s(at(n * p), 0.0);  // the gradient of S_t
        for (std::int64_t t = length - 1; t >= 0; --t) {
          const std::int64_t row = b * length + t, gate = row * heads + h;
          const double* const d_o = d_out.data() + at(gate * p);
          for (std::int64_t i = 0; i < n; ++i) {
            for (std::int64_t j = 0; j < p; ++j) {
              double& d = d_s[at(i * p + j)];
              const double ki = k[at(k_at(row, h) + i)], vj = v[at(v_at(row, h) + j)];
              d += q[at(q_at(row, h) + i)] * d_o[j];
              g.q[at(q_at(row, h) + i)] += s[at((t * n + i) * p + j)] * d_o[j];
              g.k[at(k_at(row, h) + i)] += dt[at(gate)] * d * vj;
              g.v[at(v_at(row, h) + j)] += dt[at(gate)] * d * ki;
              g.dt[at(gate)] += d * ki * vj;
            }
          }
          for (std::int64_t j = 0; j < p && !skip.empty(); ++j) {
            g.v[at(v_at(row, h) + j)] += skip[at(h)] * d_o[j];
            g.skip[at(h)] += d_o[j] * v[at(v_at(row, h) + j)];
          }
          const double decay = starts(row) ? 0.0 : std::exp(log_decay[at(gate)]);
          for (std::int64_t i = 0; i < n * p; ++i) {
            if (decay != 0.0) {
              g.log_decay[at(gate)] += decay * d_s[at(i)] * s[at((t - 1) * n * p + i)];
            }
            d_s[at(i)] *= decay;
          }
        }
      }
    }
    return g;
  }
};

inline double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

// dt = softplus(raw + bias), log_decay = -exp(A_log) dt; raw [rows, heads].
struct Steps {
  Array dt, log_decay;
  Steps(const Array& raw, const Array& a_log, const Array& bias) {
    const std::size_t heads = a_log.size();
    for (std::size_t i = 0; i < raw.size(); ++i) {
      dt.push_back(softplus(raw[i] + bias[i % heads]));
      log_decay.push_back(-std::exp(a_log[i % heads]) * dt[i]);
    }
  }
};

}  // namespace reference
