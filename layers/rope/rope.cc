#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/rope/rope.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/rope/rope.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// (a, b) -> (a cos - b sin, b cos + a sin), a and b the halves of a vector; to may be from.
// direction -1 turns it back.
void rotate(Elements from, Elements to, const float* cosines, const float* sines, std::int64_t half,
            float direction) {
  const FloatVector sign = hn::Set(Floats(), direction);
  for_vectors(half, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector a = load(from + i, count);
    const FloatVector b = load(from + half + i, count);
    const FloatVector c = load(cosines + i, count);
    const FloatVector s = hn::Mul(load(sines + i, count), sign);
    store(hn::NegMulAdd(b, s, hn::Mul(a, c)), to + i, count);
    store(hn::MulAdd(a, s, hn::Mul(b, c)), to + half + i, count);
  });
}

// The first of `group` rows that lie `stride` apart becomes their sum.
void sum_group(float* rows, std::int64_t stride, std::int64_t group, std::int64_t width) {
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector sum = load(rows + i, count);
    for (std::int64_t member = 1; member < group; ++member) {
      sum = hn::Add(sum, load(rows + member * stride + i, count));
    }
    store(sum, rows + i, count);
  });
}

void copy_row(const float* from, Elements to, std::int64_t width) {
  for_vectors(width, [&](std::int64_t i, std::int64_t count)
                         HWY_ATTR { store(load(from + i, count), to + i, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <mutex>
#include <tuple>

#include "layers/kernels/elementwise.h"

namespace tessera {
namespace {
HWY_EXPORT(rotate);
HWY_EXPORT(sum_group);
HWY_EXPORT(copy_row);
}  // namespace

RopeTable::RopeTable(std::int64_t length, std::int64_t width, double theta)
    : length_(length),
      width_(width),
      cosines_(static_cast<std::size_t>(length * width / 2)),
      sines_(cosines_.size()) {
  const std::int64_t half = width / 2;
  for (std::int64_t f = 0; f < half; ++f) {
    const double frequency =
        std::pow(theta, -2.0 * static_cast<double>(f) / static_cast<double>(width));
    for (std::int64_t position = 0; position < length; ++position) {
      const double angle = static_cast<double>(position) * frequency;
      const auto at = static_cast<std::size_t>(position * half + f);
      cosines_[at] = static_cast<float>(std::cos(angle));
      sines_[at] = static_cast<float>(std::sin(angle));
    }
  }
}

std::shared_ptr<const RopeTable> shared_rope_table(std::int64_t length, std::int64_t width,
                                                   double theta) {
  static std::mutex mutex;
  static std::map<std::tuple<std::int64_t, std::int64_t, double>, std::weak_ptr<const RopeTable>>
      tables;
  const std::lock_guard lock(mutex);
  std::weak_ptr<const RopeTable>& known = tables[{length, width, theta}];
  std::shared_ptr<const RopeTable> table = known.lock();
  if (!table) {
    table = std::make_shared<const RopeTable>(length, width, theta);
    known = table;
  }
  return table;
}

void split_heads(Queue& queue, BatchShape shape, const RopeTable* table, const View& x,
                 const View& by_head) {
  const std::int64_t heads = by_head.extent(1);
  const std::int64_t padded = by_head.extent(2);
  const std::int64_t width = by_head.extent(3);
  TESSERA_CHECK(!table || (table->width() == width && shape.length <= table->length()));
  TESSERA_CHECK(x.count() == shape.rows() * heads * width && padded >= shape.length);
  TESSERA_CHECK(x.dtype() == by_head.dtype());
  const Elements from = elements(x), to = elements(by_head);
  const auto row_bytes = static_cast<std::size_t>(width * size_of(x.dtype()));
  const std::int64_t blocks = pieces_of(padded, kRowsPerPiece);
  queue.parallel_for(shape.batch * blocks, [&](std::int64_t piece, Worker&) {
    const std::int64_t sequence = piece / blocks;
    const std::int64_t begin = piece % blocks * kRowsPerPiece;
    const std::int64_t end = std::min(padded, begin + kRowsPerPiece);
    for (std::int64_t head = 0; head < heads; ++head) {
      const Elements out = to + (sequence * heads + head) * padded * width;
      for (std::int64_t t = begin; t < std::min(end, shape.length); ++t) {
        const Elements in = from + ((sequence * shape.length + t) * heads + head) * width;
        if (table) {
          HWY_DYNAMIC_DISPATCH(rotate)
          (in, out + t * width, table->cosines(t), table->sines(t), width / 2, 1.0F);
        } else {
          std::memcpy((out + t * width).data, in.data, row_bytes);
        }
      }
      for (std::int64_t t = std::max(begin, shape.length); t < end; ++t) {
        std::memset((out + t * width).data, 0, row_bytes);
      }
    }
  });
}

void merge_heads(Queue& queue, BatchShape shape, const RopeTable* table, std::int64_t group,
                 const View& by_head, const View& x) {
  const std::int64_t heads = by_head.extent(1) / group;
  const std::int64_t padded = by_head.extent(2);
  const std::int64_t width = by_head.extent(3);
  TESSERA_CHECK(!table || (table->width() == width && shape.length <= table->length()));
  TESSERA_CHECK(x.count() == shape.rows() * heads * width && padded >= shape.length);
  float* const from = by_head.as<float>();
  const Elements to = elements(x);
  const std::int64_t blocks = pieces_of(shape.length, kRowsPerPiece);
  queue.parallel_for(shape.batch * blocks, [&](std::int64_t piece, Worker&) {
    const std::int64_t sequence = piece / blocks;
    const std::int64_t begin = piece % blocks * kRowsPerPiece;
    const std::int64_t end = std::min(shape.length, begin + kRowsPerPiece);
    for (std::int64_t head = 0; head < heads; ++head) {
      float* const in = from + (sequence * heads + head) * group * padded * width;
      for (std::int64_t t = begin; t < end; ++t) {
        const Elements out = to + ((sequence * shape.length + t) * heads + head) * width;
        float* const row = in + t * width;
        if (group > 1) HWY_DYNAMIC_DISPATCH(sum_group)(row, padded * width, group, width);
        if (table) {
          const Elements summed = {reinterpret_cast<std::byte*>(row), DType::kF32};
          HWY_DYNAMIC_DISPATCH(rotate)
          (summed, out, table->cosines(t), table->sines(t), width / 2, -1.0F);
        } else {
          HWY_DYNAMIC_DISPATCH(copy_row)(row, out, width);
        }
      }
    }
  });
}

}  // namespace tessera
#endif
