// Which lanes of a row of scores are visible, for every attention: a row's visible columns are a
// run [begin, end). And such rows one at a time, for attention whose tiles are small
// (layers/mixers/nsa; tiles of 128 columns go through attention.cc). Included once for every
// instruction set (Highway's foreach_target).
#if defined(TESSERA_LAYERS_ATTENTION_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_LAYERS_ATTENTION_SOFTMAX_INL_H_
#undef TESSERA_LAYERS_ATTENTION_SOFTMAX_INL_H_
#else
#define TESSERA_LAYERS_ATTENTION_SOFTMAX_INL_H_
#endif

#include <cstdint>
#include <limits>

#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// Lanes of columns [column, column + lanes) that lie in [begin, end).
HWY_INLINE hn::Mask<Floats> lanes_inside(std::int64_t column, std::int64_t begin,
                                         std::int64_t end) {
  const Floats d;
  const FloatVector at = hn::Iota(d, static_cast<float>(column));
  return hn::And(hn::Ge(at, hn::Set(d, static_cast<float>(begin))),
                 hn::Lt(at, hn::Set(d, static_cast<float>(end))));
}

// What a row of scores adds to an online softmax: the sums so far are to be multiplied by
// e^exponent, then `sum` is added.
struct SoftmaxStep {
  float exponent = 0.0F, sum = 0.0F;
};

// The row becomes probabilities relative to the new maximum, 0 outside its run, of type T from
// where it began; row_max is updated.
template <class T>
HWY_INLINE SoftmaxStep softmax_row(float* row, std::int64_t columns, std::int64_t begin,
                                   std::int64_t end, float scale, float& row_max) {
  const Floats d;
  const std::int64_t step = lanes();
  T* const out = reinterpret_cast<T*>(row);
  const auto width = [&](std::int64_t c) { return HWY_MIN(step, columns - c); };
  if (begin >= end) {
    for (std::int64_t c = 0; c < columns; c += step) store(hn::Zero(d), out + c, width(c));
    return {};
  }
  const FloatVector factor = hn::Set(d, scale);
  const FloatVector lowest = hn::Set(d, -std::numeric_limits<float>::infinity());
  // Only the first and the last vector can reach outside the run. (No fused multiply-subtract
  // below: with huge scores the largest must come out as e^0.)
  const std::int64_t first = begin / step * step;
  const auto edge = [&](std::int64_t c) { return c < begin || c + step > end; };
  FloatVector largest = lowest;
  for (std::int64_t c = first; c < end; c += step) {
    FloatVector s = load(row + c, width(c));
    if (edge(c)) s = hn::IfThenElse(lanes_inside(c, begin, end), s, lowest);
    largest = hn::Max(largest, s);
  }
  const float tile_max = max_of(largest) * scale;
  const float new_max = tile_max > row_max ? tile_max : row_max;
  const FloatVector shift = hn::Set(d, new_max);
  FloatVector sum = hn::Zero(d);
  std::int64_t c = 0;
  for (; c < first; c += step) store(hn::Zero(d), out + c, width(c));
  for (; c < end; c += step) {
    FloatVector p = exponential(hn::Sub(hn::Mul(load(row + c, width(c)), factor), shift));
    if (edge(c)) p = hn::IfThenElseZero(lanes_inside(c, begin, end), p);
    sum = hn::Add(sum, p);
    store(p, out + c, width(c));
  }
  for (; c < columns; c += step) store(hn::Zero(d), out + c, width(c));
  const float exponent = row_max - new_max;
  row_max = new_max;
  return {exponent, sum_of(sum)};
}

// scores -> probabilities p, d_p -> p (d_p - delta) scale, 0 outside the run; of type T, each from
// where its row began.
template <class T>
HWY_INLINE void softmax_backward_row(float* scores, float* d_p, std::int64_t columns,
                                     std::int64_t begin, std::int64_t end, float scale,
                                     float log_sum_exp, float delta) {
  const Floats d;
  const std::int64_t step = lanes();
  T* const out = reinterpret_cast<T*>(scores);
  T* const d_out = reinterpret_cast<T*>(d_p);
  const FloatVector factor = hn::Set(d, scale);
  const FloatVector shift = hn::Set(d, log_sum_exp);
  const FloatVector mean = hn::Set(d, delta);
  for (std::int64_t c = 0; c < columns; c += step) {
    const std::int64_t count = HWY_MIN(step, columns - c);
    if (c + step <= begin || c >= end) {
      store(hn::Zero(d), out + c, count);
      store(hn::Zero(d), d_out + c, count);
      continue;
    }
    FloatVector p = exponential(hn::Sub(hn::Mul(load(scores + c, count), factor), shift));
    FloatVector gradient = hn::Mul(hn::Mul(p, hn::Sub(load(d_p + c, count), mean)), factor);
    if (c < begin || c + step > end) {
      const auto visible = lanes_inside(c, begin, end);
      p = hn::IfThenElseZero(visible, p);
      gradient = hn::IfThenElseZero(visible, gradient);
    }
    store(p, out + c, count);
    store(gradient, d_out + c, count);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
