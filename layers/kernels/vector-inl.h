// What the vector kernels share: whole vectors for bodies and tails alike, so that an element's
// bits don't depend on where a loop was cut; sums over fixed lanes; the exponential.
// Included once for every instruction set (Highway's foreach_target).
#if defined(TESSERA_LAYERS_KERNELS_VECTOR_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_LAYERS_KERNELS_VECTOR_INL_H_
#undef TESSERA_LAYERS_KERNELS_VECTOR_INL_H_
#else
#define TESSERA_LAYERS_KERNELS_VECTOR_INL_H_
#endif

#include <cstdint>
#include <cstring>

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using Floats = hn::ScalableTag<float>;
using Doubles = hn::ScalableTag<double>;
using FloatVector = hn::Vec<Floats>;
using DoubleVector = hn::Vec<Doubles>;

HWY_INLINE std::int64_t lanes() { return static_cast<std::int64_t>(hn::Lanes(Floats())); }

// `count` elements, at most a vector; the missing lanes are `fill`.
HWY_INLINE FloatVector load(const float* from, std::int64_t count, float fill = 0.0F) {
  const Floats d;
  if (count >= lanes()) return hn::LoadU(d, from);
  HWY_ALIGN float room[hn::MaxLanes(Floats())];
  hn::Store(hn::Set(d, fill), d, room);
  std::memcpy(room, from, static_cast<std::size_t>(count) * sizeof(float));
  return hn::Load(d, room);
}

HWY_INLINE void store(FloatVector value, float* to, std::int64_t count) {
  const Floats d;
  if (count >= lanes()) {
    hn::StoreU(value, d, to);
    return;
  }
  HWY_ALIGN float room[hn::MaxLanes(Floats())];
  hn::Store(value, d, room);
  std::memcpy(to, room, static_cast<std::size_t>(count) * sizeof(float));
}

// Calls body(first element, elements) for each vector of an array of n.
template <class Body>
HWY_INLINE void for_vectors(std::int64_t n, const Body& body) {
  const std::int64_t step = lanes();
  std::int64_t i = 0;
  for (; i + step <= n; i += step) body(i, step);
  if (i < n) body(i, n - i);
}

HWY_INLINE float sum_of(FloatVector v) { return hn::GetLane(hn::SumOfLanes(Floats(), v)); }
HWY_INLINE float max_of(FloatVector v) { return hn::GetLane(hn::MaxOfLanes(Floats(), v)); }

// The lower and the upper half of a vector as doubles; a single lane is its own lower half.
HWY_INLINE DoubleVector lower(FloatVector v) {
#if HWY_TARGET == HWY_SCALAR
  return hn::PromoteTo(Doubles(), v);
#else
  return hn::PromoteTo(Doubles(), hn::LowerHalf(hn::Half<Floats>(), v));
#endif
}
HWY_INLINE DoubleVector upper([[maybe_unused]] FloatVector v) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Zero(Doubles());
#else
  return hn::PromoteTo(Doubles(), hn::UpperHalf(hn::Half<Floats>(), v));
#endif
}

// A sum of floats kept in double lanes.
class DoubleSum {
 public:
  HWY_INLINE DoubleSum() : low_(hn::Zero(Doubles())), high_(low_) {}
  HWY_INLINE void add(FloatVector v) {
    low_ = hn::Add(low_, lower(v));
    high_ = hn::Add(high_, upper(v));
  }
  // Adds a * b, the product in double (exact).
  HWY_INLINE void add_product(FloatVector a, FloatVector b) {
    low_ = hn::MulAdd(lower(a), lower(b), low_);
    high_ = hn::MulAdd(upper(a), upper(b), high_);
  }
  HWY_INLINE double total() const {
    return hn::GetLane(hn::SumOfLanes(Doubles(), hn::Add(low_, high_)));
  }

 private:
  DoubleVector low_, high_;
};

// e^x within 1 unit in the last place; 0 below -104; infinity above 89; NaN stays NaN (Highway's
// own turns it into 0, which would hide a broken run).
HWY_INLINE FloatVector exponential(FloatVector x) {
  const Floats d;
  const FloatVector y = hn::Exp(d, hn::Min(x, hn::Set(d, 104.0F)));
  return hn::IfThenElse(hn::IsNaN(x), x, y);
}

HWY_INLINE FloatVector sigmoid(FloatVector x) {
  const FloatVector one = hn::Set(Floats(), 1.0F);
  return hn::Div(one, hn::Add(one, exponential(hn::Neg(x))));
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
