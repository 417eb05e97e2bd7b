// The mixers full and sliding, with and without the norm of queries and keys.
#include "layers/mixers/mixers.h"

#include <google/protobuf/text_format.h>

#include "tests/layers/testing.h"
#include "tests/reference/model.h"

namespace tessera::testing {
namespace {

ModelConfig config_of(const std::string& text) {
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return config;
}

struct Shape4 {
  std::int64_t width, heads, key_value_heads, head_width;
};

// window 0: full.
std::unique_ptr<Layer> make(const Shape4& s, std::int64_t window, bool norm,
                            std::int64_t length = 512) {
  const std::string attention = "heads: " + std::to_string(s.heads) +
                                " key_value_heads: " + std::to_string(s.key_value_heads) +
                                " head_width: " + std::to_string(s.head_width) +
                                " rope_theta: 100 query_key_norm: " + (norm ? "true" : "false");
  const ModelConfig config = config_of(
      "width: " + std::to_string(s.width) + " vocabulary: 8 length: " + std::to_string(length) +
      " feed_forward { width: 8 } mixer { " +
      (window == 0
           ? "full { " + attention + " }"
           : "sliding { window: " + std::to_string(window) + " attention { " + attention + " } }") +
      " }");
  return make_mixer(window == 0 ? "full" : "sliding", {config, 0, 2});
}

reference::AttentionMixer reference_of(const Shape4& s, std::int64_t window, bool norm,
                                       const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {{shape.batch, shape.length, s.heads, s.key_value_heads, s.head_width,
           window == 0 ? shape.length : window, batch.segments},
          s.width,
          100.0,
          norm};
}

struct Kind {
  std::int64_t window;
  bool norm;
};
const std::vector<Kind> kKinds = {{0, false}, {0, true}, {37, false}, {70, true}};

TEST(Mixers, AgreeWithFloat64) {
  struct Case {
    std::int64_t batch, length;
    Shape4 shape;
    std::vector<std::int64_t> starts;
  };
  const std::vector<Case> cases = {{1, 1, {5, 1, 1, 2}, {0}},
                                   {2, 13, {7, 4, 2, 6}, {0, 5}},
                                   {1, 67, {12, 3, 1, 4}, {0}},
                                   {2, 101, {9, 4, 2, 8}, {0, 33, 64, 99}}};
  for (const Case& c : cases) {
    for (const Kind& kind : kKinds) {
      SCOPED_TRACE(::testing::Message() << c.batch << " x " << c.length << ", window "
                                        << kind.window << ", norm " << kind.norm);
      const TestBatch batch(c.batch, c.length, 2, c.starts);
      const auto layer = make(c.shape, kind.window, kind.norm);
      LayerRun run(*layer, batch, c.shape.width);
      const reference::AttentionMixer mixer = reference_of(c.shape, kind.window, kind.norm, batch);
      expect_layer(
          run,
          [&](const reference::Array& x, const std::vector<reference::Array>& p) {
            return mixer.forward(x, p);
          },
          2 * c.shape.width + 2 * c.shape.heads * c.shape.head_width + 2 * c.length);
    }
  }
}

// Changing position t moves no bit before it.
TEST(Mixers, B22_NoBitBeforeAChangedPositionMoves) {
  const Shape4 shape = {24, 4, 2, 8};
  constexpr std::int64_t kLength = 257;
  for (const Kind& kind : kKinds) {
    const auto layer = make(shape, kind.window, kind.norm);
    const TestBatch batch(1, kLength, 2);
    LayerRun run(*layer, batch, shape.width);
    run.forward();
    const std::vector<float> before = values(run.out());
    for (const std::int64_t t :
         {0, 1, 15, 16, 36, 37, 38, 63, 64, 65, 70, 71, 127, 128, 129, 191, 192, 200, 255, 256}) {
      float* const row = run.in().as<float>() + t * shape.width;
      const std::vector<float> kept(row, row + shape.width);
      for (std::int64_t i = 0; i < shape.width; ++i) row[i] = 3.0F - 2.0F * row[i];
      run.forward();
      EXPECT_TRUE(same_bits(run.out().as<float>(), before.data(), t * shape.width)) << t;
      EXPECT_FALSE(same_bits(run.out().as<float>() + t * shape.width,
                             before.data() + t * shape.width, shape.width))
          << t;
      // Nor one that lies a window or more behind it.
      if (kind.window > 0 && t + kind.window < kLength) {
        const std::int64_t from = (t + kind.window) * shape.width;
        EXPECT_TRUE(same_bits(run.out().as<float>() + from, before.data() + from,
                              kLength * shape.width - from))
            << t;
      }
      std::copy(kept.begin(), kept.end(), row);
    }
  }
}

TEST(Mixers, B22_NothingCrossesADocumentsStart) {
  const Shape4 shape = {24, 4, 2, 8};
  for (const Kind& kind : kKinds) {
    for (const std::int64_t start : {1, 40, 63, 64, 65, 128}) {
      const auto layer = make(shape, kind.window, kind.norm);
      const TestBatch batch(1, 150, 2, {0, start});
      LayerRun run(*layer, batch, shape.width);
      run.forward();
      run.backward();
      const std::vector<float> out = values(run.out()), d_in = values(run.d_in());
      // The first document's last token changes: the second one doesn't move.
      float* const row = run.in().as<float>() + (start - 1) * shape.width;
      for (std::int64_t i = 0; i < shape.width; ++i) row[i] += 1.0F;
      run.forward();
      run.backward();
      const std::int64_t from = start * shape.width;
      const std::int64_t count = 150 * shape.width - from;
      EXPECT_TRUE(same_bits(run.out().as<float>() + from, out.data() + from, count)) << start;
      EXPECT_TRUE(same_bits(run.d_in().as<float>() + from, d_in.data() + from, count)) << start;
      EXPECT_FALSE(same_bits(run.out().as<float>(), out.data(), from)) << start;
      for (std::int64_t i = 0; i < shape.width; ++i) row[i] -= 1.0F;
    }
  }
}

TEST(Mixers, SameBitsForEveryNumberOfThreads) {
  const Shape4 shape = {48, 4, 2, 16};
  for (const Kind& kind : kKinds) {
    const auto layer = make(shape, kind.window, kind.norm);
    std::vector<float> expected;
    for (const int threads : {1, 2, 3}) {
      const TestBatch batch(2, 187, threads, {0, 50});
      LayerRun run(*layer, batch, shape.width);
      run.forward();
      run.backward();
      if (threads == 1) expected = run.results();
      EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
    }
  }
}

// A row's bits for every M: neither the length nor the number of sequences moves them.
TEST(Mixers, ARowsBitsDontDependOnTheNumberOfRows) {
  const Shape4 shape = {40, 4, 2, 12};
  for (const Kind& kind : kKinds) {
    const auto layer = make(shape, kind.window, kind.norm);
    const TestBatch all_batch(1, 300, 2);
    LayerRun all(*layer, all_batch, shape.width);
    all.forward();
    for (const std::int64_t length : {1, 7, 64, 65, 127, 128, 200}) {
      const TestBatch batch(2, length, 2);
      LayerRun run(*layer, batch, shape.width);
      for (const std::int64_t sequence : {0, 1}) {
        std::copy_n(all.in().as<float>(), length * shape.width,
                    run.in().as<float>() + sequence * length * shape.width);
      }
      run.forward();
      for (const std::int64_t sequence : {0, 1}) {
        EXPECT_TRUE(same_bits(run.out().as<float>() + sequence * length * shape.width,
                              all.out().as<float>(), length * shape.width))
            << length;
      }
    }
  }
}

TEST(Mixers, ExtremeInputsStayFinite) {
  const Shape4 shape = {16, 2, 1, 8};
  for (const Kind& kind : kKinds) {
    for (const float factor : {0.0F, 1e-20F, 1e4F}) {
      const auto layer = make(shape, kind.window, kind.norm);
      const TestBatch batch(1, 75, 1);
      LayerRun run(*layer, batch, shape.width);
      for (std::int64_t i = 0; i < run.in().count(); ++i) run.in().as<float>()[i] *= factor;
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
    }
  }
}

// The hand sheet: width 2048, 16 query and 4 key/value heads of 128. Projections: 2 * 2048 * (2048
// + 2 * 512 + 2048) = 20,971,520; attention: 4 * 2048 for every visible key.
TEST(Mixers, B36_FlopsAgreeWithTheHandSheet) {
  const Shape4 flagship = {2048, 16, 4, 128};
  const auto full = make(flagship, 0, false, 8192);
  const auto sliding = make(flagship, 128, false, 8192);
  EXPECT_DOUBLE_EQ(full->flops_per_token(4096), 20971520.0 + 8192.0 * 2048.5);
  // 127 positions see 1..127 keys, the other 3969 see 128.
  EXPECT_DOUBLE_EQ(sliding->flops_per_token(4096),
                   20971520.0 + 8192.0 * (127.0 * 64.0 + 3969.0 * 128.0) / 4096.0);
  EXPECT_DOUBLE_EQ(full->flops_per_token(1), 20971520.0 + 8192.0);
  // Twice the length: sliding's cost stays, full's attention doubles.
  EXPECT_NEAR(sliding->flops_per_token(8192) / sliding->flops_per_token(4096), 1.0, 0.002);
  EXPECT_NEAR(
      (full->flops_per_token(8192) - 20971520.0) / (full->flops_per_token(4096) - 20971520.0), 2.0,
      0.001);
}

TEST(Mixers, ReportTheirSizes) {
  const auto sizes = [](std::int64_t window) {
    std::vector<std::pair<std::string, std::int64_t>> list;
    for (const LayerSize& size : make({8, 2, 1, 4}, window, false)->sizes()) {
      list.emplace_back(size.name, size.positions);
    }
    return list;
  };
  using List = std::vector<std::pair<std::string, std::int64_t>>;
  EXPECT_EQ(sizes(0), (List{{"tile", 128}}));
  EXPECT_EQ(sizes(37), (List{{"tile", 128}, {"window", 37}}));
}

// Every type with a small configuration.
std::vector<std::pair<std::string, std::string>> all_types() {
  const std::string heads = "heads: 4 key_value_heads: 2 head_width: 8 ";
  const std::string attention = "attention { " + heads + "} ";
  const std::string compression = "compression { block_length: 8 block_stride: 4 inner_width: 6 } ";
  const std::string nsa =
      attention + compression + "selected_block_length: 16 selected_blocks: 4 window: 8 ";
  return {{"full", heads},
          {"sliding", "window: 20 " + attention},
          {"differential", attention},
          {"linear", attention},
          {"mamba2", "expand: 2 head_width: 8 state_width: 4 groups: 1"},
          {"nsa", nsa},
          {"compress", heads + compression},
          {"hybrid", "nsa { " + nsa + "} differential { " + attention + "}"}};
}
std::unique_ptr<Layer> make_type(const std::string& type, const std::string& text) {
  const ModelConfig config = config_of(
      "width: 24 vocabulary: 8 length: 512 init_deviation: 0.5 feed_forward { width: 8 } "
      "mixer { " +
      type + " { " + text + " } }");
  return make_mixer(type, {config, 0, 2});
}

// Each sequence has documents of its own: its bits are those that it has alone.
TEST(Mixers, B22_SequencesKeepTheirOwnDocuments) {
  constexpr std::int64_t kLength = 280;
  const std::vector<std::vector<std::int64_t>> starts = {{0, 70, 256}, {0, 33, 150}, {0}};
  for (const auto& [type, text] : all_types()) {
    const auto layer = make_type(type, text);
    const auto sequences = static_cast<std::int64_t>(starts.size());
    TestBatch together(sequences, kLength, 2);
    LayerRun all(*layer, together, 24);
    for (std::int64_t s = 0; s < sequences; ++s) {
      const TestBatch own(1, kLength, 1, starts[static_cast<std::size_t>(s)]);
      std::copy(own.segments.begin(), own.segments.end(), together.segments.begin() + s * kLength);
    }
    all.forward();
    all.backward();
    for (std::int64_t s = 0; s < sequences; ++s) {
      SCOPED_TRACE(type + ", sequence " + std::to_string(s));
      const TestBatch own(1, kLength, 2, starts[static_cast<std::size_t>(s)]);
      LayerRun alone(*layer, own, 24);
      const std::int64_t from = s * kLength * 24, count = kLength * 24;
      std::copy_n(all.in().as<float>() + from, count, alone.in().as<float>());
      std::copy_n(all.d_out().as<float>() + from, count, alone.d_out().as<float>());
      alone.forward();
      alone.backward();
      EXPECT_TRUE(same_bits(alone.out().as<float>(), all.out().as<float>() + from, count));
      EXPECT_TRUE(same_bits(alone.d_in().as<float>(), all.d_in().as<float>() + from, count));
    }
  }
}

// How the parameters start: matrices and tables of positions normal, the output's with what the
// depth leaves, norms 1, biases 0. Matrices alone decay.
TEST(Mixers, ParametersStartAndDecayByTheirKind) {
  ASSERT_EQ(all_types().size(), mixer_types().size());
  for (const auto& [type, text] : all_types()) {
    const std::vector<ParameterSpec> specs = make_type(type, text)->parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const ParameterSpec& p = specs[i];
      SCOPED_TRACE(type + " " + p.name);
      const bool table = p.name.ends_with("position");
      EXPECT_EQ(p.decay, p.shape.rank() > 1 && !table);
      if (p.shape.rank() > 1 && !p.name.starts_with("conv1d")) {
        EXPECT_EQ(p.init.kind, Init::Kind::kNormal);
        EXPECT_EQ(p.init.scale, i + 1 == specs.size() ? 0.25 : 0.5);  // 0.5 / sqrt(2 * 2 layers)
      } else if (p.name.ends_with("norm.weight") || p.name == "conv1d.bias") {
        EXPECT_EQ(p.init.kind, Init::Kind::kConstant);
        EXPECT_EQ(p.init.scale, p.name == "conv1d.bias" ? 0.0 : 1.0);
      }
    }
  }
}

TEST(Mixers, FlagshipParametersAreThePapers) {
  for (const std::int64_t window : {0, 512}) {
    const auto layer = make({2048, 16, 4, 128}, window, false);
    std::int64_t count = 0;
    for (const ParameterSpec& parameter : layer->parameters()) count += parameter.shape.count();
    EXPECT_EQ(count, 10485760);
  }
}

}  // namespace
}  // namespace tessera::testing
