// Ours of mixers.py: one mixer, forward and backward into its input and every parameter. Each
// number on standard input is that many repetitions, answered with "seconds peak_bytes".
#include <sys/resource.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "layers/mixers/mixers.h"
#include "layers/stack.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

void set_heads(AttentionConfig& attention, std::int64_t heads, std::int64_t shared,
               std::int64_t head_width) {
  attention.set_heads(heads);
  attention.set_key_value_heads(shared);
  attention.set_head_width(head_width);
}

// Every type, heads alike.
ModelConfig configuration(std::int64_t width, std::int64_t length, std::int64_t heads,
                          std::int64_t shared, std::int64_t head_width) {
  ModelConfig config;
  config.set_width(width);
  config.set_length(length);
  const auto attention = [&](AttentionConfig* of) { set_heads(*of, heads, shared, head_width); };
  attention(config.add_mixer()->mutable_full());
  attention(config.add_mixer()->mutable_sliding()->mutable_attention());
  attention(config.add_mixer()->mutable_differential()->mutable_attention());
  attention(config.add_mixer()->mutable_linear()->mutable_attention());
  config.add_mixer()->mutable_mamba2();
  attention(config.add_mixer()->mutable_nsa()->mutable_attention());
  config.mutable_mixer(5)->mutable_nsa()->mutable_compression();
  CompressConfig& compress = *config.add_mixer()->mutable_compress();
  compress.set_heads(heads);
  compress.set_key_value_heads(shared);
  compress.set_head_width(head_width);
  HybridConfig& hybrid = *config.add_mixer()->mutable_hybrid();
  attention(hybrid.mutable_nsa()->mutable_attention());
  attention(hybrid.mutable_differential()->mutable_attention());
  return config;
}

// Memory for a list of buffers, each of normal numbers.
class Buffers {
 public:
  Buffers(Device& device, const std::vector<BufferSpec>& specs, double deviation) {
    for (const BufferSpec& spec : specs) {
      memory_.push_back(std::make_unique<Memory>(device, spec.dtype, spec.shape, deviation));
      views_.push_back(memory_.back()->view());
    }
  }
  const std::vector<View>& views() const { return views_; }

 private:
  std::vector<std::unique_ptr<Memory>> memory_;
  std::vector<View> views_;
};

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("One mixer, forward and backward, for mixers.py");
  std::string type = "full", precision = "f32";
  int threads = 2;
  std::int64_t width = 512, heads = 8, shared = 2, head_width = 64, length = 2048, layer = 3;
  app.add_option("--type", type, mixer_names())->required();
  app.add_option("--precision", precision)->check(CLI::IsMember({"f32", "bf16"}));
  app.add_option("--threads", threads)->check(CLI::Range(1, 4096));
  app.add_option("--width", width);
  app.add_option("--heads", heads);
  app.add_option("--shared", shared, "key/value heads");
  app.add_option("--head-width", head_width);
  app.add_option("--length", length);
  app.add_option("--layer", layer);
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  Device device(threads);
  const DType compute = precision == "bf16" ? DType::kBF16 : DType::kF32;
  const ModelConfig config = bench::configuration(width, length, heads, shared, head_width);
  const std::unique_ptr<Layer> mixer = make_mixer(type, {config, layer, layer + 1, compute});

  const BatchShape shape = {1, length, threads};
  std::vector<BufferSpec> parameters, gradients;
  for (const ParameterSpec& spec : mixer->parameters()) {
    parameters.push_back({spec.name, spec.full_precision ? DType::kF32 : compute, spec.shape});
    gradients.push_back({spec.name, DType::kF32, spec.shape});
  }
  const bench::Buffers weights(device, parameters, 0.02), d_weights(device, gradients, 1.0);
  const bench::Buffers saved(device, mixer->saved(shape), 1.0);
  const bench::Buffers scratch(device, mixer->scratch(shape), 1.0);
  const bench::Memory in(device, compute, {length, width}), d_out(device, compute, {length, width});
  const bench::Memory out(device, DType::kF32, {length, width});
  const bench::Memory d_in(device, DType::kF32, {length, width});
  std::vector<std::uint32_t> tokens(static_cast<std::size_t>(length));
  std::vector<std::int32_t> labels(tokens.size()), segments(tokens.size());
  const Batch batch = {shape, View(tokens.data(), {1, length}), View(labels.data(), {1, length}),
                       View(segments.data(), {1, length})};
  const LayerMemory memory = {weights.views(), saved.views(), scratch.views()};
  for (int count = 0; std::cin >> count;) {
    const double seconds = bench::seconds_of([&] {
      for (int i = 0; i < count; ++i) {
        mixer->forward(device.queue(), batch, in.view(), out.view(), memory);
        mixer->backward(device.queue(), batch, in.view(), d_out.view(), d_in.view(),
                        d_weights.views(), memory);
      }
    });
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    std::printf("%.9f %lld\n", seconds, 1024LL * static_cast<long long>(usage.ru_maxrss));
    std::fflush(stdout);
  }
  return 0;
}
