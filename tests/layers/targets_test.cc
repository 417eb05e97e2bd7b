#include "tests/targets.h"

#include "layers/mixers/mixers.h"
#include "layers/swiglu/swiglu.h"
#include "tests/layers/testing.h"

namespace tessera::testing {
namespace {

void expect_same(const Layer& layer, const TestBatch& batch, std::int64_t width,
                 std::int64_t length) {
  reference::Array expected;
  for_targets([&](const std::string& target) {
    LayerRun run(layer, batch, width);
    run.forward();
    run.backward();
    const std::vector<float> results = run.results();
    if (expected.empty()) expected.assign(results.begin(), results.end());
    expect_close(target, results.data(), expected, length);
  });
}

TEST(Targets, MixersAgreeOnEveryInstructionSet) {
  ModelConfig config;
  config.set_width(21);
  config.set_length(140);
  AttentionConfig attention;
  attention.set_heads(4);
  attention.set_key_value_heads(2);
  attention.set_head_width(14);
  attention.set_query_key_norm(true);
  *config.add_mixer()->mutable_full() = attention;
  SlidingConfig& sliding = *config.add_mixer()->mutable_sliding();
  *sliding.mutable_attention() = attention;
  sliding.set_window(35);
  const TestBatch batch(2, 139, 2, {0, 60});
  for (const char* type : {"full", "sliding"}) {
    expect_same(*make_mixer(type, {config, 0, 1}), batch, 21, 2 * 21 + 2 * 56 + 4 * 139);
  }
}

TEST(Targets, SwiGluAgreesOnEveryInstructionSet) {
  const TestBatch batch(1, 77, 2);
  expect_same(SwiGlu(13, 29, 0.02, 0.02), batch, 13, 2 * 13 + 2 * 29 + 77);
}

TEST(Targets, TheHeadAgreesOnEveryInstructionSet) {
  ModelConfig config;
  config.set_width(11);
  config.set_vocabulary(83);
  const Head head(config);
  const TestBatch batch(1, 90, 2, {0}, 83);
  const BatchShape shape = batch.batch.shape;
  reference::Array expected;
  double expected_loss = 0.0;
  for_targets([&](const std::string& target) {
    Queue queue(2);
    Buffers p(head.parameters()), d_p(head.parameters()), scratch(head.scratch(shape));
    Buffers rows(
        {{"x", DType::kF32, {shape.rows(), 11}}, {"d_x", DType::kF32, {shape.rows(), 11}}});
    fill_normal(p[0], "norm", 0.3, 1.0);
    fill_normal(p[1], "weight", 0.3);
    fill_normal(rows[0], "x");
    const double loss = head.loss_and_gradient(queue, batch.batch, rows[0], 1.0, rows[1], p.views(),
                                               d_p.views(), scratch.views());
    std::vector<float> results = values(rows[1]);
    for (const View& view : d_p.views()) {
      results.insert(results.end(), view.as<float>(), view.as<float>() + view.count());
    }
    if (expected.empty()) {
      expected.assign(results.begin(), results.end());
      expected_loss = loss;
    }
    expect_close(target, results.data(), expected, 11 + 83 + 90);
    EXPECT_NEAR(loss, expected_loss, tolerance(4.0 * 90, 11)) << target;
  });
}

}  // namespace
}  // namespace tessera::testing
