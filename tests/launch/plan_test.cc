// What plan says, the parameter matcher and the table of explicit letters.
#include "launch/plan.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <set>

#include "launch/engine.h"
#include "launch/match.h"
#include "launch/trainer.h"
#include "layers/mixers/mixers.h"
#include "runtime/error.h"

namespace tessera {
namespace {

ModelConfig model_of(std::int64_t layers) {
  ModelConfig model;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      R"(width: 24 vocabulary: 100 length: 1 feed_forward { width: 7 }
         mixer { full { heads: 2 key_value_heads: 1 head_width: 8 } }
         schedule { homogeneous { type: "full" layers: )" +
          std::to_string(layers) + " } }",
      &model));
  return model;
}

std::int64_t count(ModelConfig model, std::int64_t width, std::int64_t wider) {
  model.mutable_feed_forward()->set_width(width);
  model.mutable_feed_forward()->set_wider_layers(wider);
  return Stack(model).parameter_count();
}

TEST(Match, FindsTheNearestOfAllWidths) {
  const ModelConfig model = model_of(5);
  // One more in one layer is 3 * 24 = 72 parameters.
  for (std::int64_t target = count(model, 1, 0); target < count(model, 4, 0); target += 5) {
    const ParameterMatch match = match_parameters(model, target);
    EXPECT_EQ(match.parameters, count(model, match.width, match.wider_layers));
    EXPECT_LE(std::abs(match.parameters - target), 36) << target;
    EXPECT_GE(match.wider_layers, 0);
    EXPECT_LT(match.wider_layers, 5);
  }
  const ParameterMatch exact = match_parameters(model, count(model, 40, 3));
  EXPECT_EQ(exact.width, 40);
  EXPECT_EQ(exact.wider_layers, 3);
}

TEST(Match, TheFirstLayersAreWider) {
  ModelConfig model = model_of(4);
  model.mutable_feed_forward()->set_wider_layers(2);
  const Stack stack(model);
  for (std::size_t l = 0; l < 4; ++l) {
    EXPECT_EQ(stack.blocks()[l].feed_forward().parameters()[0].shape[0], l < 2 ? 8 : 7);
  }
}

TEST(Match, B35_WhatCantBeIsRefused) {
  const ModelConfig model = model_of(3);
  const auto refusal = [&](std::int64_t target) {
    try {
      match_parameters(model, target);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  EXPECT_THAT(refusal(count(model, 1, 0) - 1), testing::StartsWith("--match: the model has "));
  EXPECT_THAT(refusal(std::int64_t{1} << 50), testing::HasSubstr("feed-forward of width "));
}

TEST(Match, RefusesExperts) {
  ModelConfig model = model_of(3);
  model.mutable_feed_forward()->mutable_experts()->set_experts(4);
  EXPECT_THROW(match_parameters(model, 100'000), Error);
}

// The flagship's 6,586,356,320 parameters, on every layout: each rank's slices add up to all of
// them with their padding, once; gathers, sums and tokens on their way shrink as they should.
TEST(Plan, TheFlagshipIsSharedOutOnceOnEveryLayout) {
  Config config = load_config("aether_7b");
  const Stack stack(config.model(), DType::kBF16);
  for (const int ranks : {16, 32, 64}) {
    std::int64_t all = 0, gathered = INT64_MAX;
    for (const int expert_ranks : {1, 2, 4, 8, 16}) {
      config.mutable_parallel()->set_expert_ranks(expert_ranks);
      std::int64_t held = 0, padded = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const EnginePlan plan(stack, engine_options(config, 4096, rank, ranks));
        for (const auto& [category, bytes] : plan.memory().categories()) {
          if (category == "master parameters") held += bytes;
        }
        for (const ShardedUnit& unit : plan.units()) {
          // Of its group, each rank's experts once; of the rest, all.
          if (unit.experts ? rank < expert_ranks : rank == 0) padded += unit.layout.count();
        }
        if (rank == 0) {
          EXPECT_LT(plan.communication().gather_bytes, gathered);
          gathered = plan.communication().gather_bytes;
          EXPECT_EQ(plan.communication().exchange_bytes > 0, expert_ranks > 1);
        }
      }
      EXPECT_GE(padded, 6'586'356'320);
      EXPECT_LT(padded, 6'586'356'320 + std::int64_t{49} * 40 * 1024);
      EXPECT_EQ(held, 4 * padded);
      if (all == 0) all = padded;
      EXPECT_EQ(padded, all);
      gathered = expert_ranks == 16 ? INT64_MAX : gathered;
    }
  }
}

// Of many ranks some are looked at: nothing that the others need is missed by more than a granule a
// unit.
TEST(Plan, ManyRanksArePlannedByAFew) {
  Config config = load_config("aether_7b");
  config.mutable_train()->set_global_batch(700);
  constexpr int kRanks = 600;
  for (const int expert_ranks : {1, 3}) {
    config.mutable_parallel()->set_expert_ranks(expert_ranks);
    const Stack stack(config.model(), DType::kBF16);
    std::int64_t most = 0, units = 0;
    for (int rank = 0; rank < kRanks; ++rank) {
      const EnginePlan plan(stack, engine_options(config, 4096, rank, kRanks));
      most = std::max(most, plan.memory().bytes());
      units = static_cast<std::int64_t>(plan.units().size());
    }
    const std::int64_t found =
        summarise(stack, config, 4096, kRanks).bytes_per_rank - kLibraryBytes;
    EXPECT_LE(found, most);
    EXPECT_GE(found, most - std::int64_t{32} * 1024 * units);
  }
}

TEST(Plan, B37_WhatCantFitIsRefusedByTheLargestLine) {
  Config config = load_config("aether_7b");
  config.mutable_parallel()->set_expert_ranks(8);
  const Stack stack(config.model(), DType::kBF16);
  const RunSummary summary = summarise(stack, config, 4096, 16);
  EXPECT_EQ(summary.total_parameters, 6'586'356'320);
  EXPECT_EQ(summary.active_parameters, 3'118'191'200);
  EXPECT_GT(summary.expert_row_bytes, 0);
  EXPECT_NO_THROW(check_memory(summary, summary.bytes_per_rank));
  try {
    check_memory(summary, summary.bytes_per_rank - 1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), testing::HasSubstr(std::to_string(summary.bytes_per_rank)));
    EXPECT_THAT(error.what(), testing::HasSubstr("the largest part is "));
  }
  config.mutable_parallel()->set_expert_ranks(3);
  EXPECT_THROW(summarise(stack, config, 4096, 16), Error);
}

TEST(Schedule, EveryTypeHasALetterOfItsOwn) {
  std::set<char> letters;
  std::string all;
  for (const MixerType& type : mixer_types()) {
    EXPECT_TRUE(letters.insert(type.letter).second) << type.letter;
    EXPECT_EQ(find_mixer_type(type.name), &type);
    all += type.letter;
  }
  Schedule schedule;
  schedule.set_explicit_(all);
  const std::vector<std::string> types = schedule_types(schedule);
  ASSERT_EQ(types.size(), mixer_types().size());
  for (std::size_t i = 0; i < types.size(); ++i) EXPECT_EQ(types[i], mixer_types()[i].name);
  const std::set<char> known = {'F', 'S', 'G', 'L', 'M', 'N', 'C', 'H'};
  EXPECT_EQ(letters, known);
}

}  // namespace
}  // namespace tessera
