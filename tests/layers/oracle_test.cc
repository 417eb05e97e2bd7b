// The layers against values that PyTorch computed in float64 (tests/oracle/make_layers.py), forward
// and every gradient.
#include "tests/layers/oracle.h"

#include <google/protobuf/text_format.h>

#include "layers/mixers/mixers.h"
#include "layers/rms_norm/rms_norm.h"
#include "layers/swiglu/swiglu.h"

namespace tessera::testing {
namespace {

using Json = nlohmann::json;

void expect_layer(const Json& stored, const Layer& layer, const TestBatch& batch,
                  std::int64_t width, std::int64_t length) {
  LayerRun run(layer, batch, width);
  const std::vector<ParameterSpec> specs = layer.parameters();
  fill(run.in(), stored["inputs"]["x"]);
  fill(run.d_out(), stored["d_out"]);
  ASSERT_EQ(stored["inputs"].size(), specs.size() + 1);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    fill(run.parameters[i], stored["inputs"].at(specs[i].name));
  }
  run.forward();
  run.backward();
  expect_close("out", run.out(), array_of(stored["out"]), length);
  expect_close("d_in", run.d_in(), array_of(stored["gradients"]["x"]), length);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    expect_close("d_" + specs[i].name, run.d_parameters[i],
                 array_of(stored["gradients"].at(specs[i].name)),
                 length + batch.batch.shape.rows());
  }
}

TEST(Oracle, RmsNorm) {
  const Json stored = read_oracle("rms_norm");
  const std::int64_t rows = stored["settings"]["rows"], d = stored["settings"]["width"];
  Queue queue(1);
  Buffers b({{"x", DType::kF32, {rows, d}},
             {"weight", DType::kF32, {d}},
             {"y", DType::kF32, {rows, d}},
             {"inverse", DType::kF32, {rows}},
             {"d_y", DType::kF32, {rows, d}},
             {"d_x", DType::kF32, {rows, d}},
             {"partial", DType::kF32, {rms_norm_blocks(rows), d}},
             {"d_weight", DType::kF32, {d}}});
  fill(b[0], stored["inputs"]["x"]);
  fill(b[1], stored["inputs"]["weight"]);
  fill(b[4], stored["d_out"]);
  rms_norm(queue, b[0], b[1], 1e-6, b[2], b[3]);
  rms_norm_backward(queue, b[0], b[1], b[3], b[4], b[5], false, b[6]);
  rms_norm_weight_gradient(queue, b[6], b[7]);
  expect_close("y", b[2], array_of(stored["out"]), 8);
  expect_close("d_x", b[5], array_of(stored["gradients"]["x"]), 8);
  expect_close("d_weight", b[7], array_of(stored["gradients"]["weight"]), 8 + rows);
}

TEST(Oracle, SwiGlu) {
  const Json stored = read_oracle("swiglu");
  const Json& s = stored["settings"];
  const std::int64_t width = s["width"], inner = s["inner"];
  const TestBatch batch(s["batch"], s["length"], 2);
  expect_layer(stored, SwiGlu(width, inner, 0.02, 0.02), batch, width, 2 * width + 2 * inner);
}

void expect_mixer(const std::string& name) {
  const Json stored = read_oracle(name);
  const Json& s = stored["settings"];
  const std::int64_t width = s["width"], window = s["window"], length = s["length"];
  ModelConfig config;
  config.set_width(width);
  config.set_length(length);
  MixerConfig& mixer = *config.add_mixer();
  AttentionConfig& attention =
      window == 0 ? *mixer.mutable_full() : *mixer.mutable_sliding()->mutable_attention();
  if (window > 0) mixer.mutable_sliding()->set_window(window);
  attention.set_heads(s["heads"]);
  attention.set_key_value_heads(s["key_value_heads"]);
  attention.set_head_width(s["head_width"]);
  attention.set_rope_theta(s["theta"]);
  attention.set_query_key_norm(s["norm"]);
  const auto layer = make_mixer(window == 0 ? "full" : "sliding", {config, 0, 1});
  const TestBatch batch(s["batch"], length, 2, s["starts"]);
  expect_layer(stored, *layer, batch, width,
               2 * width + 2 * attention.heads() * attention.head_width() + 2 * length);
}

TEST(Oracle, Full) { expect_mixer("full"); }
TEST(Oracle, FullWithNormAndDocuments) { expect_mixer("full_norm_documents"); }
TEST(Oracle, SlidingWithDocuments) { expect_mixer("sliding"); }
TEST(Oracle, SlidingOverSeveralTiles) { expect_mixer("sliding_long"); }

// A mixer whose settings hold its configuration as text.
void expect_configured(const std::string& name, std::int64_t length) {
  const Json stored = read_oracle(name);
  const Json& s = stored["settings"];
  ModelConfig config;
  config.set_width(s["width"]);
  config.set_length(s["length"]);
  ASSERT_TRUE(google::protobuf::TextFormat::ParseFromString(s["mixer"].get<std::string>(),
                                                            config.add_mixer()));
  const auto layer = make_mixer(s["type"], {config, 0, 1});
  const TestBatch batch(s["batch"], s["length"], 2, s["starts"]);
  expect_layer(stored, *layer, batch, config.width(), length);
}

// Lengths of sums: projections, phi, keys that a position sees and queries that see a key.
TEST(Oracle, Compress) { expect_configured("compress", 12 + 32 + 128 + 10 + 131); }
TEST(Oracle, NsaOfFlasParts) { expect_configured("nsa_fla", 12 + 32 + 64 + 10 + 160); }
TEST(Oracle, NsaOverlappingBlocksAndDocuments) {
  expect_configured("nsa", 8 + 16 + 128 + 10 + 1280);
}

TEST(Oracle, EmbeddingHeadAndCrossEntropy) {
  const Json stored = read_oracle("ends");
  const Json& s = stored["settings"];
  const std::int64_t width = s["width"], vocabulary = s["vocabulary"];
  TestBatch batch(s["batch"], s["length"], 2);
  std::copy_n(s["tokens"].get<std::vector<std::uint32_t>>().begin(), batch.tokens.size(),
              batch.tokens.begin());
  std::copy_n(s["labels"].get<std::vector<std::int32_t>>().begin(), batch.labels.size(),
              batch.labels.begin());
  ModelConfig config;
  config.set_width(width);
  config.set_vocabulary(vocabulary);
  const Embedding embedding(config);
  const Head head(config);
  Queue queue(2);
  const BatchShape shape = batch.batch.shape;
  Buffers embedding_p(embedding.parameters()), d_embedding(embedding.parameters());
  Buffers head_p(head.parameters()), d_head(head.parameters());
  Buffers scratch(head.scratch(shape)), embedding_scratch(embedding.scratch(shape));
  Buffers rows(
      {{"x", DType::kF32, {shape.rows(), width}}, {"d_x", DType::kF32, {shape.rows(), width}}});
  fill(embedding_p[0], stored["inputs"]["embedding"]);
  fill(head_p[0], stored["inputs"]["norm"]);
  fill(head_p[1], stored["inputs"]["lm_head"]);
  embedding.forward(queue, batch.batch, embedding_p.views(), rows[0]);
  const double loss = head.loss_and_gradient(queue, batch.batch, rows[0], 1.0, rows[1],
                                             head_p.views(), d_head.views(), scratch.views());
  embedding.backward(queue, batch.batch, rows[1], d_embedding.views(), embedding_scratch.views());
  const std::int64_t length = width + vocabulary + shape.rows();
  EXPECT_NEAR(loss, array_of(stored["out"])[0],
              tolerance(4.0 * static_cast<double>(shape.rows()), width));
  expect_close("d_embedding", d_embedding[0], array_of(stored["gradients"]["embedding"]), length);
  expect_close("d_norm", d_head[0], array_of(stored["gradients"]["norm"]), length);
  expect_close("d_lm_head", d_head[1], array_of(stored["gradients"]["lm_head"]), length);
}

}  // namespace
}  // namespace tessera::testing
