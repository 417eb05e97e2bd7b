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

// Where vector pairs go: terms from c on, c a multiple of two vectors, of a factor's row.
template <class T>
HWY_INLINE T* terms(const FactorRows& rows, std::byte* row, std::int64_t c) {
  return reinterpret_cast<T*>(row + c / kFactorChunk * rows.chunk) + c % kFactorChunk;
}

// Rows of scores become probabilities relative to the new maximum, 0 outside the row's visible
// columns; correction is what the sums so far are to be multiplied by.
template <class T>
HWY_INLINE void softmax_tile_as(const TileRows& tile, const ForwardTile& of) {
  const Floats d;
  const std::int64_t step = lanes();
  const FloatVector lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  const FloatVector factor = hn::Set(d, tile.scale);
  HWY_ALIGN float tile_sum[kAttentionTile];
  // The largest of all rows before the exponentials of any, so that no row waits for its own.
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const float* const row = of.scores + r * kAttentionTile;
    const std::int64_t begin = tile.begin[r], end = tile.end[r];
    of.correction[r] = 0.0F;
    if (begin >= end) continue;
    FloatVector largest = lowest;
    for (std::int64_t c = begin / step * step; c < end; c += step) {
      FloatVector s = hn::LoadU(d, row + c);
      if (c < begin || c + step > end) {
        s = hn::IfThenElse(lanes_inside(c, begin, end), s, lowest);
      }
      largest = hn::Max(largest, s);
    }
    const float tile_max = max_of(largest) * tile.scale;
    const float new_max = tile_max > of.row_max[r] ? tile_max : of.row_max[r];
    of.correction[r] = of.row_max[r] - new_max;
    of.row_max[r] = new_max;
  }
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const float* const row = of.scores + r * kAttentionTile;
    std::byte* const out = of.probabilities.at(r);
    const std::int64_t begin = tile.begin[r], end = tile.end[r];
    const FloatVector shift = hn::Set(d, of.row_max[r]);
    // (No fused multiply-subtract: with huge scores the largest must come out as e^0.)
    const auto probability = [&](std::int64_t c) HWY_ATTR {
      return exponential_below_88(hn::Sub(hn::Mul(hn::LoadU(d, row + c), factor), shift));
    };
    FloatVector sum = hn::Zero(d);
    for (std::int64_t c = 0; c < kAttentionTile; c += 2 * step) {
      T* const to = terms<T>(of.probabilities, out, c);
      if (c + 2 * step <= begin || c >= end) {
        store_pair(hn::Zero(d), hn::Zero(d), to);
        continue;
      }
      FloatVector p = probability(c), q = probability(c + step);
      if (c < begin || c + 2 * step > end) {
        p = hn::IfThenElseZero(lanes_inside(c, begin, end), p);
        q = hn::IfThenElseZero(lanes_inside(c + step, begin, end), q);
      }
      sum = hn::Add(hn::Add(sum, p), q);
      store_pair(p, q, to);
    }
    tile_sum[r] = sum_of(sum);
  }
  for (std::int64_t r = 0; r < tile.rows; r += step) {
    const FloatVector c = exponential_below_88(hn::LoadU(d, of.correction + r));
    hn::StoreU(c, d, of.correction + r);
    hn::StoreU(hn::MulAdd(hn::LoadU(d, of.row_sum + r), c, hn::Load(d, tile_sum + r)), d,
               of.row_sum + r);
  }
}

void softmax_tile(DType dtype, const TileRows& tile, const ForwardTile& of) {
  if (dtype == DType::kF32) {
    softmax_tile_as<float>(tile, of);
  } else {
    softmax_tile_as<BFloat16>(tile, of);
  }
}

void scale_rows(float* rows, const float* factors, std::int64_t count, std::int64_t width) {
  for (std::int64_t r = 0; r < count; ++r) {
    if (factors[r] == 1.0F) continue;
    float* const row = rows + r * width;
    const FloatVector factor = hn::Set(Floats(), factors[r]);
    for_vectors(width, [&](std::int64_t i, std::int64_t n)
                           HWY_ATTR { store(hn::Mul(load(row + i, n), factor), row + i, n); });
  }
}

// Of each map m: scores -> probabilities p_m, and with d_p, which the maps share, the gradients of
// the scores w_m p_m (d_p - delta_m) scale; 0 where not visible. The results are of type T.
template <class T, std::size_t kMaps>
HWY_INLINE void backward_tile_as(const TileRows& tile, const BackwardTile& of) {
  const Floats d;
  const std::int64_t step = lanes();
  const FloatVector factor = hn::Set(d, tile.scale);
  for (std::int64_t r = 0; r < tile.rows; ++r) {
    const std::int64_t at = r * kAttentionTile, begin = tile.begin[r], end = tile.end[r];
    std::byte* const sums = of.probabilities.at(r);
    std::array<std::byte*, kMaps> gradients;
    for (std::size_t m = 0; m < kMaps; ++m) gradients[m] = of.gradients[m].at(r);
    for (std::int64_t c = 0; c < kAttentionTile; c += 2 * step) {
      const bool hidden = c + 2 * step <= begin || c >= end;
      const bool edge = c < begin || c + 2 * step > end;
      FloatVector sum[2] = {hn::Zero(d), hn::Zero(d)};
      FloatVector gradient[kMaps][2];
      for (std::size_t m = 0; m < kMaps; ++m) gradient[m][0] = gradient[m][1] = hn::Zero(d);
      for (std::int64_t half = 0; half < 2 && !hidden; ++half) {
        const std::int64_t column = c + half * step;
        const FloatVector d_p = hn::LoadU(d, of.d_p + at + column);
        for (std::size_t m = 0; m < kMaps; ++m) {
          const FloatVector score = hn::LoadU(d, of.scores[m] + at + column);
          const FloatVector shift = hn::LoadU(d, of.log_sum_exp[m] + column);
          const FloatVector mean = hn::LoadU(d, of.delta[m] + column);
          FloatVector p = hn::Mul(hn::Set(d, of.weights[m]),
                                  exponential_below_88(hn::Sub(hn::Mul(score, factor), shift)));
          FloatVector g = hn::Mul(hn::Mul(p, hn::Sub(d_p, mean)), factor);
          if (edge) {
            const auto visible = lanes_inside(column, begin, end);
            p = hn::IfThenElseZero(visible, p);
            g = hn::IfThenElseZero(visible, g);
          }
          sum[half] = m == 0 ? p : hn::Add(sum[half], p);
          gradient[m][half] = g;
        }
      }
      store_pair(sum[0], sum[1], terms<T>(of.probabilities, sums, c));
      for (std::size_t m = 0; m < kMaps; ++m) {
        store_pair(gradient[m][0], gradient[m][1], terms<T>(of.gradients[m], gradients[m], c));
      }
    }
  }
}

void backward_tile(DType dtype, std::int64_t maps, const TileRows& tile, const BackwardTile& of) {
  if (dtype == DType::kF32 && maps == 1) backward_tile_as<float, 1>(tile, of);
  if (dtype == DType::kF32 && maps == 2) backward_tile_as<float, 2>(tile, of);
  if (dtype == DType::kBF16 && maps == 1) backward_tile_as<BFloat16, 1>(tile, of);
  if (dtype == DType::kBF16 && maps == 2) backward_tile_as<BFloat16, 2>(tile, of);
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
    rows_ = std::min(kTile, length - query_tile * kTile);
    std::int64_t first = shape.padded_keys(), end = 0;
    for (std::int64_t r = 0; r < rows_; ++r) {
      const std::int64_t i = query_tile * kTile + r;
      Range& run = runs_[static_cast<std::size_t>(r)];
      run = shape.visibility.keys_of(i, starts[i]);
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
  void keys(std::int64_t key_tile, Columns& begin, Columns& end) const {
    for (std::size_t r = 0; r < runs_.size(); ++r) {
      begin[r] = std::clamp<std::int64_t>(runs_[r].begin - key_tile * kTile, 0, kTile);
      end[r] = std::clamp<std::int64_t>(runs_[r].end - key_tile * kTile, 0, kTile);
    }
  }
  // The rows that see each of a tile's keys: a run too, for neither end of keys_of ever falls.
  void queries(std::int64_t key_tile, Columns& begin, Columns& end) const {
    std::int64_t from = 0, to = 0;
    for (std::int64_t j = 0; j < kTile; ++j) {
      const std::int64_t key = key_tile * kTile + j;
      while (from < rows_ && runs_[static_cast<std::size_t>(from)].end <= key) ++from;
      while (to < rows_ && runs_[static_cast<std::size_t>(to)].begin <= key) ++to;
      begin[static_cast<std::size_t>(j)] = from;
      end[static_cast<std::size_t>(j)] = to;
    }
  }

 private:
  std::array<Range, kTile> runs_{};
  std::int64_t rows_, first_tile_, end_tile_;
};

// Values of this type where rows of scores were, each row at the start of its scores.
Matrix in_place(DType dtype, float* scores, std::int64_t rows) {
  return {dtype, scores, rows, kTile, kTile * size_of(DType::kF32) / size_of(dtype)};
}

// A tile of an array by head: the one with this index in the row-major order of [heads, tiles].
Matrix tile_of(const View& by_head, std::int64_t index) {
  const std::int64_t width = by_head.extent(3);
  return {by_head.dtype(), (elements(by_head) + index * kTile * width).data, kTile, width, width};
}
Matrix rows_of(const Matrix& tile, std::int64_t row, std::int64_t rows) {
  return {tile.dtype, tile.at(row, 0), rows, tile.columns, tile.stride};
}

// A map of what `owner` counts.
std::int64_t of_map(const AttentionShape& shape, std::int64_t owner, std::size_t map) {
  return owner * shape.maps + static_cast<std::int64_t>(map);
}

// Rows of a tile that are multiplied, exponentiated and multiplied again before the next ones:
// where factors are packed, no more than the first cache holds.
std::int64_t rows_at_once(DType dtype) { return packs_factors(dtype) ? kFactorGroup : kTile; }

// A thread's own arrays, cut from its room one behind the other, each at a multiple of 64 bytes if
// the room is.
class Room {
 public:
  explicit Room(std::byte* start) : start_(start) {}
  float* floats(std::int64_t count) { return reinterpret_cast<float*>(bytes(count * 4)); }
  std::byte* factor(std::int64_t extent, std::int64_t inner) {
    return bytes(factor_bytes(extent, inner));
  }
  std::int64_t used() const { return used_; }

 private:
  std::byte* bytes(std::int64_t count) {
    std::byte* const at = start_ == nullptr ? nullptr : start_ + used_;
    used_ += (count + 63) / 64 * 64;
    return at;
  }
  std::byte* start_;
  std::int64_t used_ = 0;
};

struct ForwardRoom {
  ForwardRoom(const AttentionShape& shape, Room room) {
    for (std::int64_t m = 0; m < shape.maps; ++m) {
      PerMap& map = maps[static_cast<std::size_t>(m)];
      map.sums = room.floats(kTile * shape.value_width);
      map.row_max = room.floats(kTile);
      map.row_sum = room.floats(kTile);
      map.query = room.factor(kTile, shape.key_width);
    }
    scores = room.floats(kScores);
    correction = room.floats(kTile);
    key = room.factor(kTile, shape.key_width);
    value = room.factor(shape.value_width, kTile);
    probabilities = room.factor(kFactorGroup, kTile);
    used = room.used();
  }
  struct PerMap {
    float *sums, *row_max, *row_sum;
    std::byte* query;
  };
  std::array<PerMap, static_cast<std::size_t>(kMaxAttentionMaps)> maps{};
  float *scores, *correction;
  std::byte *key, *value, *probabilities;
  std::int64_t used;
};

struct BackwardRoom {
  BackwardRoom(const AttentionShape& shape, Room room) {
    for (std::int64_t m = 0; m < shape.maps; ++m) {
      PerMap& map = maps[static_cast<std::size_t>(m)];
      map.scores = room.floats(kScores);
      map.key = room.factor(kTile, shape.key_width);
      map.key_right = room.factor(shape.key_width, kTile);
      map.query_turned = room.factor(kTile, shape.key_width);
      map.query = room.factor(shape.key_width, kTile);
      map.gradient = room.factor(kTile, kTile);
    }
    d_p = room.floats(kScores);
    value = room.factor(kTile, shape.value_width);
    d_out_turned = room.factor(kTile, shape.value_width);
    d_out = room.factor(shape.value_width, kTile);
    probabilities = room.factor(kTile, kTile);
    turned = room.factor(kTile, kTile);
    used = room.used();
  }
  struct PerMap {
    float* scores;
    std::byte *key, *key_right, *query_turned, *query, *gradient;
  };
  std::array<PerMap, static_cast<std::size_t>(kMaxAttentionMaps)> maps{};
  float* d_p;
  std::byte *value, *d_out_turned, *d_out, *probabilities, *turned;
  std::int64_t used;
};

Room own_room(const View& tile_room, const Worker& worker) {
  return Room(
      reinterpret_cast<std::byte*>(tile_room.as<float>() + worker.index() * tile_room.extent(1)));
}

}  // namespace

Shape AttentionShape::tile_room() const {
  TESSERA_CHECK(maps <= kMaxAttentionMaps);
  const Room nowhere(nullptr);
  return {batch.threads,
          std::max(ForwardRoom(*this, nowhere).used, BackwardRoom(*this, nowhere).used) / 4};
}

void attention_forward(Queue& queue, const AttentionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v, const View& out,
                       const View& log_sum_exp, const View& tile_room) {
  const std::int64_t tiles = shape.tiles();
  const std::int64_t key_tiles = shape.key_tiles();
  const std::int64_t length = shape.batch.length;
  const std::int64_t width = shape.value_width;
  const auto maps = static_cast<std::size_t>(shape.maps);
  TESSERA_CHECK(queue.threads() <= shape.batch.threads && tile_room.shape() == shape.tile_room());
  const DType dtype = q.dtype();
  const std::int64_t rows = rows_at_once(dtype);
  const Elements result = elements(out);
  float* const lse = log_sum_exp.as<float>();
  const std::int64_t pieces = shape.batch.batch * shape.heads * tiles;
  queue.parallel_for(pieces, [&](std::int64_t piece, Worker& worker) {
    // Long rows of tiles first for one head, last for the next: the threads' shares are alike.
    const bool falling = piece / tiles % 2 == 0;
    const std::int64_t query_tile = falling ? tiles - 1 - piece % tiles : piece % tiles;
    const std::int64_t owner = piece / tiles;           // sequence, head
    const std::int64_t values = owner / shape.group();  // sequence, key/value head
    const ForwardRoom room(shape, own_room(tile_room, worker));
    const Factor probabilities =
        Factor::to_be_written(in_place(dtype, room.scores, rows), room.probabilities);
    std::array<Factor, static_cast<std::size_t>(kMaxAttentionMaps)> query;
    for (std::size_t m = 0; m < maps; ++m) {
      const ForwardRoom::PerMap& map = room.maps[m];
      std::fill_n(map.row_max, kTile, -std::numeric_limits<float>::infinity());
      std::fill_n(map.row_sum, kTile, 0.0F);
      query[m] = Factor::left(tile_of(q, of_map(shape, owner, m) * tiles + query_tile),
                              Transpose::kNo, map.query);
    }
    const TileVisibility sees(shape, segments, owner / shape.heads, query_tile);
    const std::int64_t first = sees.first_tile();
    for (std::int64_t key_tile = first; key_tile < sees.end_tile(); ++key_tile) {
      const Factor value =
          Factor::right(tile_of(v, values * key_tiles + key_tile), Transpose::kNo, room.value);
      Columns begin, end;
      sees.keys(key_tile, begin, end);
      for (std::size_t m = 0; m < maps; ++m) {
        const ForwardRoom::PerMap& map = room.maps[m];
        const Factor key = Factor::right(
            tile_of(k, of_map(shape, values, m) * key_tiles + key_tile), Transpose::kYes, room.key);
        for (std::int64_t row = 0; row < kTile; row += rows) {
          const Matrix sums = {map.sums + row * width, rows, width, width};
          product(worker, query[m].from_row(row, rows), key, {room.scores, rows, kTile, kTile},
                  false);
          HWY_DYNAMIC_DISPATCH(softmax_tile)
          (dtype, {rows, begin.data() + row, end.data() + row, static_cast<float>(scale)},
           {room.scores, probabilities.rows(), map.row_max + row, map.row_sum + row,
            room.correction});
          if (key_tile > first) {
            HWY_DYNAMIC_DISPATCH(scale_rows)(map.sums + row * width, room.correction, rows, width);
          }
          product(worker, probabilities, value, sums, key_tile > first);
        }
      }
    }
    for (std::size_t m = 0; m < maps; ++m) {
      const ForwardRoom::PerMap& map = room.maps[m];
      for (std::int64_t r = 0; r < kTile; ++r) {
        const std::int64_t i = query_tile * kTile + r;
        const bool blind = map.row_sum[r] == 0.0F;
        lse[of_map(shape, owner, m) * shape.padded() + i] =
            blind ? 0.0F
                  : static_cast<float>(static_cast<double>(map.row_max[r]) +
                                       std::log(static_cast<double>(map.row_sum[r])));
        if (i >= length) continue;
        const std::int64_t head =
            owner / shape.heads * length * shape.heads + i * shape.heads + owner % shape.heads;
        const Elements row = result + of_map(shape, head, m) * width;
        if (blind) {
          std::memset(row.data, 0, static_cast<std::size_t>(width * size_of(row.dtype)));
        } else {
          HWY_DYNAMIC_DISPATCH(divide_row)(map.sums + r * width, map.row_sum[r], row, width);
        }
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
  const auto maps = static_cast<std::size_t>(shape.maps);
  const std::int64_t width = shape.value_width;
  TESSERA_CHECK(queue.threads() <= shape.batch.threads && tile_room.shape() == shape.tile_room());
  TESSERA_CHECK(maps == weights.size());
  TESSERA_CHECK(d_out.dtype() == q.dtype() && d_out_by_head.dtype() == q.dtype());
  const DType dtype = q.dtype();
  const std::int64_t rows = rows_at_once(dtype);
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
        for (std::int64_t map = 0; map < shape.maps; ++map) {
          means[(owner * shape.maps + map) * shape.padded() + i] =
              i < length
                  ? static_cast<float>(HWY_DYNAMIC_DISPATCH(dot)(
                        d_result + row * width, result + (row * shape.maps + map) * width, width))
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
    const BackwardRoom room(shape, own_room(tile_room, worker));
    const auto per_map = [&](const auto& make) {
      std::array<Factor, static_cast<std::size_t>(kMaxAttentionMaps)> list;
      for (std::size_t m = 0; m < maps; ++m) list[m] = make(m);
      return list;
    };
    BackwardTile tile;
    tile.d_p = room.d_p;
    for (std::size_t m = 0; m < maps; ++m) {
      tile.scores[m] = room.maps[m].scores;
      tile.weights[m] = weights[m];
    }
    // Where factors aren't packed the results take the place of the scores.
    const Factor probabilities =
        Factor::to_be_written(in_place(dtype, room.maps[0].scores, kTile), room.probabilities);
    const auto gradients = per_map([&](std::size_t m) {
      return Factor::to_be_written(in_place(dtype, m == 0 ? room.d_p : room.maps[m].scores, kTile),
                                   room.maps[m].gradient);
    });
    const auto zero = [&](const Matrix& of) {
      std::memset(of.data, 0, static_cast<std::size_t>(of.rows * of.columns * size_of(of.dtype)));
    };
    // Of a map: queries and their gradient; keys; the keys' gradient, by key head and then member.
    const auto query_index = [&](std::size_t map, std::int64_t query_tile) {
      return of_map(shape, piece, map) * tiles + query_tile;
    };
    const auto key_index = [&](std::size_t map, std::int64_t key_tile) {
      return of_map(shape, values, map) * key_tiles + key_tile;
    };
    const auto d_key_index = [&](std::size_t map, std::int64_t key_tile) {
      return (of_map(shape, values, map) * shape.group() + member) * key_tiles + key_tile;
    };
    for (std::int64_t query_tile = 0; query_tile < tiles; ++query_tile) {
      const TileVisibility sees(shape, segments, sequence, query_tile);
      if (sees.first_tile() < sees.end_tile()) continue;
      for (std::size_t m = 0; m < maps; ++m) zero(tile_of(d_q, query_index(m, query_tile)));
    }
    for (std::int64_t key_tile = 0; key_tile < key_tiles; ++key_tile) {
      const Matrix d_value = tile_of(d_v, piece * key_tiles + key_tile);
      const Factor value =
          Factor::left(tile_of(v, values * key_tiles + key_tile), Transpose::kNo, room.value);
      const auto key = per_map([&](std::size_t m) {
        return Factor::left(tile_of(k, key_index(m, key_tile)), Transpose::kNo, room.maps[m].key);
      });
      const auto key_right = per_map([&](std::size_t m) {
        return Factor::right(tile_of(k, key_index(m, key_tile)), Transpose::kNo,
                             room.maps[m].key_right);
      });
      // No other query sees one of these keys.
      const Range queries =
          shape.visibility.queries_of({key_tile * kTile, (key_tile + 1) * kTile}, length);
      bool more = false;
      for (std::int64_t query_tile = queries.begin / kTile;
           query_tile < attention_tiles(queries.end); ++query_tile) {
        const TileVisibility sees(shape, segments, sequence, query_tile);
        if (key_tile < sees.first_tile() || key_tile >= sees.end_tile()) continue;
        const Matrix d_row = tile_of(d_out_by_head, piece * tiles + query_tile);
        const Factor d_row_turned = Factor::right(d_row, Transpose::kYes, room.d_out_turned);
        const Factor d_row_right = Factor::right(d_row, Transpose::kNo, room.d_out);
        const auto query_turned = per_map([&](std::size_t m) {
          return Factor::right(tile_of(q, query_index(m, query_tile)), Transpose::kYes,
                               room.maps[m].query_turned);
        });
        const auto query = per_map([&](std::size_t m) {
          return Factor::right(tile_of(q, query_index(m, query_tile)), Transpose::kNo,
                               room.maps[m].query);
        });
        Columns begin, end;
        sees.queries(key_tile, begin, end);
        for (std::size_t m = 0; m < maps; ++m) {
          tile.log_sum_exp[m] = log_sum_exp.as<float>() + query_index(m, query_tile) * kTile;
          tile.delta[m] = means + query_index(m, query_tile) * kTile;
        }
        for (std::int64_t row = 0; row < kTile; row += rows) {
          for (std::size_t m = 0; m < maps; ++m) {
            product(worker, key[m].from_row(row, rows), query_turned[m],
                    {room.maps[m].scores, rows, kTile, kTile}, false);
          }
          product(worker, value.from_row(row, rows), d_row_turned, {room.d_p, rows, kTile, kTile},
                  false);
          tile.probabilities = probabilities.from_row(row, rows).rows();
          for (std::size_t m = 0; m < maps; ++m) {
            tile.gradients[m] = gradients[m].from_row(row, rows).rows();
          }
          HWY_DYNAMIC_DISPATCH(backward_tile)
          (dtype, shape.maps,
           {rows, begin.data() + row, end.data() + row, static_cast<float>(scale)}, tile);
          product(worker, probabilities.from_row(row, rows), d_row_right,
                  rows_of(d_value, row, rows), more);
          for (std::size_t m = 0; m < maps; ++m) {
            product(worker, gradients[m].from_row(row, rows), query[m],
                    rows_of(tile_of(d_k, d_key_index(m, key_tile)), row, rows), more);
          }
        }
        for (std::size_t m = 0; m < maps; ++m) {
          product(worker, gradients[m].transposed(room.turned), key_right[m],
                  tile_of(d_q, query_index(m, query_tile)), key_tile > sees.first_tile());
        }
        more = true;
      }
      if (more) continue;
      zero(d_value);
      for (std::size_t m = 0; m < maps; ++m) zero(tile_of(d_k, d_key_index(m, key_tile)));
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
