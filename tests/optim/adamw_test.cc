#include "optim/adamw.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <hwy/targets.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <vector>

#include "optim/schedule.h"
#include "runtime/error.h"

namespace tessera {
namespace {

constexpr double kEpsilon = 0x1p-24;  // half a unit in the last place of f32, relative

template <class T>
struct Arrays {
  std::vector<T> weights, first, second;
  explicit Arrays(std::vector<T> w) : weights(std::move(w)) {
    first.resize(weights.size());
    second.resize(weights.size());
  }
  bool operator==(const Arrays&) const = default;
};

View view(std::vector<float>& values) {
  return {values.data(), Shape{static_cast<std::int64_t>(values.size())}};
}

void update(Queue& queue, const AdamWStep& step, Arrays<float>& a, std::vector<float> gradient) {
  adamw_update(queue, step, view(a.weights), view(a.first), view(a.second), view(gradient));
}

// Algorithm 2 of Loshchilov and Hutter 2019, as it is written there.
void reference(const AdamWStep& step, Arrays<double>& a, const std::vector<float>& gradient) {
  const auto t = static_cast<double>(step.count);
  for (std::size_t i = 0; i < gradient.size(); ++i) {
    const double g = static_cast<double>(gradient[i]) * step.gradient_scale;
    a.first[i] = step.beta1 * a.first[i] + (1 - step.beta1) * g;
    a.second[i] = step.beta2 * a.second[i] + (1 - step.beta2) * g * g;
    const double m = a.first[i] / (1 - std::pow(step.beta1, t));
    const double v = a.second[i] / (1 - std::pow(step.beta2, t));
    a.weights[i] -=
        step.learning_rate * (m / (std::sqrt(v) + step.epsilon) + step.weight_decay * a.weights[i]);
  }
}

std::vector<float> normal(std::size_t count, unsigned seed, double deviation = 1.0) {
  std::mt19937 random(seed);
  std::normal_distribution<double> distribution(0.0, deviation);
  std::vector<float> values(count);
  std::generate(values.begin(), values.end(),
                [&] { return static_cast<float>(distribution(random)); });
  return values;
}

std::vector<double> in_double(const std::vector<float>& values) {
  return {values.begin(), values.end()};
}

double largest(const std::vector<double>& values) {
  double result = 0.0;
  for (const double v : values) {
    result = std::max(result, std::abs(v));
  }
  return result;
}

// Runs the test's body with every instruction set that this machine has.
template <class Body>
void on_every_target(const Body& body) {
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    SCOPED_TRACE(hwy::TargetName(target));
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body();
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// What T steps may differ from exact arithmetic. A moment is a weighted mean of T inputs and is
// rounded about four times a step: 4 T eps of the largest input. The root of the second moment is
// at least 0.3 of the largest input over the first six steps, so a step's movement, lr * m / root,
// is off by at most lr * (4 T / 0.3 + 8) eps, 88 eps lr at T = 6; and the weight is rounded once a
// step.
struct Bound {
  double weights, first, second;
};
Bound bound(int steps, double largest_weight, double largest_rate, double largest_gradient) {
  const double t = steps;
  return {t * kEpsilon * (largest_weight + 100 * largest_rate), 4 * t * kEpsilon * largest_gradient,
          6 * t * kEpsilon * largest_gradient * largest_gradient};
}

TEST(AdamW, AgreesWithPyTorch) {
  std::ifstream file(TESSERA_SOURCE_DIR "/tests/oracle/adamw.json");
  const nlohmann::json oracle = nlohmann::json::parse(file);
  ASSERT_GE(oracle["cases"].size(), 4U);
  on_every_target([&] {
    for (const auto& c : oracle["cases"]) {
      OptimConfig config;
      config.set_beta1(c["beta1"]);
      config.set_beta2(c["beta2"]);
      config.set_epsilon(c["epsilon"]);
      config.set_weight_decay(c["weight_decay"]);
      config.set_clip_norm(c["clip_norm"]);
      const auto group = parameter_group(config, ModelPart::kHead, 0, 1, true);
      Queue queue(1);
      Arrays<float> ours(c["weights"].get<std::vector<float>>());
      OptimState state;
      double largest_rate = 0.0;
      double largest_gradient = 0.0;
      for (const auto& s : c["steps"]) {
        const StepDecision decision = decide_step(config, 1.0, s["norm"], state);
        ASSERT_TRUE(decision.apply);
        const double rate = s["learning_rate"];
        update(queue, adamw_step(config, rate, group, state.adam_steps, decision.gradient_scale),
               ours, s["gradient"].get<std::vector<float>>());
        const auto weights = s["weights"].get<std::vector<double>>();
        const auto first = s["first"].get<std::vector<double>>();
        const auto second = s["second"].get<std::vector<double>>();
        largest_rate = std::max(largest_rate, rate);
        largest_gradient =
            std::max(largest_gradient,
                     decision.gradient_scale * largest(s["gradient"].get<std::vector<double>>()));
        const Bound limit = bound(static_cast<int>(c["steps"].size()), largest(weights),
                                  largest_rate, largest_gradient);
        for (std::size_t i = 0; i < weights.size(); ++i) {
          ASSERT_NEAR(ours.weights[i], weights[i], limit.weights) << i;
          ASSERT_NEAR(ours.first[i], first[i], limit.first) << i;
          ASSERT_NEAR(ours.second[i], second[i], limit.second) << i;
        }
      }
    }
  });
}

TEST(AdamW, AnyCutGivesTheSameBits) {
  constexpr std::size_t kCount = 50021;  // a prime: more than three of a queue's pieces
  AdamWStep step;
  step.learning_rate = 1e-3;
  step.weight_decay = 0.1;
  step.gradient_scale = 0.37;
  const std::vector<float> gradient = normal(kCount, 1);
  on_every_target([&] {
    Queue one(1);
    Queue two(2);
    Arrays<float> whole(normal(kCount, 2));
    Arrays<float> cut = whole;
    std::mt19937 random(3);
    for (step.count = 1; step.count <= 3; ++step.count) {
      update(one, step, whole, gradient);
      std::vector<float> g = gradient;
      for (std::size_t begin = 0; begin < kCount;) {
        // Mostly a few elements, so that every offset and every length of a tail occurs.
        const std::size_t longest = random() % 8 == 0 ? 20000 : 40;
        const std::size_t count = std::min<std::size_t>(1 + random() % longest, kCount - begin);
        const Shape shape{static_cast<std::int64_t>(count)};
        adamw_update(two, step, View(cut.weights.data() + begin, shape),
                     View(cut.first.data() + begin, shape), View(cut.second.data() + begin, shape),
                     View(g.data() + begin, shape));
        begin += count;
      }
      ASSERT_EQ(whole, cut);
    }
  });
}

// The failure's own case: a weight of 1, a constant gradient, a small rate.
TEST(AdamW, B18_SmallUpdatesAreNotRoundedAway) {
  OptimConfig config;
  config.set_learning_rate(1e-4);
  const auto group = parameter_group(config, ModelPart::kHead, 0, 1, true);
  Queue queue(1);
  for (const float gradient : {1.0F, -1.0F, 0.013F, 1e-5F, 0.0F}) {
    Arrays<float> ours({1.0F});
    Arrays<double> exact({1.0});
    for (std::int64_t t = 1; t <= 1000; ++t) {
      const AdamWStep step = adamw_step(config, config.learning_rate(), group, t, 1.0);
      update(queue, step, ours, {gradient});
      reference(step, exact, {gradient});
    }
    EXPECT_LT(exact.weights[0], gradient < 0 ? 1.2 : 0.995);
    EXPECT_NEAR(ours.weights[0] / exact.weights[0], 1.0, 1e-5) << gradient;
  }
}

// 1000 steps of random gradients. A weight of size about 1 is rounded once a step by up to eps;
// these roundings are independent, so that six standard deviations of their sum are
// 6 sqrt(1000 / 3) eps = 110 eps; the moments' relative error of about 10 eps moves each of the
// steps' lr * 1 by 10 eps, 1000 * 10 eps * lr = 10 eps at this rate if they all agreed.
TEST(AdamW, StaysByTheReferenceForAThousandSteps) {
  constexpr std::size_t kCount = 101;
  OptimConfig config;
  config.set_learning_rate(1e-3);
  const auto group = parameter_group(config, ModelPart::kHead, 0, 1, true);
  Queue queue(1);
  const std::vector<float> weights = normal(kCount, 4);
  Arrays<float> ours(weights);
  Arrays<double> exact(in_double(weights));
  for (std::int64_t t = 1; t <= 1000; ++t) {
    const AdamWStep step = adamw_step(config, config.learning_rate(), group, t, 0.5);
    const std::vector<float> gradient = normal(kCount, 100 + static_cast<unsigned>(t), 0.02);
    update(queue, step, ours, gradient);
    reference(step, exact, gradient);
  }
  for (std::size_t i = 0; i < kCount; ++i) {
    EXPECT_NEAR(ours.weights[i], exact.weights[i],
                120 * kEpsilon * std::max(1.0, std::abs(static_cast<double>(weights[i]))))
        << i;
  }
}

TEST(AdamW, DecayIsDecoupledFromTheGradient) {
  Queue queue(1);
  AdamWStep step;
  step.learning_rate = 0.01;
  step.weight_decay = 0.5;
  Arrays<float> a({2.0F, -4.0F, 0.0F});
  update(queue, step, a, {0.0F, 0.0F, 0.0F});
  EXPECT_FLOAT_EQ(a.weights[0], 2.0F * 0.995F);
  EXPECT_FLOAT_EQ(a.weights[1], -4.0F * 0.995F);
  EXPECT_THAT(a.first, testing::Each(0.0F));
  EXPECT_THAT(a.second, testing::Each(0.0F));
}

TEST(AdamW, B19_AZeroGradientAndPaddingChangeNothing) {
  Queue queue(1);
  AdamWStep step;
  step.learning_rate = 0.01;
  const std::vector<float> weights = normal(100, 5);
  Arrays<float> a(weights);
  update(queue, step, a, std::vector<float>(100));
  EXPECT_EQ(a, Arrays<float>(weights));
  step.weight_decay = 0.1;  // padding is zero and decays to zero
  Arrays<float> padding(std::vector<float>(100));
  update(queue, step, padding, std::vector<float>(100));
  EXPECT_EQ(padding, Arrays<float>(std::vector<float>(100)));
}

TEST(AdamW, MomentsNeverBecomeDenormal) {
  Queue queue(1);
  OptimConfig config;
  const auto group = parameter_group(config, ModelPart::kHead, 0, 1, false);
  Arrays<float> a({1.0F, -1.0F});
  update(queue, adamw_step(config, 1e-3, group, 1, 1.0), a, {1e-3F, -1e-3F});
  std::int64_t t = 2;
  for (; t <= 5000 && (a.first[0] != 0.0F || a.second[0] != 0.0F); ++t) {
    update(queue, adamw_step(config, 1e-3, group, t, 1.0), a, {0.0F, 0.0F});
    for (const float value : {a.first[0], a.first[1], a.second[0], a.second[1]}) {
      ASSERT_NE(std::fpclassify(value), FP_SUBNORMAL) << t;
    }
  }
  EXPECT_LT(t, 5000);
  EXPECT_EQ(a.first[1], 0.0F);
}

TEST(AdamW, WrongViewsAreOurFault) {
  Queue queue(1);
  std::vector<float> a(4);
  std::vector<float> b(4);
  std::vector<float> c(4);
  std::vector<float> shorter(3);
  std::vector<double> doubles(4);
  const View wrong(doubles.data(), Shape{4});
  EXPECT_THROW(adamw_update(queue, {}, view(a), view(b), view(c), view(shorter)), Error);
  EXPECT_THROW(adamw_update(queue, {}, view(a), view(b), view(c), wrong), Error);
  AdamWStep zeroth;
  zeroth.count = 0;
  std::vector<float> g(4);
  EXPECT_THROW(adamw_update(queue, zeroth, view(a), view(b), view(c), view(g)), Error);
}

TEST(DecideStep, ClipsByTheNormAlone) {
  OptimConfig config;
  OptimState state;
  EXPECT_EQ(decide_step(config, 2.0, 0.5, state).gradient_scale, 1.0);
  EXPECT_EQ(decide_step(config, 2.0, 1.0, state).gradient_scale, 1.0);
  EXPECT_EQ(decide_step(config, 2.0, 4.0, state).gradient_scale, 0.25);
  EXPECT_EQ(decide_step(config, 2.0, 1e30, state).gradient_scale, 1.0 / 1e30);
  EXPECT_EQ(decide_step(config, 2.0, 0.0, state).gradient_scale, 1.0);
  config.set_clip_norm(0.0);
  EXPECT_EQ(decide_step(config, 2.0, 4.0, state).gradient_scale, 1.0);
  EXPECT_EQ(state.adam_steps, 6);
}

TEST(DecideStep, B19_NonFiniteStepsAreNotAppliedAndAreCounted) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  OptimConfig config;
  OptimState state;
  EXPECT_TRUE(decide_step(config, 2.0, 1.0, state).apply);
  const auto bad = [&](double loss, double norm) {
    const StepDecision decision = decide_step(config, loss, norm, state);
    EXPECT_FALSE(decision.apply);
    EXPECT_EQ(decision.gradient_scale, 0.0);
    return decision.stop;
  };
  EXPECT_FALSE(bad(kNan, 1.0));
  EXPECT_FALSE(bad(2.0, kInfinity));
  EXPECT_EQ(state.bad_steps_in_a_row, 2);
  EXPECT_EQ(state.adam_steps, 1);
  EXPECT_TRUE(decide_step(config, 2.0, 1.0, state).apply);
  EXPECT_EQ(state.bad_steps_in_a_row, 0);
  EXPECT_EQ(state.adam_steps, 2);
  EXPECT_FALSE(bad(kInfinity, kInfinity));
  EXPECT_FALSE(bad(2.0, kNan));
  EXPECT_TRUE(bad(kNan, kNan));
  EXPECT_EQ(state.adam_steps, 2);
}

// Without a clip a gradient can be finite and still too large for its square.
TEST(DecideStep, AGradientWhoseSquareOverflowsIsNotApplied) {
  OptimConfig config;
  config.set_clip_norm(0.0);
  OptimState state;
  EXPECT_FALSE(decide_step(config, 2.0, 1e19, state).apply);
  EXPECT_TRUE(decide_step(config, 2.0, 1e18, state).apply);
  Queue queue(1);
  Arrays<float> a({1.0F});
  const auto group = parameter_group(config, ModelPart::kHead, 0, 1, false);
  update(queue, adamw_step(config, 1e-3, group, 1, 1.0), a, {1e18F});
  EXPECT_TRUE(std::isfinite(a.second[0]));
  EXPECT_NEAR(a.weights[0], 0.999, 1e-6);
}

// A run of 40 steps with warm-up, a stable part, decay, and two steps that aren't applied, against
// the same run stopped at every step and once more three steps later. What a checkpoint keeps is
// OptimState and the arrays.
TEST(AdamW, B10_AStoppedRunTakesTheSameSteps) {
  constexpr std::int64_t kSteps = 40;
  OptimConfig config;
  config.set_schedule(OptimConfig::WARMUP_STABLE_DECAY);
  config.set_warmup_steps(8);
  config.set_decay_steps(8);
  const auto group = parameter_group(config, ModelPart::kBlock, 0, 3, true);
  struct Run {
    Arrays<float> arrays{normal(33, 6)};
    OptimState state;
    std::vector<AdamWStep> steps;
  };
  const auto train = [&](Run& run, std::int64_t begin, std::int64_t end) {
    Queue queue(1);
    for (std::int64_t s = begin; s < end; ++s) {
      const double loss = s == 5 || s == 20 ? NAN : 2.0;
      const StepDecision decision = decide_step(config, loss, 3.0, run.state);
      if (!decision.apply) {
        run.steps.emplace_back();
        continue;
      }
      run.steps.push_back(adamw_step(config, learning_rate(config, s, kSteps), group,
                                     run.state.adam_steps, decision.gradient_scale));
      update(queue, run.steps.back(), run.arrays, normal(33, 200 + static_cast<unsigned>(s)));
    }
  };
  const auto resumed = [](const Run& run) {
    Run next;
    next.arrays = run.arrays;
    next.state.adam_steps = run.state.adam_steps;
    next.state.bad_steps_in_a_row = run.state.bad_steps_in_a_row;
    next.steps = run.steps;
    return next;
  };
  Run straight;
  train(straight, 0, kSteps);
  EXPECT_EQ(straight.state.adam_steps, kSteps - 2);
  for (std::int64_t stop = 1; stop < kSteps; ++stop) {
    Run run;
    train(run, 0, stop);
    run = resumed(run);
    train(run, stop, std::min(stop + 3, kSteps));
    run = resumed(run);
    train(run, std::min(stop + 3, kSteps), kSteps);
    ASSERT_EQ(run.arrays, straight.arrays) << stop;
    for (std::size_t s = 0; s < straight.steps.size(); ++s) {
      const AdamWStep& a = run.steps[s];
      const AdamWStep& b = straight.steps[s];
      ASSERT_EQ(std::bit_cast<std::uint64_t>(a.learning_rate),
                std::bit_cast<std::uint64_t>(b.learning_rate));
      ASSERT_EQ(std::bit_cast<std::uint64_t>(a.weight_decay),
                std::bit_cast<std::uint64_t>(b.weight_decay));
      ASSERT_EQ(a.count, b.count);
    }
  }
}

// B18: a weight that moves by far less than a step of bf16 does move, in its master; what computes
// is the master, rounded.
TEST(AdamW, B18_SmallUpdatesReachTheMasterAndTheCopyIsTheMasterRounded) {
  constexpr int kSteps = 1000;
  on_every_target([&] {
    Queue queue(2);
    // Several vectors and a tail; all elements alike but the last, whose gradient turns.
    constexpr std::size_t kCount = 37;
    Arrays<float> found(std::vector<float>(kCount, 1.0F));
    Arrays<double> expected(std::vector<double>(kCount, 1.0));
    std::vector<BFloat16> rounded(kCount);
    std::vector<float> gradient(kCount, 0.5F);
    AdamWStep step;
    step.learning_rate = 1e-4;
    step.weight_decay = 0.1;
    for (step.count = 1; step.count <= kSteps; ++step.count) {
      gradient.back() = step.count % 3 == 0 ? -0.25F : 0.125F;
      adamw_update(queue, step, view(found.weights), view(found.first), view(found.second),
                   view(gradient), {rounded.data(), Shape{kCount}});
      reference(step, expected, gradient);
      for (std::size_t i = 0; i < kCount; ++i) {
        ASSERT_EQ(rounded[i].bits, to_bfloat16(found.weights[i]).bits) << step.count;
      }
    }
    for (std::size_t i = 0; i < kCount; ++i) {
      EXPECT_NEAR(found.weights[i], expected.weights[i], 1e-5 * std::abs(expected.weights[i]));
    }
    // A bf16 weight would still be 1: the step of 1e-4 is below half of bf16's 2^-8 there.
    EXPECT_LT(found.weights[0], 0.91F);
    EXPECT_EQ(to_float(to_bfloat16(1.0F - 1e-4F)), 1.0F);
  });
}

}  // namespace
}  // namespace tessera
