// What the kernels of the backward take. Private to layers/attention/.
#pragma once

#include <array>
#include <cstddef>

#include "layers/attention/attention.h"

namespace tessera {

// One tile of queries against one of keys, by map; scores, d_p [tile, tile], the rest [tile].
struct BackwardTile {
  template <class T>
  using PerMap = std::array<T, static_cast<std::size_t>(kMaxAttentionMaps)>;
  PerMap<float*> scores{};
  float* d_p = nullptr;
  PerMap<const float*> log_sum_exp{}, delta{};
  PerMap<float> weights{};
  // Where a map's gradient of the scores goes.
  float* gradients(std::size_t map) const { return map == 0 ? d_p : scores[map]; }
};

}  // namespace tessera
