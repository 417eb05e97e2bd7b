// A gate, then RMSNorm over each group of columns:
//   u = x * gate(z)      y = u / sqrt(mean over the group (u^2) + epsilon) * weight
// with gate = sigmoid or SiLU. A row's bits depend on that row alone. Derivation: gated_norm.md.
#pragma once

#include <cstdint>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

enum class Gate : std::uint8_t { kSigmoid, kSilu };

struct GatedNormConfig {
  std::int64_t width = 0;  // of a row
  std::int64_t group = 0;  // columns that are normalised together; divides width
  Gate gate = Gate::kSigmoid;
  double epsilon = 0.0;
  std::int64_t groups() const { return width / group; }
};

// x, z, y: [rows, width] f32 or bf16; weight: [group], shared by the groups, or [width], f32 or
// bf16; inverse_rms: [rows, groups] f32, for the backward. y and inverse_rms are overwritten.
void gated_norm(Queue& queue, const GatedNormConfig& config, const View& x, const View& z,
                const View& weight, const View& y, const View& inverse_rms);

// d_x and d_z, f32 or bf16, are overwritten; d_x may be d_y. d_weight f32, overwritten. partial:
// scratch, [rms_norm_blocks(rows), weight's elements] f32.
void gated_norm_backward(Queue& queue, const GatedNormConfig& config, const View& x, const View& z,
                         const View& weight, const View& inverse_rms, const View& d_y,
                         const View& d_x, const View& d_z, const View& d_weight,
                         const View& partial);

}  // namespace tessera
