#include "parallel/exact_sum.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace tessera {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double exact(const std::vector<double>& values) {
  ExactSum sum;
  for (const double value : values) sum.add(value);
  return sum.value();
}

// A double with any exponent and any mantissa.
double any_double(std::mt19937_64& random) {
  for (;;) {
    const auto value = std::bit_cast<double>(random());
    if (std::isfinite(value)) return value;
  }
}

TEST(ExactSum, SingleValuesComeBackBitForBit) {
  std::mt19937_64 random(1);
  std::vector<double> values{0.0,
                             1.0,
                             -1.0,
                             5e-324,
                             -5e-324,
                             2.2250738585072014e-308,
                             std::numeric_limits<double>::max(),
                             std::numeric_limits<double>::lowest()};
  for (int i = 0; i < 20000; ++i) values.push_back(any_double(random));
  for (const double value : values) EXPECT_EQ(exact({value}), value);
}

// Integers below 2^63 are summed by 64-bit arithmetic, whose result is then rounded by the
// processor.
TEST(ExactSum, EqualsIntegerArithmetic) {
  std::mt19937_64 random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    std::int64_t expected = 0;
    ExactSum sum;
    const int count = 1 + static_cast<int>(random() % 50);
    for (int i = 0; i < count; ++i) {
      const auto value = static_cast<std::int64_t>(random()) >> (11 + random() % 40);
      expected += value;
      sum.add(std::ldexp(static_cast<double>(value), -300));
    }
    EXPECT_EQ(sum.value(), std::ldexp(static_cast<double>(expected), -300));
  }
}

// The sum of two doubles, rounded once, is what the processor's addition gives.
TEST(ExactSum, TwoValuesRoundAsTheProcessorDoes) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 20000; ++i) {
    const double a = any_double(random);
    // Near in exponent, so that rounding and cancellation both happen.
    const double b = std::ldexp(any_double(random) < 0 ? -1.0 : 1.0, std::ilogb(a)) *
                     (1.0 + std::ldexp(static_cast<double>(random() >> 12), -52)) *
                     std::ldexp(1.0, static_cast<int>(random() % 60) - 30);
    if (!std::isfinite(b)) continue;
    EXPECT_EQ(exact({a, b}), a + b) << a << " " << b;
  }
}

TEST(ExactSum, OrderAndCutDontMatter) {
  std::mt19937_64 random(4);
  for (int trial = 0; trial < 50; ++trial) {
    std::vector<double> values(200);
    for (double& value : values) value = any_double(random) * 1e-10;
    const auto bits = std::bit_cast<std::uint64_t>(exact(values));
    std::shuffle(values.begin(), values.end(), random);
    EXPECT_EQ(std::bit_cast<std::uint64_t>(exact(values)), bits);
    ExactSum total;
    for (std::size_t begin = 0; begin < values.size();) {
      const std::size_t end = std::min(values.size(), begin + random() % 60);
      ExactSum part;
      for (std::size_t i = begin; i < end; ++i) part.add(values[i]);
      total.add(part);
      begin = end;
    }
    EXPECT_EQ(std::bit_cast<std::uint64_t>(total.value()), bits);
  }
}

TEST(ExactSum, CancellationLeavesTheSmallest) {
  EXPECT_EQ(exact({1e300, 1.0, -1e300}), 1.0);
  EXPECT_EQ(exact({1e300, 5e-324, -1e300}), 5e-324);
  EXPECT_EQ(exact({-1e300, -5e-324, 1e300}), -5e-324);
  EXPECT_EQ(exact({1.0, -1.0}), 0.0);
  // Half a unit in the last place is a tie, and anything more isn't.
  EXPECT_EQ(exact({1.0, std::ldexp(1.0, -53)}), 1.0);
  EXPECT_EQ(exact({1.0, std::ldexp(1.0, -53), 5e-324}), 1.0 + std::ldexp(1.0, -52));
}

TEST(ExactSum, OverflowAndSpecialValues) {
  const double huge = std::numeric_limits<double>::max();
  EXPECT_EQ(exact({huge, huge}), kInfinity);
  EXPECT_EQ(exact({huge, huge, -huge}), huge);
  EXPECT_EQ(exact({1.0, kInfinity}), kInfinity);
  EXPECT_EQ(exact({1.0, -kInfinity}), -kInfinity);
  EXPECT_TRUE(std::isnan(exact({kInfinity, -kInfinity})));
  EXPECT_TRUE(std::isnan(exact({std::nan(""), 1.0})));
}

// 1024 values in double, whatever the order, are within n * epsilon of the sum in long double.
TEST(SumOfSquares, EqualsLongDoubleAndItsOwnDefinition) {
  std::mt19937 random(5);
  std::normal_distribution<float> normal;
  for (const std::int64_t count : {0, 1, 15, 16, 17, 100, 1024}) {
    std::vector<float> values(static_cast<std::size_t>(count));
    long double expected = 0;
    std::array<double, 16> lanes{};
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = normal(random);
      expected += static_cast<long double>(values[i]) * values[i];
      lanes[i % 16] += static_cast<double>(values[i]) * values[i];
    }
    for (std::size_t half = 8; half >= 1; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) lanes[i] += lanes[i + half];
    }
    const double sum = sum_of_squares(values.data(), count);
    EXPECT_EQ(sum, lanes[0]);
    EXPECT_NEAR(sum, static_cast<double>(expected),
                static_cast<double>(count) * std::numeric_limits<double>::epsilon() *
                    static_cast<double>(expected));
  }
}

}  // namespace
}  // namespace tessera
