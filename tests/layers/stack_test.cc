// The whole stack: names and counts, schedules, what a config may not be, initialisation, the
// loss's gradient, and that a step allocates nothing.
#include "layers/stack.h"

#include <google/protobuf/text_format.h>

#include <memory>
#include <set>

#include "tests/layers/count_allocations.h"
#include "tests/layers/testing.h"
#include "tests/reference/model.h"

namespace tessera::testing {
namespace {

ModelConfig config_of(const std::string& text) {
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

const std::string kTiny = R"(
  width: 12 vocabulary: 17 length: 128 feed_forward { width: 10 } schedule { explicit: "FS SF" }
  mixer { full { heads: 4 key_value_heads: 2 head_width: 6 query_key_norm: true } }
  mixer { sliding { attention { heads: 2 key_value_heads: 1 head_width: 4 } window: 9 } })";

// The stack with its memory, as a trainer runs one quantum.
struct StackRun {
  StackRun(const ModelConfig& config, const TestBatch& run_batch)
      : stack(config), batch(run_batch), queue(batch.batch.shape.threads) {
    const BatchShape shape = batch.batch.shape;
    for (const UnitSpec& unit : stack.units()) {
      parameters.emplace_back(unit.parameters);
      d_parameters.emplace_back(unit.parameters);
      for (std::size_t i = 0; i < unit.parameters.size(); ++i) {
        initialise(unit.parameters[i], 3, 0, parameters.back()[i]);
        if (unit.parameters[i].shape.rank() == 1) {
          fill_normal(parameters.back()[i], unit.parameters[i].name, 0.3, 1.0);
        } else {
          // Larger than a run would start with, so that every part of the gradient counts.
          const View& view = parameters.back()[i];
          for (std::int64_t j = 0; j < view.count(); ++j) view.as<float>()[j] *= 12.0F;
        }
      }
    }
    const BufferSpec row = {"x", DType::kF32, {shape.rows(), config.width()}};
    rows.emplace_back(std::vector<BufferSpec>(stack.blocks().size() + 2, row));
    embedding_scratch.emplace_back(stack.embedding().scratch(shape));
    head_scratch.emplace_back(stack.head().scratch(shape));
    for (const Block& block : stack.blocks()) {
      saved.emplace_back(block.saved(shape));
      scratch.emplace_back(block.scratch(shape));
    }
  }
  const View& x(std::size_t l) const { return rows[0][l]; }
  LayerMemory memory(std::size_t l) const {
    return {parameters[l + 1].views(), saved[l].views(), scratch[l].views()};
  }
  double step(double scale) {
    const std::size_t layers = stack.blocks().size();
    stack.embedding().forward(queue, batch.batch, parameters[0].views(), x(0));
    for (std::size_t l = 0; l < layers; ++l) {
      stack.blocks()[l].forward(queue, batch.batch, x(l), x(l + 1), memory(l));
    }
    const View& d_x = x(layers + 1);
    const double loss = stack.head().loss_and_gradient(
        queue, batch.batch, x(layers), scale, d_x, parameters.back().views(),
        d_parameters.back().views(), head_scratch[0].views());
    for (std::size_t l = layers; l-- > 0;) {
      stack.blocks()[l].backward_feed_forward(queue, batch.batch, d_x, d_parameters[l + 1].views(),
                                              memory(l));
      stack.blocks()[l].backward_mixer(queue, batch.batch, x(l), d_x, d_parameters[l + 1].views(),
                                       memory(l));
    }
    stack.embedding().backward(queue, batch.batch, d_x, d_parameters[0].views(),
                               embedding_scratch[0].views());
    return loss;
  }
  std::vector<float> gradients() const {
    std::vector<float> all;
    for (const Buffers& unit : d_parameters) {
      for (const View& view : unit.views()) {
        all.insert(all.end(), view.as<float>(), view.as<float>() + view.count());
      }
    }
    return all;
  }
  Stack stack;
  const TestBatch& batch;
  Queue queue;
  std::vector<Buffers> parameters, d_parameters, rows, saved, scratch, embedding_scratch,
      head_scratch;
};

TestBatch tiny_batch(int threads) {
  TestBatch batch(2, 71, threads, {0, 20}, 17);
  batch.labels[30] = batch.labels[100] = kNoLabel;
  return batch;
}

double reference_loss(const std::vector<std::vector<reference::Array>>& p, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  const reference::AttentionMixer full = {
      {shape.batch, shape.length, 4, 2, 6, shape.length, batch.segments}, 12, 1e6, true};
  const reference::AttentionMixer sliding = {
      {shape.batch, shape.length, 2, 1, 4, 9, batch.segments}, 12, 1e6, false};
  reference::Array x = reference::embedding(p[0][0], batch.tokens, 12);
  for (std::size_t l = 0; l < 4; ++l) {
    x = reference::block(x, p[l + 1], l == 0 || l == 3 ? full : sliding, 10, 1e-6);
  }
  return reference::head_loss(x, p[5][0], p[5][1], batch.labels, 1e-6);
}

TEST(Stack, LossAndGradientAgreeWithFloat64) {
  const TestBatch batch = tiny_batch(2);
  StackRun run(config_of(kTiny), batch);
  const double scale = 1.0 / 140.0;
  const double loss = run.step(scale);
  std::vector<std::vector<reference::Array>> p;
  for (const Buffers& unit : run.parameters) p.push_back(to_double(unit));
  // Four blocks of seven products and sums each, one behind the other.
  const std::int64_t sums = 4 * (4 * 12 + 2 * 24 + 2 * 10 + 71) + 142;
  EXPECT_NEAR(loss, reference_loss(p, batch), tolerance(loss, sums));
  const std::vector<UnitSpec> units = run.stack.units();
  for (std::size_t u = 0; u < units.size(); ++u) {
    for (std::size_t i = 0; i < units[u].parameters.size(); ++i) {
      expect_gradient(
          units[u].parameters[i].name, run.d_parameters[u][i], p[u][i],
          [&](const reference::Array& moved) {
            std::vector<std::vector<reference::Array>> all = p;
            all[u][i] = moved;
            return scale * reference_loss(all, batch);
          },
          sums);
    }
  }
}

TEST(Stack, SameBitsForEveryNumberOfThreads) {
  std::vector<float> expected;
  double expected_loss = 0.0;
  for (const int threads : {1, 2, 3}) {
    const TestBatch batch = tiny_batch(threads);
    StackRun run(config_of(kTiny), batch);
    const double loss = run.step(1.0);
    if (threads == 1) {
      expected = run.gradients();
      expected_loss = loss;
    }
    EXPECT_EQ(loss, expected_loss);
    EXPECT_TRUE(same_bits(run.gradients(), expected)) << threads;
  }
}

TEST(Stack, B22_NoBlocksOutputMovesBeforeAChangedToken) {
  constexpr std::int64_t kOne = std::int64_t{71} * 12;  // elements of one sequence
  TestBatch batch = tiny_batch(2);
  StackRun run(config_of(kTiny), batch);
  run.step(1.0);
  std::vector<std::vector<float>> before;
  for (std::size_t l = 0; l <= 4; ++l) before.push_back(values(run.x(l)));
  for (const std::int64_t t : {0, 8, 9, 19, 20, 63, 64, 70}) {
    std::uint32_t& token = batch.tokens[static_cast<std::size_t>(t)];
    token = (token + 1) % 17;
    run.step(1.0);
    for (std::size_t l = 0; l <= 4; ++l) {
      EXPECT_TRUE(same_bits(run.x(l).as<float>(), before[l].data(), t * 12)) << t << " " << l;
      // Nor does the other sequence.
      EXPECT_TRUE(same_bits(run.x(l).as<float>() + kOne, before[l].data() + kOne, kOne));
    }
    token = (token + 16) % 17;
  }
}

TEST(Stack, AStepAllocatesNothing) {
  for (const int threads : {1, 2}) {
    const TestBatch batch = tiny_batch(threads);
    StackRun run(config_of(kTiny), batch);
    run.step(1.0);  // each thread prepares the products of its own pieces
    EXPECT_EQ(count_allocations([&] { run.step(1.0); }), 0) << threads << " threads";
  }
  // The count itself must work.
  std::unique_ptr<float> one;
  EXPECT_EQ(count_allocations([&] { one = std::make_unique<float>(1.0F); }), 1);
}

TEST(Stack, NamesShapesAndDecay) {
  const Stack stack(config_of(kTiny));
  const std::vector<UnitSpec> units = stack.units();
  ASSERT_EQ(units.size(), 6U);
  EXPECT_EQ(units[0].name, "embedding");
  EXPECT_EQ(units[1].name, "layers.0");
  EXPECT_EQ(units[4].name, "layers.3");
  EXPECT_EQ(units[4].layer, 3);
  EXPECT_EQ(units[5].name, "head");
  std::vector<std::string> names;
  std::int64_t count = 0;
  for (const UnitSpec& unit : units) {
    for (const ParameterSpec& parameter : unit.parameters) {
      if (unit.kind != UnitSpec::Kind::kBlock || unit.layer < 2) names.push_back(parameter.name);
      count += parameter.shape.count();
      // No decay on the embedding and on parameters of one axis; the head's matrix decays.
      EXPECT_EQ(parameter.decay,
                parameter.shape.rank() > 1 && unit.kind != UnitSpec::Kind::kEmbedding)
          << parameter.name;
    }
  }
  EXPECT_EQ(names, (std::vector<std::string>{"model.embed_tokens.weight",
                                             "model.layers.0.input_norm.weight",
                                             "model.layers.0.mixer.q_proj.weight",
                                             "model.layers.0.mixer.k_proj.weight",
                                             "model.layers.0.mixer.v_proj.weight",
                                             "model.layers.0.mixer.q_norm.weight",
                                             "model.layers.0.mixer.k_norm.weight",
                                             "model.layers.0.mixer.o_proj.weight",
                                             "model.layers.0.post_norm.weight",
                                             "model.layers.0.feed_forward.gate_proj.weight",
                                             "model.layers.0.feed_forward.up_proj.weight",
                                             "model.layers.0.feed_forward.down_proj.weight",
                                             "model.layers.1.input_norm.weight",
                                             "model.layers.1.mixer.q_proj.weight",
                                             "model.layers.1.mixer.k_proj.weight",
                                             "model.layers.1.mixer.v_proj.weight",
                                             "model.layers.1.mixer.o_proj.weight",
                                             "model.layers.1.post_norm.weight",
                                             "model.layers.1.feed_forward.gate_proj.weight",
                                             "model.layers.1.feed_forward.up_proj.weight",
                                             "model.layers.1.feed_forward.down_proj.weight",
                                             "model.norm.weight",
                                             "lm_head.weight"}));
  // Two ends of 17 x 12 and a norm; per block two norms and three matrices of 12 x 10; full 12 x
  // (24 + 2 * 12 + 24) and two norms of 6, sliding 12 x (8 + 2 * 4 + 8).
  const std::int64_t expected =
      2 * 17 * 12 + 12 + 4 * (2 * 12 + 3 * 120) + 2 * (12 * 72 + 12) + 2 * (12 * 24);
  EXPECT_EQ(count, expected);
  EXPECT_EQ(stack.parameter_count(), expected);
}

// 2 flops for each weight of a matrix that a token meets, 4 * heads * head width for each visible
// key.
TEST(Stack, B36_FlopsAgreeWithTheHandSheet) {
  const Stack stack(config_of(kTiny));
  const double matrices = 2.0 * (17 * 12 + 4 * 360 + 2 * 12 * 72 + 2 * 12 * 24);
  const double full = 4.0 * 24 * 50.5;
  const double sliding = 4.0 * 8 * (8 * 4.5 + 92 * 9) / 100.0;
  EXPECT_DOUBLE_EQ(stack.flops_per_token(100), matrices + 2 * full + 2 * sliding);
}

TEST(Initialise, AnyCutGivesTheSameValues) {
  const ParameterSpec parameter = {
      "model.layers.0.mixer.q_proj.weight", {37, 11}, {Init::Kind::kNormal, 0.02}, true};
  std::vector<float> all(407), cut(407);
  initialise(parameter, 5, 0, View(all.data(), {407}));
  for (const std::int64_t size : {1, 7, 100, 406}) {
    std::fill(cut.begin(), cut.end(), 0.0F);
    for (std::int64_t begin = 0; begin < 407; begin += size) {
      initialise(parameter, 5, begin, View(cut.data() + begin, {std::min(size, 407 - begin)}));
    }
    EXPECT_TRUE(same_bits(all, cut)) << size;
  }
  std::vector<float> other(407);
  initialise(parameter, 6, 0, View(other.data(), {407}));
  EXPECT_FALSE(same_bits(all, other));
  ParameterSpec renamed = parameter;
  renamed.name = "model.layers.1.mixer.q_proj.weight";
  initialise(renamed, 5, 0, View(other.data(), {407}));
  EXPECT_FALSE(same_bits(all, other));
}

TEST(Initialise, DistributionsAreTheSpecs) {
  const Stack stack(config_of(R"(
    width: 64 vocabulary: 500 length: 16 feed_forward { width: 128 }
    schedule { homogeneous { type: "full" layers: 8 } }
    mixer { full { heads: 4 key_value_heads: 2 head_width: 16 query_key_norm: true } })"));
  for (const UnitSpec& unit : stack.units()) {
    for (const ParameterSpec& parameter : unit.parameters) {
      std::vector<float> drawn(static_cast<std::size_t>(parameter.shape.count()));
      initialise(parameter, 1, 0, View(drawn.data(), parameter.shape));
      double sum = 0.0, squares = 0.0;
      for (const float value : drawn) {
        sum += value;
        squares += static_cast<double>(value) * value;
      }
      const auto count = static_cast<double>(drawn.size());
      if (parameter.shape.rank() == 1) {
        EXPECT_EQ(sum, count) << parameter.name;
        EXPECT_EQ(squares, count) << parameter.name;
        continue;
      }
      const bool back = parameter.name.find("o_proj") != std::string::npos ||
                        parameter.name.find("down_proj") != std::string::npos;
      const double deviation = back ? 0.02 / std::sqrt(16.0) : 0.02;
      // Five standard errors.
      EXPECT_NEAR(sum / count, 0.0, 5 * deviation / std::sqrt(count)) << parameter.name;
      EXPECT_NEAR(std::sqrt(squares / count) / deviation, 1.0, 5 / std::sqrt(2 * count))
          << parameter.name;
    }
  }
  const ParameterSpec uniform = {"u", {10000}, {Init::Kind::kUniform, 0.5}, false};
  std::vector<float> drawn(10000);
  initialise(uniform, 1, 0, View(drawn.data(), {10000}));
  EXPECT_GE(*std::min_element(drawn.begin(), drawn.end()), -0.5F);
  EXPECT_LT(*std::max_element(drawn.begin(), drawn.end()), 0.5F);
  EXPECT_LT(*std::min_element(drawn.begin(), drawn.end()), -0.49F);
  EXPECT_GT(*std::max_element(drawn.begin(), drawn.end()), 0.49F);
}

Schedule schedule_of(const std::string& text) {
  Schedule schedule;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &schedule)) << text;
  return schedule;
}

std::string letters(const std::string& text) {
  std::string all;
  for (const std::string& type : schedule_types(schedule_of(text))) {
    all += type == "full" ? 'F' : 'S';
  }
  return all;
}

TEST(Schedule, TypesOfEveryKind) {
  EXPECT_EQ(letters(R"(latin { order: "full" })"), "F");
  EXPECT_EQ(letters(R"(latin { order: "sliding" order: "full" })"), "SFFS");
  EXPECT_EQ(letters(R"(periodic { order: "sliding" order: "full" layers: 5 })"), "SFSFS");
  EXPECT_EQ(letters(R"(block { order: "sliding" order: "full" layers: 5 })"), "SSSFF");
  EXPECT_EQ(letters(R"(homogeneous { type: "full" layers: 3 })"), "FFF");
  EXPECT_EQ(letters("explicit: \"FS SF\\n S\""), "FSSFS");
}

// Each type once in every row and at every place of a row.
TEST(Schedule, ALatinSquareHasEachTypeOnceInEachRowAndColumn) {
  for (std::size_t n = 1; n <= 13; ++n) {
    for (std::size_t i = 0; i < n; ++i) {
      std::set<std::size_t> row, column;
      for (std::size_t j = 0; j < n; ++j) {
        row.insert(latin_place(i * n + j, n));
        column.insert(latin_place(j * n + i, n));
      }
      EXPECT_EQ(row.size(), n);
      EXPECT_EQ(column.size(), n);
      EXPECT_LT(*row.rbegin(), n);
    }
  }
  // The identities that the flagship's authors published: nsa, differential, full, linear, sliding,
  // compress, hybrid in this order; layer 0 nsa, 12 hybrid, 25 nsa, 40 linear.
  EXPECT_EQ(latin_place(0, 7), 0U);
  EXPECT_EQ(latin_place(12, 7), 6U);
  EXPECT_EQ(latin_place(25, 7), 0U);
  EXPECT_EQ(latin_place(40, 7), 3U);
}

TEST(Config, B35_RefusalsNameTheField) {
  struct Case {
    std::string change;  // merged into kTiny
    std::string message;
  };
  const std::vector<Case> cases = {
      {"width: 0", "model.width: must be at least 1, is 0"},
      {"width: -3", "model.width: must be at least 1, is -3"},
      {"vocabulary: 0", "model.vocabulary: must be at least 1, is 0"},
      {"length: 0", "model.length: must be at least 1, is 0"},
      {"feed_forward { width: 0 }",
       "model.feed_forward.width: must be at least 1, unless there are experts in its place, is 0"},
      {"norm_epsilon: 0", "model.norm_epsilon: must be a finite number above 0, is 0"},
      {"norm_epsilon: inf", "model.norm_epsilon: must be a finite number above 0, is inf"},
      {"norm_epsilon: nan", "model.norm_epsilon: must be a finite number above 0, is nan"},
      {"init_deviation: -1", "model.init_deviation: must be a finite number above 0, is -1"},
      {"width: 1000000", "model.width: must be at most 262144, is 1000000"},
      {"schedule { explicit: \"FX\" }",
       "model.schedule.explicit: unknown letter 'X' for layer 1; known: F full, S sliding, "
       "G differential, L linear, M mamba2, N nsa, C compress, H hybrid"},
      {"schedule { explicit: \"S\u00e4\" }",
       "model.schedule.explicit: unknown letter '\u00e4' for layer 1; known: F full, S sliding, "
       "G differential, L linear, M mamba2, N nsa, C compress, H hybrid"},
      {"schedule { explicit: \" \" }", "model.schedule.explicit: must name at least one layer"},
      {"schedule { latin { order: \"full\" order: \"fool\" } }",
       "model.schedule.latin.order[1]: must be one of full, sliding, differential, linear, mamba2, "
       "nsa, compress, "
       "hybrid, is \"fool\""},
      {"schedule { latin { order: \"full\" order: \"full\" } }",
       "model.schedule.latin.order[1]: \"full\" stands twice; a Latin square needs different "
       "types"},
      {"schedule { periodic { layers: 3 } }",
       "model.schedule.periodic.order: must name at least one mixer"},
      {"schedule { periodic { order: \"full\" } }",
       "model.schedule.periodic.layers: must be at least 1, is 0"},
      {"schedule { block { order: \"full\" layers: -1 } }",
       "model.schedule.block.layers: must be at least 1, is -1"},
      {"schedule { homogeneous { layers: 3 } }",
       "model.schedule.homogeneous.type: must be one of full, sliding, differential, linear, "
       "mamba2, nsa, compress, "
       "hybrid, is \"\""},
      {"mixer { full { heads: 1 key_value_heads: 1 head_width: 2 } }",
       "model.mixer[2]: full is configured a second time (first in model.mixer[0])"},
  };
  for (const Case& c : cases) {
    try {
      ModelConfig config = config_of(kTiny);
      config.MergeFrom(config_of(c.change));
      const Stack stack(config);
      ADD_FAILURE() << "accepted: " << c.change;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_EQ(error.what(), c.message);
    }
  }
}

TEST(Config, B35_RefusalsOfMixersNameTheField) {
  const std::string rest =
      "width: 8 vocabulary: 8 length: 8 feed_forward { width: 8 } schedule { explicit: \"S\" } "
      "mixer { full { heads: 1 key_value_heads: 1 head_width: 2 } } ";
  const std::string path = "model.mixer[1].sliding.";
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"",
       "model.mixer: the schedule names \"sliding\", but no mixer { sliding { ... } } configures "
       "it"},
      {"window: 0", path + "window: must be at least 1, is 0"},
      {"attention { heads: 0 key_value_heads: 1 head_width: 2 }",
       path + "attention.heads: must be at least 1, is 0"},
      {"attention { heads: 4 key_value_heads: 3 head_width: 2 }",
       path + "attention.key_value_heads: must divide heads, which is 4, is 3"},
      {"attention { heads: 4 key_value_heads: 8 head_width: 2 }",
       path + "attention.key_value_heads: must be at most 4, is 8"},
      {"attention { heads: 4 key_value_heads: 2 head_width: 3 }",
       path + "attention.head_width: must be even for the rotation, is 3"},
      {"attention { heads: 4 key_value_heads: 2 head_width: 4 rope_theta: 0 }",
       path + "attention.rope_theta: must be a finite number above 0, is 0"},
  };
  for (const auto& [mixer, message] : cases) {
    try {
      const Stack stack(
          config_of(rest + (mixer.empty() ? "" : "mixer { sliding { " + mixer + " } }")));
      ADD_FAILURE() << "accepted: " << mixer;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      EXPECT_EQ(error.what(), message);
    }
  }
  ModelConfig bare = config_of(rest);
  bare.clear_schedule();
  EXPECT_THROW(const Stack stack(bare), Error);
}

}  // namespace
}  // namespace tessera::testing
