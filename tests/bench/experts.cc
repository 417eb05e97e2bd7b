// Ours of experts.py: a feed-forward of experts, forward and backward into its input and every
// parameter, the experts' own included. Each number on standard input is that many repetitions,
// answered with "seconds peak_bytes flops largest_load": operations of one repetition, without
// padding, and the busiest expert's load over the mean one.
#include "layers/experts/experts.h"

#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "tests/bench/bench.h"

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("A feed-forward of experts, forward and backward, for experts.py");
  std::string precision = "bf16";
  int threads = 2;
  std::int64_t length = 4096;
  bool peak = false;
  ExpertsShape shape;
  shape.width = 2048;
  shape.experts = 25;
  shape.active = 7;
  shape.inner = 640;
  shape.shared = 1536;
  shape.auxiliary_coefficient = 0.01;
  shape.z_coefficient = 1e-3;
  app.add_option("--precision", precision)->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", threads)->check(CLI::Range(1, 4096));
  app.add_option("--length", length, "tokens, of one sequence");
  app.add_option("--width", shape.width);
  app.add_option("--experts", shape.experts);
  app.add_option("--active", shape.active);
  app.add_option("--inner", shape.inner);
  app.add_option("--shared", shape.shared);
  app.add_option("--latent", shape.latent, "0: none");
  app.add_flag("--peak", peak, "answer with the peak loop's operations per second, and end");
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  const DType compute = precision == "bf16" ? DType::kBF16 : DType::kF32;
  if (peak) {
    std::printf("%.0f\n", measure_peak_flops(bench::precision_of(compute), threads));
    return 0;
  }
  Device device(threads);
  const MixtureOfExperts layer(shape, 0.02, 0.02, compute);

  std::vector<std::unique_ptr<bench::Memory>> memories;
  const auto allocate = [&](DType dtype, Shape of, double deviation) {
    memories.push_back(std::make_unique<bench::Memory>(device, dtype, of, deviation));
    return memories.back()->view();
  };
  const BatchShape batch_shape = {1, length, threads};
  std::vector<View> weights, d_weights, experts, d_experts, saved, scratch;
  for (const ParameterSpec& spec : layer.parameters()) {
    weights.push_back(allocate(spec.full_precision ? DType::kF32 : compute, spec.shape, 0.02));
    d_weights.push_back(allocate(DType::kF32, spec.shape, 1.0));
  }
  // Not the numbers of the input, which would make a few tokens very sure of an expert.
  const RandomStream stream(1, "router");
  for (std::int64_t i = 0; i < weights[0].count(); ++i) {
    weights[0].as<float>()[i] =
        static_cast<float>(0.02 * stream.normal(static_cast<std::uint64_t>(i)));
  }
  for (const ParameterSpec& spec : layer.expert_parameters()) {
    for (std::int64_t expert = 0; expert < spec.shape[0]; ++expert) {
      const Shape matrix = {spec.shape[1], spec.shape[2]};
      experts.push_back(allocate(compute, matrix, 0.02));
      d_experts.push_back(allocate(DType::kF32, matrix, 1.0));
    }
  }
  for (const BufferSpec& spec : layer.saved(batch_shape)) {
    saved.push_back(View(spec.dtype, spec.shape, device.allocate(spec.bytes())));
  }
  for (const BufferSpec& spec : layer.scratch(batch_shape)) {
    scratch.push_back(View(spec.dtype, spec.shape, device.allocate(spec.bytes())));
  }
  const View in = allocate(compute, {length, shape.width}, 1.0);
  const View d_out = allocate(compute, {length, shape.width}, 1.0);
  const View out = allocate(DType::kF32, {length, shape.width}, 1.0);
  const View d_in = allocate(DType::kF32, {length, shape.width}, 1.0);
  std::vector<std::uint32_t> tokens(static_cast<std::size_t>(length));
  std::vector<std::int32_t> labels(tokens.size()), segments(tokens.size());
  const Batch batch = {batch_shape, View(tokens.data(), {1, length}),
                       View(labels.data(), {1, length}), View(segments.data(), {1, length}), 1};
  const LayerMemory memory = {weights, saved, scratch, experts, {}, nullptr};
  const double flops = 3.0 * static_cast<double>(length) * layer.flops_per_token(length);
  for (int count = 0; std::cin >> count;) {
    const double seconds = bench::seconds_of([&] {
      for (int i = 0; i < count; ++i) {
        layer.forward(device.queue(), batch, in, out, memory);
        layer.backward(device.queue(), batch, in, d_out, d_in, d_weights, memory);
        layer.expert_gradient(device.queue(), batch, 0, d_experts, memory);
      }
    });
    std::int64_t most = 0;
    for (const std::int64_t load : layer.statistics(memory).loads) most = std::max(most, load);
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::printf(
        "%.9f %lld %.0f %.3f\n", seconds, 1024LL * static_cast<long long>(usage.ru_maxrss), flops,
        static_cast<double>(most * shape.experts) / static_cast<double>(length * shape.active));
    std::fflush(stdout);
  }
  return 0;
}
