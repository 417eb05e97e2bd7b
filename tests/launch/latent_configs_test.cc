// The ready configs of latent mixtures of experts: their counts are what their heads say, and the
// small ones have equal budgets.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <string>
#include <vector>

#include "launch/allocation.h"
#include "launch/config.h"
#include "launch/plan.h"
#include "layers/experts/experts.h"

namespace tessera {
namespace {

// The experts of each layer, in order; null where there are none.
std::vector<const MixtureOfExperts*> experts_of(const Stack& stack) {
  std::vector<const MixtureOfExperts*> experts;
  for (const Block& block : stack.blocks()) experts.push_back(block.experts());
  return experts;
}

Regime regime_of(const ExpertsShape& shape) {
  return {shape.active, shape.experts, shape.latent, shape.inner, shape.shared};
}

// n and w for the blocks with experts, - for the others; fails where a regime is neither.
std::string letters(const Stack& stack, const Regime& narrow, const Regime& wide) {
  std::string text;
  for (const MixtureOfExperts* const experts : experts_of(stack)) {
    if (experts == nullptr) {
      text += '-';
      continue;
    }
    const Regime regime = regime_of(experts->shape());
    EXPECT_TRUE(regime == narrow || regime == wide);
    text += regime == narrow ? 'n' : 'w';
    // The original's: weights as they are, a loss of 1e-4 beside the bias.
    EXPECT_FALSE(experts->shape().renormalise);
    EXPECT_TRUE(experts->shape().selection_bias);
    EXPECT_EQ(experts->shape().auxiliary_coefficient, 1e-4);
  }
  return text;
}

struct Counts {
  std::int64_t total = 0, active = 0;  // without embedding and head
};
Counts counts_of(const std::string& name) {
  const Config config = load_config(name);
  const Stack stack(config.model(), DType::kBF16);
  const RunSummary summary = summarise(stack, config, config.model().length(), 1);
  const std::int64_t outside = summary.embedding_parameters + summary.head_parameters;
  return {summary.total_parameters - outside, summary.active_parameters - outside};
}

// Attention with a quarter of the heads for keys and values, two norms, the dense layer's SwiGLU.
std::int64_t rest_of_stack(std::int64_t width, std::int64_t layers, std::int64_t dense) {
  return layers * (2 * width * width + 2 * width * width / 4 + 2 * width) + 3 * width * dense;
}

TEST(LatentConfigs, TheReconstructed3BIsAsWorkedOutByHand) {
  const Regime narrow = {22, 704, 320, 448, 2560}, wide = {14, 448, 512, 440, 2517};
  const Stack stack(load_config("latent_3b4").model(), DType::kBF16);
  EXPECT_EQ(letters(stack, narrow, wide), "-nnnnwwwwwww");
  const std::int64_t rest = rest_of_stack(1024, 12, 4096);
  const Counts counts = counts_of("latent_3b4");
  EXPECT_EQ(counts.total, rest + 11 * std::int64_t{302'776'320} + std::int64_t{4} * 9'240'576 +
                              std::int64_t{7} * 9'239'552);
  EXPECT_EQ(counts.active, rest + std::int64_t{11} * 9'461'760 + std::int64_t{4} * 9'240'576 +
                               std::int64_t{7} * 9'239'552);
  EXPECT_EQ(counts.total, 3'476'243'456);
  EXPECT_EQ(counts.active, 249'783'296);
}

TEST(LatentConfigs, TheReconstructed8BIsAsWorkedOutByHand) {
  const Regime narrow = {29, 928, 352, 512, 3584}, wide = {16, 512, 640, 512, 3531};
  const Stack stack(load_config("latent_8b").model(), DType::kBF16);
  EXPECT_EQ(letters(stack, narrow, wide), "-nnnnnwwwwwwwwww");
  const std::int64_t rest = rest_of_stack(1280, 16, 5120);
  const Counts counts = counts_of("latent_8b");
  EXPECT_EQ(counts.total, rest + 5 * (std::int64_t{501'743'616} + 15'851'520) +
                              10 * (std::int64_t{503'316'480} + 15'852'800));
  EXPECT_EQ(counts.active, rest + std::int64_t{5} * (15'679'488 + 15'851'520) +
                               std::int64_t{10} * (15'728'640 + 15'852'800));
  EXPECT_EQ(counts.total, 7'864'906'240);
  EXPECT_EQ(counts.active, 558'707'200);
}

// Within what the models' names round to: 3 % of the total, 1 % of the active ones.
TEST(LatentConfigs, TheReconstructedAreOfTheirSizes) {
  struct Named {
    double total, active;
  };
  for (const auto& [name, size] :
       std::map<std::string, Named>{{"latent_3b4", {3.4e9, 250e6}}, {"latent_8b", {8e9, 560e6}}}) {
    const Counts counts = counts_of(name);
    EXPECT_NEAR(static_cast<double>(counts.total), size.total, 0.03 * size.total) << name;
    EXPECT_NEAR(static_cast<double>(counts.active), size.active, 0.01 * size.active) << name;
  }
}

TEST(LatentConfigs, TheSmallOnesHaveEqualBudgets) {
  const Regime narrow = {11, 88, 40, 56, 64}, wide = {7, 56, 64, 55, 59};
  const RegimeMatch match = match_regimes(narrow, wide, 128);
  EXPECT_EQ(match.pool, 0.0);
  EXPECT_EQ(match.products, 0.0);
  EXPECT_EQ(match.residual, 128);
  EXPECT_TRUE(match.matched());
  EXPECT_TRUE(narrow.near_square() && wide.near_square());
  const std::map<std::string, std::string> arms = {{"two_regime", "-nnnwwww"},
                                                   {"narrow", "-nnnnnnn"},
                                                   {"wide", "-wwwwwww"},
                                                   {"fixed_exchange", "-wwwnnnn"},
                                                   {"matched_exchange", "-wwwwnnn"}};
  std::map<std::string, std::int64_t> totals;
  for (const auto& [arm, blocks] : arms) {
    SCOPED_TRACE(arm);
    const Stack stack(load_config("latent_small_" + arm).model());
    EXPECT_EQ(letters(stack, narrow, wide), blocks);
    totals[arm] = stack.parameter_count();
  }
  // Only m_s, a whole number, leaves them apart: at most 1.5 d a block.
  for (const auto& [arm, total] : totals) {
    EXPECT_LE(std::abs(total - totals.at("two_regime")), 7 * 192) << arm;
  }
  EXPECT_EQ(totals.at("two_regime"), totals.at("matched_exchange"));
}

}  // namespace
}  // namespace tessera
