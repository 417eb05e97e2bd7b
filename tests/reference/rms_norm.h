#pragma once

#include "tests/reference/array.h"

namespace reference {

// y = x / sqrt(mean(x^2) + epsilon) * weight over rows of the weight's width.
inline Array rms_norm(const Array& x, const Array& weight, double epsilon) {
  const auto d = static_cast<std::int64_t>(weight.size());
  Array y(x.size());
  for (std::int64_t r = 0; r < static_cast<std::int64_t>(x.size()) / d; ++r) {
    double mean = 0.0;
    for (std::int64_t i = 0; i < d; ++i) mean += x[at(r * d + i)] * x[at(r * d + i)];
    mean /= static_cast<double>(d);
    for (std::int64_t i = 0; i < d; ++i) {
      y[at(r * d + i)] = x[at(r * d + i)] / std::sqrt(mean + epsilon) * weight[at(i)];
    }
  }
  return y;
}

}  // namespace reference
