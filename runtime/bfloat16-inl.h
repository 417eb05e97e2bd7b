// bf16 in vectors. Included once for every instruction set (Highway's foreach_target), in integers,
// so that every one rounds alike.
#if defined(TESSERA_RUNTIME_BFLOAT16_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_RUNTIME_BFLOAT16_INL_H_
#undef TESSERA_RUNTIME_BFLOAT16_INL_H_
#else
#define TESSERA_RUNTIME_BFLOAT16_INL_H_
#endif

#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// The bits of as many bf16 as a vector has f32.
using BFloat16Bits =
    hwy::HWY_NAMESPACE::Rebind<std::uint16_t, hwy::HWY_NAMESPACE::ScalableTag<float>>;

HWY_INLINE hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::ScalableTag<float>> from_bfloat16(
    hwy::HWY_NAMESPACE::Vec<BFloat16Bits> bits) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint32_t> d;
  return hn::BitCast(hn::ScalableTag<float>(), hn::ShiftLeft<16>(hn::PromoteTo(d, bits)));
}

// The bf16 nearest to each number, ties to even, in the upper half of its lane; below it are bits
// of no meaning. A NaN must have a zero there, or it may become a number.
HWY_INLINE hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::ScalableTag<std::uint32_t>> bfloat16_upper(
    hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::ScalableTag<float>> value) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint32_t> d;
  const auto bits = hn::BitCast(d, value);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d, 1U));
  return hn::Add(hn::Add(bits, hn::Set(d, 0x7FFFU)), odd);
}

// To the nearest, ties to even; NaN stays NaN: to_bfloat16 of runtime/view.h.
HWY_INLINE hwy::HWY_NAMESPACE::Vec<BFloat16Bits> bfloat16_bits(
    hwy::HWY_NAMESPACE::Vec<hwy::HWY_NAMESPACE::ScalableTag<float>> value) {
  namespace hn = hwy::HWY_NAMESPACE;
  const hn::ScalableTag<std::uint32_t> d;
  const auto quiet = hn::Or(hn::BitCast(d, value), hn::Set(d, 0x400000U));
  const auto kept =
      hn::IfThenElse(hn::RebindMask(d, hn::IsNaN(value)), quiet, bfloat16_upper(value));
  return hn::TruncateTo(BFloat16Bits(), hn::ShiftRight<16>(kept));
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();
#endif  // per-target include guard
