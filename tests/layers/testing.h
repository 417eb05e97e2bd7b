// What the tests of layers share: memory as a plan would grant it, random contents, comparison with
// float64 under tolerances derived from epsilon and the length of the sums, finite differences.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "layers/layer.h"
#include "layers/stack.h"
#include "runtime/memory.h"
#include "runtime/random.h"
#include "tests/reference/array.h"

namespace tessera::testing {

constexpr double kEpsilon = 1.1920928955078125e-07 / 2;  // one rounding to f32
constexpr double kHalfEpsilon = 1.0 / 512;               // one rounding to bf16

// Views with memory of their own, filled with NaN so that nothing is read before it is written.
class Buffers {
 public:
  explicit Buffers(const std::vector<BufferSpec>& specs) : layout_(specs) {
    storage_.assign(static_cast<std::size_t>(layout_.bytes() + kAlignment), std::byte{0xFF});
    void* base = storage_.data();
    std::size_t room = storage_.size();
    std::align(static_cast<std::size_t>(kAlignment), static_cast<std::size_t>(layout_.bytes()),
               base, room);
    views_ = layout_.views(static_cast<std::byte*>(base));
  }
  explicit Buffers(const std::vector<ParameterSpec>& specs, DType dtype = DType::kF32)
      : Buffers(as_buffers(specs, dtype)) {}
  Buffers(Buffers&&) = default;
  const View& operator[](std::size_t i) const { return views_[i]; }
  std::size_t size() const { return views_.size(); }
  std::span<const View> views() const { return views_; }

 private:
  static std::vector<BufferSpec> as_buffers(const std::vector<ParameterSpec>& specs, DType dtype) {
    std::vector<BufferSpec> buffers;
    buffers.reserve(specs.size());
    for (const ParameterSpec& spec : specs) {
      buffers.push_back({spec.name, spec.full_precision ? DType::kF32 : dtype, spec.shape});
    }
    return buffers;
  }
  Layout layout_;
  std::vector<std::byte> storage_;
  std::vector<View> views_;
};

inline void fill_normal(const View& view, const std::string& name, double deviation = 1.0,
                        double mean = 0.0) {
  const RandomStream stream(7, name);
  for (std::int64_t i = 0; i < view.count(); ++i) {
    const auto value =
        static_cast<float>(mean + deviation * stream.normal(static_cast<std::uint64_t>(i)));
    if (view.dtype() == DType::kBF16) {
      view.as<BFloat16>()[i] = to_bfloat16(value);
    } else {
      view.as<float>()[i] = value;
    }
  }
}

inline reference::Array to_double(const View& view) {
  if (view.dtype() == DType::kBF16) {
    reference::Array all;
    for (std::int64_t i = 0; i < view.count(); ++i) {
      all.push_back(static_cast<double>(to_float(view.as<BFloat16>()[i])));
    }
    return all;
  }
  return {view.as<float>(), view.as<float>() + view.count()};
}
inline std::vector<reference::Array> to_double(const Buffers& buffers) {
  std::vector<reference::Array> all;
  for (const View& view : buffers.views()) all.push_back(to_double(view));
  return all;
}

inline std::vector<float> values(const View& view) {
  return {view.as<float>(), view.as<float>() + view.count()};
}
inline bool same_bits(const float* a, const float* b, std::int64_t count) {
  return count == 0 || std::memcmp(a, b, static_cast<std::size_t>(count) * sizeof(float)) == 0;
}
inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && same_bits(a.data(), b.data(), static_cast<std::int64_t>(a.size()));
}

inline double largest(const reference::Array& values) {
  double most = 0.0;
  for (const double value : values) most = std::max(most, std::abs(value));
  return most;
}

// What rounding may do to a result of this magnitude that comes out of sums of `length` terms in a
// row: each rounding moves it by at most epsilon, independent ones add up as a random walk; 8
// covers the largest of many elements.
inline double tolerance(double magnitude, std::int64_t length, double epsilon = kEpsilon) {
  return 8.0 * epsilon * std::sqrt(static_cast<double>(length) + 1.0) * magnitude;
}

// Every element of `found` within the tolerance at the magnitude of the largest expected one, or of
// the terms of its sum (`terms`) where they cancel.
inline void expect_close(const std::string& what, const float* found,
                         const reference::Array& expected, std::int64_t length, double terms = 0.0,
                         double epsilon = kEpsilon) {
  const double allowed = tolerance(std::max({largest(expected), terms, 1e-30}), length, epsilon);
  double worst = 0.0;
  std::size_t place = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double difference = std::abs(static_cast<double>(found[i]) - expected[i]);
    if (!(difference <= worst)) {
      worst = difference;
      place = i;
    }
  }
  EXPECT_LE(worst, allowed) << what << " differs at " << place << ": found " << found[place]
                            << ", expected " << expected[place];
  EXPECT_FALSE(std::isnan(worst)) << what;
}
inline void expect_close(const std::string& what, const View& found,
                         const reference::Array& expected, std::int64_t length, double terms = 0.0,
                         double epsilon = kEpsilon) {
  ASSERT_EQ(static_cast<std::size_t>(found.count()), expected.size()) << what;
  expect_close(what, found.as<float>(), expected, length, terms, epsilon);
}

// The gradient against central differences of a float64 function of `at`: all elements of a small
// array, a sample of a large one. The differences' own error, (h^2 + 1e-16/h), is far below f32's.
inline void expect_gradient(const std::string& what, const View& gradient, reference::Array at,
                            const std::function<double(const reference::Array&)>& function,
                            std::int64_t length, double terms = 0.0, double epsilon = kEpsilon) {
  ASSERT_EQ(static_cast<std::size_t>(gradient.count()), at.size()) << what;
  constexpr std::int64_t kMost = 40;
  const double step = 1e-5 * std::max(1.0, largest(at));
  const std::int64_t count = gradient.count();
  const std::int64_t stride = std::max<std::int64_t>(1, count / kMost);
  const double magnitude = std::max(largest(to_double(gradient)), terms);
  const double allowed = tolerance(magnitude, length, epsilon) + 1e-9 * magnitude + 1e-9;
  for (std::int64_t i = 0; i < count; i += stride) {
    const auto place = static_cast<std::size_t>(i);
    const double before = at[place];
    at[place] = before + step;
    const double above = function(at);
    at[place] = before - step;
    const double below = function(at);
    at[place] = before;
    ASSERT_NEAR(gradient.as<float>()[i], (above - below) / (2 * step), allowed)
        << what << " at element " << i << " of " << count;
  }
}

// A quantum's inputs with memory of their own. Documents start at the given positions.
struct TestBatch {
  TestBatch(std::int64_t sequences, std::int64_t length, int threads,
            const std::vector<std::int64_t>& starts = {0}, std::int64_t vocabulary = 2)
      : tokens(static_cast<std::size_t>(sequences * length)),
        labels(tokens.size()),
        segments(tokens.size()) {
    const RandomStream stream(11, "batch");
    for (std::int64_t i = 0; i < sequences * length; ++i) {
      const auto place = static_cast<std::size_t>(i);
      const auto draw = [&](int which) {
        return static_cast<std::int64_t>(stream.uniform(static_cast<std::uint64_t>(2 * i + which)) *
                                         static_cast<double>(vocabulary));
      };
      tokens[place] = static_cast<std::uint32_t>(draw(0));
      labels[place] = static_cast<std::int32_t>(draw(1));
      for (const std::int64_t start : starts) {
        if (start <= i % length) segments[place] = static_cast<std::int32_t>(start);
      }
    }
    const Shape shape = {sequences, length};
    batch = {{sequences, length, threads},
             View(tokens.data(), shape),
             View(labels.data(), shape),
             View(segments.data(), shape)};
  }
  std::vector<std::uint32_t> tokens;
  std::vector<std::int32_t> labels, segments;
  Batch batch;
};

// A layer with everything that one forward and backward need, its compute type that of the layer.
// Contents depend on names alone.
struct LayerRun {
  LayerRun(const Layer& run_layer, const TestBatch& run_batch, std::int64_t width,
           DType compute = DType::kF32)
      : layer(run_layer),
        batch(run_batch),
        queue(run_batch.batch.shape.threads),
        parameters(layer.parameters(), compute),
        d_parameters(layer.parameters()),
        saved(layer.saved(batch.batch.shape)),
        scratch(layer.scratch(batch.batch.shape)),
        rows({{"in", compute, {batch.batch.shape.rows(), width}},
              {"out", DType::kF32, {batch.batch.shape.rows(), width}},
              {"d_out", compute, {batch.batch.shape.rows(), width}},
              {"d_in", DType::kF32, {batch.batch.shape.rows(), width}}}) {
    const std::vector<ParameterSpec> specs = layer.parameters();
    for (std::size_t i = 0; i < specs.size(); ++i) {
      const bool matrix = specs[i].shape.rank() > 1;
      fill_normal(parameters[i], specs[i].name,
                  matrix ? 1.0 / std::sqrt(static_cast<double>(specs[i].shape[1])) : 0.3,
                  matrix ? 0.0 : 1.0);
    }
    fill_normal(in(), "in");
    fill_normal(d_out(), "d_out");
  }
  const View& in() const { return rows[0]; }
  const View& out() const { return rows[1]; }
  const View& d_out() const { return rows[2]; }
  const View& d_in() const { return rows[3]; }
  LayerMemory memory() const { return {parameters.views(), saved.views(), scratch.views()}; }
  void forward() { layer.forward(queue, batch.batch, in(), out(), memory()); }
  void backward() {
    layer.backward(queue, batch.batch, in(), d_out(), d_in(), d_parameters.views(), memory());
  }
  // Everything that a run computes, for comparisons of bits.
  std::vector<float> results() const {
    std::vector<float> all = values(out());
    const auto add = [&](const View& view) {
      all.insert(all.end(), view.as<float>(), view.as<float>() + view.count());
    };
    add(d_in());
    for (const View& view : d_parameters.views()) add(view);
    return all;
  }

  const Layer& layer;
  const TestBatch& batch;
  Queue queue;
  Buffers parameters, d_parameters, saved, scratch, rows;
};

// Forward and every gradient of a layer against a float64 function of (input, parameters). With
// bf16's epsilon `length` counts the roundings to bf16 that lie one behind the other: those of one
// sum's terms are independent and don't grow against it.
inline void expect_layer(LayerRun& run,
                         const std::function<reference::Array(
                             const reference::Array&, const std::vector<reference::Array>&)>& layer,
                         std::int64_t length, double epsilon = kEpsilon) {
  run.forward();
  run.backward();
  const reference::Array x = to_double(run.in());
  const std::vector<reference::Array> p = to_double(run.parameters);
  const reference::Array d_out = to_double(run.d_out());
  expect_close("out", run.out(), layer(x, p), length, 0.0, epsilon);
  expect_gradient(
      "d_in", run.d_in(), x,
      [&](const reference::Array& at) { return reference::dot(layer(at, p), d_out); }, length, 0.0,
      epsilon);
  const std::vector<ParameterSpec> specs = run.layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    expect_gradient(
        "d_" + specs[i].name, run.d_parameters[i], p[i],
        [&](const reference::Array& at) {
          std::vector<reference::Array> moved = p;
          moved[i] = at;
          return reference::dot(layer(x, moved), d_out);
        },
        epsilon == kEpsilon ? length + run.batch.batch.shape.rows() : length, 0.0, epsilon);
  }
}

}  // namespace tessera::testing
