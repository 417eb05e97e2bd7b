#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "parallel/exact_sum.h"
#include "parallel/sharding.h"

namespace tessera {
namespace {

std::vector<UnitLayout> units() {
  return {{"embedding", {{"weight", DType::kF32, Shape{131, 37}}}},
          {"layers.0",
           {{"norm", DType::kF32, Shape{64}},
            {"q", DType::kF32, Shape{97, 53}},
            {"up", DType::kF32, Shape{211, 31}}}},
          {"head", {{"norm", DType::kF32, Shape{37}}, {"weight", DType::kF32, Shape{131, 37}}}}};
}

// Whole units of gradients, and this rank's views of its slices.
struct Gradients {
  std::vector<UnitLayout> layouts = units();
  std::vector<std::vector<float>> whole;
  Gradients() {
    for (const UnitLayout& layout : layouts) whole.emplace_back(layout.count());
  }
  template <class Value>
  void fill(const Value& value) {
    std::size_t tensor = 0;
    for (std::size_t u = 0; u < layouts.size(); ++u) {
      for (std::size_t p = 0; p < layouts[u].size(); ++p, ++tensor) {
        for (std::int64_t i = 0; i < layouts[u].parameter(p).shape.count(); ++i) {
          whole[u][static_cast<std::size_t>(layouts[u].offset(p) + i)] = value(tensor, i);
        }
      }
    }
  }
  std::vector<View> slices(int rank, int ranks) {
    std::vector<View> views;
    for (std::size_t u = 0; u < layouts.size(); ++u) {
      const Slice slice = layouts[u].slice(rank, ranks);
      views.emplace_back(whole[u].data() + slice.begin, Shape{slice.count()});
    }
    return views;
  }
};

double norm_over_ranks(Gradients& gradients, int threads) {
  Communicator communicator(MPI_COMM_WORLD);
  Queue queue(threads);
  return global_norm(communicator, queue,
                     gradients.slices(communicator.rank(), communicator.size()));
}

double norm_of_one_rank(Gradients& gradients) {
  Communicator alone(MPI_COMM_SELF);
  Queue queue(1);
  return global_norm(alone, queue, gradients.slices(0, 1));
}

TEST(GlobalNorm, B19_ConstantTensorsAndZeroPadding) {
  Gradients gradients;
  const std::vector<float> constants{0.5F, -3.0F, 0.25F, 1.5F, 7.0F, -0.125F};
  gradients.fill([&](std::size_t tensor, std::int64_t) { return constants[tensor]; });
  // Sums of exact squares of few bits are exact in double, so the expected value is too.
  double squares = 0.0;
  std::size_t tensor = 0;
  for (const UnitLayout& layout : gradients.layouts) {
    for (std::size_t p = 0; p < layout.size(); ++p, ++tensor) {
      squares += static_cast<double>(layout.parameter(p).shape.count()) * constants[tensor] *
                 constants[tensor];
    }
  }
  EXPECT_EQ(norm_over_ranks(gradients, 1), std::sqrt(squares));
  gradients.fill([](std::size_t, std::int64_t) { return 0.0F; });
  EXPECT_EQ(norm_over_ranks(gradients, 1), 0.0);
}

TEST(GlobalNorm, SameBitsAsOnOneRankForAnyThreads) {
  Gradients gradients;
  std::mt19937 random(7);
  std::normal_distribution<float> normal;
  gradients.fill([&](std::size_t tensor, std::int64_t) {
    return normal(random) * std::ldexp(1.0F, static_cast<int>(tensor) * 8 - 20);
  });
  const auto expected = std::bit_cast<std::uint64_t>(norm_of_one_rank(gradients));
  for (const int threads : {1, 2, 3}) {
    EXPECT_EQ(std::bit_cast<std::uint64_t>(norm_over_ranks(gradients, threads)), expected);
  }
  long double plain = 0;
  for (const auto& whole : gradients.whole) {
    for (const float value : whole) plain += static_cast<long double>(value) * value;
  }
  // A block's lanes add at most 64 + 4 doubles; what follows is exact, and the root halves it.
  const double reference = static_cast<double>(std::sqrt(plain));
  EXPECT_NEAR(std::bit_cast<double>(expected), reference,
              70 * std::numeric_limits<double>::epsilon() * reference);
}

TEST(GlobalNorm, OneBadElementIsSeenByAllRanks) {
  Gradients gradients;
  gradients.fill([](std::size_t, std::int64_t) { return 1.0F; });
  float& element = gradients.whole[1][5000];
  element = std::numeric_limits<float>::infinity();
  EXPECT_EQ(norm_over_ranks(gradients, 1), std::numeric_limits<double>::infinity());
  element = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(norm_over_ranks(gradients, 1)));
  // Squares of the largest floats overflow float, not the norm.
  element = std::numeric_limits<float>::max();
  EXPECT_NEAR(norm_over_ranks(gradients, 1), element, element * 1e-15);
}

}  // namespace
}  // namespace tessera
