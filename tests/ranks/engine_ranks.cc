// The engine as a library, under mpirun: what a step does with given batches.
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "launch/engine.h"
#include "runtime/random.h"
#include "tests/layers/count_allocations.h"

namespace tessera {
namespace {

constexpr std::int64_t kLength = 23;
constexpr std::int64_t kVocabulary = 61;
constexpr std::int64_t kSamples = 8;

Stack make_stack(DType compute) {
  ModelConfig config;
  TESSERA_CHECK(google::protobuf::TextFormat::ParseFromString(R"(
    width: 20 vocabulary: 61 length: 23
    schedule { periodic { order: "full" order: "sliding" layers: 2 } }
    mixer { full { heads: 2 key_value_heads: 1 head_width: 10 } }
    mixer { sliding { attention { heads: 2 key_value_heads: 2 head_width: 6 } window: 7 } }
    feed_forward { width: 37 })",
                                                              &config));
  return Stack(config, compute);
}

std::uint32_t token(std::int64_t sample, std::int64_t position) {
  const RandomStream stream(5, "tokens");
  return static_cast<std::uint32_t>(
      stream.uniform(static_cast<std::uint64_t>(sample * (kLength + 1) + position)) * kVocabulary);
}

// 0 %, 50 % and 99 % of the labels masked in different samples, and one sample with none left.
bool counts(std::int64_t sample, std::int64_t position) {
  switch (sample % 4) {
    case 0:
      return true;
    case 1:
      return position % 2 == 0;
    case 2:
      return position == 13;
    default:
      return false;
  }
}

// Everything that one configuration of the engine needs, filled with the samples' batches.
struct TestRun {
  Communicator communicator{MPI_COMM_WORLD};
  Activity activity;
  Device device{1};
  Stack stack;
  EnginePlan plan;
  Engine engine;
  OptimState state;
  OptimConfig optim;

  static EngineOptions options(std::int64_t micro_batch, Accumulate accumulate, bool per_step,
                               bool prefetch) {
    EngineOptions options;
    MPI_Comm_rank(MPI_COMM_WORLD, &options.rank);
    MPI_Comm_size(MPI_COMM_WORLD, &options.ranks);
    options.quantum = {micro_batch, kLength, 1};
    options.quanta = kSamples / micro_batch;
    options.accumulate = accumulate;
    options.gather_per_step = per_step;
    options.prefetch = prefetch;
    return options;
  }

  static EngineOptions plain() {
    EngineOptions plain = options(1, Accumulate::kLocal, false, true);
    plain.order = SumOrder::kPlain;
    return plain;
  }

  explicit TestRun(const EngineOptions& options)
      : stack(make_stack(DType::kF32)),
        plan(stack, options),
        engine(stack, plan, device, communicator, activity) {
    engine.initialise(1);
  }

  explicit TestRun(std::int64_t micro_batch, Accumulate accumulate = Accumulate::kSharded,
                   bool per_step = false, DType compute = DType::kF32, bool prefetch = true)
      : stack(make_stack(compute)),
        plan(stack, options(micro_batch, accumulate, per_step, prefetch)),
        engine(stack, plan, device, communicator, activity) {
    engine.initialise(1);
  }

  std::int64_t count() const { return plan.share().count(communicator.rank()); }

  void fill(bool all_masked = false) {
    const std::int64_t m = plan.options().quantum.batch;
    for (std::int64_t round = 0; round < count(); ++round) {
      const Batch& batch = engine.batch(round);
      const std::int64_t first = plan.share().quantum(round, communicator.rank()) * m;
      for (std::int64_t i = 0; i < m * kLength; ++i) {
        const std::int64_t sample = first + i / kLength, position = i % kLength;
        batch.tokens.as<std::uint32_t>()[i] = token(sample, position);
        batch.labels.as<std::int32_t>()[i] =
            counts(sample, position) && !all_masked
                ? static_cast<std::int32_t>(token(sample, position + 1))
                : kNoLabel;
        batch.segments.as<std::int32_t>()[i] = 0;
      }
    }
  }

  StepResult step() { return engine.step(optim, 1e-3, count(), state); }

  // This rank's parameters and first moments, which after one step show the whole gradient.
  std::vector<float> shard() {
    std::vector<float> values;
    for (const CheckpointArray& array : engine.arrays(true)) {
      for (const auto& part : array.parts) {
        values.insert(values.end(), part.data, part.data + (part.end - part.begin));
      }
    }
    return values;
  }
};

// The loss is the sum over the counted labels of the whole step divided by their number, however
// the batch is cut; a piece without labels gives 0 and no NaN.
TEST(Engine, B20_LossAndGradientDontDependOnTheCut) {
  StepResult first;
  std::vector<float> first_shard;
  for (const std::int64_t micro_batch : {8, 4, 2, 1}) {
    TestRun run(micro_batch);
    run.fill();
    run.optim.set_clip_norm(0);
    const StepResult result = run.step();
    const std::vector<float> shard = run.shard();
    ASSERT_TRUE(result.applied);
    EXPECT_EQ(result.labels, 2 * (23 + 12 + 1));
    if (first_shard.empty()) {
      first = result;
      first_shard = shard;
      // Random weights of deviation 0.02: close to the uniform loss.
      EXPECT_NEAR(result.loss, std::log(kVocabulary), 0.1);
      continue;
    }
    // Sums of the same f32 products in another order: relative error a few eps of sqrt(terms).
    EXPECT_NEAR(result.loss, first.loss, 1e-6 * first.loss);
    EXPECT_NEAR(result.gradient_norm, first.gradient_norm, 2e-6 * first.gradient_norm);
    ASSERT_EQ(shard.size(), first_shard.size());
    for (std::size_t i = 0; i < shard.size(); ++i) {
      // A first moment is a tenth of a gradient; gradients here are below 1. A parameter moved by
      // the rate times the gradient's sign, which may differ where a gradient is all rounding.
      ASSERT_NEAR(shard[i], first_shard[i], 2.1e-3) << i;
    }
  }
}

// The same in bf16. The quantum's cut changes no rounding of a row, only the order of f32 sums; the
// loss is a mean over the same labels.
TEST(Engine, B20_LossInBFloat16DoesntDependOnTheCut) {
  StepResult first;
  for (const std::int64_t micro_batch : {8, 4, 2, 1}) {
    TestRun run(micro_batch, Accumulate::kSharded, false, DType::kBF16);
    run.fill();
    const StepResult result = run.step();
    ASSERT_TRUE(result.applied);
    EXPECT_EQ(result.labels, 2 * (23 + 12 + 1));
    if (micro_batch == 8) {
      first = result;
      EXPECT_NEAR(result.loss, std::log(kVocabulary), 0.1);
    }
    EXPECT_NEAR(result.loss, first.loss, 1e-6 * first.loss);
    EXPECT_NEAR(result.gradient_norm, first.gradient_norm, 1e-6 * first.gradient_norm);
  }
}

// B19: the norm is that of every parameter's whole gradient once: with the clip at half of it, the
// next moments are half of those without, on any number of ranks and in both precisions.
TEST(Engine, B19_TheReportedNormIsTheOneBeforeClippingAndClipsWhatItSays) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    TestRun whole(2, Accumulate::kSharded, false, compute);
    whole.fill();
    whole.optim.set_clip_norm(0);
    const StepResult free_step = whole.step();
    TestRun half(2, Accumulate::kSharded, false, compute);
    half.fill();
    half.optim.set_clip_norm(free_step.gradient_norm / 2);
    const StepResult clipped = half.step();
    EXPECT_EQ(clipped.gradient_norm, free_step.gradient_norm);
    double own = 0.0;
    for (const CheckpointArray& array : whole.engine.arrays(true)) {
      if (!array.name.starts_with("adamw/m/")) continue;
      for (const auto& part : array.parts) {
        for (std::int64_t i = 0; i < part.end - part.begin; ++i) {
          // The first moment after one step is a tenth of the gradient.
          own += std::pow(static_cast<double>(part.data[i]) / (1 - whole.optim.beta1()), 2);
        }
      }
    }
    MPI_Allreduce(MPI_IN_PLACE, &own, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_NEAR(std::sqrt(own), free_step.gradient_norm, 1e-5 * free_step.gradient_norm);
    const std::vector<CheckpointArray> a = whole.engine.arrays(true), b = half.engine.arrays(true);
    for (std::size_t k = 0; k < a.size(); ++k) {
      if (!a[k].name.starts_with("adamw/m/")) continue;
      for (std::size_t p = 0; p < a[k].parts.size(); ++p) {
        for (std::int64_t i = 0; i < a[k].parts[p].end - a[k].parts[p].begin; ++i) {
          const float expected = a[k].parts[p].data[i] / 2;
          ASSERT_NEAR(b[k].parts[p].data[i], expected, 1e-6 * std::abs(expected) + 1e-12);
        }
      }
    }
  }
}

// B18: what computes is the master rounded, after initialisation, after every step, and after
// somebody wrote to the masters: the loss with the masters rounded beforehand is the same to the
// bit.
TEST(Engine, B18_WhatComputesIsTheMasterRounded) {
  TestRun run(1, Accumulate::kSharded, false, DType::kBF16);
  run.fill();
  for (int i = 0; i < 3; ++i) {
    const double loss = run.engine.evaluate(run.count() > 0);
    std::int64_t moved = 0;
    for (CheckpointArray& array : run.engine.arrays(false)) {
      for (auto& part : array.parts) {
        for (std::int64_t j = 0; j < part.end - part.begin; ++j) {
          const float rounded = to_float(to_bfloat16(part.data[j]));
          moved += rounded != part.data[j] ? 1 : 0;
          part.data[j] = rounded;
        }
      }
    }
    EXPECT_GT(run.communicator.all_reduce("test", Reduction::kSum, moved), 100);
    run.engine.weights_changed();
    EXPECT_EQ(run.engine.evaluate(run.count() > 0), loss) << i;
    run.step();
  }
}

TEST(Engine, B20_AStepWithoutALabelIsZeroNotNaN) {
  TestRun run(2);
  run.fill(true);
  const std::vector<float> before = run.shard();
  const StepResult result = run.step();
  EXPECT_EQ(result.labels, 0);
  EXPECT_EQ(result.loss, 0.0);
  EXPECT_EQ(result.gradient_norm, 0.0);
  for (const float value : run.shard()) ASSERT_TRUE(std::isfinite(value));
}

// A weight that isn't finite makes the step's loss so: nothing is applied, on any rank, and the
// limit of such steps ends the run.
TEST(Engine, NonFiniteStepsAreNotApplied) {
  TestRun run(2);
  run.fill();
  for (CheckpointArray& array : run.engine.arrays(false)) {
    if (array.name == "params/model.norm.weight") {
      for (auto& part : array.parts) {
        if (part.begin <= 3 && 3 < part.end) {
          part.data[3 - part.begin] = std::numeric_limits<float>::quiet_NaN();
        }
      }
    }
  }
  run.engine.weights_changed();
  const std::vector<float> before = run.shard();
  for (int bad = 1; bad <= 3; ++bad) {
    const StepResult result = run.step();
    EXPECT_FALSE(result.applied);
    EXPECT_EQ(result.stop, bad == 3);
    EXPECT_EQ(run.state.bad_steps_in_a_row, bad);
    EXPECT_EQ(run.state.adam_steps, 0);
  }
  const std::vector<float> after = run.shard();
  ASSERT_EQ(before.size(), after.size());
  for (std::size_t i = 0; i < before.size(); ++i) {
    ASSERT_TRUE(before[i] == after[i] || (std::isnan(before[i]) && std::isnan(after[i])));
  }
}

TEST(Engine, AStepAllocatesNothingOnceWarm) {
  for (const auto& [accumulate, compute] :
       {std::pair(Accumulate::kSharded, DType::kF32), std::pair(Accumulate::kLocal, DType::kF32),
        std::pair(Accumulate::kSharded, DType::kBF16)}) {
    for (const bool prefetch : {true, false}) {
      TestRun run(1, accumulate, false, compute, prefetch);
      run.fill();
      run.step();
      run.step();
      EXPECT_EQ(testing::count_allocations([&] {
                  for (int i = 0; i < 3; ++i) run.step();
                }),
                0);
    }
  }
}

// What plan says of the traffic is what is sent, and with several ranks something is.
TEST(Engine, PlannedTrafficIsTheTrafficSent) {
  for (const Accumulate accumulate : {Accumulate::kSharded, Accumulate::kLocal}) {
    for (const bool per_step : {false, true}) {
      for (const bool prefetch : {true, false}) {
        TestRun run(1, accumulate, per_step, per_step ? DType::kBF16 : DType::kF32, prefetch);
        run.fill();
        const EnginePlan::Communication planned = run.plan.communication();
        for (int step = 0; step < 2; ++step) {
          run.communicator.reset_traffic();
          ASSERT_TRUE(run.step().applied);
          EXPECT_EQ(run.communicator.traffic(Traffic::kGather).bytes_sent, planned.gather_bytes);
          EXPECT_EQ(run.communicator.traffic(Traffic::kReduce).bytes_sent, planned.reduce_bytes);
        }
        if (run.communicator.size() > 1) {
          EXPECT_GT(planned.gather_bytes, 0);
          EXPECT_GT(planned.reduce_bytes, 0);
        }
      }
    }
  }
}

TEST(Engine, PrefetchChangesNoBit) {
  for (const Accumulate accumulate : {Accumulate::kSharded, Accumulate::kLocal}) {
    for (const bool per_step : {false, true}) {
      const DType compute = per_step ? DType::kBF16 : DType::kF32;
      TestRun blocking(1, accumulate, per_step, compute, false);
      TestRun overlapping(1, accumulate, per_step, compute, true);
      blocking.fill();
      overlapping.fill();
      for (int step = 0; step < 3; ++step) {
        const StepResult expected = blocking.step();
        const StepResult result = overlapping.step();
        EXPECT_EQ(result.loss, expected.loss);
        EXPECT_EQ(result.gradient_norm, expected.gradient_norm);
        // What evaluating leaves in the buffers of gathered parameters must not be taken for new.
        EXPECT_EQ(overlapping.engine.evaluate(overlapping.count() > 0),
                  blocking.engine.evaluate(blocking.count() > 0));
      }
      EXPECT_EQ(overlapping.shard(), blocking.shard());
    }
  }
}

// FAST: the same bits again and again on one layout, and the canonical numbers but for rounding.
TEST(Engine, PlainSumsAreRepeatableAndCloseToCanonical) {
  TestRun canonical(1), first(TestRun::plain()), second(TestRun::plain());
  for (TestRun* run : {&canonical, &first, &second}) {
    run->fill();
    run->optim.set_clip_norm(0);
  }
  const StepResult expected = canonical.step(), result = first.step();
  EXPECT_EQ(result.loss, expected.loss);  // losses are summed by the tree as ever
  EXPECT_EQ(result.labels, expected.labels);
  // 8 terms an element, each sum within 7 eps of the sum of magnitudes, which cancellation makes
  // larger than the sum's own; the norm is over all elements.
  constexpr double kEpsilon = std::numeric_limits<float>::epsilon();
  EXPECT_NEAR(result.gradient_norm, expected.gradient_norm,
              2 * 7 * kEpsilon * 8 * expected.gradient_norm);
  EXPECT_EQ(second.step().gradient_norm, result.gradient_norm);
  for (int step = 0; step < 2; ++step) {
    const StepResult a = first.step(), b = second.step();
    EXPECT_EQ(a.loss, b.loss);
    EXPECT_EQ(a.gradient_norm, b.gradient_norm);
  }
  EXPECT_EQ(first.shard(), second.shard());
  first.communicator.reset_traffic();
  first.step();
  EXPECT_EQ(first.communicator.traffic(Traffic::kReduce).bytes_sent,
            first.plan.communication().reduce_bytes);
  EXPECT_EQ(testing::count_allocations([&] { first.step(); }), 0);
}

// While a unit computes, its gradient's predecessor goes and its successor's parameters come.
TEST(Engine, TransfersOverlapWithCompute) {
  for (const Accumulate accumulate : {Accumulate::kSharded, Accumulate::kLocal}) {
    TestRun run(1, accumulate);
    run.fill();
    run.communicator.reset_traffic();
    const TrafficCount& gather = run.communicator.traffic(Traffic::kGather);
    const TrafficCount& reduce = run.communicator.traffic(Traffic::kReduce);
    // How fast the other ranks are, nobody knows; in one step of many some transfers are in time.
    for (int step = 0; step < 200; ++step) {
      run.step();
      std::int64_t in_time = std::min(gather.overlapped, reduce.overlapped);
      if (run.communicator.all_reduce("test", Reduction::kMin, in_time) > 0) break;
    }
    if (run.communicator.size() == 1) {
      EXPECT_EQ(run.communicator.most_in_flight(), 0);
      continue;
    }
    EXPECT_GE(run.communicator.most_in_flight(), 2);
    EXPECT_GT(gather.overlapped, 0);
    EXPECT_GT(reduce.overlapped, 0);
    EXPECT_LE(gather.overlapped, gather.calls);
    EXPECT_LE(reduce.overlapped, reduce.calls);
  }
  TestRun blocking(1, Accumulate::kSharded, false, DType::kF32, false);
  blocking.fill();
  blocking.communicator.reset_traffic();
  blocking.step();
  EXPECT_LE(blocking.communicator.most_in_flight(), 1);
  EXPECT_EQ(blocking.communicator.traffic(Traffic::kGather).overlapped, 0);
  EXPECT_EQ(blocking.communicator.traffic(Traffic::kReduce).overlapped, 0);
}

// The promise of equal bits means something only if parameters are cut between ranks.
TEST(Engine, ParametersStraddleRanks) {
  TestRun run(1);
  if (run.communicator.size() == 1) return;
  std::int64_t straddling = 0;
  for (const CheckpointArray& array : run.engine.arrays(false)) {
    for (const auto& part : array.parts) {
      if (part.end - part.begin < array.shape.count()) ++straddling;
    }
  }
  EXPECT_GT(run.communicator.all_reduce("test", Reduction::kSum, straddling), 1);
}

}  // namespace
}  // namespace tessera
