#include "layers/swiglu/swiglu.h"

#include "tests/layers/testing.h"
#include "tests/reference/model.h"

namespace tessera::testing {
namespace {

TEST(SwiGlu, AgreesWithFloat64) {
  for (const auto& [batch_size, length, width, inner] : std::vector<std::array<std::int64_t, 4>>{
           {1, 1, 1, 1}, {2, 3, 5, 7}, {1, 65, 16, 43}, {3, 47, 24, 64}}) {
    SCOPED_TRACE(::testing::Message() << batch_size * length << " x " << width << " x " << inner);
    const SwiGlu layer(width, inner, 0.02, 0.01);
    const TestBatch batch(batch_size, length, 2);
    LayerRun run(layer, batch, width);
    expect_layer(
        run,
        [w = width, f = inner](const reference::Array& x, const std::vector<reference::Array>& p) {
          return reference::swiglu(x, p, w, f);
        },
        2 * width + 2 * inner);
  }
}

TEST(SwiGlu, ExtremeGatesStayFinite) {
  const SwiGlu layer(4, 4, 0.02, 0.01);
  const TestBatch batch(1, 6, 1);
  LayerRun run(layer, batch, 4);
  for (std::int64_t i = 0; i < run.in().count(); ++i) {
    run.in().as<float>()[i] *= i < 8 ? 1e4F : i < 16 ? 0.0F : 1e-30F;
  }
  run.forward();
  run.backward();
  for (const float value : run.results()) EXPECT_TRUE(std::isfinite(value));
}

TEST(SwiGlu, SameBitsForEveryNumberOfThreadsAndRows) {
  const SwiGlu layer(40, 104, 0.02, 0.01);
  const TestBatch batch(2, 411, 1);
  LayerRun one(layer, batch, 40);
  one.forward();
  one.backward();
  for (const int threads : {2, 3}) {
    const TestBatch same(2, 411, threads);
    LayerRun more(layer, same, 40);
    more.forward();
    more.backward();
    EXPECT_TRUE(same_bits(one.results(), more.results())) << threads;
  }
  for (const std::int64_t length : {1, 5, 127, 128, 129, 400}) {
    const TestBatch few(1, length, 2);
    LayerRun some(layer, few, 40);
    some.forward();
    some.backward();
    EXPECT_TRUE(same_bits(one.out().as<float>(), some.out().as<float>(), length * 40)) << length;
    EXPECT_TRUE(same_bits(one.d_in().as<float>(), some.d_in().as<float>(), length * 40)) << length;
  }
}

}  // namespace
}  // namespace tessera::testing
