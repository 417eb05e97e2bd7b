// AdamW against the memory's bandwidth, measured by a copy and a triad in the same run.
#include "optim/adamw.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

// a = b + 3 c, STREAM's triad.
void triad(Queue& queue, const View& a, const View& b, const View& c) {
  constexpr std::int64_t kPiece = 1 << 16;
  float* const to = a.as<float>();
  const float* const left = b.as<float>();
  const float* const right = c.as<float>();
  const std::int64_t count = a.count();
  queue.parallel_for((count + kPiece - 1) / kPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(count, (piece + 1) * kPiece);
    for (std::int64_t i = piece * kPiece; i < end; ++i) to[i] = left[i] + 3.0F * right[i];
  });
}

void measure(Device& device, const std::vector<std::int64_t>& counts) {
  Queue& queue = device.queue();
  const Table table("GB/s (bytes that the program asks for: AdamW 28 an element, triad 12, copy 8)",
                    {"elements", "AdamW", "ns/element", "triad", "copy", "AdamW/triad"});
  for (const std::int64_t count : counts) {
    const Memory weights(device, DType::kF32, {count}, 0.02);
    const Memory first(device, DType::kF32, {count}, 0.0);
    const Memory second(device, DType::kF32, {count}, 0.0);
    const Memory gradient(device, DType::kF32, {count}, 0.01);
    AdamWStep step;
    step.learning_rate = 1e-4;
    step.weight_decay = 0.1;
    const std::vector<double> seconds = alternate({
        [&] {
          ++step.count;
          adamw_update(queue, step, weights.view(), first.view(), second.view(), gradient.view());
        },
        [&] { triad(queue, first.view(), weights.view(), gradient.view()); },
        [&] { queue.copy(weights.view(), gradient.view()); },
    });
    const double gigabyte = static_cast<double>(count) / 1e9;
    table.row({std::to_string(count), number(28 * gigabyte / seconds[0]),
               number(seconds[0] / gigabyte, 3), number(12 * gigabyte / seconds[1]),
               number(8 * gigabyte / seconds[2]),
               number(28 * gigabyte / seconds[0] / (12 * gigabyte / seconds[1]), 2)});
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("AdamW against the bandwidth of a triad and of a copy");
  int threads = 2;
  app.add_option("--threads", threads, "threads of the queue")->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  bench::print_machine(threads);
  Device device(threads);
  bench::measure(device, {1 << 20, 1 << 24, 1 << 27});
  return 0;
}
