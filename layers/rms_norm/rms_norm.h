// RMSNorm over the last axis: y = x / sqrt(mean(x^2) + epsilon) * weight, row by row. A row's bits
// depend on that row alone. Derivation of the backward: rms_norm.md.
#pragma once

#include <cstdint>

#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// x, y: [rows, d]; weight: [d]; each f32 or bf16. inverse_rms: [rows] f32,
// 1 / sqrt(mean(x^2) + epsilon), written for the backward. y and inverse_rms are overwritten; y may
// be x.
void rms_norm(Queue& queue, const View& x, const View& weight, double epsilon, const View& y,
              const View& inverse_rms);

// y again, bit for bit, from the saved inverse_rms.
void rms_norm_again(Queue& queue, const View& x, const View& weight, const View& inverse_rms,
                    const View& y);

// The weight's gradient is summed over blocks of this many rows, then over the blocks in order.
constexpr std::int64_t kRmsNormBlock = 64;
constexpr std::int64_t rms_norm_blocks(std::int64_t rows) {
  return (rows + kRmsNormBlock - 1) / kRmsNormBlock;
}

// d_y, d_x: f32 or bf16; d_x is overwritten, or added to when `accumulate` (f32 then); d_x may be
// d_y. partial_d_weight: [rms_norm_blocks(rows), d] f32, overwritten: to be summed by
// rms_norm_weight_gradient.
void rms_norm_backward(Queue& queue, const View& x, const View& weight, const View& inverse_rms,
                       const View& d_y, const View& d_x, bool accumulate,
                       const View& partial_d_weight);

// d_weight [d] = the sum over the blocks [blocks, d], ascending; overwritten.
void rms_norm_weight_gradient(Queue& queue, const View& partial_d_weight, const View& d_weight);

}  // namespace tessera
