#include "optim/schedule.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <numbers>

#include "optim/groups.h"
#include "runtime/error.h"

namespace tessera {
namespace {

// The rate of the source paper: 5e-6 + 4.5e-5 (1 + cos(pi s / S)) / 2, S = 162,000.
TEST(Schedule, CosineIsThePapersFormula) {
  OptimConfig config;
  config.set_learning_rate(5e-5);
  config.set_final_learning_rate(5e-6);
  constexpr std::int64_t kSteps = 162000;
  for (const std::int64_t s : {0, 1, 1000, 81000, 110000, 115000, 161999}) {
    const long double angle =
        std::numbers::pi_v<long double> * static_cast<long double>(s) / kSteps;
    const long double expected = 5e-6L + 4.5e-5L * (1 + std::cos(angle)) / 2;
    // The rounding of pi s / S alone moves the cosine by up to pi * 2^-52; the rest adds a few ulp.
    EXPECT_NEAR(learning_rate(config, s, kSteps), static_cast<double>(expected), 5e-5 * 0x1p-50)
        << s;
  }
  EXPECT_EQ(learning_rate(config, 0, kSteps), 5e-5);
  EXPECT_EQ(learning_rate(config, kSteps, kSteps), 5e-6);
  EXPECT_EQ(learning_rate(config, kSteps + 7, kSteps), 5e-6);
}

TEST(Schedule, CosineStartsAfterTheWarmUp) {
  OptimConfig config;
  config.set_learning_rate(1.0);
  config.set_warmup_steps(4);
  const std::array<double, 4> rising = {0.25, 0.5, 0.75, 1.0};
  for (std::size_t s = 0; s < rising.size(); ++s) {
    EXPECT_EQ(learning_rate(config, static_cast<std::int64_t>(s), 12), rising[s]);
  }
  EXPECT_EQ(learning_rate(config, 4, 12), 1.0);
  EXPECT_NEAR(learning_rate(config, 8, 12), 0.5, 0x1p-52);
  EXPECT_EQ(learning_rate(config, 12, 12), 0.0);
}

TEST(Schedule, ConstantStaysAtThePeak) {
  OptimConfig config;
  config.set_schedule(OptimConfig::CONSTANT);
  config.set_learning_rate(3e-4);
  config.set_warmup_steps(3);
  EXPECT_EQ(learning_rate(config, 0, 10), 3e-4 * 1.0 / 3.0);
  for (std::int64_t s = 2; s < 20; ++s) {
    EXPECT_EQ(learning_rate(config, s, 10), 3e-4);
  }
}

// Made with Python's float.hex from the formulas in schedule.h, which use IEEE operations alone
// here: 40 steps, 5 of warm-up, 8 of decay, 3e-4 down to 3e-5.
TEST(Schedule, B10_WarmUpStableDecayToTheLastBit) {
  OptimConfig config;
  config.set_schedule(OptimConfig::WARMUP_STABLE_DECAY);
  config.set_learning_rate(3e-4);
  config.set_final_learning_rate(3e-5);
  config.set_warmup_steps(5);
  config.set_decay_steps(8);
  constexpr std::array<double, 5> kWarmUp = {0x1.f75104d551d68p-15, 0x1.f75104d551d68p-14,
                                             0x1.797cc39ffd60ep-13, 0x1.f75104d551d68p-13,
                                             0x1.3a92a30553261p-12};
  constexpr std::array<double, 8> kDecay = {
      0x1.3a92a30553261p-12, 0x1.172ef0ae53650p-12, 0x1.e7967caea747cp-13, 0x1.a0cf1800a7c59p-13,
      0x1.5a07b352a8437p-13, 0x1.13404ea4a8c15p-13, 0x1.98f1d3ed527e4p-14, 0x1.0b630a915379fp-14};
  for (std::int64_t s = 0; s < 40; ++s) {
    double expected = 3e-4;
    if (s < 5) {
      expected = kWarmUp[static_cast<std::size_t>(s)];
    } else if (s >= 32) {
      expected = kDecay[static_cast<std::size_t>(s - 32)];
    }
    EXPECT_EQ(learning_rate(config, s, 40), expected) << s;
  }
  EXPECT_EQ(learning_rate(config, 40, 40), 3e-5);
}

TEST(Schedule, PartsThatDoNotFitAreRefused) {
  OptimConfig config;
  config.set_warmup_steps(11);
  const auto message = [&] {
    try {
      check_schedule(config, 10);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return std::string(error.what());
    }
    return std::string();
  };
  EXPECT_EQ(message(), "optim.warmup_steps: expected at most all of the run's 10 steps, got 11");
  config.set_warmup_steps(10);
  EXPECT_EQ(message(), "");
  config.set_schedule(OptimConfig::WARMUP_STABLE_DECAY);
  config.set_warmup_steps(4);
  config.set_decay_steps(7);
  EXPECT_EQ(message(),
            "optim.decay_steps: expected at most the 6 of the run's 10 steps that the warm-up "
            "leaves, got 7");
  config.set_decay_steps(6);
  EXPECT_EQ(message(), "");
  EXPECT_EQ(learning_rate(config, 3, 10), config.learning_rate());
  EXPECT_EQ(learning_rate(config, 4, 10), config.learning_rate());
  EXPECT_LT(learning_rate(config, 5, 10), config.learning_rate());
}

TEST(Groups, RatesAndDecayAsInThePaper) {
  OptimConfig config;
  config.set_embedding_rate_scale(0.1);
  config.set_layer_decay(0.97);
  const auto embedding = parameter_group(config, ModelPart::kEmbedding, 0, 49, false);
  EXPECT_EQ(embedding.rate_scale, 0.1);
  EXPECT_EQ(embedding.weight_decay, 0.0);
  const auto head = parameter_group(config, ModelPart::kHead, 0, 49, true);
  EXPECT_EQ(head.rate_scale, 1.0);
  EXPECT_EQ(head.weight_decay, 0.1);
  EXPECT_EQ(parameter_group(config, ModelPart::kHead, 0, 49, false).weight_decay, 0.0);
  EXPECT_EQ(parameter_group(config, ModelPart::kBlock, 48, 49, true).rate_scale, 1.0);
  EXPECT_EQ(parameter_group(config, ModelPart::kBlock, 47, 49, true).rate_scale, 0.97);
  double product = 1.0;
  for (int i = 0; i < 48; ++i) {
    product *= 0.97;
  }
  // 48 products round 48 times.
  EXPECT_NEAR(parameter_group(config, ModelPart::kBlock, 0, 49, true).rate_scale, product,
              48 * 0x1p-53);
}

}  // namespace
}  // namespace tessera
