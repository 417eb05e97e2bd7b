// One side of tokenizer.py: encodes a file's documents as often as a line of standard input says,
// and answers with the seconds and the number of ids.
#include "data/tokenizer.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>
#include <vector>

#include "tests/bench/bench.h"
#include "tests/data/data_fixture.h"

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  CLI::App app("Encodes a file on one thread; driven by tokenizer.py");
  std::string tokenizer_path, text_path;
  app.add_option("tokenizer", tokenizer_path, "tokenizer.json or .tiktoken")->required();
  app.add_option("text", text_path, "documents, each ended by a byte 0")->required();
  CLI11_PARSE(app, argc, argv);
  try {
    const auto tokenizer = open_tokenizer(tokenizer_path);
    const std::string text = read_file(text_path);
    std::vector<std::string_view> documents;
    for (std::size_t begin = 0, end = 0; (end = text.find('\0', begin)) != std::string::npos;
         begin = end + 1) {
      documents.emplace_back(text.data() + begin, end - begin);
    }
    std::vector<std::uint32_t> ids;
    for (std::int64_t passes = 0; std::cin >> passes;) {
      std::size_t count = 0;
      const double seconds = bench::seconds_of([&] {
        for (std::int64_t pass = 0; pass < passes; ++pass) {
          for (const std::string_view document : documents) {
            ids.clear();
            tokenizer->encode(document, ids);
            count += ids.size();
          }
        }
      });
      std::cout << seconds << ' ' << count << std::endl;
    }
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    return static_cast<int>(error.code());
  }
  return 0;
}
