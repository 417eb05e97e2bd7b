// The fused head and loss against its own products and against the peak loop.
#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "layers/stack.h"
#include "runtime/memory.h"
#include "runtime/products.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

struct Size {
  std::int64_t batch, length, width, vocabulary;
};

void measure(Device& device, DType dtype, const std::vector<Size>& sizes) {
  Queue& queue = device.queue();
  const double peak = measure_peak_flops(precision_of(dtype), queue.threads());
  const Table table(
      std::string(name_of(dtype)) + ", share of the peak loop's " + number(peak / 1e9) + " GFLOP/s",
      {"batch x length x d x V", "loss ms", "share", "+grad ms", "share", "products ms",
       "products/all"});
  for (const Size& size : sizes) {
    ModelConfig config;
    config.set_width(size.width);
    config.set_vocabulary(size.vocabulary);
    const Head head(config, dtype);
    const BatchShape shape{size.batch, size.length, queue.threads()};
    const std::int64_t rows = shape.rows();
    const Memory tokens(device, DType::kU32, {size.batch, size.length});
    const Memory labels(device, DType::kI32, {size.batch, size.length});
    const Memory segments(device, DType::kI32, {size.batch, size.length});
    const RandomStream stream(2, "labels");
    for (std::int64_t i = 0; i < rows; ++i) {
      labels.view().as<std::int32_t>()[i] = static_cast<std::int32_t>(
          stream.uniform(static_cast<std::uint64_t>(i)) * static_cast<double>(size.vocabulary));
    }
    const Batch batch{shape, tokens.view(), labels.view(), segments.view()};
    const Memory x(device, DType::kF32, {rows, size.width});
    const Memory d_x(device, DType::kF32, {rows, size.width});
    const Memory norm(device, dtype, {size.width});
    const Memory weight(device, dtype, {size.vocabulary, size.width}, 0.02);
    const Memory d_norm(device, DType::kF32, {size.width});
    const Memory d_weight(device, DType::kF32, {size.vocabulary, size.width});
    const std::vector<View> parameters = {norm.view(), weight.view()};
    const std::vector<View> d_parameters = {d_norm.view(), d_weight.view()};
    const Layout layout(head.scratch(shape));
    const Memory room(device, DType::kF32, {layout.bytes() / 4 + 1});
    const std::vector<View> scratch = layout.views(room.view().raw());
    // The three products alone, over logits that do exist, for as many rows as fit 1 GiB.
    const std::int64_t cut = std::min(rows, (std::int64_t{1} << 28) / size.vocabulary);
    const Memory logits(device, dtype, {cut, size.vocabulary}, 0.02);
    const Memory h(device, dtype, {cut, size.width});
    const Memory d_h(device, DType::kF32, {cut, size.width});
    const std::vector<double> seconds = alternate(
        {[&] { head.loss(queue, batch, x.view(), parameters, scratch); },
         [&] {
           head.loss_and_gradient(queue, batch, x.view(), 1.0 / static_cast<double>(rows),
                                  d_x.view(), parameters, d_parameters, scratch);
         },
         [&] {
           linear_forward(queue, matrix(h.view()), matrix(weight.view()), matrix(logits.view()));
           linear_backward_input(queue, matrix(logits.view()), matrix(weight.view()),
                                 matrix(d_h.view()), false);
           linear_backward_weight(queue, matrix(logits.view()), matrix(h.view()),
                                  matrix(d_weight.view()), false);
         }},
        5);
    const double operations = 2.0 * static_cast<double>(rows * size.width * size.vocabulary);
    const double products = seconds[2] * static_cast<double>(rows) / static_cast<double>(cut);
    table.row({std::to_string(size.batch) + " x " + std::to_string(size.length) + " x " +
                   std::to_string(size.width) + " x " + std::to_string(size.vocabulary),
               number(seconds[0] * 1e3), percent(operations / seconds[0] / peak),
               number(seconds[1] * 1e3), percent(3 * operations / seconds[1] / peak),
               number(products * 1e3), percent(products / seconds[1])});
  }
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("The head with its loss, forward alone and with gradients, against its products");
  int threads = 2;
  app.add_option("--threads", threads, "threads of the queue")->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  bench::print_machine(threads);
  Device device(threads);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    bench::measure(device, dtype,
                   {{4, 512, 512, 32000}, {4, 64, 768, 50257}, {4, 256, 768, 50257}});
  }
  return 0;
}
