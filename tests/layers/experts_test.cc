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
#include "tests/layers/testing.h"
#include "tests/reference/experts.h"

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
    SCOPED_TRACE(::testing::Message()
                 << s.experts << " experts, " << s.active << " active, " << s.width << " x "
                 << s.inner << ", latent " << s.latent << ", " << c.sizes.sequences << " x "
                 << c.sizes.length);
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
  if (!has_products(DType::kBF16)) GTEST_SKIP() << "no bf16 products on this CPU";
  for (const Case& c : cases()) {
    SCOPED_TRACE(::testing::Message() << c.shape.experts << " experts");
    const MixtureOfExperts layer(c.shape, 0.02, 0.01, DType::kBF16);
    ExpertsRun run(layer, c.sizes, DType::kBF16);
    expect_float64(run, 8, kHalfEpsilon);
  }
}

}  // namespace
}  // namespace tessera::testing
