#include "parallel/exact_sum.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "parallel/sharding.h"

namespace tessera {

namespace {

constexpr int kMantissaBits = 52;
constexpr std::uint64_t kImplicitBit = std::uint64_t{1} << kMantissaBits;
constexpr std::int64_t kLimbMask = 0xffffffff;

}  // namespace

void ExactSum::add(double value) {
  const auto bits = std::bit_cast<std::uint64_t>(value);
  const bool negative = (bits >> 63) != 0;
  const int exponent = static_cast<int>((bits >> kMantissaBits) & 0x7ff);
  std::uint64_t mantissa = bits & (kImplicitBit - 1);
  if (exponent == 0x7ff) {
    ++specials_[mantissa != 0 ? 0 : (negative ? 2 : 1)];
    return;
  }
  // A subnormal number has exponent 1 and no implicit bit.
  if (exponent != 0) mantissa |= kImplicitBit;
  const int position = exponent == 0 ? 0 : exponent - 1;  // of the mantissa's lowest bit
  const auto limb = static_cast<std::size_t>(position / 32);
  const int shift = position % 32;
  // mantissa << shift has up to 84 bits: three limbs.
  const std::uint64_t low = mantissa << shift;
  const std::uint64_t high = shift == 0 ? 0 : mantissa >> (64 - shift);
  const std::array<std::int64_t, 3> parts{static_cast<std::int64_t>(low & kLimbMask),
                                          static_cast<std::int64_t>(low >> 32),
                                          static_cast<std::int64_t>(high)};
  for (std::size_t i = 0; i < parts.size(); ++i) {
    limbs_[limb + i] += negative ? -parts[i] : parts[i];
  }
  if (++pending_ == kMaxPending) normalise();
}

void ExactSum::normalise() {
  std::int64_t carry = 0;
  for (std::size_t i = 0; i + 1 < kLimbs; ++i) {
    const std::int64_t sum = limbs_[i] + carry;
    limbs_[i] = sum & kLimbMask;
    carry = sum >> 32;  // rounds down, so limbs stay non-negative
  }
  limbs_[kLimbs - 1] += carry;
  pending_ = 0;
}

void ExactSum::add(const ExactSum& other) {
  ExactSum part = other;
  part.normalise();
  normalise();
  for (std::size_t i = 0; i < kLimbs; ++i) limbs_[i] += part.limbs_[i];
  for (std::size_t i = 0; i < specials_.size(); ++i) specials_[i] += part.specials_[i];
  pending_ = 2;
}

void ExactSum::all_reduce(Communicator& communicator) {
  normalise();
  std::array<std::int64_t, kLimbs + 3> values{};
  std::copy(limbs_.begin(), limbs_.end(), values.begin());
  std::copy(specials_.begin(), specials_.end(), values.begin() + kLimbs);
  communicator.all_reduce("exact sum", Reduction::kSum, values);
  std::copy_n(values.begin(), kLimbs, limbs_.begin());
  std::copy_n(values.begin() + kLimbs, specials_.size(), specials_.begin());
  normalise();
}

double ExactSum::value() const {
  if (specials_[0] > 0 || (specials_[1] > 0 && specials_[2] > 0)) {
    return std::numeric_limits<double>::quiet_NaN();
  }
  if (specials_[1] > 0) return std::numeric_limits<double>::infinity();
  if (specials_[2] > 0) return -std::numeric_limits<double>::infinity();
  ExactSum magnitude = *this;
  magnitude.normalise();
  const bool negative = magnitude.limbs_[kLimbs - 1] < 0;
  if (negative) {
    for (std::int64_t& limb : magnitude.limbs_) limb = -limb;
    magnitude.normalise();
  }
  std::size_t top = kLimbs;
  while (top > 0 && magnitude.limbs_[top - 1] == 0) --top;
  if (top == 0) return 0.0;
  // Bit i of the number, counted from 2^-1074.
  const auto bit = [&](std::int64_t i) {
    return i < 0 ? 0U
                 : static_cast<unsigned>(
                       magnitude.limbs_[static_cast<std::size_t>(i / 32)] >> (i % 32) & 1);
  };
  const auto top_limb = static_cast<std::uint64_t>(magnitude.limbs_[top - 1]);
  const std::int64_t highest =
      static_cast<std::int64_t>(top - 1) * 32 + std::bit_width(top_limb) - 1;
  const std::int64_t lowest = std::max<std::int64_t>(highest - kMantissaBits, 0);
  std::uint64_t mantissa = 0;
  for (std::int64_t i = highest; i >= lowest; --i) mantissa = mantissa << 1 | bit(i);
  // To nearest even: by the first bit that is dropped and whether anything follows it.
  bool more = false;
  for (std::int64_t i = lowest - 2; i >= 0 && !more; --i) more = bit(i) != 0;
  if (bit(lowest - 1) != 0 && (more || (mantissa & 1) != 0)) ++mantissa;
  const double rounded = std::ldexp(static_cast<double>(mantissa), static_cast<int>(lowest - 1074));
  return negative ? -rounded : rounded;
}

double sum_of_squares(const float* values, std::int64_t count) {
  constexpr std::int64_t kLanes = 16;
  std::array<double, kLanes> lanes{};
  const std::int64_t whole = count / kLanes * kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double value = values[i + lane];
      lanes[static_cast<std::size_t>(lane)] += value * value;
    }
  }
  for (std::int64_t i = whole; i < count; ++i) {
    const double value = values[i];
    lanes[static_cast<std::size_t>(i - whole)] += value * value;
  }
  for (std::size_t half = kLanes / 2; half >= 1; half /= 2) {
    for (std::size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

double global_norm(Communicator& communicator, Queue& queue, std::span<const View> slices) {
  // A piece is a run of blocks over all slices; which piece a block falls into doesn't matter.
  constexpr std::int64_t kPieces = 64;
  std::array<ExactSum, kPieces> sums;
  queue.parallel_for(kPieces, [&](std::int64_t piece, Worker&) {
    ExactSum& sum = sums[static_cast<std::size_t>(piece)];
    for (const View& slice : slices) {
      TESSERA_CHECK(slice.count() % kGranule == 0);
      const std::int64_t blocks = slice.count() / kGranule;
      const float* values = slice.as<float>();
      for (std::int64_t block = blocks * piece / kPieces; block < blocks * (piece + 1) / kPieces;
           ++block) {
        sum.add(sum_of_squares(values + block * kGranule, kGranule));
      }
    }
  });
  ExactSum total;
  for (const ExactSum& sum : sums) total.add(sum);
  total.all_reduce(communicator);
  return std::sqrt(total.value());
}

}  // namespace tessera
