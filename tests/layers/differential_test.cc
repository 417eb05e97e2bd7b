// The mixer differential against float64 and finite differences; causality, documents, bits,
// counts.
#include "layers/mixers/differential/differential.h"

#include <google/protobuf/text_format.h>

#include "tests/layers/mixer_checks.h"
#include "tests/layers/oracle.h"
#include "tests/reference/differential.h"

namespace tessera::testing {
namespace {

struct DifferentialShape {
  std::int64_t width, heads, key_value_heads, head_width;
  bool norm = false;
  std::int64_t layer = 1;
};

std::unique_ptr<Layer> make(const DifferentialShape& s, DType compute = DType::kF32,
                            const std::string& theta = "100") {
  const std::string text =
      "width: " + std::to_string(s.width) +
      " vocabulary: 8 length: 4096 feed_forward { width: 8 } mixer { differential { attention { "
      "heads: " +
      std::to_string(s.heads) + " key_value_heads: " + std::to_string(s.key_value_heads) +
      " head_width: " + std::to_string(s.head_width) + " rope_theta: " + theta +
      " query_key_norm: " + (s.norm ? "true" : "false") + " } } }";
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return make_mixer("differential", {config, s.layer, 49, compute});
}

reference::Differential reference_of(const DifferentialShape& s, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {{shape.batch, shape.length, s.heads, s.key_value_heads, s.head_width / 2, shape.length,
           batch.segments, s.head_width},
          s.width,
          100.0,
          s.norm,
          s.layer};
}

// Where training leaves them: lambda differs from its initial value, and neither is 1.
void fill_lambdas(LayerRun& run) {
  for (const char* const name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
    fill_parameter(run, name, 0.0, 0.2);
  }
}

std::int64_t sums(const DifferentialShape& s, std::int64_t length) {
  return 2 * s.width + 2 * s.heads * s.head_width + 2 * length + s.head_width;
}

const DifferentialShape kSmall = {12, 4, 2, 8};
const DifferentialShape kNorm = {12, 4, 2, 8, true, 3};

TEST(Differential, AgreesWithFloat64) {
  struct Case {
    std::int64_t batch, length;
    DifferentialShape shape;
    std::vector<std::int64_t> starts = {0};
  };
  const std::vector<Case> cases = {
      {1, 2, {5, 1, 1, 4, false, 0}},
      {2, 13, {7, 4, 2, 12, true, 48}, {0, 5}},
      {1, 31, kSmall},
      {1, 33, {9, 3, 1, 4, true, 2}},
      {2, 65, kSmall, {0, 33, 64}},
      {1, 127, {6, 2, 1, 4, false, 5}},
      {1, 128, {6, 2, 1, 4, false, 5}},
      {1, 129, {6, 2, 2, 8, true, 0}, {0, 127}},
      {1, 261, {4, 2, 1, 4}, {0, 128, 140}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message()
                 << c.batch << " x " << c.length << ", heads " << c.shape.heads << " of "
                 << c.shape.head_width << ", norm " << c.shape.norm << ", layer " << c.shape.layer);
    const TestBatch batch(c.batch, c.length, 2, c.starts);
    const auto layer = make(c.shape);
    LayerRun run(*layer, batch, c.shape.width);
    fill_lambdas(run);
    const reference::Differential mixer = reference_of(c.shape, batch);
    expect_layer(
        run,
        [&](const reference::Array& x, const std::vector<reference::Array>& p) {
          return mixer.forward(x, p);
        },
        sums(c.shape, c.length));
  }
}

// Both maps are 1, so that the output is the norm of (1 - lambda) v: queries, keys and lambda get
// no gradient but what rounding leaves of the values'.
TEST(Differential, OnePositionAgreesWithFloat64) {
  const TestBatch batch(2, 1, 1);
  const auto layer = make(kSmall);
  LayerRun run(*layer, batch, kSmall.width);
  fill_lambdas(run);
  run.forward();
  run.backward();
  const reference::Differential mixer = reference_of(kSmall, batch);
  const reference::Array x = to_double(run.in()), d_out = to_double(run.d_out());
  const std::vector<reference::Array> p = to_double(run.parameters);
  expect_close("out", run.out(), mixer.forward(x, p), sums(kSmall, 1));
  const double terms = largest(to_double(run.d_parameters[2]));
  for (std::size_t i = 0; i < p.size(); ++i) {
    expect_gradient(
        layer->parameters()[i].name, run.d_parameters[i], p[i],
        [&](const reference::Array& at) {
          std::vector<reference::Array> moved = p;
          moved[i] = at;
          return reference::dot(mixer.forward(x, moved), d_out);
        },
        sums(kSmall, 1), terms);
  }
}

TEST(Differential, InBFloat16AgreesWithFloat64) {
  for (const bool norm : {false, true}) {
    const DifferentialShape shape = {20, 4, 2, 8, norm};
    const TestBatch batch(2, 141, 2, {0, 33, 64, 99});
    const auto layer = make(shape, DType::kBF16);
    LayerRun run(*layer, batch, shape.width, DType::kBF16);
    fill_lambdas(run);
    const reference::Differential mixer = reference_of(shape, batch);
    // Projections, norm, rotation, probabilities, both maps' outputs, the normed difference; the
    // same again backward.
    expect_layer(
        run,
        [&](const reference::Array& x, const std::vector<reference::Array>& p) {
          return mixer.forward(x, p);
        },
        14, kHalfEpsilon);
  }
}

// Against what DiffLlama of the transformers package computes (tests/oracle/make_differential.py).
TEST(Differential, AgreesWithTransformers) {
  for (const std::string name : {"differential", "differential_documents"}) {
    SCOPED_TRACE(name);
    const nlohmann::json stored = read_oracle(name);
    const auto& s = stored["settings"];
    ASSERT_EQ(s["theta"], 10000.0);
    const DifferentialShape shape = {s["width"],      s["heads"], s["key_value_heads"],
                                     s["head_width"], false,      s["layer"]};
    const TestBatch batch(s["batch"], s["length"], 2, s["starts"]);
    const auto layer = make(shape, DType::kF32, "10000");
    LayerRun run(*layer, batch, shape.width);
    const std::vector<ParameterSpec> specs = layer->parameters();
    fill(run.in(), stored["inputs"]["x"]);
    fill(run.d_out(), stored["d_out"]);
    ASSERT_EQ(stored["inputs"].size(), specs.size() + 1);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      fill(run.parameters[i], stored["inputs"].at(specs[i].name));
    }
    run.forward();
    run.backward();
    const std::int64_t length = sums(shape, batch.batch.shape.length);
    expect_close("out", run.out(), array_of(stored["out"]), length);
    expect_close("d_in", run.d_in(), array_of(stored["gradients"]["x"]), length);
    for (std::size_t i = 0; i < specs.size(); ++i) {
      // A weight's gradient is a sum over the rows, a lambda's over all that it scales.
      std::int64_t terms = batch.batch.shape.rows();
      if (specs[i].name.starts_with("lambda")) terms *= 2 * shape.heads * shape.head_width;
      expect_close("d_" + specs[i].name, run.d_parameters[i],
                   array_of(stored["gradients"].at(specs[i].name)), length + terms);
    }
  }
}

TEST(Differential, B22_NoBitBeforeAChangedPositionMoves) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const DifferentialShape& shape : {kSmall, kNorm}) {
      expect_causal(*make(shape, compute), shape.width, compute, 257,
                    {0, 1, 15, 63, 64, 126, 127, 128, 129, 254, 255, 256});
    }
  }
}

TEST(Differential, B22_NothingCrossesADocumentsStart) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_documents_apart(*make(kNorm, compute), kNorm.width, compute, 150,
                           {1, 40, 63, 64, 65, 127, 128, 129});
  }
}

TEST(Differential, SameBitsForEveryNumberOfThreadsAndRows) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_same_bits(*make(kNorm, compute), kNorm.width, compute, 300,
                     {1, 2, 31, 64, 127, 128, 129});
  }
}

TEST(Differential, AStepAllocatesNothing) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_no_allocation(*make(kNorm, compute), kNorm.width, compute, 150);
  }
}

TEST(Differential, ExtremeInputsStayFinite) {
  for (const DifferentialShape& shape : {kSmall, kNorm}) {
    for (const float factor : {0.0F, 1e-20F, 1e4F}) {
      const auto layer = make(shape);
      const TestBatch batch(1, 75, 1);
      LayerRun run(*layer, batch, shape.width);
      fill_lambdas(run);
      for (std::int64_t i = 0; i < run.in().count(); ++i) run.in().as<float>()[i] *= factor;
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
    }
  }
}

TEST(Differential, FlagshipParametersAreThePapers) {
  const auto layer = make({2048, 16, 4, 128});
  EXPECT_EQ(parameter_count(*layer), 10486016);
  int lambdas = 0;
  for (const ParameterSpec& p : layer->parameters()) {
    const bool lambda = p.name.starts_with("lambda_");
    lambdas += lambda ? 1 : 0;
    EXPECT_EQ(p.full_precision, lambda) << p.name;
    EXPECT_EQ(p.decay, !lambda) << p.name;
    EXPECT_EQ(p.init.scale, lambda                      ? 0.1
                            : p.name == "o_proj.weight" ? 0.02 / std::sqrt(98.0)
                                                        : 0.02)
        << p.name;
  }
  EXPECT_EQ(lambdas, 4);
}

// 0.8 - 0.6 = 0.2 in the first layer, then towards 0.8.
TEST(Differential, LambdaStartsByTheLayersPlaceInTheStack) {
  EXPECT_DOUBLE_EQ(differential_lambda_init(0), 0.2);
  EXPECT_NEAR(differential_lambda_init(1), 0.35550906759096935, 1e-15);
  EXPECT_NEAR(differential_lambda_init(48), 0.7999996655, 1e-9);
}

// The hand sheet: projections 2 * 2048 * (2048 + 2 * 512 + 2048) = 20,971,520; for every visible
// key and head two scores of 64 and two products with values of 128: 2 * (2 * 64 + 2 * 128) = 768.
TEST(Differential, B36_FlopsAgreeWithTheHandSheet) {
  const auto layer = make({2048, 16, 4, 128});
  EXPECT_DOUBLE_EQ(layer->flops_per_token(4096), 20971520.0 + 16 * 768.0 * 2048.5);
  EXPECT_DOUBLE_EQ(layer->flops_per_token(1), 20971520.0 + 16 * 768.0);
}

TEST(Differential, RefusesWhatCantBe) {
  const auto refusal = [](const DifferentialShape& shape) -> std::string {
    try {
      make(shape);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return error.what();
    }
    return "";
  };
  const std::string path = "model.mixer[0].differential.attention.";
  EXPECT_EQ(refusal({8, 4, 3, 4}), path + "key_value_heads: must divide heads, which is 4, is 3");
  EXPECT_EQ(refusal({8, 4, 2, 6}),
            path + "head_width: must be a multiple of 4 for the rotation of its halves, is 6");
}

}  // namespace
}  // namespace tessera::testing
