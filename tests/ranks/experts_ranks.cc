// The engine with experts, under mpirun: the same bits wherever the experts are, whatever the
// routing, and the gradient of what is said to be the loss.
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>
#include <mpi.h>

#include <cmath>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch/engine.h"
#include "runtime/products.h"
#include "runtime/random.h"
#include "tests/layers/count_allocations.h"

namespace tessera {
namespace {

constexpr std::int64_t kVocabulary = 61;

ModelConfig model_of(const std::string& experts, std::int64_t length) {
  ModelConfig config;
  TESSERA_CHECK(google::protobuf::TextFormat::ParseFromString(
      "width: 20 vocabulary: 61 schedule { periodic { order: \"full\" order: \"sliding\" layers: 3 "
      "} } mixer { full { heads: 2 key_value_heads: 1 head_width: 10 } } mixer { sliding { "
      "attention "
      "{ heads: 2 key_value_heads: 2 head_width: 6 } window: 7 } } feed_forward { experts { " +
          experts + " } } feed_forward_range { first: 1 last: 1 feed_forward { width: 19 } }",
      &config));
  config.set_length(length);
  return config;
}

struct Layout {
  int expert_ranks = 1;
  bool recompute = false;
  Accumulate accumulate = Accumulate::kSharded;
  bool gather_per_step = false;
};

// An engine on the ranks of `parent`, its batches filled with the same tokens wherever it runs.
struct TestRun {
  TestRun(MPI_Comm parent, const ModelConfig& model, std::int64_t quanta, const Layout& layout = {},
          DType compute = DType::kF32, int threads = 1)
      : communicator(parent),
        device(threads),
        stack(model, compute),
        plan(stack, options(model, quanta, layout, threads)),
        engine(stack, plan, device, communicator, activity) {
    engine.initialise(1);
    optim.set_clip_norm(0);
    for (std::int64_t round = 0; round < count(); ++round) {
      const Batch& batch = engine.batch(round);
      const std::int64_t quantum = plan.share().quantum(round, communicator.rank());
      const RandomStream stream(5, "tokens of " + std::to_string(quantum));
      for (std::int64_t i = 0; i < batch.tokens.count(); ++i) {
        const auto draw = [&](std::int64_t at) {
          return static_cast<std::int64_t>(stream.uniform(static_cast<std::uint64_t>(at)) *
                                           kVocabulary);
        };
        batch.tokens.as<std::uint32_t>()[i] = static_cast<std::uint32_t>(draw(i));
        batch.labels.as<std::int32_t>()[i] = static_cast<std::int32_t>(draw(i + 1));
        batch.segments.as<std::int32_t>()[i] = 0;
      }
    }
  }
  EngineOptions options(const ModelConfig& model, std::int64_t quanta, const Layout& layout,
                        int threads) const {
    EngineOptions options;
    options.rank = communicator.rank();
    options.ranks = communicator.size();
    options.expert_ranks = layout.expert_ranks;
    options.quantum = {1, model.length(), threads};
    options.quanta = quanta;
    options.recompute = layout.recompute;
    options.accumulate = layout.accumulate;
    options.gather_per_step = layout.gather_per_step;
    return options;
  }
  std::int64_t count() const { return plan.share().count(communicator.rank()); }
  StepResult step(double rate = 1e-3) { return engine.step(optim, rate, count(), state); }

  // Adds to the probabilities in the choice of all layers with experts.
  void force(const std::vector<float>& bias) {
    for (const CheckpointArray& array : engine.arrays(false)) {
      if (!array.name.starts_with("state/")) continue;
      for (const auto& part : array.parts) {
        std::copy(bias.begin(), bias.end(), part.data);
      }
    }
    engine.weights_changed();
  }
  // On one rank: every array whole.
  std::map<std::string, std::vector<float>> arrays() {
    std::map<std::string, std::vector<float>> all;
    for (const CheckpointArray& array : engine.arrays(true)) {
      std::vector<float>& values = all[array.name];
      values.resize(static_cast<std::size_t>(array.shape.count()));
      for (const auto& part : array.parts) {
        std::copy(part.data, part.data + (part.end - part.begin), values.begin() + part.begin);
      }
    }
    return all;
  }

  Communicator communicator;
  Activity activity;
  Device device;
  Stack stack;
  EnginePlan plan;
  Engine engine;
  OptimState state;
  OptimConfig optim;
};

// All that this rank holds, and what a step says, against a run on one rank.
void expect_same(TestRun& run, const StepResult& result,
                 const std::map<std::string, std::vector<float>>& reference,
                 const StepResult& expected) {
  EXPECT_EQ(result.loss, expected.loss);
  EXPECT_EQ(result.gradient_norm, expected.gradient_norm);
  ASSERT_NE(result.routers, nullptr);
  EXPECT_EQ(result.routers->loads, expected.routers->loads);
  EXPECT_EQ(result.routers->dropped, expected.routers->dropped);
  EXPECT_EQ(result.routers->auxiliary, expected.routers->auxiliary);
  EXPECT_EQ(result.routers->z, expected.routers->z);
  EXPECT_EQ(result.routers->entropy, expected.routers->entropy);
  std::int64_t held = 0;
  for (const CheckpointArray& array : run.engine.arrays(true)) {
    const auto found = reference.find(array.name);
    ASSERT_NE(found, reference.end()) << array.name;
    for (const auto& part : array.parts) {
      held += part.end - part.begin;
      EXPECT_EQ(std::memcmp(part.data, found->second.data() + part.begin,
                            static_cast<std::size_t>(part.end - part.begin) * sizeof(float)),
                0)
          << array.name << " from element " << part.begin;
    }
  }
  std::int64_t all = 0;
  for (const auto& [name, values] : reference) all += static_cast<std::int64_t>(values.size());
  EXPECT_EQ(run.communicator.all_reduce("elements", Reduction::kSum, held), all);
}

std::vector<int> expert_ranks(int ranks) {
  std::vector<int> all;
  for (int e = 1; e <= ranks; ++e) {
    if (ranks % e == 0) all.push_back(e);
  }
  return all;
}

int world_size() {
  int size = 0;
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  return size;
}

struct Routing {
  std::string name;
  std::string experts;  // the config's
  std::vector<float> bias;
  std::int64_t length = 23, quanta = 8;
  int steps = 2;
};

// Expert numbers [begin, end) get so much.
std::vector<float> bias_of(std::int64_t experts, std::int64_t begin, std::int64_t end,
                           float value) {
  std::vector<float> bias(static_cast<std::size_t>(experts));
  std::fill(bias.begin() + begin, bias.begin() + end, value);
  return bias;
}

std::vector<Routing> routings() {
  const std::string some = "experts: 25 active: 3 width: 13 shared_width: 9 selection_bias: true";
  const std::string one = "experts: 25 active: 1 width: 13 selection_bias: true";
  const std::string latent =
      "experts: 25 active: 3 width: 13 shared_width: 9 selection_bias: true latent { width: 12 "
      "norm: true }";
  const std::string few = "experts: 3 active: 2 width: 13 selection_bias: true";
  const ExpertPlacement last = {2, 1}, first = {4, 0};
  return {
      {"as it comes", some, {}},
      {"in a latent space", latent, {}},
      {"with a capacity", some + " capacity_factor: 0.9", {}},
      {"fewer experts than ranks", few, {}},
      {"all to one expert, 50 steps", one, bias_of(25, 4, 5, 10.0F), 11, 8, 50},
      {"all to the experts of one rank", some, bias_of(25, last.begin(25), 25, 10.0F)},
      {"none to a rank", some, bias_of(25, 0, first.end(25), -10.0F)},
      {"exactly one token in all", some, {}, 1, 1},
      {"fewer quanta than ranks", some, {}, 23, 3},
      {"exact ties", some, bias_of(25, 0, 25, 1e9F)},  // swallows the probabilities
  };
}

TEST(Experts, B29_EveryRoutingGivesTheBitsOfOneRank) {
  for (const Routing& routing : routings()) {
    SCOPED_TRACE(routing.name);
    const ModelConfig model = model_of(routing.experts, routing.length);
    TestRun alone(MPI_COMM_SELF, model, routing.quanta);
    if (!routing.bias.empty()) alone.force(routing.bias);
    StepResult expected;
    std::vector<std::int64_t> chosen(
        static_cast<std::size_t>(model.feed_forward().experts().experts()));
    for (int step = 0; step < routing.steps; ++step) {
      expected = alone.step();
      ASSERT_TRUE(std::isfinite(expected.loss));
      for (std::size_t e = 0; e < chosen.size(); ++e) chosen[e] += expected.routers->loads[0][e];
    }
    const std::map<std::string, std::vector<float>> reference = alone.arrays();

    // Every token chose as often as it should; an expert that none chose has no gradient at all.
    const std::int64_t tokens = routing.quanta * routing.length;
    const std::int64_t active = model.feed_forward().experts().active();
    std::int64_t unused = 0, choices = 0;
    const std::vector<float>& moments =
        reference.at("adamw/m/model.layers.0.feed_forward.experts.up_proj.weight");
    const std::size_t elements = moments.size() / chosen.size();
    for (std::size_t e = 0; e < chosen.size(); ++e) {
      choices += chosen[e];
      const auto begin = moments.begin() + static_cast<std::ptrdiff_t>(e * elements);
      const bool zero = std::all_of(begin, begin + static_cast<std::ptrdiff_t>(elements),
                                    [](float value) { return value == 0.0F; });
      EXPECT_EQ(zero, chosen[e] == 0) << "expert " << e;
      unused += zero ? 1 : 0;
    }
    EXPECT_EQ(choices, tokens * active * routing.steps);
    if (routing.name.starts_with("all to one expert")) {
      EXPECT_EQ(unused, 24);
    }
    if (routing.name == "exact ties") {
      EXPECT_EQ(chosen[0], tokens * routing.steps);
      EXPECT_EQ(unused, 22);
    }

    for (const int e : expert_ranks(world_size())) {
      for (const bool recompute : {false, true}) {
        for (const Accumulate accumulate : {Accumulate::kSharded, Accumulate::kLocal}) {
          if (recompute != (accumulate == Accumulate::kLocal) && routing.steps > 2) continue;
          SCOPED_TRACE(::testing::Message() << e << " expert ranks, recompute " << recompute);
          TestRun run(MPI_COMM_WORLD, model, routing.quanta, {e, recompute, accumulate});
          if (!routing.bias.empty()) run.force(routing.bias);
          StepResult result;
          for (int step = 0; step < routing.steps; ++step) result = run.step();
          expect_same(run, result, reference, expected);
        }
      }
    }
  }
}

TEST(Experts, Bf16AndThreadsGiveTheBitsOfOneRank) {
  const ModelConfig model =
      model_of("experts: 25 active: 3 width: 13 shared_width: 9 latent { width: 12 }", 40);
  TestRun alone(MPI_COMM_SELF, model, 8, {}, DType::kBF16);
  alone.step();
  const StepResult expected = alone.step();
  for (const int e : expert_ranks(world_size())) {
    TestRun run(MPI_COMM_WORLD, model, 8, {e}, DType::kBF16, 2);
    run.step();
    const StepResult result = run.step();
    expect_same(run, result, alone.arrays(), expected);
  }
}

// B19: the norm is that of each logical parameter once, wherever experts are.
TEST(Experts, B19_TheNormIsThatOfEveryParameterOnce) {
  const ModelConfig model = model_of("experts: 7 active: 2 width: 13 shared_width: 9", 23);
  for (const int e : expert_ranks(world_size())) {
    TestRun run(MPI_COMM_WORLD, model, 8, {e});
    run.optim.set_beta1(0.5);
    const StepResult result = run.step();
    double mine = 0.0;
    for (const CheckpointArray& array : run.engine.arrays(true)) {
      if (!array.name.starts_with("adamw/m/")) continue;
      for (const auto& part : array.parts) {
        for (std::int64_t i = 0; i < part.end - part.begin; ++i) {
          const double gradient = 2.0 * static_cast<double>(part.data[i]);
          mine += gradient * gradient;
        }
      }
    }
    double sum = 0.0;
    MPI_Allreduce(&mine, &sum, 1, MPI_DOUBLE, MPI_SUM, MPI_COMM_WORLD);
    EXPECT_NEAR(result.gradient_norm, std::sqrt(sum), 1e-6 * std::sqrt(sum));
    EXPECT_GT(sum, 0.0);
  }
}

TEST(Experts, RowsReallyCrossRanksAndNothingIsAllocated) {
  const ModelConfig model = model_of("experts: 25 active: 3 width: 13 shared_width: 9", 23);
  for (const int e : expert_ranks(world_size())) {
    TestRun run(MPI_COMM_WORLD, model, 8, {e});
    run.step();
    run.step();
    run.engine.mesh().reset_traffic();
    EXPECT_EQ(testing::count_allocations([&] { run.step(); }), 0);
    const TrafficCount exchange = run.engine.mesh().traffic(Traffic::kExchange);
    // Counts, rows and results; and their gradients: in each round, of two layers with experts.
    EXPECT_EQ(exchange.calls, e == 1 ? 0 : 10 * run.plan.share().rounds());
    const std::int64_t sent =
        run.communicator.all_reduce("sent", Reduction::kSum, exchange.bytes_sent);
    EXPECT_EQ(sent > 0, e > 1);
    if (e == 1) continue;
    // If experts were balanced, so much: rows there and back, twice; here they aren't, and numbers
    // go along.
    const std::int64_t planned = run.communicator.all_reduce(
        "planned", Reduction::kSum, run.plan.communication().exchange_bytes);
    EXPECT_GT(sent, planned / 2);
    EXPECT_LT(sent, 2 * planned);
    // Experts' parameters straddle the slices of the ranks that share them.
    if (run.engine.mesh().shard_group().size() == 1) continue;
    const EnginePlan& plan = run.plan;
    const UnitLayout& layout = plan.units()[plan.experts_of(0)].layout;
    std::int64_t straddling = 0;
    for (int member = 0; member < run.engine.mesh().shard_group().size(); ++member) {
      const auto pieces =
          layout.pieces(layout.slice(member, run.engine.mesh().shard_group().size()));
      straddling += pieces.size() > 1 ? 1 : 0;
    }
    EXPECT_GT(straddling, 0);
  }
}

// What plan says of parameters' and gradients' traffic is what is sent, within groups and across
// them; under every policy.
TEST(Experts, PlannedTrafficIsTheTrafficSent) {
  const ModelConfig model = model_of("experts: 25 active: 3 width: 13 shared_width: 9", 23);
  for (const int e : expert_ranks(world_size())) {
    for (const Accumulate accumulate : {Accumulate::kSharded, Accumulate::kLocal}) {
      for (const bool per_step : {false, true}) {
        for (const std::int64_t quanta : {8, 11}) {
          Layout layout = {e, per_step, accumulate};
          layout.gather_per_step = per_step;
          TestRun run(MPI_COMM_WORLD, model, quanta, layout);
          const EnginePlan::Communication planned = run.plan.communication();
          for (int step = 0; step < 2; ++step) {
            run.engine.mesh().reset_traffic();
            run.step();
            EXPECT_EQ(run.engine.mesh().traffic(Traffic::kGather).bytes_sent, planned.gather_bytes);
            EXPECT_EQ(run.engine.mesh().traffic(Traffic::kReduce).bytes_sent, planned.reduce_bytes);
          }
        }
      }
    }
  }
}

TEST(Experts, SelectionBiasesMoveByTheLoads) {
  const ModelConfig model = model_of("experts: 5 active: 2 width: 13 selection_bias: true", 23);
  TestRun run(MPI_COMM_WORLD, model, 8, {world_size()});
  std::vector<float> expected(5);
  for (int step = 0; step < 3; ++step) {
    const StepResult result = run.step();
    const std::vector<std::int64_t>& loads = result.routers->loads[0];
    std::int64_t total = 0;
    for (const std::int64_t load : loads) total += load;
    EXPECT_EQ(total, 8 * 23 * 2);
    for (std::size_t e = 0; e < 5; ++e) {
      const double mean = static_cast<double>(total) / 5.0;
      const auto load = static_cast<double>(loads[e]);
      if (load != mean) expected[e] += load < mean ? 1e-3F : -1e-3F;
    }
  }
  for (const CheckpointArray& array : run.engine.arrays(false)) {
    if (array.name != "state/selection_bias/layers.0") continue;
    EXPECT_EQ(array.shape, Shape{5});
    EXPECT_EQ(array.parts.size(), run.communicator.rank() == 0 ? 1U : 0U);
    for (const auto& part : array.parts) {
      EXPECT_EQ(std::vector<float>(part.data, part.data + 5), expected);
    }
  }
}

// Along the gradient the loss with the routers' own rises as fast as the gradient is long.
TEST(Experts, TheGradientIsThatOfTheLossWithTheRoutersOwn) {
  for (const char* const extra :
       {"", "latent { width: 16 norm: true }", "renormalise: false", "capacity_factor: 1"}) {
    SCOPED_TRACE(extra);
    const ModelConfig model = model_of(
        std::string("experts: 6 active: 2 width: 24 shared_width: 9 auxiliary_coefficient: 0.7 "
                    "z_coefficient: 0.3 ") +
            extra,
        11);
    TestRun run(MPI_COMM_WORLD, model, 2, {world_size()});
    run.optim.set_beta1(0.5);
    const auto total = [](const StepResult& result) {
      return result.loss + 0.7 * result.routers->auxiliary + 0.3 * result.routers->z;
    };
    const StepResult first = run.step(0.0);
    const double norm = first.gradient_norm;
    std::vector<std::vector<std::int64_t>> loads = first.routers->loads;
    std::map<std::string, std::vector<std::vector<float>>> gradient;
    for (const CheckpointArray& array : run.engine.arrays(true)) {
      if (!array.name.starts_with("adamw/m/")) continue;
      auto& parts = gradient["params/" + array.name.substr(8)];
      for (const auto& part : array.parts) {
        parts.emplace_back(part.data, part.data + (part.end - part.begin));
      }
    }
    constexpr double kStep = 1e-3;
    std::vector<double> ends;
    for (const double sign : {1.0, -2.0}) {  // from the middle to one end, then to the other
      for (const CheckpointArray& array : run.engine.arrays(false)) {
        if (!array.name.starts_with("params/")) continue;
        for (std::size_t p = 0; p < array.parts.size(); ++p) {
          const auto& part = array.parts[p];
          for (std::int64_t i = 0; i < part.end - part.begin; ++i) {
            part.data[i] += static_cast<float>(
                sign * kStep * 2.0 *
                static_cast<double>(gradient[array.name][p][static_cast<std::size_t>(i)]) / norm);
          }
        }
      }
      run.engine.weights_changed();
      const StepResult moved = run.step(0.0);
      ASSERT_EQ(moved.routers->loads, loads) << "a choice changed on the way: take other numbers";
      ends.push_back(total(moved));
    }
    // f32 rounds parameters of size 1e-2 to 1e-9 and the loss to 1e-7 in 2e-3.
    EXPECT_NEAR((ends[0] - ends[1]) / (2.0 * kStep), norm, 1e-3 * norm);
  }
}

}  // namespace
}  // namespace tessera
