#pragma once

#include "tests/reference/scan.h"

namespace reference {

// u = x * gate(z), RMSNorm of each `group` of columns, times weight ([group] or [width]).
inline Array gated_norm(const Array& x, const Array& z, const Array& weight, std::int64_t width,
                        std::int64_t group, bool silu, double epsilon) {
  Array y(x.size());
  for (std::int64_t first = 0; first < static_cast<std::int64_t>(x.size()); first += group) {
    double squares = 0.0;
    for (std::int64_t i = first; i < first + group; ++i) {
      const double gate = sigmoid(z[at(i)]);
      y[at(i)] = x[at(i)] * (silu ? z[at(i)] * gate : gate);
      squares += y[at(i)] * y[at(i)];
    }
    const double rms = std::sqrt(squares / static_cast<double>(group) + epsilon);
    const bool shared = static_cast<std::int64_t>(weight.size()) == group;
    for (std::int64_t i = first; i < first + group; ++i) {
      y[at(i)] *= weight[at(shared ? i - first : i % width)] / rms;
    }
  }
  return y;
}

}  // namespace reference
