// Matrix products of a linear layer against the peak loop.
#include "runtime/products.h"

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

struct Size {
  const char* what;
  std::int64_t rows, in, out;
};

void measure(Device& device, DType dtype, const std::vector<Size>& sizes) {
  Queue& queue = device.queue();
  const Precision precision = precision_of(dtype);
  const double peak = measure_peak_flops(precision, queue.threads());
  Table table(std::string(name_of(dtype)) + ", " + products_library() +
                  ", GFLOP/s and share of the peak loop's " + number(peak / 1e9) + " GFLOP/s",
              {"rows x in x out", "x W'", "share", "dY W", "share", "dY' x", "share"});
  for (const Size& size : sizes) {
    const Memory x(device, dtype, {size.rows, size.in});
    const Memory w(device, dtype, {size.out, size.in}, 0.02);
    const Memory y(device, dtype, {size.rows, size.out});
    // Sums that other sums are added to stay f32, as in the layers.
    const Memory d_x(device, DType::kF32, {size.rows, size.in});
    const Memory d_w(device, DType::kF32, {size.out, size.in});
    const std::vector<double> seconds = alternate({
        [&] { linear_forward(queue, matrix(x.view()), matrix(w.view()), matrix(y.view())); },
        [&] {
          linear_backward_input(queue, matrix(y.view()), matrix(w.view()), matrix(d_x.view()),
                                false);
        },
        [&] {
          linear_backward_weight(queue, matrix(y.view()), matrix(x.view()), matrix(d_w.view()),
                                 false);
        },
    });
    std::vector<std::string> cells = {std::to_string(size.rows) + " x " + std::to_string(size.in) +
                                      " x " + std::to_string(size.out) + " " + size.what};
    for (const double s : seconds) {
      const double rate = 2.0 * static_cast<double>(size.rows * size.in * size.out) / s;
      cells.push_back(number(rate / 1e9));
      cells.push_back(percent(rate / peak));
    }
    table.row(cells);
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("Matrix products of a linear layer, forward and backward, against the peak loop");
  int threads = 2;
  app.add_option("--threads", threads, "threads of the queue")->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  bench::print_machine(threads);
  Device device(threads);
  const std::vector<bench::Size> sizes = {
      {"", 2048, 512, 512},        {"(SwiGLU)", 2048, 512, 1365}, {"(SwiGLU)", 2048, 1365, 512},
      {"(head)", 512, 512, 32000}, {"", 256, 768, 768},           {"(SwiGLU)", 256, 768, 2048},
      {"", 1024, 768, 768},        {"", 2048, 2048, 2048},
  };
  bench::measure(device, DType::kF32, sizes);
  bench::measure(device, DType::kBF16, sizes);
  return 0;
}
