#pragma once

#include "tests/reference/scan.h"

namespace reference {

// Depthwise, causal, within documents. x [B*T, channels], weight [channels, taps], its last tap for
// the current position; bias [channels] or empty; segments [B*T].
inline Array convolution(const Array& x, const Array& weight, const Array& bias,
                         const std::vector<std::int32_t>& segments, std::int64_t length,
                         std::int64_t channels, std::int64_t taps, bool silu) {
  Array y(x.size());
  for (std::int64_t row = 0; row < static_cast<std::int64_t>(segments.size()); ++row) {
    for (std::int64_t c = 0; c < channels; ++c) {
      double u = bias.empty() ? 0.0 : bias[at(c)];
      for (std::int64_t m = 0; m < taps && row % length - m >= segments[at(row)]; ++m) {
        u += weight[at(c * taps + taps - 1 - m)] * x[at((row - m) * channels + c)];
      }
      y[at(row * channels + c)] = silu ? u * sigmoid(u) : u;
    }
  }
  return y;
}

}  // namespace reference
