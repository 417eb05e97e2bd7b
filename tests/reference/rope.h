#pragma once

#include "tests/reference/array.h"

namespace reference {

// x [B, T, heads, width]: pairs (f, f + width/2) turned by t * theta^(-2f/width).
inline Array rope(const Array& x, std::int64_t length, std::int64_t heads, std::int64_t width,
                  double theta) {
  Array y(x.size());
  const std::int64_t half = width / 2;
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(x.size()) / width; ++row) {
    const std::int64_t t = row / heads % length;
    for (std::int64_t f = 0; f < half; ++f) {
      const double angle = static_cast<double>(t) * std::pow(theta, -2.0 * static_cast<double>(f) /
                                                                        static_cast<double>(width));
      const double a = x[at(row * width + f)];
      const double b = x[at(row * width + f + half)];
      y[at(row * width + f)] = a * std::cos(angle) - b * std::sin(angle);
      y[at(row * width + f + half)] = b * std::cos(angle) + a * std::sin(angle);
    }
  }
  return y;
}

}  // namespace reference
