// Depthwise causal convolution within documents: channel c of position t is
//   u_t = bias + sum over m < taps of weight[c, taps - 1 - m] x_{t-m},  x_{t-m} = 0 before t's
// document, and y_t = SiLU(u_t) or u_t. The last tap multiplies the current token. Derivation:
// convolution.md.
#pragma once

#include <cstdint>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

struct ConvolutionConfig {
  std::int64_t channels = 0;
  std::int64_t taps = 0;
  bool bias = true;
  bool silu = true;
  Shape weight() const { return {channels, taps}; }
  // f32 scratch of both passes.
  Shape scratch(BatchShape shape) const;
  double flops_per_token() const { return 2.0 * static_cast<double>(channels * taps); }
  Init init() const;  // uniform in +-1/sqrt(taps)
};

// x, y [B*T, channels] f32 or bf16; weight [channels, taps], bias [channels] (unused without) f32
// or bf16; segments [B, T] i32. y is overwritten and doesn't alias x.
void convolution_forward(Queue& queue, const ConvolutionConfig& config, BatchShape shape,
                         const View& segments, const View& x, const View& weight, const View& bias,
                         const View& y, const View& scratch);

// d_y is overwritten with the gradient of u. d_x [B*T, channels] f32 or bf16, d_weight
// [channels, taps] f32 and d_bias [channels] f32 (unused without a bias) are overwritten.
void convolution_backward(Queue& queue, const ConvolutionConfig& config, BatchShape shape,
                          const View& segments, const View& x, const View& weight, const View& bias,
                          const View& d_y, const View& d_x, const View& d_weight,
                          const View& d_bias, const View& scratch);

}  // namespace tessera
