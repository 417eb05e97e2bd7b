#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/attention/attention.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/attention/attention.h"
#include "layers/attention/softmax-inl.h"
#include "layers/attention/tile.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// One tile of the online softmax. scores [tile, tile] become probabilities relative to the new
// maximum, 0 outside the row's visible columns [begin[r], end[r]), of type T, each row where its
// scores began; row_max, row_sum and correction [tile] are updated: correction is what the sums so
// far are to be multiplied by.
template <class T>
HWY_INLINE void softmax_tile_as(float* scores, const std::int64_t* begin, const std::int64_t* end,
                                float scale, float* row_max, float* row_sum, float* correction) {
  HWY_ALIGN float tile_sum[kAttentionTile];
  for (std::int64_t r = 0; r < kAttentionTile; ++r) {
    const SoftmaxStep step = softmax_row<T>(scores + r * kAttentionTile, kAttentionTile, begin[r],
                                            end[r], scale, row_max[r]);
    correction[r] = step.exponent;
    tile_sum[r] = step.sum;
  }
  const Floats d;
  for (std::int64_t r = 0; r < kAttentionTile; r += lanes()) {
    const FloatVector c = exponential(hn::LoadU(d, correction + r));
    hn::StoreU(c, d, correction + r);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, row_sum + r), c, hn::Load(d, tile_sum + r)), d, row_sum + r);
  }
}

void softmax_tile(DType dtype, float* scores, const std::int64_t* begin, const std::int64_t* end,
                  float scale, float* row_max, float* row_sum, float* correction) {
  if (dtype == DType::kF32) {
    softmax_tile_as<float>(scores, begin, end, scale, row_max, row_sum, correction);
  } else {
    softmax_tile_as<BFloat16>(scores, begin, end, scale, row_max, row_sum, correction);
  }
}

void scale_rows(float* rows, const float* factors, std::int64_t width) {
  for (std::int64_t r = 0; r < kAttentionTile; ++r) {
    if (factors[r] == 1.0F) continue;
    const FloatVector factor = hn::Set(Floats(), factors[r]);
    float* const row = rows + r * width;
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      store(hn::Mul(load(row + i, count), factor), row + i, count);
    });
  }
}

// Of each map m: scores -> probabilities p_m, and d_p, which the maps share, -> the gradients of
// the scores w_m p_m (d_p - delta_m) scale; 0 where not visible. The results are of type T, each
// row where its scores began: the sum of w_m p_m in the first map's scores, the first map's
// gradient in d_p, the second's in its scores.
template <class T, std::size_t kMaps>
HWY_INLINE void backward_tile_as(const BackwardTile& tile, const std::int64_t* begin,
                                 const std::int64_t* end, float scale) {
  const Floats d;
  const std::int64_t step = lanes();
  const FloatVector factor = hn::Set(d, scale);
  for (std::int64_t r = 0; r < kAttentionTile; ++r) {
    const std::int64_t at = r * kAttentionTile;
    T* const sums = reinterpret_cast<T*>(tile.scores[0] + at);
    const float* const d_row = tile.d_p + at;
    const auto gradients = [&](std::size_t m)
                               HWY_ATTR { return reinterpret_cast<T*>(tile.gradients(m) + at); };
    for (std::int64_t c = 0; c < kAttentionTile; c += step) {
      if (c + step <= begin[r] || c >= end[r]) {
        store(hn::Zero(d), sums + c, step);
        for (std::size_t m = 0; m < kMaps; ++m) store(hn::Zero(d), gradients(m) + c, step);
        continue;
      }
      const bool edge = c < begin[r] || c + step > end[r];
      const auto visible = lanes_inside(c, begin[r], end[r]);
      const FloatVector d_p = hn::LoadU(d, d_row + c);
      FloatVector sum = hn::Zero(d);
      for (std::size_t m = 0; m < kMaps; ++m) {
        const FloatVector score = hn::LoadU(d, tile.scores[m] + at + c);
        const FloatVector p = hn::Mul(
            hn::Set(d, tile.weights[m]),
            exponential(hn::Sub(hn::Mul(score, factor), hn::Set(d, tile.log_sum_exp[m][r]))));
        const FloatVector mean = hn::Set(d, tile.delta[m][r]);
        FloatVector gradient = hn::Mul(hn::Mul(p, hn::Sub(d_p, mean)), factor);
        if (edge) gradient = hn::IfThenElseZero(visible, gradient);
        sum = m == 0 ? p : hn::Add(sum, p);
        store(gradient, gradients(m) + c, step);
      }
      if (edge) sum = hn::IfThenElseZero(visible, sum);
      store(sum, sums + c, step);
    }
  }
}

void backward_tile(DType dtype, std::int64_t maps, const BackwardTile& tile,
                   const std::int64_t* begin, const std::int64_t* end, float scale) {
  if (dtype == DType::kF32 && maps == 1) backward_tile_as<float, 1>(tile, begin, end, scale);
  if (dtype == DType::kF32 && maps == 2) backward_tile_as<float, 2>(tile, begin, end, scale);
  if (dtype == DType::kBF16 && maps == 1) backward_tile_as<BFloat16, 1>(tile, begin, end, scale);
  if (dtype == DType::kBF16 && maps == 2) backward_tile_as<BFloat16, 2>(tile, begin, end, scale);
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(softmax_tile);
HWY_EXPORT(scale_rows);
HWY_EXPORT(divide_row);
HWY_EXPORT(backward_tile);
HWY_EXPORT(dot);

constexpr std::int64_t kTile = kAttentionTile;
constexpr std::int64_t kScores = kTile * kTile;

using Columns = std::array<std::int64_t, kTile>;

// The keys that the rows of one tile of queries see; those beyond the length see none.
class TileVisibility {
 public:
  TileVisibility(const AttentionShape& shape, const View& segments, std::int64_t sequence,
                 std::int64_t query_tile) {
    const std::int64_t length = shape.batch.length;
    const std::int32_t* const starts = segments.as<std::int32_t>() + sequence * length;
    std::int64_t first = shape.padded_keys(), end = 0;
    for (std::int64_t r = 0; r < kTile; ++r) {
      const std::int64_t i = query_tile * kTile + r;
      Range& run = runs_[static_cast<std::size_t>(r)];
      if (i < length) run = shape.visibility.keys_of(i, starts[i]);
      if (run.begin >= run.end) continue;
      first = std::min(first, run.begin);
      end = std::max(end, run.end);
    }
    first_tile_ = first / kTile;
    end_tile_ = attention_tiles(end);
  }
  // Tiles of keys that one of the rows sees; none when end_tile() <= first_tile().
  std::int64_t first_tile() const { return first_tile_; }
  std::int64_t end_tile() const { return end_tile_; }
  // The columns of a tile of keys that each row sees.
  void columns(std::int64_t key_tile, Columns& begin, Columns& end) const {
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      begin[r] = std::clamp<std::int64_t>(runs_[r].begin - key_tile * kTile, 0, kTile);
      end[r] = std::clamp<std::int64_t>(runs_[r].end - key_tile * kTile, 0, kTile);
    }
  }

 private:
  std::array<Range, kTile> runs_;
  std::int64_t first_tile_, end_tile_;
};

// Values of this type where a tile of scores was, each row at the start of its scores.
Matrix in_place(DType dtype, float* scores) {
  return {dtype, scores, kTile, kTile, kTile * size_of(DType::kF32) / size_of(dtype)};
}

// A tile of an array by head: the one with this index in the row-major order of [heads, tiles].
Matrix tile_of(const View& by_head, std::int64_t index) {
  const std::int64_t width = by_head.extent(3);
  return {by_head.dtype(), (elements(by_head) + index * kTile * width).data, kTile, width, width};
}

}  // namespace

Shape AttentionShape::tile_room() const {
  return {batch.threads, (maps + 1) * kScores + kTile * value_width + 3 * kTile};
}

void attention_forward(Queue& queue, const AttentionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v, const View& out,
                       const View& log_sum_exp, const View& tile_room) {
  const std::int64_t tiles = shape.tiles();
  const std::int64_t key_tiles = shape.key_tiles();
  const std::int64_t length = shape.batch.length;
  const std::int64_t heads = shape.heads * shape.maps;  // each of a map
  const std::int64_t width = shape.value_width;
  const std::int64_t room_size = shape.tile_room()[1];
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  const DType dtype = q.dtype();
  const Elements result = elements(out);
  float* const lse = log_sum_exp.as<float>();
  float* const rooms = tile_room.as<float>();
  queue.parallel_for(shape.batch.batch * heads * tiles, [&](std::int64_t piece, Worker& worker) {
    // Long rows of tiles first for one head, last for the next: the threads' shares are alike.
    const bool falling = piece / tiles % 2 == 0;
    const std::int64_t query_tile = falling ? tiles - 1 - piece % tiles : piece % tiles;
    const std::int64_t owner = piece / tiles;  // sequence, head, map
    const std::int64_t sequence = owner / heads;
    const std::int64_t head = owner % heads;
    const std::int64_t values =
        sequence * shape.key_value_heads + head / shape.maps / shape.group();
    const std::int64_t keys = values * shape.maps + head % shape.maps;
    float* const scores = rooms + worker.index() * room_size;
    float* const sums = scores + kScores;
    float* const row_max = sums + kTile * width;
    float* const row_sum = row_max + kTile;
    float* const correction = row_sum + kTile;
    std::fill_n(row_max, kTile, -std::numeric_limits<float>::infinity());
    std::fill_n(row_sum, kTile, 0.0F);

    const TileVisibility sees(shape, segments, sequence, query_tile);
    const Matrix query = tile_of(q, owner * tiles + query_tile);
    const Matrix score = {scores, kTile, kTile, kTile};
    const Matrix probability = in_place(dtype, scores);
    const Matrix sum = {sums, kTile, width, width};
    const std::int64_t first = sees.first_tile();
    for (std::int64_t key_tile = first; key_tile < sees.end_tile(); ++key_tile) {
      product(worker, query, Transpose::kNo, tile_of(k, keys * key_tiles + key_tile),
              Transpose::kYes, score, false);
      Columns begin, end;
      sees.columns(key_tile, begin, end);
      HWY_DYNAMIC_DISPATCH(softmax_tile)
      (dtype, scores, begin.data(), end.data(), static_cast<float>(scale), row_max, row_sum,
       correction);
      if (key_tile > first) HWY_DYNAMIC_DISPATCH(scale_rows)(sums, correction, width);
      product(worker, probability, Transpose::kNo, tile_of(v, values * key_tiles + key_tile),
              Transpose::kNo, sum, key_tile > first);
    }
    for (std::int64_t r = 0; r < kTile; ++r) {
      const std::int64_t i = query_tile * kTile + r;
      const bool blind = row_sum[r] == 0.0F;
      lse[owner * shape.padded() + i] =
          blind ? 0.0F
                : static_cast<float>(static_cast<double>(row_max[r]) +
                                     std::log(static_cast<double>(row_sum[r])));
      if (i >= length) continue;
      const Elements row = result + ((sequence * length + i) * heads + head) * width;
      if (blind) {
        std::memset(row.data, 0, static_cast<std::size_t>(width * size_of(row.dtype)));
      } else {
        HWY_DYNAMIC_DISPATCH(divide_row)(sums + r * width, row_sum[r], row, width);
      }
    }
  });
}

void attention_backward(Queue& queue, const AttentionShape& shape, const View& segments,
                        double scale, std::span<const float> weights, const View& q, const View& k,
                        const View& v, const View& out, const View& log_sum_exp, const View& d_out,
                        const View& d_out_by_head, const View& delta, const View& d_q,
                        const View& d_k, const View& d_v, const View& tile_room) {
  const std::int64_t tiles = shape.tiles();
  const std::int64_t key_tiles = shape.key_tiles();
  const std::int64_t length = shape.batch.length;
  const std::int64_t maps = shape.maps;
  const std::int64_t width = shape.value_width;
  const std::int64_t room_size = shape.tile_room()[1];
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  TESSERA_CHECK(maps == static_cast<std::int64_t>(weights.size()) && maps <= kMaxAttentionMaps);
  TESSERA_CHECK(d_out.dtype() == q.dtype() && d_out_by_head.dtype() == q.dtype());
  const DType dtype = q.dtype();
  const Elements result = elements(out), d_result = elements(d_out);
  const Elements d_rows = elements(d_out_by_head);
  const auto row_bytes = static_cast<std::size_t>(width * size_of(dtype));
  float* const means = delta.as<float>();

  // delta_i = d_out_i . out_i of each map, and d_out by head.
  queue.parallel_for(shape.batch.batch * tiles, [&](std::int64_t piece, Worker&) {
    const std::int64_t sequence = piece / tiles;
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const std::int64_t owner = sequence * shape.heads + head;
      for (std::int64_t i = piece % tiles * kTile; i < (piece % tiles + 1) * kTile; ++i) {
        const Elements by_head = d_rows + (owner * shape.padded() + i) * width;
        const std::int64_t row = (sequence * length + i) * shape.heads + head;
        if (i < length) {
          std::memcpy(by_head.data, (d_result + row * width).data, row_bytes);
        } else {
          std::memset(by_head.data, 0, row_bytes);
        }
        for (std::int64_t map = 0; map < maps; ++map) {
          means[(owner * maps + map) * shape.padded() + i] =
              i < length ? static_cast<float>(HWY_DYNAMIC_DISPATCH(dot)(
                               d_result + row * width, result + (row * maps + map) * width, width))
                         : 0.0F;
        }
      }
    }
  });

  // One piece a query head: tiles of keys ascending, within each the tiles of queries ascending.
  queue.parallel_for(shape.batch.batch * shape.heads, [&](std::int64_t piece, Worker& worker) {
    const std::int64_t sequence = piece / shape.heads;
    const std::int64_t values = piece / shape.group();  // sequence, key/value head
    const std::int64_t member = piece % shape.group();
    float* const room = tile_room.as<float>() + worker.index() * room_size;
    BackwardTile tile;
    for (std::int64_t map = 0; map < maps; ++map) {
      const auto m = static_cast<std::size_t>(map);
      tile.scores[m] = room + map * kScores;
      tile.weights[m] = weights[m];
    }
    tile.d_p = room + maps * kScores;
    const Matrix d_p = {tile.d_p, kTile, kTile, kTile};
    const Matrix probability = in_place(dtype, tile.scores[0]);
    const auto zero = [&](const Matrix& of) {
      std::memset(of.data, 0, static_cast<std::size_t>(of.rows * of.columns * size_of(of.dtype)));
    };
    // Of a map: queries and their gradient; keys; the keys' gradient, by key head and then member.
    const auto query_index = [&](std::int64_t map, std::int64_t query_tile) {
      return (piece * maps + map) * tiles + query_tile;
    };
    const auto key_index = [&](std::int64_t map, std::int64_t key_tile) {
      return (values * maps + map) * key_tiles + key_tile;
    };
    const auto d_key_index = [&](std::int64_t map, std::int64_t key_tile) {
      return ((values * maps + map) * shape.group() + member) * key_tiles + key_tile;
    };
    for (std::int64_t query_tile = 0; query_tile < tiles; ++query_tile) {
      const TileVisibility sees(shape, segments, sequence, query_tile);
      if (sees.first_tile() < sees.end_tile()) continue;
      for (std::int64_t map = 0; map < maps; ++map)
        zero(tile_of(d_q, query_index(map, query_tile)));
    }
    for (std::int64_t key_tile = 0; key_tile < key_tiles; ++key_tile) {
      const Matrix value = tile_of(v, values * key_tiles + key_tile);
      const Matrix d_value = tile_of(d_v, piece * key_tiles + key_tile);
      // No other query sees one of these keys.
      const Range queries =
          shape.visibility.queries_of({key_tile * kTile, (key_tile + 1) * kTile}, length);
      bool more = false;
      for (std::int64_t query_tile = queries.begin / kTile;
           query_tile < attention_tiles(queries.end); ++query_tile) {
        const TileVisibility sees(shape, segments, sequence, query_tile);
        if (key_tile < sees.first_tile() || key_tile >= sees.end_tile()) continue;
        const Matrix d_row = tile_of(d_out_by_head, piece * tiles + query_tile);
        for (std::int64_t map = 0; map < maps; ++map) {
          const auto m = static_cast<std::size_t>(map);
          const std::int64_t row = query_index(map, query_tile) * kTile;
          tile.log_sum_exp[m] = log_sum_exp.as<float>() + row;
          tile.delta[m] = means + row;
          product(worker, tile_of(q, query_index(map, query_tile)), Transpose::kNo,
                  tile_of(k, key_index(map, key_tile)), Transpose::kYes,
                  {tile.scores[m], kTile, kTile, kTile}, false);
        }
        product(worker, d_row, Transpose::kNo, value, Transpose::kYes, d_p, false);
        Columns begin, end;
        sees.columns(key_tile, begin, end);
        HWY_DYNAMIC_DISPATCH(backward_tile)
        (dtype, maps, tile, begin.data(), end.data(), static_cast<float>(scale));
        product(worker, probability, Transpose::kYes, d_row, Transpose::kNo, d_value, more);
        for (std::int64_t map = 0; map < maps; ++map) {
          const Matrix d_score = in_place(dtype, tile.gradients(static_cast<std::size_t>(map)));
          product(worker, d_score, Transpose::kYes, tile_of(q, query_index(map, query_tile)),
                  Transpose::kNo, tile_of(d_k, d_key_index(map, key_tile)), more);
          product(worker, d_score, Transpose::kNo, tile_of(k, key_index(map, key_tile)),
                  Transpose::kNo, tile_of(d_q, query_index(map, query_tile)),
                  key_tile > sees.first_tile());
        }
        more = true;
      }
      if (more) continue;
      zero(d_value);
      for (std::int64_t map = 0; map < maps; ++map) zero(tile_of(d_k, d_key_index(map, key_tile)));
    }
  });
}

double Visibility::mean_keys(std::int64_t length) const {
  const auto t = static_cast<double>(length);
  if (window_ < length) {
    const auto w = static_cast<double>(window_);
    return (w * (w + 1) / 2 + (t - w) * w) / t;
  }
  // The u-th position that can see a block, from 0, sees u div stride + 1.
  const std::int64_t positions = std::max<std::int64_t>(length - block_ + 1, 0);
  const std::int64_t steps = positions / stride_, rest = positions % stride_;
  const auto seen = static_cast<double>(steps);
  return (static_cast<double>(stride_) * seen * (seen + 1) / 2 +
          static_cast<double>(rest) * (seen + 1)) /
         t;
}

}  // namespace tessera
#endif
