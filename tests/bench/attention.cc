// Attention in tiles against the peak loop, and the cost per token of a sliding window.
#include "layers/attention/attention.h"

#include <CLI/CLI.hpp>
#include <array>
#include <cmath>
#include <string>
#include <vector>

#include "runtime/products.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

constexpr std::int64_t kHeads = 8, kHeadWidth = 64;

struct Times {
  double forward, backward;  // seconds
};

Times measure(Device& device, DType dtype, std::int64_t length, std::int64_t window) {
  Queue& queue = device.queue();
  const BatchShape batch{1, length, queue.threads()};
  const AttentionShape shape{batch,      kHeads,     kHeads,
                             kHeadWidth, kHeadWidth, Visibility::tokens(window)};
  const Memory q(device, dtype, shape.queries());
  const Memory k(device, dtype, shape.keys());
  const Memory v(device, dtype, shape.values());
  const Memory out(device, dtype, {length, kHeads * kHeadWidth});
  const Memory d_out(device, dtype, {length, kHeads * kHeadWidth});
  const Memory log_sum_exp(device, DType::kF32, shape.rows());
  const Memory d_out_by_head(device, dtype, shape.d_out_by_head());
  const Memory delta(device, DType::kF32, shape.rows());
  const Memory d_q(device, DType::kF32, shape.queries());
  const Memory d_k(device, DType::kF32, shape.d_keys());
  const Memory d_v(device, DType::kF32, shape.d_values());
  const Memory room(device, DType::kF32, shape.tile_room());
  const Memory segments(device, DType::kI32, {1, length});  // zeros: one document
  const double scale = 1.0 / std::sqrt(static_cast<double>(kHeadWidth));
  const std::vector<double> seconds =
      alternate({[&] {
                   attention_forward(queue, shape, segments.view(), scale, q.view(), k.view(),
                                     v.view(), out.view(), log_sum_exp.view(), room.view());
                 },
                 [&] {
                   attention_backward(queue, shape, segments.view(), scale, std::array{1.0F},
                                      q.view(), k.view(), v.view(), out.view(), log_sum_exp.view(),
                                      d_out.view(), d_out_by_head.view(), delta.view(), d_q.view(),
                                      d_k.view(), d_v.view(), room.view());
                 }},
                5);
  return {seconds[0], seconds[1]};
}

// Two products of T x (keys seen) x head width forward, five backward (the scores once more).
double forward_operations(std::int64_t length, std::int64_t window) {
  return 4.0 * Visibility::tokens(window).mean_keys(length) *
         static_cast<double>(length * kHeads * kHeadWidth);
}

void table_of(Device& device, DType dtype, const std::string& title,
              const std::vector<std::int64_t>& lengths, std::int64_t window) {
  const double peak = measure_peak_flops(precision_of(dtype), device.queue().threads());
  const Table table(
      std::string(name_of(dtype)) + ", " + title + ", share of the peak loop's " +
          number(peak / 1e9) + " GFLOP/s",
      {"length", "forward ms", "us/token", "share", "backward ms", "us/token", "share"});
  for (const std::int64_t length : lengths) {
    const Times times = measure(device, dtype, length, window);
    const double operations = forward_operations(length, window);
    const auto tokens = static_cast<double>(length);
    table.row({std::to_string(length), number(times.forward * 1e3, 2),
               number(times.forward * 1e6 / tokens, 3), percent(operations / times.forward / peak),
               number(times.backward * 1e3, 2), number(times.backward * 1e6 / tokens, 3),
               percent(2.5 * operations / times.backward / peak)});
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("Attention, forward and backward, 8 heads of 64: full and with a window");
  int threads = 2;
  std::int64_t window = 512;
  app.add_option("--threads", threads, "threads of the queue")->check(CLI::Range(1, 4096));
  app.add_option("--window", window, "of the sliding table")->check(CLI::Range(1, 1 << 20));
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  bench::print_machine(threads);
  Device device(threads);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    bench::table_of(device, dtype, "full, causal", {512, 2048, 8192}, Visibility::kNoWindow);
    bench::table_of(device, dtype, "sliding, window " + std::to_string(window),
                    {2048, 4096, 8192, 16384, 32768}, window);
  }
  return 0;
}
