// The mixer hybrid against float64 and finite differences; causality, documents, bits, counts.
#include "layers/mixers/hybrid/hybrid.h"

#include <google/protobuf/text_format.h>

#include <stdexcept>

#include "tests/layers/mixer_checks.h"
#include "tests/reference/hybrid.h"

namespace tessera::testing {
namespace {

struct HybridShape {
  std::int64_t heads, key_value_heads, head_width;
  bool norm = false;
  std::int64_t block = 8, stride = 4, inner = 6, selected = 16, most = 3, window = 11;
  std::int64_t width() const { return heads * head_width; }
};
constexpr std::int64_t kLayer = 2;

std::string text_of(const HybridShape& s) {
  const std::string attention = "attention { heads: " + std::to_string(s.heads) +
                                " key_value_heads: " + std::to_string(s.key_value_heads) +
                                " head_width: " + std::to_string(s.head_width) +
                                " rope_theta: 100 query_key_norm: " + (s.norm ? "true" : "false") +
                                " }";
  return "nsa { " + attention + " compression { block_length: " + std::to_string(s.block) +
         " block_stride: " + std::to_string(s.stride) + " inner_width: " + std::to_string(s.inner) +
         " } selected_block_length: " + std::to_string(s.selected) +
         " selected_blocks: " + std::to_string(s.most) + " window: " + std::to_string(s.window) +
         " } differential { " + attention + " }";
}

std::unique_ptr<Layer> make(const std::string& text, std::int64_t width,
                            DType compute = DType::kF32) {
  const std::string all =
      "width: " + std::to_string(width) +
      " vocabulary: 8 length: 4096 feed_forward { width: 8 } mixer { hybrid { " + text + " } }";
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(all, &config)) << all;
  return make_mixer("hybrid", {config, kLayer, 49, compute});
}
std::unique_ptr<Layer> make(const HybridShape& s, DType compute = DType::kF32) {
  return make(text_of(s), s.width(), compute);
}

reference::Hybrid reference_of(const HybridShape& s, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {{{shape.batch,
            shape.length,
            s.width(),
            s.heads,
            s.key_value_heads,
            s.head_width,
            {s.block, s.stride},
            batch.segments},
           s.selected,
           s.most,
           s.window,
           100.0,
           s.norm,
           {}},
          {{shape.batch, shape.length, s.heads, s.key_value_heads, s.head_width / 2, shape.length,
            batch.segments, s.head_width},
           s.width(),
           100.0,
           s.norm,
           kLayer}};
}

std::vector<std::int32_t> choice_of(const LayerRun& run) {
  const std::vector<BufferSpec> specs = run.layer.saved(run.batch.batch.shape);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name != "nsa.choice") continue;
    const View& view = run.saved[i];
    return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.count()};
  }
  throw std::runtime_error("no choice is saved");
}

const HybridShape kSmall = {4, 2, 4};
const HybridShape kNorm = {4, 2, 4, true};

void expect_reference(const HybridShape& s, const TestBatch& batch, DType compute,
                      std::int64_t length, double epsilon) {
  const auto layer = make(s, compute);
  LayerRun run(*layer, batch, s.width(), compute);
  for (const char* const name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
    fill_parameter(run, std::string("differential.") + name, 0.0, 0.2);
  }
  run.forward();
  reference::Hybrid mixer = reference_of(s, batch);
  mixer.nsa.choice = choice_of(run);
  expect_layer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return mixer.forward(x, p);
      },
      length, epsilon);
}

TEST(Hybrid, AgreesWithFloat64) {
  struct Case {
    std::int64_t batch, length;
    HybridShape shape;
    std::vector<std::int64_t> starts = {0};
  };
  // Its mechanisms have tests of their own; here they meet.
  const std::vector<Case> cases = {
      {1, 2, {2, 1, 4}},
      {2, 7, {2, 1, 4}},
      {1, 49, {2, 1, 4, false, 8, 4, 3, 16, 3, 40}},
      {2, 25, {2, 1, 4, true}, {0, 11}},
      {1, 70, {1, 1, 4}, {0, 5, 40}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << c.batch << " x " << c.length << ", norm " << c.shape.norm);
    const TestBatch batch(c.batch, c.length, 2, c.starts);
    expect_reference(
        c.shape, batch, DType::kF32,
        4 * c.shape.width() + c.shape.block * c.shape.head_width + c.shape.inner + 2 * c.length,
        kEpsilon);
  }
}

TEST(Hybrid, InBFloat16AgreesWithFloat64) {
  // nsa's 18 (nsa_test), the gate and the mixed rows, both ways.
  const TestBatch batch(1, 43, 2, {0, 17});
  expect_reference({2, 1, 8, true}, batch, DType::kBF16, 21, kHalfEpsilon);
}

TEST(Hybrid, B22_NoBitBeforeAChangedPositionMoves) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_causal(*make(kNorm, compute), kNorm.width(), compute, 257,
                  {0, 1, 3, 4, 7, 8, 10, 11, 15, 16, 17, 63, 64, 127, 128, 129, 255, 256});
  }
}

TEST(Hybrid, B22_NothingCrossesADocumentsStart) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_documents_apart(*make(kNorm, compute), kNorm.width(), compute, 150,
                           {1, 4, 7, 8, 16, 40, 64, 65, 128});
  }
}

TEST(Hybrid, SameBitsForEveryNumberOfThreadsAndRows) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_same_bits(*make(kNorm, compute), kNorm.width(), compute, 300, {1, 2, 31, 64, 128, 129});
  }
}

TEST(Hybrid, AStepAllocatesNothing) {
  expect_no_allocation(*make(kNorm), kNorm.width(), DType::kF32, 150);
}

TEST(Hybrid, ExtremeInputsStayFinite) {
  for (const float factor : {0.0F, 1e-20F, 1e4F}) {
    const auto layer = make(kSmall);
    const TestBatch batch(1, 75, 1);
    LayerRun run(*layer, batch, kSmall.width());
    for (std::int64_t i = 0; i < run.in().count(); ++i) run.in().as<float>()[i] *= factor;
    run.forward();
    run.backward();
    for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
  }
}

// A gate that is open or closed altogether leaves the bits of one mechanism.
TEST(Hybrid, AClosedGateLeavesOneMechanism) {
  const TestBatch batch(1, 140, 2, {0, 60});
  const auto layer = make(kSmall);
  for (const float logit : {1000.0F, -1000.0F}) {
    LayerRun run(*layer, batch, kSmall.width());
    const std::size_t gate = run.parameters.size() - 2;
    // x's first element is 1, and the gate looks at it alone.
    for (std::int64_t i = 0; i < run.in().count(); i += kSmall.width()) run.in().as<float>()[i] = 1;
    for (std::int64_t i = 0; i < run.parameters[gate].count(); ++i) {
      run.parameters[gate].as<float>()[i] = i % kSmall.width() == 0 ? logit : 0.0F;
    }
    run.forward();
    // Saved: the projected mixer's "mixed", then nsa's and differential's outputs.
    const View& alone = run.saved[logit > 0 ? 1 : 2];
    EXPECT_TRUE(same_bits(values(run.saved[0]), values(alone)));
  }
}

TEST(Hybrid, FlagshipParametersAreThePapers) {
  const HybridShape flagship = {16, 4, 128, false, 32, 16, 192, 64, 16, 512};
  EXPECT_EQ(parameter_count(*make(flagship)), 22733056);
}

// Its mechanisms' without one of the two output projections, and the gate.
TEST(Hybrid, B36_FlopsAreThoseOfItsParts) {
  const HybridShape s = {16, 4, 128, false, 32, 16, 192, 64, 16, 512};
  ModelConfig config;
  config.set_width(s.width());
  config.set_length(4096);
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(text_of(s),
                                                            config.add_mixer()->mutable_hybrid()));
  *config.add_mixer()->mutable_nsa() = config.mixer(0).hybrid().nsa();
  *config.add_mixer()->mutable_differential() = config.mixer(0).hybrid().differential();
  const auto flops = [&](const char* type) {
    return make_mixer(type, {config, kLayer, 49})->flops_per_token(4096);
  };
  EXPECT_DOUBLE_EQ(flops("hybrid"),
                   flops("nsa") + flops("differential") - 2.0 * 2048 * 2048 + 2.0 * 2048 * 16);
}

TEST(Hybrid, ReportsTheSizesOfBoth) {
  const auto layer = make(HybridShape{16, 4, 128, false, 32, 16, 192, 64, 16, 512});
  for (const std::int64_t size : {16, 32, 64, 128, 512}) {
    const std::vector<LayerSize> sizes = layer->sizes();
    EXPECT_EQ(std::count_if(sizes.begin(), sizes.end(),
                            [&](const LayerSize& of) { return of.positions == size; }),
              1)
        << size;
  }
}

TEST(Hybrid, RefusesMechanismsThatDontMatch) {
  const auto refusal = [](const std::string& heads, const std::string& width) -> std::string {
    try {
      make(
          "nsa { attention { heads: 4 key_value_heads: 2 head_width: 8 } compression { "
          "block_length: 8 block_stride: 4 inner_width: 4 } selected_block_length: 16 "
          "selected_blocks: 3 window: 8 } differential { attention { heads: " +
              heads + " key_value_heads: 2 head_width: " + width + " } }",
          16);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return error.what();
    }
    return "";
  };
  const std::string path = "model.mixer[0].hybrid.differential.attention.";
  EXPECT_EQ(refusal("2", "8"), path + "heads: must be that of nsa, which is 4, is 2");
  EXPECT_EQ(refusal("4", "4"), path + "head_width: must be that of nsa, which is 8, is 4");
}

}  // namespace
}  // namespace tessera::testing
