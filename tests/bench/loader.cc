// The stream and the loader against plain reads of as many bytes at random places.
#include "data/loader.h"

#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "data/stream.h"
#include "tests/bench/bench.h"
#include "tests/data/data_fixture.h"

namespace tessera::bench {
namespace {

constexpr std::int64_t kTokens = std::int64_t{1} << 25;  // of each of two components
constexpr std::int64_t kPassTokens = std::int64_t{1} << 22;

void measure(const std::string& root, std::int64_t length, const Table& table) {
  const auto stream = open_stream(
      "tokenizer: \"byte\" seed: 3 total_tokens: 1000000000 "
      "sequence_length: " +
          std::to_string(length) +
          " component { name: \"a\" weight: \"2\" }"
          " component { name: \"b\" weight: \"1\" }",
      root);
  const std::int64_t samples = kPassTokens / length, window = length + 1;
  constexpr std::int64_t kQuantum = 4;
  std::vector<std::uint32_t> out(static_cast<std::size_t>(window));
  std::vector<std::uint32_t> tokens(static_cast<std::size_t>(kQuantum * length));
  std::vector<std::int32_t> labels(tokens.size()), segments(tokens.size());
  const Shape shape{kQuantum, length};
  Loader loader(
      *stream, kQuantum, [](std::int64_t n) { return n; }, 4, 0);
  const int file = open((root + "/a/part-0").c_str(), O_RDONLY);
  TESSERA_CHECK(file >= 0);
  std::int64_t next = 0;
  const auto at_random = [&] {
    next = (next * 1103515245 + 12345) & 0x7FFFFFFF;
    return next % (kTokens - window) * 4;
  };
  const std::vector<double> seconds =
      alternate({[&] {
                   for (std::int64_t i = 0; i < samples; ++i) stream->read(i, out.data());
                 },
                 [&] {
                   for (std::int64_t q = 0; q < samples / kQuantum; ++q) {
                     const View windows = loader.acquire();
                     split_windows(windows, View(tokens.data(), shape), View(labels.data(), shape));
                     fill_segments(windows, kByteEnd, true, View(segments.data(), shape));
                     loader.release();
                   }
                 },
                 [&] {
                   for (std::int64_t i = 0; i < samples; ++i) {
                     TESSERA_CHECK(pread(file, out.data(), static_cast<std::size_t>(window) * 4,
                                         at_random()) == window * 4);
                   }
                 }});
  close(file);
  const auto rate = [](double s) { return static_cast<double>(kPassTokens) / s / 1e6; };
  table.row({std::to_string(length), number(rate(seconds[0])), number(rate(seconds[1])),
             number(rate(seconds[2])), number(seconds[2] / seconds[0], 2),
             number(seconds[2] / seconds[1], 2)});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("The token stream and the loader against plain reads; files in the page cache");
  CLI11_PARSE(app, argc, argv);
  keep_large_allocations();
  bench::print_machine(1);
  const TempFolder root;
  for (const std::string name : {"a", "b"}) {
    write_component(root.path(), name, counting(bench::kTokens, 0), {bench::kTokens});
  }
  const bench::Table table(
      "million tokens a second; the loader in quanta of 4, split and with "
      "segments",
      {"sequence length", "stream", "loader", "plain reads", "stream/plain", "loader/plain"});
  for (const std::int64_t length : {512, 2048, 8192}) bench::measure(root.path(), length, table);
  return 0;
}
