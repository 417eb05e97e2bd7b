#include "layers/rms_norm/rms_norm.h"

#include "tests/layers/testing.h"
#include "tests/reference/rms_norm.h"

namespace tessera::testing {
namespace {

struct Norm {
  Norm(std::int64_t norm_rows, std::int64_t width, int threads)
      : rows(norm_rows),
        d(width),
        queue(threads),
        buffers({{"x", DType::kF32, {rows, d}},
                 {"weight", DType::kF32, {d}},
                 {"y", DType::kF32, {rows, d}},
                 {"inverse", DType::kF32, {rows}},
                 {"d_y", DType::kF32, {rows, d}},
                 {"d_x", DType::kF32, {rows, d}},
                 {"partial", DType::kF32, {rms_norm_blocks(rows), d}},
                 {"d_weight", DType::kF32, {d}},
                 {"again", DType::kF32, {rows, d}}}) {
    fill_normal(x(), "x");
    fill_normal(weight(), "weight", 0.3, 1.0);
    fill_normal(d_y(), "d_y");
  }
  const View& x() const { return buffers[0]; }
  const View& weight() const { return buffers[1]; }
  const View& y() const { return buffers[2]; }
  const View& inverse() const { return buffers[3]; }
  const View& d_y() const { return buffers[4]; }
  const View& d_x() const { return buffers[5]; }
  const View& d_weight() const { return buffers[7]; }
  void forward() { rms_norm(queue, x(), weight(), 1e-6, y(), inverse()); }
  void backward(bool accumulate = false) {
    rms_norm_backward(queue, x(), weight(), inverse(), d_y(), d_x(), accumulate, buffers[6]);
    rms_norm_weight_gradient(queue, buffers[6], d_weight());
  }
  std::int64_t rows, d;
  Queue queue;
  Buffers buffers;
};

// Roundings in a row: the inverse, two products forward; the mean, two more backward.
constexpr std::int64_t kRoundings = 8;

TEST(RmsNorm, AgreesWithFloat64) {
  for (const auto& [rows, d] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {1, 1}, {3, 7}, {65, 16}, {130, 33}, {1, 257}, {64, 64}}) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(d));
    Norm norm(rows, d, 2);
    norm.forward();
    norm.backward();
    const reference::Array x = to_double(norm.x()), w = to_double(norm.weight()),
                           d_y = to_double(norm.d_y());
    expect_close("y", norm.y(), reference::rms_norm(x, w, 1e-6), kRoundings);
    expect_gradient(
        "d_x", norm.d_x(), x,
        [&](const reference::Array& at) {
          return reference::dot(reference::rms_norm(at, w, 1e-6), d_y);
        },
        kRoundings, largest(d_y) * largest(w) * largest(to_double(norm.inverse())));
    expect_gradient(
        "d_weight", norm.d_weight(), w,
        [&](const reference::Array& at) {
          return reference::dot(reference::rms_norm(x, at, 1e-6), d_y);
        },
        kRoundings + rows);
  }
}

TEST(RmsNorm, AddsWhenAsked) {
  Norm norm(5, 19, 1);
  norm.forward();
  norm.backward();
  const std::vector<float> alone = values(norm.d_x());
  std::fill_n(norm.d_x().as<float>(), norm.d_x().count(), 2.0F);
  norm.backward(true);
  for (std::size_t i = 0; i < alone.size(); ++i) {
    EXPECT_EQ(norm.d_x().as<float>()[i], 2.0F + alone[i]);
  }
}

TEST(RmsNorm, RecomputesTheSameBits) {
  Norm norm(67, 45, 2);
  norm.forward();
  rms_norm_again(norm.queue, norm.x(), norm.weight(), norm.inverse(), norm.buffers[8]);
  EXPECT_TRUE(same_bits(values(norm.y()), values(norm.buffers[8])));
}

TEST(RmsNorm, ExtremesStayFinite) {
  Norm norm(4, 24, 1);
  float* const x = norm.x().as<float>();
  std::fill_n(x, 24, 0.0F);
  for (int i = 0; i < 24; ++i) {
    x[24 + i] = static_cast<float>(i - 11) * 1e30F;
    x[48 + i] = static_cast<float>(i - 11) * 1e-30F;
  }
  norm.forward();
  norm.backward();
  const reference::Array expected =
      reference::rms_norm(to_double(norm.x()), to_double(norm.weight()), 1e-6);
  expect_close("y", norm.y(), expected, kRoundings);
  for (std::int64_t i = 0; i < norm.d_x().count(); ++i) {
    EXPECT_TRUE(std::isfinite(norm.d_x().as<float>()[i])) << i;
  }
}

TEST(RmsNorm, NotANumberStaysInItsRow) {
  Norm norm(3, 8, 1);
  norm.x().as<float>()[8 + 3] = std::numeric_limits<float>::quiet_NaN();
  norm.forward();
  EXPECT_TRUE(std::isfinite(norm.y().as<float>()[0]));
  EXPECT_TRUE(std::isnan(norm.y().as<float>()[8]));
  EXPECT_TRUE(std::isfinite(norm.y().as<float>()[16]));
}

TEST(RmsNorm, ARowsBitsDependOnThatRowAlone) {
  Norm all(131, 37, 2);
  all.forward();
  all.backward();
  for (const std::int64_t rows : {1, 2, 63, 64, 65, 130}) {
    Norm some(rows, 37, 1);
    some.forward();
    some.backward();
    EXPECT_TRUE(same_bits(some.y().as<float>(), all.y().as<float>(), rows * 37)) << rows;
    EXPECT_TRUE(same_bits(some.d_x().as<float>(), all.d_x().as<float>(), rows * 37)) << rows;
  }
}

TEST(RmsNorm, SameBitsForEveryNumberOfThreads) {
  Norm one(517, 300, 1);
  one.forward();
  one.backward();
  for (const int threads : {2, 3}) {
    Norm more(517, 300, threads);
    more.forward();
    more.backward();
    EXPECT_TRUE(same_bits(values(one.y()), values(more.y())));
    EXPECT_TRUE(same_bits(values(one.d_x()), values(more.d_x())));
    EXPECT_TRUE(same_bits(values(one.d_weight()), values(more.d_weight())));
  }
}

}  // namespace
}  // namespace tessera::testing
