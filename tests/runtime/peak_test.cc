#include "runtime/peak.h"

#include <gtest/gtest.h>

#include <cmath>

namespace tessera {
namespace {

// That the loops have run is checked inside by their sums. A core that runs at 1 GHz makes 2e9
// operations a second with the narrowest multiply-add there is; 1e14 is above any core's.
TEST(Peak, IsARate) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const double rate = measure_peak_flops(precision, 1);
    EXPECT_TRUE(std::isfinite(rate));
    EXPECT_GT(rate, 1e7) << peak_instructions(precision);
    EXPECT_LT(rate, 1e14) << peak_instructions(precision);
  }
  EXPECT_TRUE(peak_instructions(Precision::kF32).starts_with("f32 "));
}

// Threads past the cores add nothing; each of those before adds something.
TEST(Peak, ThreadsAddUpToTheCores) {
  const double one = measure_peak_flops(Precision::kF32, 1);
  const double many = measure_peak_flops(Precision::kF32, 4096);
  EXPECT_TRUE(std::isfinite(many));
  EXPECT_GT(many, 0.3 * one);  // others may be using the cores
}

}  // namespace
}  // namespace tessera
