#include "layers/gated_norm/gated_norm.h"

#include "layers/rms_norm/rms_norm.h"
#include "tests/layers/testing.h"
#include "tests/reference/gated_norm.h"

namespace tessera::testing {
namespace {

struct NormRun {
  NormRun(const GatedNormConfig& norm, std::int64_t row_count, bool shared, DType dtype,
          int threads = 2)
      : config(norm),
        rows(row_count),
        queue(threads),
        b({{"x", dtype, {rows, norm.width}},
           {"z", dtype, {rows, norm.width}},
           {"weight", dtype, {shared ? norm.group : norm.width}},
           {"y", dtype, {rows, norm.width}},
           {"inverse", DType::kF32, {rows, norm.groups()}},
           {"d_y", dtype, {rows, norm.width}},
           {"d_z", dtype, {rows, norm.width}},
           {"d_weight", DType::kF32, {shared ? norm.group : norm.width}},
           {"partial", DType::kF32, {rms_norm_blocks(rows), shared ? norm.group : norm.width}}}) {
    for (const std::size_t i : {0, 1, 5}) fill_normal(b[i], std::to_string(i));
    fill_normal(b[2], "weight", 0.3, 1.0);
  }
  void forward() { gated_norm(queue, config, b[0], b[1], b[2], b[3], b[4]); }
  // d_x takes d_y's place.
  void backward() {
    gated_norm_backward(queue, config, b[0], b[1], b[2], b[4], b[5], b[5], b[6], b[7], b[8]);
  }
  std::vector<float> in_float(std::size_t i) const {
    std::vector<float> all;
    for (const double value : to_double(b[i])) all.push_back(static_cast<float>(value));
    return all;
  }
  GatedNormConfig config;
  std::int64_t rows;
  Queue queue;
  Buffers b;
};

TEST(GatedNorm, AgreesWithFloat64) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const Gate gate : {Gate::kSigmoid, Gate::kSilu}) {
      for (const bool shared : {false, true}) {
        for (const auto& [width, group] :
             {std::pair<std::int64_t, std::int64_t>{6, 3}, {40, 40}, {70, 35}, {96, 32}}) {
          SCOPED_TRACE(::testing::Message() << width << "/" << group << " shared " << shared);
          NormRun run({width, group, gate, 1e-5}, 67, shared, dtype);
          const reference::Array x = to_double(run.b[0]), z = to_double(run.b[1]);
          const reference::Array weight = to_double(run.b[2]), d_y = to_double(run.b[5]);
          run.forward();
          run.backward();
          const auto plain = [&, w = width, g = group](const reference::Array& at_x,
                                                       const reference::Array& at_z,
                                                       const reference::Array& at_weight) {
            return reference::gated_norm(at_x, at_z, at_weight, w, g, gate == Gate::kSilu, 1e-5);
          };
          const bool half = dtype == DType::kBF16;
          const double epsilon = half ? kHalfEpsilon : kEpsilon;
          const std::int64_t terms = half ? 1 : 16;
          expect_close("y", run.in_float(3).data(), plain(x, z, weight), terms, 0.0, epsilon);
          std::vector<float> d_x = run.in_float(5), d_z = run.in_float(6);
          expect_gradient(
              "d_x", View(d_x.data(), {67, width}), x,
              [&](const reference::Array& at) { return reference::dot(plain(at, z, weight), d_y); },
              terms, 0.0, epsilon);
          expect_gradient(
              "d_z", View(d_z.data(), {67, width}), z,
              [&](const reference::Array& at) { return reference::dot(plain(x, at, weight), d_y); },
              terms, 0.0, epsilon);
          expect_gradient(
              "d_weight", run.b[7], weight,
              [&](const reference::Array& at) { return reference::dot(plain(x, z, at), d_y); },
              half ? 1 : 16 + 67 * (shared ? width / group : 1), 0.0, epsilon);
        }
      }
    }
  }
}

TEST(GatedNorm, SameBitsForEveryNumberOfThreads) {
  std::vector<float> expected;
  for (const int threads : {1, 2, 3}) {
    NormRun run({48, 16, Gate::kSilu, 1e-6}, 300, true, DType::kF32, threads);
    run.forward();
    run.backward();
    std::vector<float> found = values(run.b[3]);
    for (const std::size_t i : {5, 6, 7}) {
      const std::vector<float> more = values(run.b[i]);
      found.insert(found.end(), more.begin(), more.end());
    }
    if (threads == 1) expected = found;
    EXPECT_TRUE(same_bits(found, expected)) << threads;
  }
}

// Closed and wide open gates, rows of zeros, squares beyond f32.
TEST(GatedNorm, ExtremesStayFinite) {
  for (const Gate gate : {Gate::kSigmoid, Gate::kSilu}) {
    for (const float x : {0.0F, 1e-30F, 1e18F}) {
      for (const float z : {-1e4F, -90.0F, 0.0F, 90.0F, 1e4F}) {
        NormRun run({16, 8, gate, 1e-6}, 3, true, DType::kF32);
        std::fill_n(run.b[0].as<float>(), 48, x);
        std::fill_n(run.b[1].as<float>(), 48, z);
        run.forward();
        run.backward();
        for (const std::size_t i : {3, 5, 6, 7}) {
          for (const float value : values(run.b[i])) {
            ASSERT_TRUE(std::isfinite(value)) << x << " " << z << " " << i;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace tessera::testing
