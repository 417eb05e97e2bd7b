#include "layers/convolution/convolution.h"

#include "tests/layers/testing.h"
#include "tests/reference/convolution.h"

namespace tessera::testing {
namespace {

void expect_convolution(const ConvolutionConfig& config, std::int64_t sequences,
                        std::int64_t length, const std::vector<std::int64_t>& starts,
                        DType compute) {
  SCOPED_TRACE(::testing::Message() << config.channels << " channels, " << config.taps << " taps, "
                                    << length << " positions, " << starts.size() << " documents");
  const TestBatch batch(sequences, length, 2, starts);
  const BatchShape shape = batch.batch.shape;
  const Shape rows = {shape.rows(), config.channels};
  Buffers b({{"x", compute, rows},
             {"weight", compute, config.weight()},
             {"bias", compute, {config.channels}},
             {"y", compute, rows},
             {"d_y", compute, rows},
             {"d_x", compute, rows},
             {"d_weight", DType::kF32, config.weight()},
             {"d_bias", DType::kF32, {config.channels}},
             {"room", DType::kF32, config.scratch(shape)}});
  for (const std::size_t i : {0, 1, 2, 4}) fill_normal(b[i], std::to_string(i));
  const reference::Array d_y = to_double(b[4]);
  Queue queue(2);
  convolution_forward(queue, config, shape, batch.batch.segments, b[0], b[1], b[2], b[3], b[8]);
  convolution_backward(queue, config, shape, batch.batch.segments, b[0], b[1], b[2], b[4], b[5],
                       b[6], b[7], b[8]);
  const auto plain = [&](const reference::Array& x, const reference::Array& weight,
                         const reference::Array& bias) {
    return reference::convolution(x, weight, config.bias ? bias : reference::Array(),
                                  batch.segments, length, config.channels, config.taps,
                                  config.silu);
  };
  const reference::Array x = to_double(b[0]), weight = to_double(b[1]), bias = to_double(b[2]);
  const bool half = compute == DType::kBF16;
  const double epsilon = half ? kHalfEpsilon : kEpsilon;
  const std::int64_t terms = half ? 2 : config.taps;
  const auto in_float = [](const View& view) {
    std::vector<float> all;
    for (const double value : to_double(view)) all.push_back(static_cast<float>(value));
    return all;
  };
  expect_close("y", in_float(b[3]).data(), plain(x, weight, bias), terms, 0.0, epsilon);
  std::vector<float> d_x = in_float(b[5]);
  expect_gradient(
      "d_x", View(d_x.data(), rows), x,
      [&](const reference::Array& at) { return reference::dot(plain(at, weight, bias), d_y); },
      terms, 0.0, epsilon);
  expect_gradient(
      "d_weight", b[6], weight,
      [&](const reference::Array& at) { return reference::dot(plain(x, at, bias), d_y); },
      half ? 2 : shape.rows(), 0.0, epsilon);
  if (config.bias) {
    expect_gradient(
        "d_bias", b[7], bias,
        [&](const reference::Array& at) { return reference::dot(plain(x, weight, at), d_y); },
        half ? 2 : shape.rows(), 0.0, epsilon);
  }
}

TEST(Convolution, AgreesWithFloat64) {
  for (const std::int64_t taps : {1, 2, 3, 4, 7}) {
    for (const bool extras : {false, true}) {
      for (const std::int64_t length : {1, 2, 3, 5, 63, 64, 65, 67, 130}) {
        expect_convolution({5, taps, extras, extras}, 2, length, {0}, DType::kF32);
      }
      expect_convolution({19, taps, extras, !extras}, 2, 70, {0, 1, 2, 5, 62, 63, 64, 66},
                         DType::kF32);
      expect_convolution({33, taps, extras, extras}, 1, 130, {0, 63, 65, 128}, DType::kBF16);
    }
  }
}

// More weights than one piece of their sums holds.
TEST(Convolution, ManyChannelsAgreeWithFloat64) {
  expect_convolution({300, 4, true, false}, 1, 70, {0}, DType::kF32);
}

// The last tap multiplies the current token: an impulse comes back as the taps from last to first.
TEST(Convolution, TheLastTapIsTheCurrentToken) {
  const ConvolutionConfig config = {1, 3, false, false};
  std::vector<float> x = {0, 1, 0, 0, 0}, weight = {5, 7, 11}, y(5), room(100);
  std::vector<std::int32_t> segments = {0, 0, 0, 3, 3};
  const BatchShape shape = {1, 5, 1};
  Queue queue(1);
  const auto run = [&] {
    convolution_forward(queue, config, shape, View(segments.data(), {1, 5}), View(x.data(), {5, 1}),
                        View(weight.data(), {1, 3}), {}, View(y.data(), {5, 1}),
                        View(room.data(), config.scratch(shape)));
  };
  run();
  EXPECT_EQ(y,
            (std::vector<float>{0, 11, 7, 0, 0}));  // what follows the document's end isn't its own
  segments.assign(5, 0);
  run();
  EXPECT_EQ(y, (std::vector<float>{0, 11, 7, 5, 0}));
}

TEST(Convolution, ItsTapsStartUniform) {
  const Init init = ConvolutionConfig{8, 4}.init();
  EXPECT_EQ(init.kind, Init::Kind::kUniform);
  EXPECT_EQ(init.scale, 0.5);
}

}  // namespace
}  // namespace tessera::testing
