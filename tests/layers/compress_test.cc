// The mixer compress, against float64 and finite differences; documents, causality, bits, counts.
#include "layers/mixers/compress/compress.h"

#include <google/protobuf/text_format.h>

#include "runtime/products.h"
#include "tests/layers/count_allocations.h"
#include "tests/layers/testing.h"
#include "tests/reference/compress.h"

namespace tessera::testing {
namespace {

struct CompressShape {
  std::int64_t width, heads, key_value_heads, head_width, block, stride, inner;
};
const CompressShape kSmall = {12, 4, 2, 6, 8, 4, 10};

std::string text_of(const CompressShape& s, std::int64_t length) {
  return "width: " + std::to_string(s.width) + " vocabulary: 8 length: " + std::to_string(length) +
         " feed_forward { width: 8 } mixer { compress { heads: " + std::to_string(s.heads) +
         " key_value_heads: " + std::to_string(s.key_value_heads) +
         " head_width: " + std::to_string(s.head_width) +
         " compression { block_length: " + std::to_string(s.block) +
         " block_stride: " + std::to_string(s.stride) + " inner_width: " + std::to_string(s.inner) +
         " } } }";
}

std::unique_ptr<Layer> make(const CompressShape& s, DType compute = DType::kF32) {
  const std::string text = text_of(s, 4096);
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return make_mixer("compress", {config, 0, 2, compute});
}
reference::CompressedMixer reference_of(const CompressShape& s, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {shape.batch,  shape.length,        s.width,       s.heads, s.key_value_heads,
          s.head_width, {s.block, s.stride}, batch.segments};
}

// Projections, phi (its two sums), scores, values, output; a token's gradient over its blocks.
std::int64_t sums(const CompressShape& s, std::int64_t length) {
  return 2 * s.width + 2 * s.heads * s.head_width + s.block * s.head_width + s.inner +
         2 * length / s.stride;
}

struct Case {
  std::int64_t batch, length;
  CompressShape shape;
  std::vector<std::int64_t> starts = {0};
};

TEST(Compress, AgreesWithFloat64) {
  const std::vector<Case> cases = {
      {1, 1, kSmall},
      {2, 7, kSmall},  // one short of a block
      {1, 12, kSmall},
      {2, 33, {7, 3, 1, 5, 8, 4, 3}, {0, 9}},
      {1, 61, {8, 2, 2, 4, 6, 6, 5}},            // blocks side by side
      {1, 47, {8, 4, 1, 4, 12, 3, 5}, {0, 20}},  // a token in four blocks
      {2, 65, {9, 4, 2, 4, 32, 16, 7}, {0, 3, 33}},
      {1, 21, {5, 2, 1, 40, 8, 4, 3}},   // a table wider than one piece of its gradient
      {1, 9, {4, 1, 1, 2, 1, 1, 2000}},  // more hidden values than one piece of their SiLU
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message() << c.batch << " x " << c.length << ", block " << c.shape.block
                                      << "/" << c.shape.stride);
    const TestBatch batch(c.batch, c.length, 2, c.starts);
    const auto layer = make(c.shape);
    LayerRun run(*layer, batch, c.shape.width);
    const reference::CompressedMixer mixer = reference_of(c.shape, batch);
    expect_layer(
        run,
        [&](const reference::Array& x, const std::vector<reference::Array>& p) {
          return mixer.forward(x, p);
        },
        sums(c.shape, c.length));
  }
}

// One block, which its last position takes whole: the gradients of queries and keys cancel
// altogether, and their terms are as large as those of the values.
TEST(Compress, OneBlockAgreesWithFloat64) {
  const TestBatch batch(1, 8, 1);
  const auto layer = make(kSmall);
  LayerRun run(*layer, batch, kSmall.width);
  run.forward();
  run.backward();
  const reference::CompressedMixer mixer = reference_of(kSmall, batch);
  const reference::Array x = to_double(run.in()), d_out = to_double(run.d_out());
  const std::vector<reference::Array> p = to_double(run.parameters);
  expect_close("out", run.out(), mixer.forward(x, p), sums(kSmall, 8));
  for (std::size_t i = 0; i < p.size(); ++i) {
    expect_gradient(
        layer->parameters()[i].name, run.d_parameters[i], p[i],
        [&](const reference::Array& at) {
          std::vector<reference::Array> moved = p;
          moved[i] = at;
          return reference::dot(mixer.forward(x, moved), d_out);
        },
        sums(kSmall, 8), largest(to_double(run.d_parameters[2])));
  }
}

// More blocks than a tile of the attention holds.
TEST(Compress, AgreesWithFloat64AcrossTiles) {
  const CompressShape shape = {4, 2, 1, 2, 4, 2, 3};
  const TestBatch batch(1, 300, 2, {0, 111});
  const auto layer = make(shape);
  LayerRun run(*layer, batch, shape.width);
  const reference::CompressedMixer mixer = reference_of(shape, batch);
  expect_layer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return mixer.forward(x, p);
      },
      sums(shape, 300));
}

TEST(Compress, InBFloat16AgreesWithFloat64) {
  const CompressShape shape = {20, 4, 2, 8, 8, 4, 12};
  const TestBatch batch(2, 75, 2, {0, 33});
  const auto layer = make(shape, DType::kBF16);
  LayerRun run(*layer, batch, shape.width, DType::kBF16);
  const reference::CompressedMixer mixer = reference_of(shape, batch);
  // Projection, positions, two products of phi, probabilities, output; the same again backward.
  expect_layer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return mixer.forward(x, p);
      },
      14, kHalfEpsilon);
}

TEST(Compress, APositionBeforeTheFirstBlocksEndSeesNothing) {
  const CompressShape shape = {9, 2, 1, 4, 32, 16, 7};
  const auto layer = make(shape);
  for (const std::int64_t length : {1, 31, 32, 50}) {
    const TestBatch batch(1, length, 1);
    LayerRun run(*layer, batch, shape.width);
    run.forward();
    run.backward();
    for (std::int64_t i = 0; i < run.out().count(); ++i) {
      const bool blind = i / shape.width < 31;
      EXPECT_EQ(run.out().as<float>()[i] == 0.0F, blind) << i;
    }
    for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
    if (length < 32) {
      for (const float value : run.results()) ASSERT_EQ(value, 0.0F);
    }
  }
}

// Blocks 16i..16i+31 that lie in both documents are seen by nobody; the first block of a document
// that starts at 50 is 64..95.
TEST(Compress, ABlockAcrossADocumentsStartIsSeenByNobody) {
  const CompressShape shape = {9, 2, 1, 4, 32, 16, 7};
  const auto layer = make(shape);
  const TestBatch batch(1, 130, 1, {0, 50});
  LayerRun run(*layer, batch, shape.width);
  run.forward();
  for (std::int64_t t = 31; t < 130; ++t) {
    EXPECT_EQ(run.out().as<float>()[t * shape.width] == 0.0F, t >= 50 && t < 95) << t;
  }
}

TEST(Compress, B22_NoBitBeforeAChangedPositionMoves) {
  const CompressShape shape = {12, 4, 2, 4, 32, 16, 7};
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto layer = make(shape, compute);
    const TestBatch batch(1, 257, 2);
    LayerRun run(*layer, batch, shape.width, compute);
    run.forward();
    const std::vector<float> before = values(run.out());
    for (const std::int64_t t :
         {0, 1, 14, 15, 16, 17, 30, 31, 32, 46, 47, 48, 63, 64, 95, 127, 128, 129, 255, 256}) {
      const std::int64_t bytes = shape.width * size_of(compute);
      std::byte* const row = run.in().raw() + t * bytes;
      const std::vector<std::byte> kept(row, row + bytes);
      const View changed(compute, {shape.width}, row);
      fill_normal(changed, "changed");
      run.forward();
      EXPECT_TRUE(same_bits(run.out().as<float>(), before.data(), t * shape.width)) << t;
      // What a block holds is seen from its last token on.
      const std::int64_t first = std::max<std::int64_t>((t - 16) / 16 * 16 + 31, t);
      if (t >= 31 && first < 240) {
        EXPECT_FALSE(same_bits(run.out().as<float>() + first * shape.width,
                               before.data() + first * shape.width, shape.width))
            << t;
      }
      std::copy(kept.begin(), kept.end(), row);
    }
  }
}

TEST(Compress, B22_NothingCrossesADocumentsStart) {
  const auto layer = make(kSmall);
  for (const std::int64_t start : {1, 4, 7, 8, 40, 63, 128}) {
    const TestBatch batch(1, 150, 2, {0, start});
    LayerRun run(*layer, batch, kSmall.width);
    run.forward();
    run.backward();
    const std::vector<float> out = values(run.out()), d_in = values(run.d_in());
    for (std::int64_t i = 0; i < start * kSmall.width; ++i) run.in().as<float>()[i] += 1.0F;
    run.forward();
    run.backward();
    const std::int64_t from = start * kSmall.width;
    const std::int64_t count = 150 * kSmall.width - from;
    EXPECT_TRUE(same_bits(run.out().as<float>() + from, out.data() + from, count)) << start;
    EXPECT_TRUE(same_bits(run.d_in().as<float>() + from, d_in.data() + from, count)) << start;
  }
}

TEST(Compress, SameBitsForEveryNumberOfThreadsAndRows) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto layer = make(kSmall, compute);
    std::vector<float> expected;
    for (const int threads : {1, 2, 3}) {
      const TestBatch batch(2, 587, threads, {0, 50});
      LayerRun run(*layer, batch, kSmall.width, compute);
      run.forward();
      run.backward();
      if (threads == 1) expected = run.results();
      EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
    }
    const TestBatch all_batch(1, 300, 2);
    LayerRun all(*layer, all_batch, kSmall.width, compute);
    all.forward();
    for (const std::int64_t length : {1, 7, 8, 64, 127, 128, 200}) {
      const TestBatch batch(2, length, 2);
      LayerRun run(*layer, batch, kSmall.width, compute);
      const std::int64_t bytes = length * kSmall.width * size_of(compute);
      for (const std::int64_t sequence : {0, 1}) {
        std::copy_n(all.in().raw(), bytes, run.in().raw() + sequence * bytes);
      }
      run.forward();
      for (const std::int64_t sequence : {0, 1}) {
        EXPECT_TRUE(same_bits(run.out().as<float>() + sequence * length * kSmall.width,
                              all.out().as<float>(), length * kSmall.width))
            << length;
      }
    }
  }
}

TEST(Compress, ExtremeInputsStayFinite) {
  for (const float factor : {0.0F, 1e-20F, 1e4F}) {
    const auto layer = make(kSmall);
    const TestBatch batch(1, 75, 1);
    LayerRun run(*layer, batch, kSmall.width);
    for (std::int64_t i = 0; i < run.in().count(); ++i) run.in().as<float>()[i] *= factor;
    run.forward();
    run.backward();
    for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
  }
}

TEST(Compress, AStepAllocatesNothing) {
  const auto layer = make(kSmall);
  const TestBatch batch(2, 150, 2, {0, 40});
  LayerRun run(*layer, batch, kSmall.width);
  const auto step = [&] {
    run.forward();
    run.backward();
  };
  step();
  EXPECT_EQ(count_allocations(step), 0);
}

TEST(Compress, FlagshipParametersAreThePapers) {
  const auto layer = make({2048, 16, 4, 128, 32, 16, 192});
  std::int64_t count = 0;
  for (const ParameterSpec& parameter : layer->parameters()) {
    count += parameter.shape.count();
    const bool table = parameter.name.find("position") != std::string::npos;
    EXPECT_EQ(parameter.decay, !table) << parameter.name;
  }
  EXPECT_EQ(count, 12115968);
}

// The hand sheet: projections 2 * 2048 * (2048 + 512 + 512 + 2048) = 20,971,520 a token; phi, for
// each of 255 blocks of 4 heads, keys and values, 2 * (4096 * 192 + 192 * 128); attention 4 * 2048
// for each visible block: 16 positions see 1, 16 see 2, ..., the last one of 4065 sees 255.
TEST(Compress, B36_FlopsAgreeWithTheHandSheet) {
  const auto layer = make({2048, 16, 4, 128, 32, 16, 192});
  const double phi = 255.0 * 4 * 2 * 2 * (4096.0 * 192 + 192 * 128);
  const double seen = 16.0 * (254.0 * 255 / 2) + 255;
  EXPECT_DOUBLE_EQ(layer->flops_per_token(4096), 20971520.0 + (phi + 8192.0 * seen) / 4096);
  EXPECT_DOUBLE_EQ(layer->flops_per_token(31), 20971520.0);
}

TEST(Compress, ReportsItsSizes) {
  std::vector<std::int64_t> sizes;
  for (const LayerSize& size : make({2048, 16, 4, 128, 32, 16, 192})->sizes()) {
    sizes.push_back(size.positions);
  }
  EXPECT_EQ(sizes, (std::vector<std::int64_t>{16, 32, 128}));
}

TEST(Compress, RefusesWhatCantBe) {
  const auto refusal = [](CompressShape shape) -> std::string {
    try {
      make(shape);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return error.what();
    }
    return "";
  };
  const std::string path = "model.mixer[0].compress.";
  EXPECT_EQ(refusal({8, 4, 3, 4, 8, 4, 2}),
            path + "key_value_heads: must divide heads, which is 4, is 3");
  EXPECT_EQ(refusal({8, 0, 1, 4, 8, 4, 2}), path + "heads: must be at least 1, is 0");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 3, 2}),
            path + "compression.block_stride: must divide block_length, which is 8, is 3");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 16, 2}),
            path + "compression.block_stride: must be at most 8, is 16");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 4, 0}),
            path + "compression.inner_width: must be at least 1, is 0");
}

}  // namespace
}  // namespace tessera::testing
