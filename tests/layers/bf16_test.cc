// Layers with operands in bf16, against float64 at the same rounded inputs; bits for every number
// of rows and threads; causality.
#include <google/protobuf/text_format.h>

#include "layers/kernels/elementwise.h"
#include "layers/mixers/mixers.h"
#include "layers/rms_norm/rms_norm.h"
#include "layers/swiglu/swiglu.h"
#include "runtime/products.h"
#include "tests/layers/testing.h"
#include "tests/reference/model.h"

namespace tessera::testing {
namespace {

ModelConfig config_of(const std::string& text) {
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

std::unique_ptr<Layer> make(const std::string& type, bool norm) {
  const std::string attention =
      "heads: 4 key_value_heads: 2 head_width: 8 rope_theta: 100 query_key_norm: " +
      std::string(norm ? "true" : "false");
  const ModelConfig config =
      config_of("width: 20 vocabulary: 8 length: 512 feed_forward { width: 8 } mixer { " +
                (type == "full" ? "full { " + attention + " }"
                                : "sliding { window: 37 attention { " + attention + " } }") +
                " }");
  return make_mixer(type, {config, 0, 2, DType::kBF16});
}

class BFloat16Layers : public ::testing::Test {
 protected:
  void SetUp() override {}
};

TEST_F(BFloat16Layers, SwiGluAgreesWithFloat64) {
  const SwiGlu layer(24, 43, 0.02, 0.01, DType::kBF16);
  const TestBatch batch(3, 47, 2);
  LayerRun run(layer, batch, 24, DType::kBF16);
  // gate and up, hidden; backward d_hidden, d_gate, d_up.
  expect_layer(
      run,
      [](const reference::Array& x, const std::vector<reference::Array>& p) {
        return reference::swiglu(x, p, 24, 43);
      },
      5, kHalfEpsilon);
}

TEST_F(BFloat16Layers, MixersAgreeWithFloat64) {
  for (const std::string type : {"full", "sliding"}) {
    for (const bool norm : {false, true}) {
      SCOPED_TRACE(::testing::Message() << type << ", norm " << norm);
      const TestBatch batch(2, 141, 2, {0, 33, 64, 99});
      const auto layer = make(type, norm);
      LayerRun run(*layer, batch, 20, DType::kBF16);
      const reference::AttentionMixer mixer = {
          {2, 141, 4, 2, 8, type == "full" ? 141 : 37, batch.segments}, 20, 100.0, norm};
      // Projections, norm, rotation, probabilities, output; the same again backward.
      expect_layer(
          run,
          [&](const reference::Array& x, const std::vector<reference::Array>& p) {
            return mixer.forward(x, p);
          },
          10, kHalfEpsilon);
    }
  }
}

TEST_F(BFloat16Layers, SameBitsForEveryNumberOfThreadsAndRows) {
  for (const std::string type : {"full", "sliding", "swiglu"}) {
    SCOPED_TRACE(type);
    const auto layer = type == "swiglu" ? std::make_unique<SwiGlu>(20, 50, 0.02, 0.01, DType::kBF16)
                                        : make(type, true);
    const TestBatch batch(1, 411, 1);
    LayerRun one(*layer, batch, 20, DType::kBF16);
    one.forward();
    one.backward();
    for (const int threads : {2, 3}) {
      const TestBatch same(1, 411, threads);
      LayerRun more(*layer, same, 20, DType::kBF16);
      more.forward();
      more.backward();
      EXPECT_TRUE(same_bits(one.results(), more.results())) << threads;
    }
    for (const std::int64_t length : {1, 5, 127, 128, 129, 400}) {
      const TestBatch few(1, length, 2);
      LayerRun some(*layer, few, 20, DType::kBF16);
      some.forward();
      EXPECT_TRUE(same_bits(one.out().as<float>(), some.out().as<float>(), length * 20)) << length;
    }
  }
}

// Changing position t moves no bit before it.
TEST_F(BFloat16Layers, B22_NoBitBeforeAChangedPositionMoves) {
  for (const std::string type : {"full", "sliding"}) {
    const auto layer = make(type, true);
    const TestBatch batch(1, 257, 2);
    LayerRun run(*layer, batch, 20, DType::kBF16);
    run.forward();
    const std::vector<float> before = values(run.out());
    for (const std::int64_t t : {0, 1, 36, 37, 127, 128, 129, 255, 256}) {
      BFloat16* const row = run.in().as<BFloat16>() + t * 20;
      const std::vector<BFloat16> kept(row, row + 20);
      for (std::int64_t i = 0; i < 20; ++i) row[i] = to_bfloat16(3.0F - 2.0F * to_float(row[i]));
      run.forward();
      EXPECT_TRUE(same_bits(run.out().as<float>(), before.data(), t * 20)) << t;
      EXPECT_FALSE(same_bits(run.out().as<float>() + t * 20, before.data() + t * 20, 20)) << t;
      std::copy(kept.begin(), kept.end(), row);
    }
  }
}

TEST_F(BFloat16Layers, TheHeadAgreesWithFloat64) {
  constexpr std::int64_t kWidth = 16, kVocabulary = 301;
  const ModelConfig config = config_of("width: 16 vocabulary: 301");
  const Head head(config, DType::kBF16);
  TestBatch batch(2, 71, 2, {0}, kVocabulary);
  batch.labels[30] = batch.labels[100] = kNoLabel;
  const BatchShape shape = batch.batch.shape;
  Queue queue(2);
  const Buffers parameters(head.parameters(), DType::kBF16);
  const Buffers gradients(head.parameters());
  const Buffers scratch(head.scratch(shape));
  const Buffers rows(
      {{"x", DType::kF32, {shape.rows(), kWidth}}, {"d_x", DType::kF32, {shape.rows(), kWidth}}});
  fill_normal(rows[0], "x");
  fill_normal(parameters[0], "norm", 0.3, 1.0);
  fill_normal(parameters[1], "weight", 0.5);
  const double scale = 1.0 / 140;
  const double loss =
      head.loss_and_gradient(queue, batch.batch, rows[0], scale, rows[1], parameters.views(),
                             gradients.views(), scratch.views());
  const reference::Array x = to_double(rows[0]);
  const std::vector<reference::Array> p = to_double(parameters);
  const auto reference = [&](const reference::Array& at, const reference::Array& norm,
                             const reference::Array& weight) {
    return reference::head_loss(at, norm, weight, batch.labels, 1e-6);
  };
  EXPECT_NEAR(loss, reference(x, p[0], p[1]), tolerance(std::abs(loss), 1, kHalfEpsilon));
  // Rounded: the normed row and the logits' gradient.
  expect_gradient(
      "d_x", rows[1], x,
      [&](const reference::Array& at) { return scale * reference(at, p[0], p[1]); }, 3, 0.0,
      kHalfEpsilon);
  expect_gradient(
      "d_norm", gradients[0], p[0],
      [&](const reference::Array& at) { return scale * reference(x, at, p[1]); }, 3, 0.0,
      kHalfEpsilon);
  expect_gradient(
      "d_weight", gradients[1], p[1],
      [&](const reference::Array& at) { return scale * reference(x, p[0], at); }, 3, 0.0,
      kHalfEpsilon);
}

// The kernels' rounding is the scalar one's, on every value's path: body, tail, NaN, infinity,
// ties.
TEST_F(BFloat16Layers, RoundsToNearestEvenAndKeepsNaN) {
  const float infinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {0.0F,
                               -0.0F,
                               1.0F,
                               1.00390625F,   // a tie, down to even
                               1.01171875F,   // a tie, up to even
                               1.003906369F,  // just above the tie
                               std::numeric_limits<float>::max(),
                               infinity,
                               -infinity,
                               std::numeric_limits<float>::quiet_NaN(),
                               std::numeric_limits<float>::denorm_min(),
                               1e-40F,
                               3.14159274F};
  EXPECT_EQ(to_bfloat16(1.00390625F).bits, 0x3F80);
  EXPECT_EQ(to_bfloat16(1.01171875F).bits, 0x3F82);
  EXPECT_EQ(to_bfloat16(1.003906369F).bits, 0x3F81);
  EXPECT_EQ(to_float(to_bfloat16(std::numeric_limits<float>::max())), infinity);
  for (int i = 0; i < 23; ++i) values.push_back(std::bit_cast<float>(0x3F800000 + i * 0x1357));
  const auto count = static_cast<std::int64_t>(values.size());
  std::vector<BFloat16> rounded(values.size());
  Queue queue(1);
  convert(queue, View(rounded.data(), {count}), View(values.data(), {count}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(rounded[i].bits, to_bfloat16(values[i]).bits) << values[i];
    EXPECT_EQ(std::isnan(to_float(rounded[i])), std::isnan(values[i]));
  }
}

}  // namespace
}  // namespace tessera::testing
