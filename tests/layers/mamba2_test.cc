#include "tests/reference/mamba2.h"

#include "tests/layers/mixer_checks.h"

namespace tessera::testing {
namespace {

struct Size {
  std::int64_t width, expand, head_width, state_width, groups;
  std::int64_t heads() const { return width * expand / head_width; }
};

std::unique_ptr<Layer> make(const Size& s, DType compute = DType::kF32) {
  return make_from_text(
      "mamba2",
      "expand: " + std::to_string(s.expand) + " head_width: " + std::to_string(s.head_width) +
          " state_width: " + std::to_string(s.state_width) + " groups: " + std::to_string(s.groups),
      s.width, compute);
}

reference::Mamba2 plain_of(const Size& s, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {shape.batch,  shape.length, s.width,       s.heads(),
          s.head_width, s.groups,     s.state_width, batch.segments};
}

void expect_mamba2(const Size& s, std::int64_t sequences, std::int64_t length,
                   const std::vector<std::int64_t>& starts, DType compute, double slow) {
  SCOPED_TRACE(::testing::Message() << sequences << " x " << length << ", " << starts.size()
                                    << " documents, dt " << slow);
  const TestBatch batch(sequences, length, 2, starts);
  const auto layer = make(s, compute);
  LayerRun run(*layer, batch, s.width, compute);
  fill_parameter(run, "A_log", -slow / 2, 0.5);
  fill_parameter(run, "dt_bias", -slow, 0.5);
  const reference::Mamba2 plain = plain_of(s, batch);
  // bf16: projection, convolution, dt x, scores, y, norm, output; the same again backward.
  const bool half = compute == DType::kBF16;
  expect_mixer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return plain.forward(x, p);
      },
      half ? 16 : 2 * s.width * (1 + s.expand) + 2 * length, half ? kHalfEpsilon : kEpsilon);
}

TEST(Mamba2, AgreesWithFloat64AtEveryLength) {
  for (const std::int64_t length : {1, 2, 3, 4, 5, 31, 33, 63, 64, 65, 255, 256, 257}) {
    expect_mamba2({4, 2, 4, 3, 1}, 1, length, {0}, DType::kF32, 2.0);
  }
}

TEST(Mamba2, AgreesWithFloat64InDocuments) {
  expect_mamba2({6, 2, 4, 5, 1}, 1, 141, {0, 1, 2, 50, 127, 128}, DType::kF32, -1.0);
  expect_mamba2({6, 2, 4, 5, 1}, 2, 70, {0, 1, 2, 33, 63, 64}, DType::kF32, 4.0);
  expect_mamba2({4, 2, 2, 3, 2}, 1, 300, {0, 129, 255}, DType::kF32, 1.0);
  expect_mamba2({4, 2, 1, 4, 2}, 1, 270, {0, 256, 257}, DType::kF32, 4.0);
}

TEST(Mamba2, AgreesWithFloat64InBFloat16) {
  for (const double slow : {-1.0, 4.0}) {
    expect_mamba2({8, 2, 8, 8, 2}, 1, 141, {0, 33, 64, 130}, DType::kBF16, slow);
  }
  expect_mamba2({8, 2, 4, 8, 1}, 1, 300, {0, 100}, DType::kBF16, 2.0);
}

class Mamba2Types : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override { layer_ = make({24, 2, 8, 16, 2}, GetParam()); }
  std::unique_ptr<Layer> layer_;
};
INSTANTIATE_TEST_SUITE_P(Both, Mamba2Types, ::testing::Values(DType::kF32, DType::kBF16));

// At the first chunk's end above all: a published scan over the wrong axis leaked exactly there.
TEST_P(Mamba2Types, B22_NoBitBeforeAChangedPositionMoves) {
  expect_causal(*layer_, 24, GetParam(), 770,
                {0, 1, 3, 4, 63, 64, 65, 255, 256, 257, 319, 320, 511, 512, 513, 767, 768, 769});
}
TEST_P(Mamba2Types, B22_NothingCrossesADocumentsStart) {
  expect_documents_apart(*layer_, 24, GetParam(), 300,
                         {1, 2, 3, 4, 63, 64, 65, 128, 254, 255, 256, 257, 258});
}
TEST_P(Mamba2Types, SameBitsForEveryNumberOfThreadsAndRows) {
  expect_same_bits(*layer_, 24, GetParam(), 520, {1, 3, 64, 255, 256, 257});
}
TEST_P(Mamba2Types, AStepAllocatesNothing) { expect_no_allocation(*layer_, 24, GetParam(), 300); }

// A token far away is still seen: the states are carried, not only the chunks' own sums.
TEST(Mamba2, AFarTokenIsSeen) {
  const auto layer = make({8, 2, 4, 4, 1});
  const TestBatch batch(1, 700, 2);
  LayerRun run(*layer, batch, 8), moved(*layer, batch, 8);
  for (LayerRun* each : {&run, &moved}) {
    fill_parameter(*each, "A_log", -3.0, 0.0);
    fill_parameter(*each, "dt_bias", -4.0, 0.0);
  }
  change_row(moved.in(), 3);
  run.forward();
  moved.forward();
  EXPECT_FALSE(same_bits(run.out().as<float>() + std::int64_t{699} * 8,
                         moved.out().as<float>() + std::int64_t{699} * 8, 8));
}

TEST_P(Mamba2Types, ExtremeInputsStayFinite) {
  for (const float factor : {0.0F, 1e-20F, 1e4F}) {
    const TestBatch batch(1, 300, 1);
    LayerRun run(*layer_, batch, 24, GetParam());
    for (std::int64_t i = 0; i < run.in().count(); ++i) {
      if (GetParam() == DType::kF32) {
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

// Steps from 2e-22 to 50, rates up to e^8, over a chunk's edge.
TEST(Mamba2, B23_ExtremeStepsAndRatesAreFiniteAndRight) {
  for (const double bias : {-50.0, 0.0, 50.0}) {
    for (const double a_log : {-8.0, 0.0, 8.0}) {
      SCOPED_TRACE(::testing::Message() << "dt_bias " << bias << " A_log " << a_log);
      const Size s = {6, 2, 4, 4, 1};
      const TestBatch batch(1, 270, 2, {0, 50});
      const auto layer = make(s);
      LayerRun run(*layer, batch, s.width);
      fill_parameter(run, "A_log", a_log, 0.0);
      fill_parameter(run, "dt_bias", bias, 0.0);
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
      expect_close("out", run.out(),
                   plain_of(s, batch).forward(to_double(run.in()), to_double(run.parameters)), 600);
    }
  }
}

TEST(Mamba2, FlagshipParametersAreThePapers) {
  EXPECT_EQ(parameter_count(*make({2048, 2, 64, 128, 1})), 25847232);
}

TEST(Mamba2, B23_RatesAndBiasesAreInFullPrecisionAndDontDecay) {
  const auto layer = make({2048, 2, 64, 128, 1});
  for (const ParameterSpec& p : layer->parameters()) {
    EXPECT_EQ(p.decay, p.shape.rank() > 1) << p.name;
    EXPECT_EQ(p.full_precision, p.name == "A_log" || p.name == "dt_bias" || p.name == "D")
        << p.name;
    if (p.name == "D") {
      EXPECT_EQ(p.init.kind, Init::Kind::kConstant);
      EXPECT_EQ(p.init.scale, 1.0);
    }
    if (p.name == "conv1d.weight") {
      EXPECT_EQ(p.init.kind, Init::Kind::kUniform);
      EXPECT_EQ(p.init.scale, 0.5);
    }
  }
  EXPECT_EQ(layer->parameters().back().name, "out_proj.weight");
}

// The hand sheet, width 2048: in_proj 2 * 2048 * 8512 = 34,865,152, out_proj 2 * 4096 * 2048 =
// 16,777,216, convolution 2 * 4 * 4352 = 34,816. Chunks of 256: 128.5 visible positions,
// 2 * 128.5 * (128 + 4096) = 1,085,568; states 2 * 64 * 128 * 64 = 1,048,576 made by all chunks but
// the last and read by all but the first.
TEST(Mamba2, B36_FlopsAgreeWithTheHandSheet) {
  const auto layer = make({2048, 2, 64, 128, 1});
  EXPECT_DOUBLE_EQ(layer->flops_per_token(4096), 34865152.0 + 16777216.0 + 34816.0 + 1085568.0 +
                                                     1048576.0 * 2.0 * 3840.0 / 4096.0);
  EXPECT_NEAR(layer->flops_per_token(8192) / layer->flops_per_token(4096), 1.0, 0.002);
  const std::vector<LayerSize> sizes = layer->sizes();
  ASSERT_EQ(sizes.size(), 3U);
  EXPECT_EQ(sizes[0].name, "chunk");
  EXPECT_EQ(sizes[0].positions, 256);
  EXPECT_EQ(sizes[2].name, "taps");
  EXPECT_EQ(sizes[2].positions, 4);
}

TEST(Mamba2, WhatCantBeIsRefusedByName) {
  const auto expect_refusal = [](const std::string& text, const std::string& message) {
    try {
      make_from_text("mamba2", text, 12);
      ADD_FAILURE() << text;
    } catch (const Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  };
  expect_refusal("", "model.mixer[0].mamba2.head_width: must divide the inner width, which is 24");
  expect_refusal("head_width: 4 groups: 4",
                 "model.mixer[0].mamba2.groups: must divide the number of heads, which is 6");
  expect_refusal("head_width: 4 groups: 7", "model.mixer[0].mamba2.groups");
  expect_refusal("head_width: 4 state_width: 0", "model.mixer[0].mamba2.state_width");
  expect_refusal("head_width: 4 expand: 0", "model.mixer[0].mamba2.expand");
}

}  // namespace
}  // namespace tessera::testing
