#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/attention/attention.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/attention/attention.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// Lanes of columns [column, column + lanes) that lie in [begin, end).
HWY_INLINE hn::Mask<Floats> inside(std::int64_t column, std::int64_t begin, std::int64_t end) {
  const Floats d;
  const FloatVector at = hn::Iota(d, static_cast<float>(column));
  return hn::And(hn::Ge(at, hn::Set(d, static_cast<float>(begin))),
                 hn::Lt(at, hn::Set(d, static_cast<float>(end))));
}

// One tile of the online softmax. scores [tile, tile] become probabilities relative to the new
// maximum, 0 outside the row's visible columns [begin[r], end[r]), of type T, each row where its
// scores began; row_max, row_sum and correction [tile] are updated: correction is what the sums so
// far are to be multiplied by.
template <class T>
HWY_INLINE void softmax_tile_as(float* scores, const std::int64_t* begin, const std::int64_t* end,
                                float scale, float* row_max, float* row_sum, float* correction) {
  const Floats d;
  const std::int64_t step = lanes();
  const FloatVector factor = hn::Set(d, scale);
  const FloatVector lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  HWY_ALIGN float tile_sum[kAttentionTile];
  for (std::int64_t r = 0; r < kAttentionTile; ++r) {
    const float* const row = scores + r * kAttentionTile;
    T* const out = reinterpret_cast<T*>(scores + r * kAttentionTile);
    correction[r] = 0.0F;
    tile_sum[r] = 0.0F;
    if (begin[r] >= end[r]) {
      for (std::int64_t c = 0; c < kAttentionTile; c += step) store(hn::Zero(d), out + c, step);
      continue;
    }
    // Only the first and the last vector of a row can reach outside its columns. (No fused
    // multiply-subtract below: with huge scores the largest must come out as e^0.)
    const std::int64_t first = begin[r] / step * step;
    const auto edge = [&](std::int64_t c) { return c < begin[r] || c + step > end[r]; };
    FloatVector largest = lowest;
    for (std::int64_t c = first; c < end[r]; c += step) {
      FloatVector s = hn::LoadU(d, row + c);
      if (edge(c)) s = hn::IfThenElse(inside(c, begin[r], end[r]), s, lowest);
      largest = hn::Max(largest, s);
    }
    const float tile_max = max_of(largest) * scale;
    const float new_max = tile_max > row_max[r] ? tile_max : row_max[r];
    const FloatVector shift = hn::Set(d, new_max);
    FloatVector sum = hn::Zero(d);
    std::int64_t c = 0;
    for (; c < first; c += step) store(hn::Zero(d), out + c, step);
    for (; c < end[r]; c += step) {
      FloatVector p = exponential(hn::Sub(hn::Mul(hn::LoadU(d, row + c), factor), shift));
      if (edge(c)) p = hn::IfThenElseZero(inside(c, begin[r], end[r]), p);
      sum = hn::Add(sum, p);
      store(p, out + c, step);
    }
    for (; c < kAttentionTile; c += step) store(hn::Zero(d), out + c, step);
    correction[r] = row_max[r] - new_max;
    row_max[r] = new_max;
    tile_sum[r] = sum_of(sum);
  }
  for (std::int64_t r = 0; r < kAttentionTile; r += step) {
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

void divide_row(const float* from, float divisor, Elements to, std::int64_t width) {
  const FloatVector by = hn::Set(Floats(), divisor);
  for_vectors(width, [&](std::int64_t i, std::int64_t count)
                         HWY_ATTR { store(hn::Div(load(from + i, count), by), to + i, count); });
}

// scores -> probabilities p, d_p -> d_scores = p (d_p - delta) scale; 0 where not visible. The
// results are of type T, each row where it began.
template <class T>
HWY_INLINE void backward_tile_as(float* scores, float* d_p, const std::int64_t* begin,
                                 const std::int64_t* end, float scale, const float* log_sum_exp,
                                 const float* delta) {
  const Floats d;
  const std::int64_t step = lanes();
  const FloatVector factor = hn::Set(d, scale);
  for (std::int64_t r = 0; r < kAttentionTile; ++r) {
    const float* const row = scores + r * kAttentionTile;
    const float* const d_row = d_p + r * kAttentionTile;
    T* const out = reinterpret_cast<T*>(scores + r * kAttentionTile);
    T* const d_out = reinterpret_cast<T*>(d_p + r * kAttentionTile);
    const FloatVector shift = hn::Set(d, log_sum_exp[r]);
    const FloatVector mean = hn::Set(d, delta[r]);
    for (std::int64_t c = 0; c < kAttentionTile; c += step) {
      if (c + step <= begin[r] || c >= end[r]) {
        store(hn::Zero(d), out + c, step);
        store(hn::Zero(d), d_out + c, step);
        continue;
      }
      FloatVector p = exponential(hn::Sub(hn::Mul(hn::LoadU(d, row + c), factor), shift));
      FloatVector gradient = hn::Mul(hn::Mul(p, hn::Sub(hn::LoadU(d, d_row + c), mean)), factor);
      if (c < begin[r] || c + step > end[r]) {
        const auto visible = inside(c, begin[r], end[r]);
        p = hn::IfThenElseZero(visible, p);
        gradient = hn::IfThenElseZero(visible, gradient);
      }
      store(p, out + c, step);
      store(gradient, d_out + c, step);
    }
  }
}

void backward_tile(DType dtype, float* scores, float* d_p, const std::int64_t* begin,
                   const std::int64_t* end, float scale, const float* log_sum_exp,
                   const float* delta) {
  if (dtype == DType::kF32) {
    backward_tile_as<float>(scores, d_p, begin, end, scale, log_sum_exp, delta);
  } else {
    backward_tile_as<BFloat16>(scores, d_p, begin, end, scale, log_sum_exp, delta);
  }
}

double dot(Elements a, Elements b, std::int64_t n) {
  DoubleSum sum;
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { sum.add_product(load(a + i, count), load(b + i, count)); });
  return sum.total();
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

// Which keys the queries of one sequence see.
struct Visibility {
  const std::int32_t* segments;
  std::int64_t length, window;

  std::int64_t first_key(std::int64_t i) const {
    return std::max<std::int64_t>(segments[i], i < window ? 0 : i - window + 1);
  }
  // The first tile of keys that a tile of queries has to look at; at most its own.
  std::int64_t first_tile(std::int64_t query_tile) const {
    std::int64_t first = query_tile * kTile;
    const std::int64_t end = std::min(length, first + kTile);
    for (std::int64_t i = query_tile * kTile; i < end; ++i) first = std::min(first, first_key(i));
    return first / kTile;
  }
  // The columns of a tile of keys that each row of a tile of queries sees; none beyond the length.
  void columns(std::int64_t query_tile, std::int64_t key_tile, Columns& begin, Columns& end) const {
    for (std::int64_t r = 0; r < kTile; ++r) {
      const auto at = static_cast<std::size_t>(r);
      const std::int64_t i = query_tile * kTile + r;
      begin[at] = end[at] = 0;
      if (i >= length) continue;
      begin[at] = std::clamp<std::int64_t>(first_key(i) - key_tile * kTile, 0, kTile);
      end[at] = std::clamp<std::int64_t>(i + 1 - key_tile * kTile, 0, kTile);
    }
  }
};

// Values of this type where a tile of scores was, each row at the start of its scores.
Matrix in_place(DType dtype, float* scores) {
  return {dtype, scores, kTile, kTile, kTile * size_of(DType::kF32) / size_of(dtype)};
}

Visibility visibility(const AttentionShape& shape, const View& segments, std::int64_t sequence) {
  return {segments.as<std::int32_t>() + sequence * shape.batch.length, shape.batch.length,
          shape.window};
}

}  // namespace

Shape AttentionShape::tile_room() const {
  return {batch.threads, 2 * kScores + kTile * head_width + 3 * kTile};
}

void attention_forward(Queue& queue, const AttentionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v, const View& out,
                       const View& log_sum_exp, const View& tile_room) {
  const std::int64_t tiles = shape.tiles();
  const std::int64_t length = shape.batch.length;
  const std::int64_t width = shape.head_width;
  const std::int64_t room_size = shape.tile_room()[1];
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  const DType dtype = q.dtype();
  const Elements queries = elements(q), keys = elements(k), values = elements(v);
  const Elements result = elements(out);
  float* const lse = log_sum_exp.as<float>();
  float* const rooms = tile_room.as<float>();
  queue.parallel_for(
      shape.batch.batch * shape.heads * tiles, [&](std::int64_t piece, Worker& worker) {
        // Long rows of tiles first for one head, last for the next: the threads' shares are alike.
        const bool falling = piece / tiles % 2 == 0;
        const std::int64_t query_tile = falling ? tiles - 1 - piece % tiles : piece % tiles;
        const std::int64_t sequence = piece / tiles / shape.heads;
        const std::int64_t head = piece / tiles % shape.heads;
        const std::int64_t shared = sequence * shape.key_value_heads + head / shape.group();
        float* const scores = rooms + worker.index() * room_size;
        float* const sums = scores + kScores;
        float* const row_max = sums + kTile * width;
        float* const row_sum = row_max + kTile;
        float* const correction = row_sum + kTile;
        std::fill_n(row_max, kTile, -std::numeric_limits<float>::infinity());
        std::fill_n(row_sum, kTile, 0.0F);

        const Visibility sees = visibility(shape, segments, sequence);
        const auto tile = [&](const Elements& of, std::int64_t owner, std::int64_t index) {
          return Matrix(dtype, (of + (owner * tiles + index) * kTile * width).data, kTile, width,
                        width);
        };
        const Matrix query = tile(queries, sequence * shape.heads + head, query_tile);
        const Matrix score = {scores, kTile, kTile, kTile};
        const Matrix probability = in_place(dtype, scores);
        const Matrix sum = {sums, kTile, width, width};
        const std::int64_t first = sees.first_tile(query_tile);
        for (std::int64_t key_tile = first; key_tile <= query_tile; ++key_tile) {
          product(worker, query, Transpose::kNo, tile(keys, shared, key_tile), Transpose::kYes,
                  score, false);
          Columns begin, end;
          sees.columns(query_tile, key_tile, begin, end);
          HWY_DYNAMIC_DISPATCH(softmax_tile)
          (dtype, scores, begin.data(), end.data(), static_cast<float>(scale), row_max, row_sum,
           correction);
          if (key_tile > first) HWY_DYNAMIC_DISPATCH(scale_rows)(sums, correction, width);
          product(worker, probability, Transpose::kNo, tile(values, shared, key_tile),
                  Transpose::kNo, sum, key_tile > first);
        }
        for (std::int64_t r = 0; r < kTile; ++r) {
          const std::int64_t i = query_tile * kTile + r;
          const bool blind = row_sum[r] == 0.0F;
          lse[(sequence * shape.heads + head) * shape.padded() + i] =
              blind ? 0.0F
                    : static_cast<float>(static_cast<double>(row_max[r]) +
                                         std::log(static_cast<double>(row_sum[r])));
          if (i >= length) continue;
          const Elements row = result + ((sequence * length + i) * shape.heads + head) * width;
          if (blind) {
            std::memset(row.data, 0, static_cast<std::size_t>(width * size_of(dtype)));
          } else {
            HWY_DYNAMIC_DISPATCH(divide_row)(sums + r * width, row_sum[r], row, width);
          }
        }
      });
}

void attention_backward(Queue& queue, const AttentionShape& shape, const View& segments,
                        double scale, const View& q, const View& k, const View& v, const View& out,
                        const View& log_sum_exp, const View& d_out, const View& d_out_by_head,
                        const View& delta, const View& d_q, const View& d_k, const View& d_v,
                        const View& tile_room) {
  const std::int64_t tiles = shape.tiles();
  const std::int64_t length = shape.batch.length;
  const std::int64_t width = shape.head_width;
  const std::int64_t tile_size = kTile * width;
  const std::int64_t room_size = shape.tile_room()[1];
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  const DType dtype = q.dtype();
  const std::int64_t element = size_of(dtype);
  const Elements result = elements(out), d_result = elements(d_out);
  const Elements d_rows = elements(d_out_by_head);
  float* const means = delta.as<float>();

  // delta_i = d_out_i . out_i, and d_out by head.
  queue.parallel_for(shape.batch.batch * tiles, [&](std::int64_t piece, Worker&) {
    const std::int64_t sequence = piece / tiles;
    for (std::int64_t head = 0; head < shape.heads; ++head) {
      const std::int64_t to = (sequence * shape.heads + head) * shape.padded();
      for (std::int64_t i = piece % tiles * kTile; i < (piece % tiles + 1) * kTile; ++i) {
        if (i >= length) {
          std::memset((d_rows + (to + i) * width).data, 0,
                      static_cast<std::size_t>(width * element));
          means[to + i] = 0.0F;
          continue;
        }
        const std::int64_t from = ((sequence * length + i) * shape.heads + head) * width;
        std::memcpy((d_rows + (to + i) * width).data, (d_result + from).data,
                    static_cast<std::size_t>(width * element));
        means[to + i] =
            static_cast<float>(HWY_DYNAMIC_DISPATCH(dot)(d_result + from, result + from, width));
      }
    }
  });

  // One piece a query head: tiles of keys ascending, within each the tiles of queries ascending.
  queue.parallel_for(shape.batch.batch * shape.heads, [&](std::int64_t piece, Worker& worker) {
    const std::int64_t sequence = piece / shape.heads;
    const std::int64_t shared =
        sequence * shape.key_value_heads + piece % shape.heads / shape.group();
    const Visibility sees = visibility(shape, segments, sequence);
    float* const room = tile_room.as<float>() + worker.index() * room_size;
    float* const d_room = room + kScores;
    const Matrix score = {room, kTile, kTile, kTile};
    const Matrix d_score = {d_room, kTile, kTile, kTile};
    const Matrix probability = in_place(dtype, room);
    const Matrix d_product = in_place(dtype, d_room);
    const auto tile = [&](const View& view, std::int64_t owner, std::int64_t index) {
      return Matrix(view.dtype(), (elements(view) + (owner * tiles + index) * tile_size).data,
                    kTile, width, width);
    };
    for (std::int64_t key_tile = 0; key_tile < tiles; ++key_tile) {
      const Matrix key = tile(k, shared, key_tile);
      const Matrix value = tile(v, shared, key_tile);
      const Matrix d_key = tile(d_k, piece, key_tile);
      const Matrix d_value = tile(d_v, piece, key_tile);
      // No later query has one of these keys in its window.
      const std::int64_t last =
          shape.window > shape.padded()
              ? tiles - 1
              : std::min(tiles - 1, ((key_tile + 1) * kTile + shape.window - 2) / kTile);
      for (std::int64_t query_tile = key_tile; query_tile <= last; ++query_tile) {
        const std::int64_t first = sees.first_tile(query_tile);
        if (key_tile < first) continue;
        const std::int64_t row = (piece * tiles + query_tile) * kTile;
        const Matrix query = tile(q, piece, query_tile);
        const Matrix d_row = tile(d_out_by_head, piece, query_tile);
        product(worker, query, Transpose::kNo, key, Transpose::kYes, score, false);
        product(worker, d_row, Transpose::kNo, value, Transpose::kYes, d_score, false);
        Columns begin, end;
        sees.columns(query_tile, key_tile, begin, end);
        HWY_DYNAMIC_DISPATCH(backward_tile)
        (dtype, room, d_room, begin.data(), end.data(), static_cast<float>(scale),
         log_sum_exp.as<float>() + row, means + row);
        // A tile of queries meets its own tile of keys first of all that look at that one.
        const bool more = query_tile > key_tile;
        product(worker, probability, Transpose::kYes, d_row, Transpose::kNo, d_value, more);
        product(worker, d_product, Transpose::kYes, query, Transpose::kNo, d_key, more);
        product(worker, d_product, Transpose::kNo, key, Transpose::kNo,
                tile(d_q, piece, query_tile), key_tile > first);
      }
    }
  });
}

double mean_visible_keys(std::int64_t length, std::int64_t window) {
  const auto t = static_cast<double>(length);
  if (window >= length) return (t + 1) / 2;
  const auto w = static_cast<double>(window);
  return (w * (w + 1) / 2 + (t - w) * w) / t;
}

}  // namespace tessera
#endif
