// The layers written a second time, in float64 and as plainly as their formulas. Arrays are
// row-major.
#pragma once

#include <cmath>
#include <cstdint>
#include <vector>

namespace reference {

using Array = std::vector<double>;

inline std::size_t at(std::int64_t i) { return static_cast<std::size_t>(i); }

// y [rows, out] = x [rows, in] w', w [out, in]
inline Array linear(const Array& x, const Array& w, std::int64_t in, std::int64_t out) {
  const std::int64_t rows = static_cast<std::int64_t>(x.size()) / in;
  Array y(at(rows * out), 0.0);
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t o = 0; o < out; ++o) {
      for (std::int64_t i = 0; i < in; ++i)
        y[at(r * out + o)] += x[at(r * in + i)] * w[at(o * in + i)];
    }
  }
  return y;
}

inline Array plus(Array a, const Array& b) {
  for (std::size_t i = 0; i < a.size(); ++i) a[i] += b[i];
  return a;
}

inline double dot(const Array& a, const Array& b) {
  double sum = 0.0;
  for (std::size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

}  // namespace reference
