// The mixer linear in both kinds.
#include "tests/reference/linear.h"

#include "tests/layers/mixer_checks.h"

namespace tessera::testing {
namespace {

struct Size {
  std::int64_t width, heads, key_heads, head_width;
};
constexpr Size kSmall = {7, 4, 2, 6};
constexpr Size kFlagship = {2048, 16, 4, 128};
constexpr std::int64_t kChunk = 128;

std::string attention_of(const Size& s, bool softmax) {
  return "attention { heads: " + std::to_string(s.heads) +
         " key_value_heads: " + std::to_string(s.key_heads) +
         " head_width: " + std::to_string(s.head_width) + (softmax ? " rope_theta: 100" : "") +
         " }";
}

std::unique_ptr<Layer> make(const Size& s, bool softmax, DType compute = DType::kF32) {
  return make_from_text(
      "linear", std::string(softmax ? "kind: GATED_SOFTMAX " : "") + attention_of(s, softmax),
      s.width, compute);
}

void expect_recurrence(const Size& s, std::int64_t sequences, std::int64_t length,
                       const std::vector<std::int64_t>& starts, DType compute, double slow) {
  SCOPED_TRACE(::testing::Message() << sequences << " x " << length << ", " << starts.size()
                                    << " documents, dt " << slow);
  const TestBatch batch(sequences, length, 2, starts);
  const auto layer = make(s, false, compute);
  LayerRun run(*layer, batch, s.width, compute);
  fill_parameter(run, "A_log", -slow / 2, 0.5);
  fill_parameter(run, "dt_bias", -slow, 0.5);
  const reference::LinearRecurrence plain = {sequences,   length,       s.width,       s.heads,
                                             s.key_heads, s.head_width, batch.segments};
  // bf16: projections, SiLU, dt v, scores, o, norm, mixed, output; the same again backward.
  const bool half = compute == DType::kBF16;
  expect_mixer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return plain.forward(x, p);
      },
      half ? 16 : 2 * s.width + 2 * s.heads * s.head_width + 2 * length,
      half ? kHalfEpsilon : kEpsilon);
}

TEST(Linear, AgreesWithFloat64AtEveryLength) {
  for (const std::int64_t length : {1, 2, 31, 33, 63, 65, 127, 128, 129, 257}) {
    expect_recurrence({5, 2, 1, 3}, 1, length, {0}, DType::kF32, 2.0);
  }
}

// More queries, and more keys, than one piece of their SiLU holds.
TEST(Linear, ManyHeadsAgreeWithFloat64) {
  const Size s = {2, 512, 256, 4};
  const TestBatch batch(1, 17, 2);
  const auto layer = make(s, false);
  LayerRun run(*layer, batch, s.width);
  fill_parameter(run, "A_log", -1.0, 0.5);
  fill_parameter(run, "dt_bias", -2.0, 0.5);
  run.forward();
  run.backward();
  const reference::LinearRecurrence plain = {1,           17,           s.width,       s.heads,
                                             s.key_heads, s.head_width, batch.segments};
  const std::vector<reference::Array> p = to_double(run.parameters);
  const reference::Array x = to_double(run.in()), d_out = to_double(run.d_out());
  const std::int64_t length = 2 * s.width + 2 * s.heads * s.head_width + std::int64_t{2} * 17;
  expect_close("out", run.out(), plain.forward(x, p), length);
  expect_gradient(
      "d_in", run.d_in(), x,
      [&](const reference::Array& at) { return reference::dot(plain.forward(at, p), d_out); },
      length);
}

// (Fast decays need outputs that aren't near 0, where the norm is too steep for finite
// differences.)
TEST(Linear, AgreesWithFloat64InDocuments) {
  expect_recurrence({9, 3, 3, 4}, 1, 300, {0, 129}, DType::kF32, -1.0);
  expect_recurrence(kSmall, 2, 141, {0, 1, 50, 127, 128, 130}, DType::kF32, 1.0);
  expect_recurrence(kSmall, 2, 141, {0, 1, 50, 127, 128, 130}, DType::kF32, 4.0);
}

TEST(Linear, AgreesWithFloat64InBFloat16) {
  for (const double slow : {-1.0, 4.0}) {
    expect_recurrence({20, 4, 2, 8}, 1, 141, {0, 33, 64, 130}, DType::kBF16, slow);
  }
}

// Softmax attention under the same gate and norm. Parameters: W_q, W_k, W_v, W_g, the norm's
// weight, W_o.
TEST(Linear, TheSoftmaxKindAgreesWithFloat64) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const Size s = {12, 4, 2, 8};
    const TestBatch batch(1, 45, 2, {0, 17});
    const auto layer = make(s, true, compute);
    LayerRun run(*layer, batch, s.width, compute);
    const std::int64_t wide = s.heads * s.head_width;
    const reference::Attention attention = {
        1, 45, s.heads, s.key_heads, s.head_width, 45, batch.segments};
    const bool half = compute == DType::kBF16;
    expect_mixer(
        run,
        [&](const reference::Array& x, const std::vector<reference::Array>& p) {
          reference::Array q = reference::linear(x, p[0], s.width, wide);
          const std::int64_t narrow = s.key_heads * s.head_width;
          reference::Array k = reference::linear(x, p[1], s.width, narrow);
          const reference::Array v = reference::linear(x, p[2], s.width, narrow);
          q = reference::rope(q, 45, s.heads, s.head_width, 100.0);
          k = reference::rope(k, 45, s.key_heads, s.head_width, 100.0);
          const reference::Array o = attention.forward(q, k, v);
          const reference::Array gate = reference::linear(x, p[3], s.width, wide);
          return reference::linear(
              reference::gated_norm(o, gate, p[4], wide, s.head_width, false, 1e-6), p[5], wide,
              s.width);
        },
        half ? 16 : 2 * s.width + 2 * wide + std::int64_t{2} * 45, half ? kHalfEpsilon : kEpsilon);
  }
}

class LinearKinds : public ::testing::TestWithParam<std::tuple<bool, DType>> {
 protected:
  void SetUp() override { layer_ = make({24, 4, 2, 8}, std::get<0>(GetParam()), compute()); }
  static DType compute() { return std::get<1>(GetParam()); }
  std::unique_ptr<Layer> layer_;
};
INSTANTIATE_TEST_SUITE_P(Both, LinearKinds,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::Values(DType::kF32, DType::kBF16)));

TEST_P(LinearKinds, B22_NoBitBeforeAChangedPositionMoves) {
  expect_causal(*layer_, 24, compute(), 257,
                {0, 1, 15, 16, 31, 63, 64, 65, 126, 127, 128, 129, 191, 192, 255, 256});
}
TEST_P(LinearKinds, B22_NothingCrossesADocumentsStart) {
  expect_documents_apart(*layer_, 24, compute(), 150, {1, 40, 63, 64, 65, 127, 128, 129});
}
TEST_P(LinearKinds, SameBitsForEveryNumberOfThreadsAndRows) {
  expect_same_bits(*layer_, 24, compute(), 270, {1, 7, 64, 127, 128, 129, 200});
}
TEST_P(LinearKinds, AStepAllocatesNothing) { expect_no_allocation(*layer_, 24, compute(), 150); }

TEST_P(LinearKinds, ExtremesStayFinite) {
  for (const float factor : {0.0F, 1e-20F, 1e4F}) {
    const TestBatch batch(1, 150, 1);
    LayerRun run(*layer_, batch, 24, compute());
    for (std::int64_t i = 0; i < run.in().count(); ++i) {
      if (compute() == DType::kF32) {
        run.in().as<float>()[i] *= factor;
      } else {
        run.in().as<BFloat16>()[i] = to_bfloat16(factor * to_float(run.in().as<BFloat16>()[i]));
      }
    }
    run.forward();
    run.backward();
    for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
  }
}

// Steps from 2e-22 to 50, rates up to e^8.
TEST(Linear, B23_ExtremeStepsAndRatesAreFiniteAndRight) {
  for (const double bias : {-50.0, 0.0, 50.0}) {
    for (const double a_log : {-8.0, 0.0, 8.0}) {
      SCOPED_TRACE(::testing::Message() << "dt_bias " << bias << " A_log " << a_log);
      const Size s = {6, 2, 1, 4};
      const TestBatch batch(1, 140, 2, {0, 50});
      const auto layer = make(s, false);
      LayerRun run(*layer, batch, s.width);
      fill_parameter(run, "A_log", a_log, 0.0);
      fill_parameter(run, "dt_bias", bias, 0.0);
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
      const reference::LinearRecurrence plain = {1, 140, 6, 2, 1, 4, batch.segments};
      expect_close("out", run.out(), plain.forward(to_double(run.in()), to_double(run.parameters)),
                   300);
    }
  }
}

TEST(Linear, FlagshipParametersAreThePapers) {
  EXPECT_EQ(parameter_count(*make(kFlagship, false)), 14712992);
  EXPECT_EQ(parameter_count(*make(kFlagship, true)), 14680192);
}

// Steps and decays are kept in f32 and don't decay; matrices do.
TEST(Linear, B23_RatesAndBiasesAreInFullPrecisionAndDontDecay) {
  for (const ParameterSpec& p : make(kFlagship, false)->parameters()) {
    EXPECT_EQ(p.decay, p.shape.rank() > 1) << p.name;
    EXPECT_EQ(p.full_precision, p.name == "A_log" || p.name == "dt_bias") << p.name;
  }
}

// The hand sheet, width 2048, H 16, Hk 4, dh 128. Projections (q, k, v, dt, gate, output):
// 2 * 2048 * (2048 + 512 + 512 + 16 + 2048 + 2048) = 29,425,664. Chunks of 128: 64.5 visible
// positions, 2 * 64.5 * 16 * (128 + 128) = 528,384; states 2 * 16 * 128 * 128 made by all chunks
// but the last and read by all but the first.
TEST(Linear, B36_FlopsAgreeWithTheHandSheet) {
  const auto layer = make(kFlagship, false);
  EXPECT_DOUBLE_EQ(layer->flops_per_token(4096),
                   29425664.0 + 528384.0 + 524288.0 * 2.0 * 3968.0 / 4096.0);
  EXPECT_DOUBLE_EQ(layer->flops_per_token(1), 29425664.0 + 2.0 * 16.0 * 256.0);
  EXPECT_NEAR(layer->flops_per_token(8192) / layer->flops_per_token(4096), 1.0, 0.001);
  // The softmax kind: no dt, full attention.
  EXPECT_DOUBLE_EQ(make(kFlagship, true)->flops_per_token(4096),
                   29425664.0 - 65536.0 + 8192.0 * 2048.5);
  const std::vector<LayerSize> sizes = layer->sizes();
  ASSERT_EQ(sizes.size(), 2U);
  EXPECT_EQ(sizes[0].name, "chunk");
  EXPECT_EQ(sizes[0].positions, kChunk);
  EXPECT_EQ(sizes[1].name, "tile");
}

TEST(Linear, WhatCantBeIsRefusedByName) {
  const auto expect_refusal = [](const std::string& text, const std::string& message) {
    try {
      make_from_text("linear", text, 8);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  const std::string heads = "attention { heads: 4 key_value_heads: 2 head_width: 4 ";
  expect_refusal(heads + "rope_theta: 10 }", "model.mixer[0].linear.attention.rope_theta");
  expect_refusal(heads + "query_key_norm: true }",
                 "model.mixer[0].linear.attention.query_key_norm");
  expect_refusal("attention { heads: 4 key_value_heads: 3 head_width: 4 }",
                 "model.mixer[0].linear.attention.key_value_heads: must divide heads");
  expect_refusal("attention { heads: 0 key_value_heads: 1 head_width: 4 }",
                 "model.mixer[0].linear.attention.heads");
  expect_refusal("kind: GATED_SOFTMAX attention { heads: 4 key_value_heads: 2 head_width: 5 }",
                 "model.mixer[0].linear.attention.head_width");
}

}  // namespace
}  // namespace tessera::testing
