// The two ends of the stack: the embedding and the head with its loss.
#include <google/protobuf/text_format.h>

#include "layers/stack.h"
#include "tests/layers/testing.h"
#include "tests/reference/model.h"

namespace tessera::testing {
namespace {

ModelConfig config_of(std::int64_t width, std::int64_t vocabulary) {
  ModelConfig config;
  config.set_width(width);
  config.set_vocabulary(vocabulary);
  return config;
}

struct EmbeddingRun {
  EmbeddingRun(std::int64_t width, std::int64_t vocabulary, const TestBatch& run_batch)
      : layer(config_of(width, vocabulary)),
        batch(run_batch),
        queue(batch.batch.shape.threads),
        parameters(layer.parameters()),
        d_parameters(layer.parameters()),
        scratch(layer.scratch(batch.batch.shape)),
        rows({{"x", DType::kF32, {batch.batch.shape.rows(), width}},
              {"d_x", DType::kF32, {batch.batch.shape.rows(), width}}}) {
    fill_normal(parameters[0], "weight");
    fill_normal(rows[1], "d_x");
  }
  Embedding layer;
  const TestBatch& batch;
  Queue queue;
  Buffers parameters, d_parameters, scratch, rows;
};

TEST(Embedding, CopiesRowsAndSumsThemInOrderOfPosition) {
  for (const auto& [width, vocabulary] :
       std::vector<std::pair<std::int64_t, std::int64_t>>{{3, 5}, {300, 5000}, {16, 1}}) {
    const TestBatch batch(2, 131, 2, {0}, vocabulary);
    EmbeddingRun run(width, vocabulary, batch);
    run.layer.forward(run.queue, batch.batch, run.parameters.views(), run.rows[0]);
    run.layer.backward(run.queue, batch.batch, run.rows[1], run.d_parameters.views(),
                       run.scratch.views());
    std::vector<float> expected(static_cast<std::size_t>(vocabulary * width), 0.0F);
    for (std::size_t r = 0; r < batch.tokens.size(); ++r) {
      const auto row = static_cast<std::int64_t>(r);
      EXPECT_TRUE(same_bits(run.rows[0].as<float>() + row * width,
                            run.parameters[0].as<float>() + batch.tokens[r] * width, width));
      for (std::int64_t i = 0; i < width; ++i) {
        expected[static_cast<std::size_t>(batch.tokens[r] * width + i)] +=
            run.rows[1].as<float>()[row * width + i];
      }
    }
    EXPECT_TRUE(same_bits(values(run.d_parameters[0]), expected));
  }
}

TEST(Embedding, ATokenOutsideTheVocabularyIsRefused) {
  TestBatch batch(2, 10, 2, {0}, 7);
  EmbeddingRun run(4, 7, batch);
  batch.tokens[13] = 7;
  try {
    run.layer.forward(run.queue, batch.batch, run.parameters.views(), run.rows[0]);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_STREQ(error.what(),
                 "token 7 at sequence 1, position 3 lies outside the model's vocabulary of 7 "
                 "(model.vocabulary)");
  }
}

struct HeadRun {
  HeadRun(std::int64_t width, std::int64_t vocabulary, const TestBatch& run_batch)
      : layer(config_of(width, vocabulary)),
        batch(run_batch),
        queue(batch.batch.shape.threads),
        parameters(layer.parameters()),
        d_parameters(layer.parameters()),
        scratch(layer.scratch(batch.batch.shape)),
        rows({{"x", DType::kF32, {batch.batch.shape.rows(), width}},
              {"d_x", DType::kF32, {batch.batch.shape.rows(), width}}}) {
    fill_normal(parameters[0], "norm", 0.3, 1.0);
    fill_normal(parameters[1], "weight", 1.0 / std::sqrt(static_cast<double>(width)));
    fill_normal(rows[0], "x");
  }
  double loss() {
    return layer.loss(queue, batch.batch, rows[0], parameters.views(), scratch.views());
  }
  double gradient(double scale = 1.0) {
    return layer.loss_and_gradient(queue, batch.batch, rows[0], scale, rows[1], parameters.views(),
                                   d_parameters.views(), scratch.views());
  }
  std::vector<float> results() const {
    std::vector<float> all;
    for (const View& view : {rows[1], d_parameters[0], d_parameters[1]}) {
      const std::vector<float> more = values(view);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  Head layer;
  const TestBatch& batch;
  Queue queue;
  Buffers parameters, d_parameters, scratch, rows;
};

TEST(Head, AgreesWithFloat64) {
  for (const auto& [sequences, length, width, vocabulary] :
       std::vector<std::array<std::int64_t, 4>>{
           {1, 1, 3, 1}, {1, 2, 5, 3}, {2, 37, 8, 50}, {3, 101, 6, 29}}) {
    SCOPED_TRACE(::testing::Message()
                 << sequences * length << " x " << width << ", " << vocabulary);
    TestBatch batch(sequences, length, 2, {0}, vocabulary);
    for (std::size_t i = 1; i < batch.labels.size(); i += 3) batch.labels[i] = kNoLabel;
    HeadRun run(width, vocabulary, batch);
    constexpr double kScale = 0.25;
    const double loss = run.gradient(kScale);
    const reference::Array x = to_double(run.rows[0]);
    const std::vector<reference::Array> p = to_double(run.parameters);
    const auto expected = [&](const reference::Array& at_x, const reference::Array& norm,
                              const reference::Array& weight) {
      return reference::head_loss(at_x, norm, weight, batch.labels, 1e-6);
    };
    // Each row's loss carries its logits' rounding; the rows are summed in double.
    const auto rows = static_cast<double>(batch.labels.size());
    EXPECT_NEAR(loss, expected(x, p[0], p[1]), tolerance(4.0 * rows, width));
    EXPECT_EQ(run.loss(), loss);
    const std::int64_t sums = width + vocabulary + batch.batch.shape.rows();
    expect_gradient(
        "d_x", run.rows[1], x,
        [&](const reference::Array& moved) { return kScale * expected(moved, p[0], p[1]); }, sums);
    expect_gradient(
        "d_norm", run.d_parameters[0], p[0],
        [&](const reference::Array& moved) { return kScale * expected(x, moved, p[1]); }, sums);
    expect_gradient(
        "d_weight", run.d_parameters[1], p[1],
        [&](const reference::Array& moved) { return kScale * expected(x, p[0], moved); }, sums);
  }
}

TEST(Head, LossOfUniformLogitsIsTheLogarithmOfTheVocabulary) {
  const TestBatch batch(1, 300, 2, {0}, 1000);
  HeadRun run(8, 1000, batch);
  std::fill_n(run.parameters[1].as<float>(), run.parameters[1].count(), 0.0F);
  EXPECT_NEAR(run.loss(), 300.0 * std::log(1000.0), 1e-10);
}

TEST(Head, B20_NoValidLabelGivesZeroAndZeroGradients) {
  TestBatch batch(2, 150, 2, {0}, 40);
  std::fill(batch.labels.begin(), batch.labels.end(), kNoLabel);
  HeadRun run(8, 40, batch);
  EXPECT_EQ(run.gradient(), 0.0);
  for (const float value : run.results()) EXPECT_EQ(value, 0.0F);
}

TEST(Head, ExtremeLogitsStayFinite) {
  const TestBatch batch(1, 20, 1, {0}, 40);
  HeadRun run(8, 40, batch);
  for (std::int64_t i = 0; i < run.parameters[1].count(); ++i)
    run.parameters[1].as<float>()[i] *= 1e6F;
  EXPECT_TRUE(std::isfinite(run.gradient()));
  for (const float value : run.results()) EXPECT_TRUE(std::isfinite(value));
}

TEST(Head, NotANumberShowsInTheLoss) {
  const TestBatch batch(1, 20, 1, {0}, 40);
  HeadRun run(8, 40, batch);
  run.rows[0].as<float>()[std::int64_t{5} * 8] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(run.loss()));
}

TEST(Head, SameBitsForEveryNumberOfThreads) {
  std::vector<float> expected;
  double expected_loss = 0.0;
  for (const int threads : {1, 2, 3}) {
    const TestBatch batch(2, 333, threads, {0}, 301);
    HeadRun run(40, 301, batch);
    const double loss = run.gradient(1e-3);
    if (threads == 1) {
      expected = run.results();
      expected_loss = loss;
    }
    EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
    EXPECT_EQ(loss, expected_loss);
  }
}

TEST(Head, LogitsOfAllPositionsNeverExistAtOnce) {
  const Head head(config_of(64, 151936));
  std::int64_t short_run = 0, long_run = 0;
  for (const BufferSpec& buffer : head.scratch({1, 1024, 2})) short_run += buffer.bytes();
  for (const BufferSpec& buffer : head.scratch({1, 65536, 2})) long_run += buffer.bytes();
  EXPECT_LT(long_run, short_run + std::int64_t{65536} * 64);
}

TEST(Head, ALabelOutsideTheVocabularyIsRefused) {
  for (const std::int32_t label : {40, -2}) {
    TestBatch batch(1, 20, 2, {0}, 40);
    batch.labels[4] = label;
    HeadRun run(8, 40, batch);
    EXPECT_THROW(run.loss(), Error);
  }
}

}  // namespace
}  // namespace tessera::testing
