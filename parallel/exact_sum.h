// Sums that no order and no cut into ranks can change.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "parallel/communicator.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// An exact sum of doubles: a fixed-point number as wide as the range of double (Kulisch), in limbs
// of 32 bits held in 64-bit integers. Adding, in any order, loses nothing; merging is integer
// addition.
class ExactSum {
 public:
  void add(double value);
  void add(const ExactSum& other);
  // Collective: the sum over all ranks, on all ranks.
  void all_reduce(Communicator& communicator);
  // Rounded once, to nearest even. NaN and infinities come out as IEEE addition gives them.
  double value() const;

 private:
  // 2^-1074 is bit 0 of limb 0; 2^1024 lies in limb 65; the rest is room for carries.
  static constexpr std::size_t kLimbs = 68;
  static constexpr std::int64_t kMaxPending = std::int64_t{1} << 29;
  void normalise();

  std::array<std::int64_t, kLimbs> limbs_{};  // after normalise(): in [0, 2^32) but the last
  std::array<std::int64_t, 3> specials_{};    // numbers of NaN, +infinity, -infinity added
  std::int64_t pending_ = 0;                  // additions since normalise()
};

// The sum of squares of `count` floats in double: element i goes to lane i mod 16, lanes are then
// added in halves (8 and 8, 4 and 4, ...).
double sum_of_squares(const float* values, std::int64_t count);

// Collective. The 2-norm over the f32 slices of all ranks: squares are summed per kGranule elements
// in fixed lanes, then exactly; so it depends on the values alone. Slices are those of UnitLayout
// (multiples of kGranule, padding zero). The same double on every rank; NaN or infinite when any
// element is.
double global_norm(Communicator& communicator, Queue& queue, std::span<const View> slices);

}  // namespace tessera
