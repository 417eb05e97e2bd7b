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

#include "hwy/highway.h"
#include "layers/kernels/elementwise.h"
#include "runtime/bfloat16-inl.h"

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

HWY_INLINE FloatVector load(const BFloat16* from, std::int64_t count, float fill = 0.0F) {
  const auto* bits = reinterpret_cast<const std::uint16_t*>(from);
  if (count >= lanes()) return from_bfloat16(hn::LoadU(BFloat16Bits(), bits));
  HWY_ALIGN std::uint16_t room[hn::MaxLanes(Floats())];
  hn::Store(bfloat16_bits(hn::Set(Floats(), fill)), BFloat16Bits(), room);
  std::memcpy(room, bits, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
  return from_bfloat16(hn::Load(BFloat16Bits(), room));
}

HWY_INLINE void store(FloatVector value, BFloat16* to, std::int64_t count) {
  auto* bits = reinterpret_cast<std::uint16_t*>(to);
  if (count >= lanes()) {
    hn::StoreU(bfloat16_bits(value), BFloat16Bits(), bits);
    return;
  }
  HWY_ALIGN std::uint16_t room[hn::MaxLanes(Floats())];
  hn::Store(bfloat16_bits(value), BFloat16Bits(), room);
  std::memcpy(bits, room, static_cast<std::size_t>(count) * sizeof(std::uint16_t));
}

// Two vectors, one behind the other.
HWY_INLINE void store_pair(FloatVector a, FloatVector b, float* to) {
  hn::StoreU(a, Floats(), to);
  hn::StoreU(b, Floats(), to + lanes());
}

// As above, to bf16, for less: a NaN stays one if it came of bf16 or of an operation, whose lower
// halves are zero.
HWY_INLINE void store_pair(FloatVector a, FloatVector b, BFloat16* to) {
#if HWY_TARGET == HWY_SCALAR
  store(a, to, 1);
  store(b, to + 1, 1);
#else
  const hn::Repartition<std::uint16_t, Floats> halves;
  hn::StoreU(hn::ConcatOdd(halves, hn::BitCast(halves, bfloat16_upper(b)),
                           hn::BitCast(halves, bfloat16_upper(a))),
             halves, reinterpret_cast<std::uint16_t*>(to));
#endif
}

HWY_INLINE FloatVector load(Elements from, std::int64_t count, float fill = 0.0F) {
  if (from.dtype == DType::kF32) {
    return load(reinterpret_cast<const float*>(from.data), count, fill);
  }
  return load(reinterpret_cast<const BFloat16*>(from.data), count, fill);
}

HWY_INLINE void store(FloatVector value, Elements to, std::int64_t count) {
  if (to.dtype == DType::kF32) {
    store(value, reinterpret_cast<float*>(to.data), count);
  } else {
    store(value, reinterpret_cast<BFloat16*>(to.data), count);
  }
}

// Calls body(first element, elements) for each vector of an array of n.
template <class Body>
HWY_INLINE void for_vectors(std::int64_t n, const Body& body) {
  const std::int64_t step = lanes();
  // One call, so that the body is inlined.
  for (std::int64_t i = 0; i < n; i += step) body(i, HWY_MIN(step, n - i));
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

// The sum of a_i b_i, each product exact, in double lanes.
inline double dot(Elements a, Elements b, std::int64_t n) {
  DoubleSum sum;
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { sum.add_product(load(a + i, count), load(b + i, count)); });
  return sum.total();
}

// to_i += from_i.
inline void add_row(const float* from, float* to, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Add(load(to + i, count), load(from + i, count)), to + i, count);
  });
}

// to_i = from_i / divisor.
inline void divide_row(const float* from, float divisor, Elements to, std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), divisor);
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(hn::Div(load(from + i, count), by), to + i, count); });
}

// e^x for x <= 88, within 2 units in the last place; 0 below -87.3; NaN stays NaN; anything above.
// Reduction by multiples of ln 2 in two parts and polynomial of Cephes' expf.
HWY_INLINE FloatVector exponential_below_88(FloatVector x) {
  const Floats d;
  const auto set = [](float value) HWY_ATTR { return hn::Set(Floats(), value); };
  // Adding 1.5 * 2^23 + 127 leaves the rounded quotient, as an exponent is stored, in the last
  // bits.
  const FloatVector magic = set(12583039.0F);
  const FloatVector shifted = hn::MulAdd(x, set(1.44269504F), magic);
  const FloatVector n = hn::Sub(shifted, magic);
  const FloatVector r =
      hn::NegMulAdd(n, set(-2.12194440e-4F), hn::NegMulAdd(n, set(0.693359375F), x));
  FloatVector p = set(1.9875691500e-4F);
  p = hn::MulAdd(p, r, set(1.3981999507e-3F));
  p = hn::MulAdd(p, r, set(8.3334519073e-3F));
  p = hn::MulAdd(p, r, set(4.1665795894e-2F));
  p = hn::MulAdd(p, r, set(1.6666665459e-1F));
  p = hn::MulAdd(p, r, set(0.5F));
  p = hn::MulAdd(p, hn::Mul(r, r), hn::Add(r, set(1.0F)));
  const hn::RebindToSigned<Floats> bits;
  const FloatVector power = hn::BitCast(d, hn::ShiftLeft<23>(hn::BitCast(bits, shifted)));
  return hn::IfThenZeroElse(hn::Lt(x, set(-87.3F)), hn::Mul(p, power));
}

// e^x; infinity above 88.4.
HWY_INLINE FloatVector exponential(FloatVector x) {
  const FloatVector highest = hn::Set(Floats(), 88.8F);
  return exponential_below_88(hn::IfThenElse(hn::Gt(x, highest), highest, x));
}

HWY_INLINE FloatVector sigmoid(FloatVector x) {
  const FloatVector one = hn::Set(Floats(), 1.0F);
  return hn::Div(one, hn::Add(one, exponential(hn::Neg(x))));
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
