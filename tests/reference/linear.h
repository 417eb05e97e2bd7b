#pragma once

#include "tests/reference/gated_norm.h"
#include "tests/reference/model.h"
#include "tests/reference/scan.h"

namespace reference {

inline Array silu(Array x) {
  for (double& value : x) value *= sigmoid(value);
  return x;
}

// The mixer linear with its decaying state. Parameters: W_q, W_k, W_v, W_dt, A_log, dt_bias, W_g,
// the norm's weight, W_o.
struct LinearRecurrence {
  std::int64_t batch, length, width, heads, key_heads, head_width;
  std::vector<std::int32_t> segments;

  Array forward(const Array& x, const std::vector<Array>& p) const {
    const std::int64_t wide = heads * head_width, narrow = key_heads * head_width;
    const Steps steps(linear(x, p[3], width, heads), p[4], p[5]);
    const Scan scan = {batch,     length,     heads,      heads,   key_heads,
                       key_heads, head_width, head_width, segments};
    Array o = scan.forward(silu(linear(x, p[0], width, wide)), silu(linear(x, p[1], width, narrow)),
                           linear(x, p[2], width, narrow), steps.dt, steps.log_decay, {});
    for (double& value : o) value /= std::sqrt(static_cast<double>(head_width));
    const Array y =
        gated_norm(o, linear(x, p[6], width, wide), p[7], wide, head_width, false, 1e-6);
    return linear(y, p[8], wide, width);
  }
};

}  // namespace reference
