// What the kernels of tiles take. Private to layers/attention/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "layers/attention/attention.h"
#include "runtime/products.h"

namespace tessera {

// Rows of scores of a tile [rows, tile], each row `kAttentionTile` behind the one before; of row r
// the columns [begin[r], end[r]) are visible.
struct TileRows {
  std::int64_t rows;
  const std::int64_t* begin;
  const std::int64_t* end;
  float scale;
};

// Of the online softmax: scores, and their probabilities, which may lie in the scores' place;
// row_max, row_sum and correction [rows].
struct ForwardTile {
  float* scores;
  FactorRows probabilities;
  float *row_max, *row_sum, *correction;
};

// Keys in rows, queries in columns, by map; scores, d_p [rows, tile], the rest [tile]. The results
// may lie in the place of scores and d_p, each in one of its own.
struct BackwardTile {
  template <class T>
  using PerMap = std::array<T, static_cast<std::size_t>(kMaxAttentionMaps)>;
  PerMap<const float*> scores{};
  const float* d_p = nullptr;
  PerMap<const float*> log_sum_exp{}, delta{};
  PerMap<float> weights{};
  FactorRows probabilities;  // the sum over the maps, weighted
  PerMap<FactorRows> gradients{};
};

}  // namespace tessera
