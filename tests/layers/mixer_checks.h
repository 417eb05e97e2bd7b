// What every mixer has to pass, whatever it computes: causality, documents, bits, allocations.
#pragma once

#include <google/protobuf/text_format.h>

#include <memory>

#include "layers/mixers/mixers.h"
#include "runtime/products.h"
#include "tests/layers/count_allocations.h"
#include "tests/layers/testing.h"

namespace tessera::testing {

// The mixer of this type from `text`, its configuration, in a model of this width.
inline std::unique_ptr<Layer> make_from_text(const std::string& type, const std::string& text,
                                             std::int64_t width, DType compute = DType::kF32,
                                             std::int64_t length = 4096) {
  ModelConfig config;
  const std::string all = "width: " + std::to_string(width) +
                          " vocabulary: 8 length: " + std::to_string(length) +
                          " feed_forward { width: 8 } mixer { " + type + " { " + text + " } }";
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(all, &config)) << all;
  return make_mixer(type, {config, 0, 2, compute});
}

// All elements of a one-axis parameter around `mean`.
inline void fill_parameter(LayerRun& run, const std::string& name, double mean, double deviation) {
  const std::vector<ParameterSpec> specs = run.layer.parameters();
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) fill_normal(run.parameters[i], name, deviation, mean);
  }
}

// As expect_layer, for mixers whose outputs are normed. What scales all of a head's outputs alike
// is taken out by the norm: the terms of the gradients of steps and rates, as large as those of the
// norm's weight, cancel.
inline void expect_mixer(LayerRun& run,
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
  double norm_terms = 0.0;
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == "norm.weight") norm_terms = largest(to_double(run.d_parameters[i]));
  }
  for (std::size_t i = 0; i < specs.size(); ++i) {
    expect_gradient(
        "d_" + specs[i].name, run.d_parameters[i], p[i],
        [&](const reference::Array& at) {
          std::vector<reference::Array> moved = p;
          moved[i] = at;
          return reference::dot(layer(x, moved), d_out);
        },
        epsilon == kEpsilon ? length + run.batch.batch.shape.rows() : length,
        specs[i].full_precision ? norm_terms : 0.0, epsilon);
  }
}

inline void change_row(const View& rows, std::int64_t row) {
  const std::int64_t width = rows.extent(1);
  for (std::int64_t i = row * width; i < (row + 1) * width; ++i) {
    if (rows.dtype() == DType::kF32) {
      rows.as<float>()[i] = 3.0F - 2.0F * rows.as<float>()[i];
    } else {
      rows.as<BFloat16>()[i] = to_bfloat16(3.0F - 2.0F * to_float(rows.as<BFloat16>()[i]));
    }
  }
}

// Changing the token at each of these positions moves no bit before it.
inline void expect_causal(const Layer& layer, std::int64_t width, DType compute,
                          std::int64_t length, const std::vector<std::int64_t>& positions) {
  const TestBatch batch(1, length, 2);
  LayerRun run(layer, batch, width, compute);
  run.forward();
  const std::vector<float> before = values(run.out());
  for (const std::int64_t t : positions) {
    LayerRun moved(layer, batch, width, compute);
    change_row(moved.in(), t);
    moved.forward();
    EXPECT_TRUE(same_bits(moved.out().as<float>(), before.data(), t * width)) << t;
    EXPECT_FALSE(same_bits(moved.out().as<float>() + t * width, before.data() + t * width, width))
        << t;
  }
}

// Changing the last token of the first document moves no bit of the second, forward or backward.
inline void expect_documents_apart(const Layer& layer, std::int64_t width, DType compute,
                                   std::int64_t length, const std::vector<std::int64_t>& starts) {
  for (const std::int64_t start : starts) {
    const TestBatch batch(1, length, 2, {0, start});
    LayerRun run(layer, batch, width, compute), moved(layer, batch, width, compute);
    change_row(moved.in(), start - 1);
    run.forward();
    run.backward();
    moved.forward();
    moved.backward();
    const std::int64_t from = start * width, count = (length - start) * width;
    for (const auto& [a, b] : {std::pair{run.out(), moved.out()}, {run.d_in(), moved.d_in()}}) {
      EXPECT_TRUE(same_bits(a.as<float>() + from, b.as<float>() + from, count)) << start;
      EXPECT_FALSE(same_bits(a.as<float>(), b.as<float>(), from)) << start;
    }
  }
}

// The same bits for every number of threads; a row's for every length and number of sequences.
inline void expect_same_bits(const Layer& layer, std::int64_t width, DType compute,
                             std::int64_t length, const std::vector<std::int64_t>& lengths) {
  std::vector<float> expected;
  for (const int threads : {1, 2, 3}) {
    const TestBatch batch(2, length, threads, {0, length / 3});
    LayerRun run(layer, batch, width, compute);
    run.forward();
    run.backward();
    if (threads == 1) expected = run.results();
    EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
  }
  const TestBatch one(1, length, 2);
  LayerRun all(layer, one, width, compute);
  all.forward();
  for (const std::int64_t few : lengths) {
    const TestBatch batch(2, few, 2);
    LayerRun run(layer, batch, width, compute);
    const View part = all.in().slice(0, few);
    for (const std::int64_t sequence : {0, 1}) {
      std::memcpy(run.in().raw() + sequence * part.bytes(), part.raw(),
                  static_cast<std::size_t>(part.bytes()));
    }
    run.forward();
    for (const std::int64_t sequence : {0, 1}) {
      EXPECT_TRUE(same_bits(run.out().as<float>() + sequence * few * width, all.out().as<float>(),
                            few * width))
          << few;
    }
  }
}

inline void expect_no_allocation(const Layer& layer, std::int64_t width, DType compute,
                                 std::int64_t length) {
  const TestBatch batch(1, length, 2);
  LayerRun run(layer, batch, width, compute);
  const auto step = [&] {
    run.forward();
    run.backward();
  };
  step();
  EXPECT_EQ(count_allocations(step), 0);
}

inline std::int64_t parameter_count(const Layer& layer) {
  std::int64_t count = 0;
  for (const ParameterSpec& parameter : layer.parameters()) count += parameter.shape.count();
  return count;
}

}  // namespace tessera::testing
