#pragma once

#include "tests/reference/convolution.h"
#include "tests/reference/gated_norm.h"
#include "tests/reference/scan.h"

namespace reference {

// Parameters: in_proj, the convolution's weight and bias, A_log, D, dt_bias, the norm's weight,
// out_proj.
struct Mamba2 {
  std::int64_t batch, length, width, heads, head_width, groups, state_width;
  std::vector<std::int32_t> segments;

  Array forward(const Array& x, const std::vector<Array>& p) const {
    const std::int64_t inner = heads * head_width, shared = groups * state_width;
    const std::int64_t channels = inner + 2 * shared, columns = inner + channels + heads;
    const Array all = linear(x, p[0], width, columns);
    const auto take = [](const Array& from, std::int64_t stride, std::int64_t first,
                         std::int64_t count) {
      Array part;
      for (std::int64_t at_row = 0; at_row < static_cast<std::int64_t>(from.size());
           at_row += stride) {
        part.insert(part.end(), from.begin() + at_row + first,
                    from.begin() + at_row + first + count);
      }
      return part;
    };
    const Array z = take(all, columns, 0, inner);
    const Array xbc = convolution(take(all, columns, inner, channels), p[1], p[2], segments, length,
                                  channels, 4, true);
    const Steps steps(take(all, columns, inner + channels, heads), p[3], p[5]);
    const Scan scan = {batch, length,      heads,      groups,  groups,
                       heads, state_width, head_width, segments};
    const Array y = scan.forward(take(xbc, channels, inner + shared, shared),
                                 take(xbc, channels, inner, shared), take(xbc, channels, 0, inner),
                                 steps.dt, steps.log_decay, p[4]);
    return linear(gated_norm(y, z, p[6], inner, inner / groups, true, 1e-5), p[7], inner, width);
  }
};

}  // namespace reference
