#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/kernels/elementwise.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/elementwise.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

void add_flat(float* to, const float* from, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Add(load(to + i, count), load(from + i, count)), to + i, count);
  });
}

void convert_flat(Elements to, Elements from, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(load(from + i, count), to + i, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

namespace tessera {
namespace {
HWY_EXPORT(add_flat);
HWY_EXPORT(convert_flat);
constexpr std::int64_t kPiece = 16384;
}  // namespace

void add(Queue& queue, const View& to, const View& from) {
  TESSERA_CHECK(to.count() == from.count());
  float* const destination = to.as<float>();
  const float* const source = from.as<float>();
  const std::int64_t count = to.count();
  queue.parallel_for(pieces_of(count, kPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(add_flat)
    (destination + begin, source + begin, std::min(kPiece, count - begin));
  });
}

void convert(Queue& queue, const View& to, const View& from) {
  TESSERA_CHECK(to.count() == from.count());
  const std::int64_t count = to.count();
  queue.parallel_for(pieces_of(count, kPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(convert_flat)
    (elements(to) + begin, elements(from) + begin, std::min(kPiece, count - begin));
  });
}

}  // namespace tessera
#endif
