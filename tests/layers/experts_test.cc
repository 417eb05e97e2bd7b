#include "layers/experts/experts.h"

#include <array>
#include <barrier>
#include <memory>
#include <numeric>
#include <set>
#include <string>
#include <thread>

#include "runtime/products.h"
#include "tests/layers/count_allocations.h"
#include "tests/layers/oracle.h"
#include "tests/layers/testing.h"
#include "tests/reference/experts.h"
#include "tests/targets.h"

namespace tessera::testing {
namespace {

// The experts' matrices of all ranks, and their gradients.
struct AllExperts {
  explicit AllExperts(const MixtureOfExperts& layer, DType compute)
      : values(layer.expert_parameters(), compute) {
    const std::vector<ParameterSpec> specs = layer.expert_parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      fill_normal(values[i], specs[i].name, 1.0 / std::sqrt(double(specs[i].shape[2])));
    }
  }
  Buffers values;
};

std::vector<View> experts_of(const Buffers& stacks, std::int64_t begin, std::int64_t end) {
  std::vector<View> views;
  for (const View& stack : stacks.views()) {
    for (std::int64_t i = begin; i < end; ++i) {
      views.push_back(stack.slice(i, i + 1).reshaped({stack.extent(1), stack.extent(2)}));
    }
  }
  return views;
}

struct Sizes {
  std::int64_t sequences = 1, length = 1;
  int threads = 1;
  std::int64_t step_sequences = 0;
};

// One rank with everything that a forward and backward of its quantum need. Contents depend on
// names alone; `quantum` says which input it has, and a negative one that it has none.
struct ExpertsRun {
  ExpertsRun(const MixtureOfExperts& run_layer, const Sizes& sizes, DType type = DType::kF32,
             int quantum = 0, ExpertPlacement placement = {},
             ExpertExchange* run_exchange = nullptr)
      : layer(run_layer),
        compute(type),
        plan{sizes.sequences, sizes.length, sizes.threads, placement},
        exchange(run_exchange),
        queue(sizes.threads),
        all(layer, type),
        parameters(layer.parameters(), type),
        d_parameters(layer.parameters()),
        d_stacks(layer.expert_parameters()),
        saved(layer.saved(plan)),
        scratch(layer.scratch(plan)),
        rows({{"in", type, {plan.rows(), layer.shape().width}},
              {"out", DType::kF32, {plan.rows(), layer.shape().width}},
              {"d_out", type, {plan.rows(), layer.shape().width}},
              {"d_in", DType::kF32, {plan.rows(), layer.shape().width}}}) {
    const std::vector<ParameterSpec> specs = layer.parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const bool matrix = specs[i].shape.rank() > 1;
      fill_normal(parameters[i], specs[i].name,
                  matrix ? 1.0 / std::sqrt(static_cast<double>(specs[i].shape[1])) : 0.3,
                  matrix ? 0.0 : 1.0);
    }
    fill_normal(in(), "in " + std::to_string(quantum));
    fill_normal(d_out(), "d_out " + std::to_string(quantum));
    batch.shape = plan;
    if (quantum < 0) batch.shape.batch = 0;
    batch.step_sequences = sizes.step_sequences;
    const std::int64_t n = layer.shape().experts;
    experts = experts_of(all.values, placement.begin(n), placement.end(n));
    d_experts = experts_of(d_stacks, placement.begin(n), placement.end(n));
  }
  const View& in() const { return rows[0]; }
  const View& out() const { return rows[1]; }
  const View& d_out() const { return rows[2]; }
  const View& d_in() const { return rows[3]; }
  LayerMemory memory() const {
    return {parameters.views(), saved.views(), scratch.views(), experts, bias, exchange};
  }
  void forward() { layer.forward(queue, batch, in(), out(), memory()); }
  void backward() {
    layer.backward(queue, batch, in(), d_out(), d_in(), d_parameters.views(), memory());
  }
  void expert_gradient(int source) {
    layer.expert_gradient(queue, batch, source, d_experts, memory());
  }
  void step() {
    forward();
    backward();
    expert_gradient(plan.experts.rank);
  }
  RouterStatistics statistics() const { return layer.statistics(memory()); }
  const View& saved_as(const std::string& name) const {
    const std::vector<BufferSpec> specs = layer.saved(plan);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      if (specs[i].name == name) return saved[i];
    }
    throw std::runtime_error(name);
  }
  std::vector<std::int32_t> choices() const {
    const View& view = saved_as("choices");
    return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.count()};
  }
  // Of the quantum, but for the experts' gradients.
  std::vector<float> results() const {
    std::vector<float> found = values(out());
    const auto add = [&](const View& view) {
      found.insert(found.end(), view.as<float>(), view.as<float>() + view.count());
    };
    add(d_in());
    for (const View& view : d_parameters.views()) add(view);
    return found;
  }
  std::vector<float> expert_gradients() const {
    std::vector<float> found;
    for (const View& view : d_experts) {
      found.insert(found.end(), view.as<float>(), view.as<float>() + view.count());
    }
    return found;
  }

  const MixtureOfExperts& layer;
  DType compute;
  BatchShape plan;
  ExpertExchange* exchange;
  Queue queue;
  AllExperts all;
  Buffers parameters, d_parameters, d_stacks, saved, scratch, rows;
  Batch batch;
  std::vector<View> experts, d_experts;
  View bias;
};

ExpertsShape shape_of(std::int64_t width, std::int64_t experts, std::int64_t active,
                      std::int64_t inner, std::int64_t shared = 0, std::int64_t latent = 0,
                      bool norm = false, bool renormalise = true) {
  ExpertsShape shape;
  shape.width = width;
  shape.experts = experts;
  shape.active = active;
  shape.inner = inner;
  shape.shared = shared;
  shape.latent = latent;
  shape.latent_norm = norm;
  shape.renormalise = renormalise;
  return shape;
}

reference::Experts reference_of(const ExpertsRun& run, std::int64_t capacity = 0) {
  const ExpertsShape& s = run.layer.shape();
  reference::Experts experts;
  experts.width = s.width;
  experts.experts = s.experts;
  experts.active = s.active;
  experts.inner = s.inner;
  experts.shared = s.shared;
  experts.latent = s.latent;
  experts.norm = s.latent_norm;
  experts.renormalise = s.renormalise;
  experts.auxiliary = s.auxiliary_coefficient;
  experts.z = s.z_coefficient;
  experts.length = run.plan.length;
  experts.capacity = capacity;
  experts.step_sequences = run.batch.step_sequences;
  if (!run.bias.empty()) experts.bias = to_double(run.bias);
  return experts;
}

std::vector<reference::Array> all_parameters(const ExpertsRun& run) {
  std::vector<reference::Array> p = to_double(run.parameters);
  for (const View& stack : run.all.values.views()) p.push_back(to_double(stack));
  return p;
}

// Forward, statistics and every gradient against float64 with the choices held fixed. `roundings`
// lie one behind the other; with bf16 those of one sum are independent and don't grow against it.
void expect_float64(ExpertsRun& run, std::int64_t roundings, double epsilon = kEpsilon,
                    std::int64_t capacity = 0) {
  run.step();
  const reference::Experts experts = reference_of(run, capacity);
  const reference::Array x = to_double(run.in()), d_out = to_double(run.d_out());
  const std::vector<reference::Array> p = all_parameters(run);
  const reference::Experts::Choices choices = experts.choose(x, p);
  const std::vector<std::int32_t> found = run.choices();
  for (std::size_t t = 0; t < choices.size(); ++t) {
    for (std::size_t i = 0; i < choices[t].size(); ++i) {
      ASSERT_EQ(found[t * choices[t].size() + i], choices[t][i]) << "token " << t;
    }
  }
  const reference::Experts::Result expected = experts.forward(x, p, choices);
  expect_close("out", run.out(), expected.out, roundings, 0.0, epsilon);

  const RouterStatistics statistics = run.statistics();
  const std::vector<std::int64_t> loads(statistics.loads.begin(), statistics.loads.end());
  EXPECT_EQ(loads, expected.loads);
  EXPECT_EQ(statistics.dropped, expected.dropped);
  const auto tokens = static_cast<double>(run.plan.rows());
  const double probability_error = 8 * kEpsilon * std::sqrt(double(run.layer.shape().width) + 1.0);
  const double each = 10.0 * probability_error * tokens;
  EXPECT_NEAR(statistics.auxiliary, expected.auxiliary, each * 2.0);
  EXPECT_NEAR(statistics.z, expected.z, each * (1.0 + expected.z / tokens));
  EXPECT_NEAR(statistics.entropy, expected.entropy, each);

  const auto function = [&](const reference::Array& in, const std::vector<reference::Array>& at) {
    const reference::Experts::Result result = experts.forward(in, at, choices);
    return reference::dot(result.out, d_out) + result.losses;
  };
  expect_gradient(
      "d_in", run.d_in(), x, [&](const reference::Array& at) { return function(at, p); }, roundings,
      0.0, epsilon);
  const std::int64_t of_weights = epsilon == kEpsilon ? roundings + run.plan.rows() : roundings;
  std::vector<ParameterSpec> specs = run.layer.parameters();
  for (const ParameterSpec& spec : run.layer.expert_parameters()) specs.push_back(spec);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    const std::size_t own = run.parameters.size();
    const View& gradient = i < own ? run.d_parameters[i] : run.d_stacks[i - own];
    expect_gradient(
        "d_" + specs[i].name, gradient, p[i],
        [&](const reference::Array& at) {
          std::vector<reference::Array> moved = p;
          moved[i] = at;
          return function(x, moved);
        },
        of_weights, 0.0, epsilon);
  }
}

std::int64_t roundings_of(const ExpertsShape& s) {
  return 2 * s.width + 4 * s.latent + 2 * s.inner + s.shared + s.experts + s.active;
}

struct Case {
  ExpertsShape shape;
  Sizes sizes;
};
std::vector<Case> cases() {
  return {{shape_of(1, 1, 1, 1), {1, 1, 1, 1}},
          {shape_of(5, 3, 2, 7), {2, 3, 2, 2}},
          {shape_of(16, 7, 1, 9, 11), {1, 65, 2, 3}},
          {shape_of(12, 5, 5, 8, 4), {3, 23, 2, 3}},
          {shape_of(24, 25, 7, 20, 13), {2, 47, 2, 2}},
          {shape_of(24, 25, 7, 20, 0, 0, false, false), {1, 70, 1, 4}},
          {shape_of(20, 9, 3, 10, 12, 6, false, false), {2, 31, 2, 2}},
          {shape_of(20, 9, 3, 10, 12, 6, true, true), {2, 31, 2, 2}},
          {shape_of(14, 6, 2, 5, 0, 7, true, false), {1, 129, 2, 1}},
          {shape_of(17, 33, 4, 3, 0, 5, false, true), {1, 40, 3, 1}}};
}

TEST(Experts, AgreesWithFloat64) {
  for (const Case& c : cases()) {
    const ExpertsShape& s = c.shape;
    SCOPED_TRACE(::testing::Message() << s.experts << " experts, " << s.active << " active, "
                                      << s.width << " x " << s.inner << ", latent " << s.latent
                                      << ", " << c.sizes.sequences << " x " << c.sizes.length);
    const MixtureOfExperts layer(s, 0.02, 0.01);
    ExpertsRun run(layer, c.sizes);
    expect_float64(run, roundings_of(s));
  }
}

// With the router's own losses large enough to show in every gradient that they reach.
TEST(Experts, OwnLossesAgreeWithFloat64) {
  for (Case c : cases()) {
    c.shape.auxiliary_coefficient = 3.0;
    c.shape.z_coefficient = 2.0;
    c.sizes.step_sequences = c.sizes.sequences + 1;
    const MixtureOfExperts layer(c.shape, 0.02, 0.01);
    ExpertsRun run(layer, c.sizes);
    expect_float64(run, roundings_of(c.shape));
  }
}

TEST(Experts, Bf16AgreesWithFloat64) {
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c.shape.experts << " experts");
    const MixtureOfExperts layer(c.shape, 0.02, 0.01, DType::kBF16);
    ExpertsRun run(layer, c.sizes, DType::kBF16);
    expect_float64(run, 8, kHalfEpsilon);
  }
}

// Runs of more rows than are packed at a time, and more experts than are packed together.
TEST(Experts, LongRunsAndManyExpertsAgreeWithFloat64) {
  for (const DType type : {DType::kF32, DType::kBF16}) {
    for (const auto& [shape, length] : std::vector<std::pair<ExpertsShape, std::int64_t>>{
             {shape_of(6, 2, 1, 5, 0, 4), 4500}, {shape_of(8, 150, 9, 5, 0, 4), 60}}) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << ", " << shape.experts << " experts");
      const MixtureOfExperts layer(shape, 0.02, 0.01, type);
      ExpertsRun run(layer, {1, length, 2, 1}, type);
      expect_float64(run, type == DType::kF32 ? roundings_of(shape) : 8,
                     type == DType::kF32 ? kEpsilon : kHalfEpsilon);
    }
  }
}

// The router's results are sums of the same numbers in another order, and its choices the same.
TEST(Experts, AgreeOnEveryInstructionSet) {
  const ExpertsShape shape = shape_of(21, 37, 5, 13, 11, 9, true);
  const MixtureOfExperts layer(shape, 0.02, 0.01);
  for_targets([&](const std::string& target) {
    SCOPED_TRACE(target);
    ExpertsRun run(layer, {2, 20, 2, 3});
    expect_float64(run, roundings_of(shape));
  });
}

// Against values that PyTorch computed in float64 (tests/oracle/make_experts.py), whose step has
// the router's own losses too.
TEST(Experts, AgreesWithTheOracle) {
  const nlohmann::json record = read_oracle("experts");
  for (const auto& [name, stored] : record["cases"].items()) {
    SCOPED_TRACE(name);
    const nlohmann::json& s = stored["settings"];
    ExpertsShape shape = shape_of(s["width"], s["experts"], s["active"], s["inner"], s["shared"],
                                  s["latent"], s["norm"], s["renormalise"]);
    shape.auxiliary_coefficient = s["auxiliary"];
    shape.z_coefficient = s["z"];
    shape.capacity_factor = s["capacity_factor"];
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun run(layer, {s["batch"], s["length"], 2, s["step_sequences"]});
    fill(run.in(), stored["inputs"]["x"]);
    fill(run.d_out(), stored["d_out"]);
    std::vector<float> bias = s["bias"];
    if (!bias.empty()) run.bias = View(bias.data(), {shape.experts});
    std::vector<std::pair<View, View>> all;  // values and gradients, in the order of specs
    std::vector<ParameterSpec> specs = layer.parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      all.emplace_back(run.parameters[i], run.d_parameters[i]);
    }
    for (const ParameterSpec& spec : layer.expert_parameters()) {
      const std::size_t i = specs.size() - run.parameters.size();
      all.emplace_back(run.all.values[i], run.d_stacks[i]);
      specs.push_back(spec);
    }
    ASSERT_EQ(stored["inputs"].size(), specs.size() + 1);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      fill(all[i].first, stored["inputs"].at(specs[i].name));
    }
    run.step();
    const std::int64_t length = roundings_of(shape), tokens = run.plan.rows();
    expect_close("out", run.out(), array_of(stored["out"]), length);
    expect_close("d_in", run.d_in(), array_of(stored["gradients"]["x"]), length);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      expect_close("d_" + specs[i].name, all[i].second,
                   array_of(stored["gradients"].at(specs[i].name)), length + tokens);
    }
    const RouterStatistics found = run.statistics();
    const nlohmann::json& expected = stored["statistics"];
    for (std::size_t e = 0; e < found.loads.size(); ++e) {
      EXPECT_EQ(found.loads[e], expected["loads"][e].get<std::int64_t>()) << e;
    }
    EXPECT_EQ(found.dropped, expected["dropped"].get<std::int64_t>());
    const double allowed = 1e-5 * static_cast<double>(tokens);
    EXPECT_NEAR(found.auxiliary, expected["auxiliary"].get<double>(), allowed);
    EXPECT_NEAR(found.z, expected["z"].get<double>(), allowed * 10.0);
    EXPECT_NEAR(found.entropy, expected["entropy"].get<double>(), allowed);
  }
}

// ---- Forced routings

// Every token's logits become those that `logit` says, exactly: column 0 of the input is 1 and the
// router looks at nothing else.
void force(ExpertsRun& run, const std::function<float(std::int64_t expert)>& logit) {
  const std::int64_t d = run.layer.shape().width;
  for (std::int64_t t = 0; t < run.plan.rows(); ++t) {
    if (run.compute == DType::kBF16) {
      run.in().as<BFloat16>()[t * d] = to_bfloat16(1.0F);
    } else {
      run.in().as<float>()[t * d] = 1.0F;
    }
  }
  float* const router = run.parameters[0].as<float>();
  for (std::int64_t e = 0; e < run.layer.shape().experts; ++e) {
    for (std::int64_t i = 0; i < d; ++i) router[e * d + i] = i == 0 ? logit(e) : 0.0F;
  }
}

std::vector<float> gradient_of(const ExpertsRun& run, std::int64_t stack, std::int64_t expert) {
  return values(run.d_stacks[static_cast<std::size_t>(stack)].slice(expert, expert + 1));
}

bool all_zero(const std::vector<float>& found) {
  return std::all_of(found.begin(), found.end(), [](float value) { return value == 0.0F; });
}

TEST(Experts, B29_UnusedExpertsHaveZeroGradients) {
  ExpertsShape shape = shape_of(10, 7, 1, 6, 5);
  for (const std::int64_t length : {1, 63, 64, 65, 130}) {
    for (const std::int64_t chosen : {0, 3, 6}) {
      SCOPED_TRACE(::testing::Message() << length << " tokens to expert " << chosen);
      const MixtureOfExperts layer(shape, 0.02, 0.01);
      ExpertsRun run(layer, {1, length, 2, 1});
      force(run, [&](std::int64_t e) { return e == chosen ? 2.0F : 0.25F; });
      expect_float64(run, roundings_of(shape));
      for (std::int64_t e = 0; e < shape.experts; ++e) {
        EXPECT_EQ(run.statistics().loads[static_cast<std::size_t>(e)], e == chosen ? length : 0);
        for (std::int64_t stack = 0; stack < 3; ++stack) {
          EXPECT_EQ(all_zero(gradient_of(run, stack, e)), e != chosen) << e;
        }
      }
    }
  }
}

TEST(Experts, B29_OneTokenAmongManyExperts) {
  const ExpertsShape shape = shape_of(9, 200, 3, 4, 0, 5, true, true);
  const MixtureOfExperts layer(shape, 0.02, 0.01);
  ExpertsRun run(layer, {1, 1, 2, 1});
  expect_float64(run, roundings_of(shape));
  const std::vector<std::int32_t> chosen = run.choices();
  for (std::int32_t e = 0; e < 200; ++e) {
    const bool used = std::find(chosen.begin(), chosen.end(), e) != chosen.end();
    EXPECT_EQ(all_zero(gradient_of(run, 0, e)), !used) << e;
  }
}

TEST(Experts, B21_TiesGoToTheLowerIndex) {
  const std::vector<DType> types = std::vector{DType::kF32, DType::kBF16};
  for (const DType type : types) {
    const ExpertsShape shape = shape_of(64, 64, 4, 8);
    const MixtureOfExperts layer(shape, 0.02, 0.01, type);
    ExpertsRun run(layer, {1, 10000, 2, 0}, type);
    // A token looks at one column alone, so that its logits are sums of one term. Column c has them
    // 1e-3 apart in an order of its own, in pairs of equal ones but for the first and the last: the
    // fourth of the largest, and of the smallest, has a twin.
    const std::int64_t d = shape.width, n = shape.experts;
    float* const router = run.parameters[0].as<float>();
    const auto place = [&](std::int64_t column, std::int64_t e) {
      return (e * 37 + column * 11) % n;
    };
    for (std::int64_t e = 0; e < n; ++e) {
      for (std::int64_t c = 0; c < d; ++c) {
        router[e * d + c] = 1e-3F * static_cast<float>((place(c, e) + 1) / 2);
      }
    }
    const RandomStream stream(3, "columns");
    std::vector<std::int64_t> columns;
    std::vector<float> signs;
    for (std::int64_t t = 0; t < run.plan.rows(); ++t) {
      columns.push_back(
          static_cast<std::int64_t>(stream.uniform(static_cast<std::uint64_t>(t)) * double(d)));
      signs.push_back(t % 3 == 0 ? -1.0F : 1.0F);
      for (std::int64_t c = 0; c < d; ++c) {
        const float value = c == columns.back() ? signs.back() : 0.0F;
        if (type == DType::kBF16) {
          run.in().as<BFloat16>()[t * d + c] = to_bfloat16(value);
        } else {
          run.in().as<float>()[t * d + c] = value;
        }
      }
    }
    run.forward();
    const std::vector<std::int32_t> first = run.choices();
    const float* const weights = run.saved_as("weights").as<float>();
    for (std::int64_t t = 0; t < run.plan.rows(); ++t) {
      const auto of = static_cast<std::size_t>(t);
      std::vector<std::int64_t> order(static_cast<std::size_t>(n));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        return signs[of] * router[a * d + columns[of]] > signs[of] * router[b * d + columns[of]];
      });
      order.resize(4);
      std::sort(order.begin(), order.end());
      double sum = 0.0;
      for (std::size_t slot = 0; slot < 4; ++slot) {
        ASSERT_EQ(first[of * 4 + slot], order[slot]) << "token " << t;
        sum += static_cast<double>(weights[of * 4 + slot]);
      }
      ASSERT_NEAR(sum, 1.0, 1e-6);
    }
    const std::vector<float> out = values(run.out());
    run.forward();
    EXPECT_EQ(run.choices(), first);
    EXPECT_TRUE(same_bits(values(run.out()), out));
  }
}

TEST(Experts, BiasShapesTheChoiceAlone) {
  const ExpertsShape shape = shape_of(12, 6, 2, 5, 0, 0, false, true);
  const MixtureOfExperts layer(shape, 0.02, 0.01);
  ExpertsRun plain(layer, {2, 40, 2, 2}), biased(layer, {2, 40, 2, 2});
  plain.forward();
  std::vector<float> bias = {0.0F, 0.3F, -0.2F, 0.05F, 0.0F, -0.5F};
  biased.bias = View(bias.data(), {6});
  expect_float64(biased, roundings_of(shape));
  EXPECT_NE(plain.choices(), biased.choices());
  EXPECT_TRUE(
      same_bits(values(plain.saved_as("probabilities")), values(biased.saved_as("probabilities"))));
  EXPECT_EQ(plain.statistics().entropy, biased.statistics().entropy);
}

// A bias may choose experts whose probability is 0 in f32.
TEST(Experts, ChosenProbabilitiesMayAllBeZero) {
  const ExpertsShape shape = shape_of(6, 4, 2, 5);
  const MixtureOfExperts layer(shape, 0.02, 0.01);
  ExpertsRun run(layer, {1, 9, 1, 1});
  force(run, [](std::int64_t e) { return e < 2 ? 200.0F : -200.0F; });
  std::vector<float> bias = {-3.0F, -3.0F, 3.0F, 3.0F};
  run.bias = View(bias.data(), {4});
  run.step();
  EXPECT_EQ(run.statistics().loads[2], 9);
  EXPECT_TRUE(all_zero(values(run.out())));
  for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
}

TEST(Experts, NotFiniteInputIsSeenAndHarmless) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
    const ExpertsShape shape = shape_of(6, 70, 3, 5);
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun run(layer, {1, 90, 2, 1});
    run.in().as<float>()[6 * 41 + 2] = bad;
    run.step();
    double sum = 0.0;
    for (std::int64_t i = 0; i < run.out().count(); ++i) sum += run.out().as<float>()[i];
    EXPECT_FALSE(std::isfinite(sum));
    const std::vector<std::int32_t> chosen = run.choices();
    for (std::size_t t = 0; t < 90; ++t) {
      const std::set<std::int32_t> ids(chosen.begin() + std::ptrdiff_t(3 * t),
                                       chosen.begin() + std::ptrdiff_t(3 * t + 3));
      EXPECT_EQ(ids.size(), 3U);
      EXPECT_GE(*ids.begin(), 0);
      EXPECT_LT(*ids.rbegin(), 70);
    }
    // A weight that is no number isn't hidden either, whoever is chosen.
    ExpertsRun other(layer, {1, 90, 2, 1});
    other.parameters[0].as<float>()[6 * 69] = bad;
    other.forward();
    EXPECT_FALSE(std::isfinite(other.statistics().z));
  }
}

// ---- Capacity

TEST(Experts, CapacityAgreesWithFloat64) {
  ExpertsShape shape = shape_of(12, 5, 2, 6, 7);
  for (const bool renormalise : {true, false}) {
    shape.renormalise = renormalise;
    shape.capacity_factor = 0.75;
    shape.auxiliary_coefficient = 2.0;
    shape.z_coefficient = 0.5;
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun run(layer, {3, 30, 2, 3});
    expect_float64(run, roundings_of(shape), kEpsilon, 9);  // 0.75 * 30 * 2 / 5
    EXPECT_GT(run.statistics().dropped, 0);
  }
  shape = shape_of(12, 5, 2, 6, 7, 8, true, false);
  shape.capacity_factor = 0.75;
  const MixtureOfExperts latent(shape, 0.02, 0.01);
  ExpertsRun run(latent, {3, 30, 2, 3});
  expect_float64(run, roundings_of(shape), kEpsilon, 9);
  EXPECT_GT(run.statistics().dropped, 0);
}

// All tokens want expert 0; what it takes is the factor's exact decimal, rounded up.
TEST(Experts, CapacityIsExact) {
  struct Expected {
    double factor;
    std::int64_t length, experts, active, capacity;
  };
  for (const Expected& e : std::vector<Expected>{{1.1, 100, 10, 1, 11},
                                                 {1.1, 50, 25, 5, 11},
                                                 {1.0, 100, 10, 1, 10},
                                                 {1.25, 7, 3, 1, 3},
                                                 {0.07, 100, 7, 1, 1},
                                                 {1e-300, 20, 4, 1, 1},
                                                 {1e300, 20, 4, 1, 20},
                                                 {2.3, 10, 23, 1, 1},
                                                 {4.6, 10, 23, 1, 2},
                                                 {0.30000000000000004, 100, 10, 1, 4},
                                                 {123.0, 20, 4, 1, 20}}) {
    ExpertsShape shape = shape_of(3, e.experts, e.active, 2);
    shape.capacity_factor = e.factor;
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun run(layer, {2, e.length, 1, 0});
    force(run, [&](std::int64_t i) { return i < e.active ? 3.0F : 0.0F; });
    run.forward();
    EXPECT_EQ(run.statistics().dropped, 2 * e.active * (e.length - e.capacity)) << e.factor;
    EXPECT_EQ(run.statistics().loads[0], 2 * e.length);
  }
}

// ---- Bits

TEST(Experts, SameBitsForEveryNumberOfThreadsAndTokens) {
  const std::vector<DType> types = std::vector{DType::kF32, DType::kBF16};
  for (const DType type : types) {
    for (const ExpertsShape& shape : {shape_of(40, 7, 3, 56, 24), shape_of(67, 25, 7, 33, 0),
                                      shape_of(48, 25, 7, 40, 24, 16, true)}) {
      SCOPED_TRACE(::testing::Message() << name_of(type) << ", " << shape.experts << " experts");
      const std::int64_t d = shape.width;
      const MixtureOfExperts layer(shape, 0.02, 0.01, type);
      ExpertsRun one(layer, {2, 411, 1, 2}, type);
      one.step();
      for (const int threads : {2, 3}) {
        ExpertsRun more(layer, {2, 411, threads, 2}, type);
        more.step();
        EXPECT_TRUE(same_bits(one.results(), more.results())) << threads;
        EXPECT_TRUE(same_bits(one.expert_gradients(), more.expert_gradients())) << threads;
        EXPECT_EQ(one.statistics().entropy, more.statistics().entropy);
        EXPECT_EQ(one.statistics().auxiliary, more.statistics().auxiliary);
      }
      // Of the first tokens alone; and of some of them in another company, in which the router sees
      // them at the same place of its tiles of 128 rows.
      for (const std::int64_t length : {1, 5, 63, 64, 65, 129, 400}) {
        ExpertsRun some(layer, {1, length, 2, 0}, type);
        some.step();
        EXPECT_TRUE(same_bits(one.out().as<float>(), some.out().as<float>(), length * d)) << length;
      }
      ExpertsRun plain(layer, {2, 411, 2, 0}, type);
      plain.step();
      for (const std::int64_t first : {128, 256, 640}) {
        ExpertsRun other(layer, {1, 90, 2, 0}, type);
        const std::int64_t bytes = 90 * d * size_of(type);
        std::memcpy(other.in().raw(), plain.in().raw() + first * d * size_of(type),
                    static_cast<std::size_t>(bytes));
        std::memcpy(other.d_out().raw(), plain.d_out().raw() + first * d * size_of(type),
                    static_cast<std::size_t>(bytes));
        other.step();
        EXPECT_TRUE(
            same_bits(plain.out().as<float>() + first * d, other.out().as<float>(), 90 * d));
        EXPECT_TRUE(
            same_bits(plain.d_in().as<float>() + first * d, other.d_in().as<float>(), 90 * d));
      }
    }
  }
}

TEST(Experts, NothingOfTheFutureIsSeen) {
  for (const double factor : {0.0, 0.6}) {
    ExpertsShape shape = shape_of(24, 7, 3, 16, 8);
    shape.capacity_factor = factor;
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun one(layer, {1, 150, 2, 0});
    one.forward();
    EXPECT_EQ(one.statistics().dropped > 0, factor > 0.0);
    for (const std::int64_t position : {1, 17, 64, 65, 128, 149}) {
      ExpertsRun other(layer, {1, 150, 2, 0});
      for (std::int64_t i = position * 24; i < 150 * 24; ++i) other.in().as<float>()[i] *= -1.5F;
      other.forward();
      EXPECT_TRUE(same_bits(one.out().as<float>(), other.out().as<float>(), position * 24));
      EXPECT_FALSE(same_bits(one.out().as<float>() + position * 24,
                             other.out().as<float>() + position * 24, 24));
    }
  }
}

// ---- Over ranks

// The exchange of a group of threads. Messages are copied when all have come to finish(), so that
// whoever reads too early reads what was there before.
class ThreadGroup {
 public:
  explicit ThreadGroup(int ranks) : barrier_(ranks) {
    for (int i = 0; i < ranks; ++i) members_.push_back(std::make_unique<Member>(*this, i));
  }
  ExpertExchange& exchange(int rank) { return *members_[static_cast<std::size_t>(rank)]; }
  std::int64_t bytes_between_ranks() const {
    std::int64_t all = 0;
    for (const auto& member : members_) all += member->bytes;
    return all;
  }

 private:
  struct Message {
    int peer;
    std::byte* data;
    std::int64_t bytes;
  };
  class Member : public ExpertExchange {
   public:
    Member(ThreadGroup& group, int rank) : group_(group), rank_(rank) {
      sends.reserve(4096);
      receives.reserve(4096);
    }
    int ranks() const override { return static_cast<int>(group_.members_.size()); }
    int rank() const override { return rank_; }
    void send(int peer, std::byte* data, std::int64_t count) override {
      sends.push_back({peer, data, count});
    }
    void receive(int peer, std::byte* data, std::int64_t count) override {
      receives.push_back({peer, data, count});
    }
    void start(std::string_view name) override { phase = name; }
    void finish() override {
      group_.barrier_.arrive_and_wait();
      for (int peer = 0; peer < ranks(); ++peer) {
        const Member& other = *group_.members_[static_cast<std::size_t>(peer)];
        EXPECT_EQ(other.phase, phase);
        auto sent = other.sends.begin();
        const auto next = [&] {
          sent = std::find_if(sent, other.sends.end(),
                              [&](const Message& message) { return message.peer == rank_; });
        };
        for (const Message& message : receives) {
          if (message.peer != peer) continue;
          next();
          ASSERT_TRUE(sent != other.sends.end()) << phase;
          ASSERT_EQ(sent->bytes, message.bytes) << phase;
          std::memcpy(message.data, sent->data, static_cast<std::size_t>(message.bytes));
          if (peer != rank_ && phase != "expert counts") bytes += message.bytes;
          ++sent;
        }
        next();
        EXPECT_TRUE(sent == other.sends.end()) << phase;  // all that was sent has been received
      }
      group_.barrier_.arrive_and_wait();
      sends.clear();
      receives.clear();
      group_.barrier_.arrive_and_wait();
    }
    std::vector<Message> sends, receives;
    std::string_view phase;
    std::int64_t bytes = 0;

   private:
    ThreadGroup& group_;
    int rank_;
  };

  std::barrier<> barrier_;
  std::vector<std::unique_ptr<Member>> members_;
};

// Quanta on as many ranks, or fewer than them, against each quantum on a rank that has all experts.
// Returns the bytes of rows and their numbers that crossed ranks.
std::int64_t expect_same_over_ranks(const MixtureOfExperts& layer, const Sizes& sizes, DType type,
                                    int ranks, int quanta,
                                    const std::function<void(ExpertsRun&)>& prepare) {
  SCOPED_TRACE(::testing::Message() << quanta << " quanta on " << ranks << " ranks, "
                                    << layer.shape().experts << " experts, " << name_of(type));
  std::vector<std::unique_ptr<ExpertsRun>> alone, together;
  for (int q = 0; q < quanta; ++q) {
    alone.push_back(std::make_unique<ExpertsRun>(layer, sizes, type, q));
    prepare(*alone.back());
    alone.back()->step();
  }
  ThreadGroup group(ranks);
  for (int r = 0; r < ranks; ++r) {
    together.push_back(std::make_unique<ExpertsRun>(layer, sizes, type, r < quanta ? r : -1,
                                                    ExpertPlacement{ranks, r}, &group.exchange(r)));
    prepare(*together.back());
  }
  std::vector<std::vector<std::vector<float>>> gradients(static_cast<std::size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      ExpertsRun& run = *together[static_cast<std::size_t>(r)];
      run.forward();
      run.backward();
      for (int source = 0; source < ranks; ++source) {
        run.expert_gradient(source);
        gradients[static_cast<std::size_t>(r)].push_back(run.expert_gradients());
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  const std::int64_t n = layer.shape().experts;
  for (int q = 0; q < ranks; ++q) {
    const ExpertsRun& run = *together[static_cast<std::size_t>(q)];
    const RouterStatistics found = run.statistics();
    if (q >= quanta) {
      EXPECT_EQ(std::accumulate(found.loads.begin(), found.loads.end(), std::int64_t{0}), 0);
      EXPECT_EQ(found.auxiliary, 0.0);
      EXPECT_EQ(found.z, 0.0);
    } else {
      const ExpertsRun& expected = *alone[static_cast<std::size_t>(q)];
      EXPECT_TRUE(same_bits(expected.results(), run.results())) << "quantum " << q;
      const RouterStatistics wanted = expected.statistics();
      EXPECT_TRUE(std::equal(found.loads.begin(), found.loads.end(), wanted.loads.begin()));
      EXPECT_EQ(found.dropped, wanted.dropped);
      EXPECT_EQ(found.auxiliary, wanted.auxiliary);
      EXPECT_EQ(found.z, wanted.z);
      EXPECT_EQ(found.entropy, wanted.entropy);
    }
    for (int r = 0; r < ranks; ++r) {
      const ExpertPlacement placement = {ranks, r};
      const std::vector<float>& of =
          gradients[static_cast<std::size_t>(r)][static_cast<std::size_t>(q)];
      std::vector<float> wanted(of.size(), 0.0F);
      if (q < quanta) {
        wanted.clear();
        const ExpertsRun& expected = *alone[static_cast<std::size_t>(q)];
        for (const View& view :
             experts_of(expected.d_stacks, placement.begin(n), placement.end(n))) {
          wanted.insert(wanted.end(), view.as<float>(), view.as<float>() + view.count());
        }
      }
      EXPECT_TRUE(same_bits(wanted, of)) << "quantum " << q << ", rank " << r;
    }
  }
  return group.bytes_between_ranks();
}

TEST(Experts, SameBitsForEveryNumberOfRanks) {
  ExpertsShape with_capacity = shape_of(24, 7, 3, 16, 8);
  with_capacity.capacity_factor = 0.8;
  ExpertsShape balanced = shape_of(24, 25, 7, 20, 16);
  balanced.auxiliary_coefficient = 0.3;
  balanced.z_coefficient = 0.2;
  const std::vector<DType> types = std::vector{DType::kF32, DType::kBF16};
  for (const ExpertsShape& shape :
       {balanced, shape_of(24, 25, 7, 20), shape_of(32, 25, 7, 20, 12, 10, true, false),
        with_capacity, shape_of(8, 3, 1, 5)}) {
    for (const DType type : types) {
      const MixtureOfExperts layer(shape, 0.02, 0.01, type);
      for (const auto& [ranks, quanta] :
           std::vector<std::pair<int, int>>{{1, 1}, {2, 2}, {3, 2}, {5, 5}}) {
        const std::int64_t bytes = expect_same_over_ranks(layer, {2, 37, 1 + ranks % 2, 4}, type,
                                                          ranks, quanta, [](ExpertsRun&) {});
        EXPECT_EQ(bytes > 0, ranks > 1);
      }
    }
  }
}

TEST(Experts, B29_SameBitsForForcedRoutingsOverRanks) {
  const ExpertsShape shape = shape_of(12, 7, 2, 9, 5);
  const MixtureOfExperts layer(shape, 0.02, 0.01);
  for (const auto& [ranks, quanta] :
       std::vector<std::pair<int, int>>{{2, 2}, {4, 4}, {4, 1}, {8, 3}}) {
    for (const std::int64_t favourite : {0, 2, 5}) {
      // All tokens to two neighbours, so none to most ranks; and one token in all.
      for (const std::int64_t length : {1, 70}) {
        expect_same_over_ranks(layer, {1, length, 1, 3}, DType::kF32, ranks, quanta,
                               [&](ExpertsRun& run) {
                                 force(run, [&](std::int64_t e) {
                                   return e == favourite || e == favourite + 1 ? 1.5F : 0.0F;
                                 });
                               });
      }
    }
  }
}

TEST(Experts, AllocateNothing) {
  for (const ExpertsShape& shape :
       {shape_of(24, 25, 7, 20, 16), shape_of(24, 9, 2, 12, 8, 6, true)}) {
    const MixtureOfExperts layer(shape, 0.02, 0.01);
    ExpertsRun run(layer, {2, 70, 2, 2});
    run.step();
    run.step();
    EXPECT_EQ(count_allocations([&] { run.step(); }), 0);

    ThreadGroup group(2);
    ExpertsRun first(layer, {2, 70, 1, 2}, DType::kF32, 0, {2, 0}, &group.exchange(0));
    ExpertsRun second(layer, {2, 70, 1, 2}, DType::kF32, 1, {2, 1}, &group.exchange(1));
    constexpr int kSteps = 3;
    std::barrier<> turn(2);
    std::thread other([&] {
      for (int i = 0; i < kSteps; ++i) {
        turn.arrive_and_wait();
        second.step();
        turn.arrive_and_wait();
      }
    });
    std::int64_t allocations = 0;
    for (int i = 0; i < kSteps; ++i) {
      allocations = count_allocations([&] {
        turn.arrive_and_wait();
        first.step();
        turn.arrive_and_wait();
      });
    }
    other.join();
    EXPECT_EQ(allocations, 0);
  }
}

// ---- What is said of it

// A hand sheet: per token, a multiply-add is two.
TEST(Experts, B36_FlopsCountActiveExpertsAlone) {
  const auto flops = [](const ExpertsShape& shape) {
    return MixtureOfExperts(shape, 0.02, 0.01).flops_per_token(4096);
  };
  // Router 2*2048*25 = 102,400; 7 experts of 3 products, 7*3*2*2048*640 = 55,050,240; shared
  // 3*2*2048*1536 = 18,874,368.
  EXPECT_EQ(flops(shape_of(2048, 25, 7, 640, 1536)), 74027008.0);
  EXPECT_EQ(flops(shape_of(2048, 25, 7, 640)), 55152640.0);
  EXPECT_EQ(flops(shape_of(2048, 50, 7, 640)) - flops(shape_of(2048, 25, 7, 640)), 102400.0);
  // Router 2*1024*704 = 1,441,792; maps 2*2*1024*320 = 1,310,720; 22 experts in the latent space
  // 22*3*2*320*448 = 18,923,520.
  EXPECT_EQ(flops(shape_of(1024, 704, 22, 448, 0, 320)), 21676032.0);
}

TEST(Experts, DispatchedBytesAreThoseOfTheRows) {
  const auto bytes = [](const ExpertsShape& shape, DType type) {
    return MixtureOfExperts(shape, 0.02, 0.01, type).dispatched_bytes_per_token();
  };
  EXPECT_EQ(bytes(shape_of(2048, 25, 7, 640), DType::kBF16), 7 * 2048 * 2);
  EXPECT_EQ(bytes(shape_of(2048, 25, 7, 640, 0, 512), DType::kBF16), 7 * 512 * 2);
  EXPECT_EQ(bytes(shape_of(2048, 25, 7, 640), DType::kF32), 7 * 2048 * 4);
}

TEST(Experts, ConfigurationsAreRefusedByField) {
  const auto refusal = [](const std::function<void(ExpertsConfig&)>& change) {
    ExpertsConfig config;
    config.set_experts(25);
    config.set_active(7);
    config.set_width(640);
    change(config);
    try {
      experts_shape(config, 64, "model.feed_forward.experts");
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return std::string(error.what());
    }
    return std::string();
  };
  const auto expect = [&](const std::string& field,
                          const std::function<void(ExpertsConfig&)>& change) {
    EXPECT_EQ(refusal(change).rfind("model.feed_forward.experts." + field + ":", 0), 0U)
        << refusal(change);
  };
  EXPECT_EQ(refusal([](ExpertsConfig&) {}), "");
  expect("experts", [](ExpertsConfig& c) { c.set_experts(0); });
  expect("experts", [](ExpertsConfig& c) { c.set_experts(std::int64_t{1} << 40); });
  expect("active", [](ExpertsConfig& c) { c.set_active(26); });
  expect("active", [](ExpertsConfig& c) { c.clear_active(); });
  expect("width", [](ExpertsConfig& c) { c.set_width(-1); });
  expect("shared_width", [](ExpertsConfig& c) { c.set_shared_width(-1); });
  expect("latent.width", [](ExpertsConfig& c) { c.mutable_latent(); });
  for (const double bad : {-1.0, std::nan(""), HUGE_VAL}) {
    expect("auxiliary_coefficient", [&](ExpertsConfig& c) { c.set_auxiliary_coefficient(bad); });
    expect("z_coefficient", [&](ExpertsConfig& c) { c.set_z_coefficient(bad); });
    expect("capacity_factor", [&](ExpertsConfig& c) { c.set_capacity_factor(bad); });
  }
}

TEST(Experts, DefaultsDependOnTheKind) {
  ExpertsConfig config;
  config.set_experts(4);
  config.set_active(2);
  config.set_width(8);
  ExpertsShape shape = experts_shape(config, 16, "experts");
  EXPECT_TRUE(shape.renormalise);
  EXPECT_EQ(shape.auxiliary_coefficient, 0.01);
  EXPECT_EQ(shape.z_coefficient, 1e-3);
  EXPECT_EQ(shape.row_width(), 16);
  config.set_selection_bias(true);
  EXPECT_EQ(experts_shape(config, 16, "experts").auxiliary_coefficient, 1e-4);
  config.set_auxiliary_coefficient(0.0);
  EXPECT_EQ(experts_shape(config, 16, "experts").auxiliary_coefficient, 0.0);
  config.clear_auxiliary_coefficient();
  config.clear_selection_bias();
  config.mutable_latent()->set_width(6);
  shape = experts_shape(config, 16, "experts");
  EXPECT_FALSE(shape.renormalise);
  EXPECT_EQ(shape.auxiliary_coefficient, 1e-4);
  EXPECT_EQ(shape.row_width(), 6);
}

}  // namespace
}  // namespace tessera::testing
