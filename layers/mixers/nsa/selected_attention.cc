#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/mixers/nsa/selected_attention.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/attention/softmax-inl.h"
#include "layers/kernels/vector-inl.h"
#include "layers/mixers/nsa/selected_attention.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// sums[c] += e^(scores[c] scale - log_sum_exp) for the columns [begin, end).
void add_probabilities(const float* scores, std::int64_t begin, std::int64_t end, float scale,
                       float log_sum_exp, float* sums) {
  const Floats d;
  for_vectors(end - begin, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector score = hn::Mul(load(scores + begin + i, count), hn::Set(d, scale));
    const FloatVector p = exponential(hn::Sub(score, hn::Set(d, log_sum_exp)));
    store(hn::Add(load(sums + begin + i, count), p), sums + begin + i, count);
  });
}

// The online softmax of a tile of `rows` gathered queries over one block: scores [kSelectedRows,
// columns] become probabilities of the type, 0 in the rows that are missing. Row r keeps its
// maximum and sum at places[r]; correction[r] is what its sums so far are to be multiplied by.
template <class T>
HWY_INLINE void softmax_gathered_as(float* scores, std::int64_t rows, std::int64_t columns,
                                    const std::int64_t* begin, const std::int64_t* end, float scale,
                                    const std::int64_t* places, float* row_max, float* row_sum,
                                    float* correction) {
  HWY_ALIGN float sums[kSelectedRows];
  for (std::int64_t r = 0; r < kSelectedRows; ++r) {
    float unused = 0.0F;
    const SoftmaxStep step =
        softmax_row<T>(scores + r * columns, columns, r < rows ? begin[r] : 0,
                       r < rows ? end[r] : 0, scale, r < rows ? row_max[places[r]] : unused);
    correction[r] = step.exponent;
    sums[r] = step.sum;
  }
  for_vectors(kSelectedRows, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(exponential(load(correction + i, count)), correction + i, count);
  });
  for (std::int64_t r = 0; r < rows; ++r) {
    row_sum[places[r]] = row_sum[places[r]] * correction[r] + sums[r];
  }
}

void softmax_gathered(DType dtype, float* scores, std::int64_t rows, std::int64_t columns,
                      const std::int64_t* begin, const std::int64_t* end, float scale,
                      const std::int64_t* places, float* row_max, float* row_sum,
                      float* correction) {
  if (dtype == DType::kF32) {
    softmax_gathered_as<float>(scores, rows, columns, begin, end, scale, places, row_max, row_sum,
                               correction);
  } else {
    softmax_gathered_as<BFloat16>(scores, rows, columns, begin, end, scale, places, row_max,
                                  row_sum, correction);
  }
}

// to[places[r]] = to[places[r]] factors[r] + from[r], rows of this width.
void scatter_scaled(const float* from, const float* factors, const std::int64_t* places,
                    std::int64_t rows, std::int64_t width, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const row = to + places[r] * width;
    const FloatVector factor = hn::Set(Floats(), factors[r]);
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      store(hn::MulAdd(load(row + i, count), factor, load(from + r * width + i, count)), row + i,
            count);
    });
  }
}

void scatter_sum(const float* from, const std::int64_t* places, std::int64_t rows,
                 std::int64_t width, float* to) {
  for (std::int64_t r = 0; r < rows; ++r) {
    float* const row = to + places[r] * width;
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      store(hn::Add(load(row + i, count), load(from + r * width + i, count)), row + i, count);
    });
  }
}

void softmax_backward_gathered(DType dtype, float* scores, float* d_p, std::int64_t rows,
                               std::int64_t columns, const std::int64_t* begin,
                               const std::int64_t* end, float scale, const float* log_sum_exp,
                               const float* delta) {
  for (std::int64_t r = 0; r < kSelectedRows; ++r) {
    const std::int64_t first = r < rows ? begin[r] : 0;
    const std::int64_t last = r < rows ? end[r] : 0;
    if (dtype == DType::kF32) {
      softmax_backward_row<float>(scores + r * columns, d_p + r * columns, columns, first, last,
                                  scale, log_sum_exp[r], delta[r]);
    } else {
      softmax_backward_row<BFloat16>(scores + r * columns, d_p + r * columns, columns, first, last,
                                     scale, log_sum_exp[r], delta[r]);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <span>

#include "layers/attention/attention.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(add_probabilities);
HWY_EXPORT(softmax_gathered);
HWY_EXPORT(scatter_scaled);
HWY_EXPORT(scatter_sum);
HWY_EXPORT(softmax_backward_gathered);
HWY_EXPORT(divide_row);
HWY_EXPORT(dot);

constexpr std::int64_t kTile = kAttentionTile;
constexpr std::int64_t kRows = kSelectedRows;

// Candidates of a position whose segment starts at `segment`: blocks [begin, end).
Range candidates(const SelectionShape& shape, std::int64_t t, std::int64_t segment) {
  return {segment / shape.block_length, t / shape.block_length + 1};
}

// The sum over compressed blocks of `probabilities`, zero outside [seen.begin, seen.end), times the
// strides that each shares with block j.
float importance(const SelectionShape& shape, std::int64_t j, Range seen,
                 const float* probabilities) {
  const std::int64_t pieces = shape.compressed_length / shape.compressed_stride;
  const std::int64_t begin = j * (shape.block_length / shape.compressed_stride);
  const std::int64_t end = begin + shape.block_length / shape.compressed_stride;
  float sum = 0.0F;
  for (std::int64_t i = std::max(begin - pieces + 1, seen.begin); i < std::min(end, seen.end);
       ++i) {
    const std::int64_t shared = std::min(i + pieces, end) - std::max(i, begin);
    sum += static_cast<float>(shared) * probabilities[i];
  }
  return sum;
}

// The `most` chosen of more candidates, into `chosen` in ascending order. best: scratch of `most`.
struct Ranked {
  float value;
  std::int32_t block;
};
void choose_best(const SelectionShape& shape, Range from, Range seen, const float* probabilities,
                 Ranked* best, std::int32_t* chosen) {
  const std::int64_t room = shape.most - 3;
  std::int64_t count = 0;
  for (std::int64_t j = from.begin + 1; j < from.end - 2; ++j) {
    const float value = importance(shape, j, seen, probabilities);
    // Equals stay in front: they have the lower index.
    if (count == room && (room == 0 || !(value > best[count - 1].value))) continue;
    std::int64_t place = count < room ? count++ : count - 1;
    for (; place > 0 && value > best[place - 1].value; --place) best[place] = best[place - 1];
    best[place] = {value, static_cast<std::int32_t>(j)};
  }
  chosen[0] = static_cast<std::int32_t>(from.begin);
  for (std::int64_t i = 0; i < room; ++i) chosen[i + 1] = best[i].block;
  chosen[room + 1] = static_cast<std::int32_t>(from.end - 2);
  chosen[room + 2] = static_cast<std::int32_t>(from.end - 1);
  std::sort(chosen + 1, chosen + 1 + room);
}

// Rows of this many elements, copied from `from` + places[r] * stride; the missing ones are zero.
void gather_rows(const Elements& from, const std::int64_t* places, std::int64_t rows,
                 std::int64_t stride, std::int64_t width, std::byte* to) {
  const auto bytes = static_cast<std::size_t>(width * size_of(from.dtype));
  for (std::int64_t r = 0; r < rows; ++r) {
    std::memcpy(to + r * static_cast<std::int64_t>(bytes), (from + places[r] * stride).data, bytes);
  }
  std::memset(to + rows * static_cast<std::int64_t>(bytes), 0,
              static_cast<std::size_t>(kRows - rows) * bytes);
}

// Up to kRows queries that chose one block, and what they see of it.
struct Gathered {
  std::array<std::int64_t, kRows> positions, places, begin, end;
  std::int64_t rows = 0;

  // places count from `origin`.
  void take(const SelectionShape& shape, const std::int32_t* segments, std::int64_t block,
            std::span<const std::int32_t> chosen_by, std::int64_t origin) {
    rows = static_cast<std::int64_t>(chosen_by.size());
    const std::int64_t first = block * shape.block_length;
    for (std::size_t r = 0; r < chosen_by.size(); ++r) {
      const std::int64_t t = chosen_by[r];
      positions[r] = t;
      places[r] = t - origin;
      begin[r] = std::clamp<std::int64_t>(segments[t] - first, 0, shape.block_length);
      end[r] = std::clamp<std::int64_t>(t + 1 - first, 0, shape.block_length);
    }
  }
};

// The parts of a thread's room, in floats.
struct TileRoom {
  TileRoom(const SelectionShape& shape, float* room)
      : queries(room),
        d_rows(queries + kRows * shape.head_width),
        part(d_rows + kRows * shape.head_width),
        scores(part + kRows * shape.head_width),
        d_scores(scores + kRows * shape.block_length),
        row_max(d_scores + kRows * shape.block_length),
        row_sum(row_max + std::min(kSelectedPositions, shape.batch.length)),
        sums(row_sum + std::min(kSelectedPositions, shape.batch.length)) {}
  float *queries, *d_rows, *part, *scores, *d_scores, *row_max, *row_sum, *sums;
};

struct Tile {
  const SelectionShape& shape;
  DType dtype;
  Matrix rows(float* at) const { return {dtype, at, kRows, shape.head_width, shape.head_width}; }
  Matrix part(float* at) const { return {at, kRows, shape.head_width, shape.head_width}; }
  Matrix scores(float* at) const { return {at, kRows, shape.block_length, shape.block_length}; }
  // Values of the type where scores were, each row from where it began.
  Matrix in_place(float* at) const {
    return {dtype, at, kRows, shape.block_length,
            shape.block_length * size_of(DType::kF32) / size_of(dtype)};
  }
  // Block j of a head's keys or values.
  Matrix block(const View& of, std::int64_t head, std::int64_t j) const {
    const Elements all = elements(of);
    return {all.dtype,
            (all + (head * shape.blocks() + j) * shape.block_length * shape.head_width).data,
            shape.block_length, shape.head_width, shape.head_width};
  }
};

}  // namespace

Shape SelectionShape::choice_room() const {
  const std::int64_t keys = attention_tiles(compressed().keys(batch.length)) * kTile;
  return {batch.threads, kTile * kTile + kTile * keys + 2 * most};
}

Shape SelectionShape::tile_room() const {
  return {batch.threads, kRows * (3 * head_width + 2 * block_length) +
                             std::min(kSelectedPositions, batch.length) * (head_width + 2)};
}

double SelectionShape::mean_keys(std::int64_t length) const {
  const auto sum_to = [](std::int64_t n) {
    return static_cast<double>(n) * static_cast<double>(n + 1) / 2;
  };
  const std::int64_t all = std::min(length, most * block_length);
  const std::int64_t full = (length - all) / block_length;
  const std::int64_t rest = (length - all) % block_length;
  // Behind the positions that see everything: all blocks but the own, and the own's part.
  return (sum_to(all) + static_cast<double>(full) * sum_to(block_length) + sum_to(rest) +
          static_cast<double>(length - all) * static_cast<double>((most - 1) * block_length)) /
         static_cast<double>(length);
}

void choose_blocks(Queue& queue, const SelectionShape& shape, const View& segments, double scale,
                   const View& q, const View& keys, const View& log_sum_exp, const View& choice,
                   const View& choice_room) {
  const std::int64_t length = shape.batch.length;
  const std::int64_t tiles = attention_tiles(length);
  const std::int64_t key_tiles = attention_tiles(shape.compressed().keys(length));
  const std::int64_t width = shape.head_width;
  const std::int64_t stride = key_tiles * kTile;
  const Visibility visibility = shape.compressed();
  const Elements queries = elements(q), compressed = elements(keys);
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  queue.parallel_for(shape.batch.batch * shape.key_value_heads * tiles, [&](std::int64_t piece,
                                                                            Worker& worker) {
    // As in the attention: the threads' shares are alike.
    const std::int64_t owner = piece / tiles;
    const bool falling = owner % 2 == 0;
    const std::int64_t tile = falling ? tiles - 1 - piece % tiles : piece % tiles;
    const std::int64_t begin = tile * kTile, end = std::min(length, begin + kTile);
    const std::int64_t sequence = owner / shape.key_value_heads;
    const std::int32_t* const starts = segments.as<std::int32_t>() + sequence * length;
    float* const scores = choice_room.as<float>() + worker.index() * shape.choice_room()[1];
    float* const sums = scores + kTile * kTile;
    auto* const best = reinterpret_cast<Ranked*>(sums + kTile * stride);

    std::array<Range, kTile> seen;
    std::int64_t first = stride, last = 0;
    for (std::int64_t t = begin; t < end; ++t) {
      Range& run = seen[static_cast<std::size_t>(t - begin)];
      run = visibility.keys_of(t, starts[t]);
      const Range from = candidates(shape, t, starts[t]);
      if (from.end - from.begin <= shape.most || run.begin >= run.end) continue;
      first = std::min(first, run.begin);
      last = std::max(last, run.end);
    }
    if (first < last) std::fill_n(sums, kTile * stride, 0.0F);
    for (std::int64_t member = 0; member < shape.group() && first < last; ++member) {
      const std::int64_t head = owner * shape.group() + member;
      const Matrix query = {q.dtype(), (queries + (head * tiles + tile) * kTile * width).data,
                            kTile, width, width};
      const float* const lse = log_sum_exp.as<float>() + (head * tiles + tile) * kTile;
      for (std::int64_t key_tile = first / kTile; key_tile < attention_tiles(last); ++key_tile) {
        const std::int64_t column = key_tile * kTile;
        product(worker, query, Transpose::kNo,
                {q.dtype(), (compressed + (owner * key_tiles + key_tile) * kTile * width).data,
                 kTile, width, width},
                Transpose::kYes, {scores, kTile, kTile, kTile}, false);
        for (std::int64_t r = 0; r < end - begin; ++r) {
          const Range& run = seen[static_cast<std::size_t>(r)];
          HWY_DYNAMIC_DISPATCH(add_probabilities)
          (scores + r * kTile, std::clamp<std::int64_t>(run.begin - column, 0, kTile),
           std::clamp<std::int64_t>(run.end - column, 0, kTile), static_cast<float>(scale), lse[r],
           sums + r * stride + column);
        }
      }
    }
    for (std::int64_t t = begin; t < end; ++t) {
      std::int32_t* const chosen = choice.as<std::int32_t>() + (owner * length + t) * shape.most;
      const Range from = candidates(shape, t, starts[t]);
      if (from.end - from.begin > shape.most) {
        choose_best(shape, from, seen[static_cast<std::size_t>(t - begin)],
                    sums + (t - begin) * stride, best, chosen);
        continue;
      }
      for (std::int64_t i = 0; i < shape.most; ++i) {
        chosen[i] = from.begin + i < from.end ? static_cast<std::int32_t>(from.begin + i) : -1;
      }
    }
  });
}

void invert_choice(Queue& queue, const SelectionShape& shape, const View& choice,
                   const View& offsets, const View& positions) {
  const std::int64_t blocks = shape.blocks();
  const std::int64_t entries = shape.batch.length * shape.most;
  queue.parallel_for(shape.batch.batch * shape.key_value_heads, [&](std::int64_t piece, Worker&) {
    const std::int32_t* const chosen = choice.as<std::int32_t>() + piece * entries;
    std::int64_t* const ends = offsets.as<std::int64_t>() + piece * (blocks + 1);
    std::int32_t* const list = positions.as<std::int32_t>() + piece * entries;
    // ends[j + 1] counts block j, then is where its list begins, and at last where it ends.
    std::fill_n(ends, blocks + 1, 0);
    for (std::int64_t i = 0; i < entries; ++i) {
      if (chosen[i] >= 0 && chosen[i] + 1 < blocks) ++ends[chosen[i] + 2];
    }
    for (std::int64_t j = 1; j <= blocks; ++j) ends[j] += ends[j - 1];
    for (std::int64_t i = 0; i < entries; ++i) {
      if (chosen[i] >= 0) list[ends[chosen[i] + 1]++] = static_cast<std::int32_t>(i / shape.most);
    }
  });
}

namespace {

// Calls body(gathered) for the tiles of those positions of [begin, end) that chose the block.
template <class Body>
void for_chosen(const SelectionShape& shape, const std::int32_t* segments, const View& offsets,
                const View& positions, std::int64_t head, std::int64_t block, std::int64_t begin,
                std::int64_t end, const Body& body) {
  const std::int64_t* const at = offsets.as<std::int64_t>() + head * (shape.blocks() + 1) + block;
  const std::int32_t* const list =
      positions.as<std::int32_t>() + head * shape.batch.length * shape.most;
  const std::int32_t* const from = std::lower_bound(list + at[0], list + at[1], begin);
  const std::int32_t* const to = std::lower_bound(from, list + at[1], end);
  Gathered gathered;
  for (const std::int32_t* next = from; next < to; next += gathered.rows) {
    gathered.take(shape, segments, block,
                  {next, static_cast<std::size_t>(std::min(kRows, to - next))}, begin);
    body(gathered);
  }
}

}  // namespace

void selected_forward(Queue& queue, const SelectionShape& shape, const View& segments, double scale,
                      const View& q, const View& k, const View& v, const View& offsets,
                      const View& positions, const View& out, const View& log_sum_exp,
                      const View& products, const View& tile_room) {
  const std::int64_t length = shape.batch.length;
  const std::int64_t width = shape.head_width;
  const std::int64_t tiles = shape.tiles();
  const std::int64_t padded = q.extent(2);
  const Elements queries = elements(q), result = elements(out);
  const Tile tile = {shape, q.dtype()};
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  queue.parallel_for(shape.batch.batch * shape.heads * tiles, [&](std::int64_t piece,
                                                                  Worker& worker) {
    const std::int64_t owner = piece / tiles;  // sequence, query head
    const std::int64_t shared = owner / shape.group();
    const bool falling = owner % 2 == 0;
    const std::int64_t index = falling ? tiles - 1 - piece % tiles : piece % tiles;
    const std::int64_t begin = index * kSelectedPositions;
    const std::int64_t end = std::min(length, begin + kSelectedPositions);
    const std::int32_t* const starts = segments.as<std::int32_t>() + owner / shape.heads * length;
    const TileRoom room(shape, tile_room.as<float>() + worker.index() * shape.tile_room()[1]);
    std::fill_n(room.row_max, end - begin, -std::numeric_limits<float>::infinity());
    std::fill_n(room.row_sum, end - begin, 0.0F);
    std::fill_n(room.sums, (end - begin) * width, 0.0F);
    std::int64_t made = 0;
    for (std::int64_t j = 0; j * shape.block_length < end; ++j) {
      for_chosen(
          shape, starts, offsets, positions, shared, j, begin, end, [&](const Gathered& some) {
            gather_rows(queries + owner * padded * width, some.positions.data(), some.rows, width,
                        width, reinterpret_cast<std::byte*>(room.queries));
            product(worker, tile.rows(room.queries), Transpose::kNo, tile.block(k, shared, j),
                    Transpose::kYes, tile.scores(room.scores), false);
            HWY_ALIGN std::array<float, kRows> correction;
            HWY_DYNAMIC_DISPATCH(softmax_gathered)
            (tile.dtype, room.scores, some.rows, shape.block_length, some.begin.data(),
             some.end.data(), static_cast<float>(scale), some.places.data(), room.row_max,
             room.row_sum, correction.data());
            product(worker, tile.in_place(room.scores), Transpose::kNo, tile.block(v, shared, j),
                    Transpose::kNo, tile.part(room.part), false);
            HWY_DYNAMIC_DISPATCH(scatter_scaled)
            (room.part, correction.data(), some.places.data(), some.rows, width, room.sums);
            ++made;
          });
    }
    products.as<std::int64_t>()[owner * tiles + index] = made;
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t at = t - begin;
      const float sum = room.row_sum[at];
      const Elements row =
          result + ((owner / shape.heads * length + t) * shape.heads + owner % shape.heads) * width;
      const bool blind = sum == 0.0F;
      log_sum_exp.as<float>()[owner * length + t] =
          blind ? 0.0F
                : static_cast<float>(static_cast<double>(room.row_max[at]) +
                                     std::log(static_cast<double>(sum)));
      if (blind) {
        std::memset(row.data, 0, static_cast<std::size_t>(width * size_of(row.dtype)));
      } else {
        HWY_DYNAMIC_DISPATCH(divide_row)(room.sums + at * width, sum, row, width);
      }
    }
  });
}

void selected_backward(Queue& queue, const SelectionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v,
                       const View& offsets, const View& positions, const View& out,
                       const View& log_sum_exp, const View& d_out, const View& delta,
                       const View& d_q, const View& d_k, const View& d_v, const View& tile_room) {
  const std::int64_t length = shape.batch.length;
  const std::int64_t width = shape.head_width;
  const std::int64_t padded = q.extent(2);
  const std::int64_t row_size = shape.heads * width;
  const Tile tile = {shape, q.dtype()};
  TESSERA_CHECK(queue.threads() <= shape.batch.threads);
  // One piece a query head: blocks ascending, for each its queries ascending.
  queue.parallel_for(shape.batch.batch * shape.heads, [&](std::int64_t owner, Worker& worker) {
    const std::int64_t shared = owner / shape.group();
    const std::int64_t sequence = owner / shape.heads;
    const std::int32_t* const starts = segments.as<std::int32_t>() + sequence * length;
    const std::int64_t first_row = sequence * length * row_size + owner % shape.heads * width;
    const Elements queries = elements(q) + owner * padded * width;
    const Elements result = elements(out) + first_row, d_result = elements(d_out) + first_row;
    const TileRoom room(shape, tile_room.as<float>() + worker.index() * shape.tile_room()[1]);
    const float* const lse = log_sum_exp.as<float>() + owner * length;
    float* const means = delta.as<float>() + owner * length;
    float* const d_queries = d_q.as<float>() + owner * padded * width;
    std::fill_n(d_queries, padded * width, 0.0F);
    for (std::int64_t t = 0; t < length; ++t) {
      means[t] = static_cast<float>(
          HWY_DYNAMIC_DISPATCH(dot)(d_result + t * row_size, result + t * row_size, width));
    }
    for (std::int64_t j = 0; j < shape.blocks(); ++j) {
      const Matrix key = tile.block(k, shared, j), value = tile.block(v, shared, j);
      const Matrix d_key = tile.block(d_k, owner, j), d_value = tile.block(d_v, owner, j);
      bool more = false;
      for_chosen(shape, starts, offsets, positions, shared, j, 0, length,
                 [&](const Gathered& some) {
                   gather_rows(queries, some.positions.data(), some.rows, width, width,
                               reinterpret_cast<std::byte*>(room.queries));
                   gather_rows(d_result, some.positions.data(), some.rows, row_size, width,
                               reinterpret_cast<std::byte*>(room.d_rows));
                   std::array<float, kRows> shift{}, mean{};
                   for (std::size_t r = 0; r < static_cast<std::size_t>(some.rows); ++r) {
                     shift[r] = lse[some.positions[r]];
                     mean[r] = means[some.positions[r]];
                   }
                   const Matrix query = tile.rows(room.queries), d_row = tile.rows(room.d_rows);
                   product(worker, query, Transpose::kNo, key, Transpose::kYes,
                           tile.scores(room.scores), false);
                   product(worker, d_row, Transpose::kNo, value, Transpose::kYes,
                           tile.scores(room.d_scores), false);
                   HWY_DYNAMIC_DISPATCH(softmax_backward_gathered)
                   (tile.dtype, room.scores, room.d_scores, some.rows, shape.block_length,
                    some.begin.data(), some.end.data(), static_cast<float>(scale), shift.data(),
                    mean.data());
                   const Matrix d_score = tile.in_place(room.d_scores);
                   product(worker, tile.in_place(room.scores), Transpose::kYes, d_row,
                           Transpose::kNo, d_value, more);
                   product(worker, d_score, Transpose::kYes, query, Transpose::kNo, d_key, more);
                   product(worker, d_score, Transpose::kNo, key, Transpose::kNo,
                           tile.part(room.part), false);
                   HWY_DYNAMIC_DISPATCH(scatter_sum)
                   (room.part, some.places.data(), some.rows, width, d_queries);
                   more = true;
                 });
      if (more) continue;
      for (const Matrix& none : {d_key, d_value}) {
        std::fill_n(reinterpret_cast<float*>(none.data), none.rows * none.columns, 0.0F);
      }
    }
  });
}

}  // namespace tessera
#endif
