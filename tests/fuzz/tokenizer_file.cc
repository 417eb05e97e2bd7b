// tokenizer.json and .tiktoken. The input is the file; where it has zeros, what is before the first
// one is tokenizer_config.json and what is after it is the tokenizer's file.
#include <unistd.h>

#include "data/tokenizer.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

namespace {

void use(const Tokenizer& tokenizer) {
  const std::string text = "Hello  world's 12 caf\xC3\xA9\r\n\t\xE2\x82\xAC<|endoftext|>";
  for (const bool special : {false, true}) {
    std::vector<std::uint32_t> ids;
    tokenizer.encode(text, ids, special);
    for (const std::uint32_t id : ids) fuzz::require(id < tokenizer.size(), "an id is too large");
    fuzz::require(tokenizer.decode(ids.data(), ids.size()) == text, "a text doesn't come back");
  }
  fuzz::require(tokenizer.end_of_sequence() < tokenizer.size(), "the end is no id");
  fuzz::require(tokenizer.digest().size() == 64, "there is no digest");
}

}  // namespace

void fuzz::take(std::string_view input) {
  const std::size_t zero = input.find('\0');
  if (zero == std::string_view::npos) {
    ::unlink("tokenizer_config.json");
  } else {
    fuzz::write_file("tokenizer_config.json", input.substr(0, zero));
  }
  fuzz::write_file("tokenizer.json",
                   zero == std::string_view::npos ? input : input.substr(zero + 1));
  fuzz::accepts({ExitCode::kData}, [] { use(*open_tokenizer("tokenizer.json")); });
  fuzz::accepts({ExitCode::kData, ExitCode::kUsage},
                [] { use(*open_tokenizer("tokenizer.json", {.vocabulary_limit = 257})); });
}
