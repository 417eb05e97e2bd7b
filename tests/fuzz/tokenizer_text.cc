// Any bytes as a document, encoded by a small byte-pair vocabulary and held against the plain
// second writing of the tokenizer.
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <algorithm>

#include "data/byte_pair.h"
#include "data/tokenizer.h"
#include "data/vocabulary.h"
#include "tests/data/plain_tokenizer.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

namespace {

std::string base64(std::string_view bytes) {
  constexpr std::string_view kDigits =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t j = i; j < i + 3; ++j) {
      bits = bits << 8 | (j < bytes.size() ? static_cast<unsigned char>(bytes[j]) : 0);
    }
    for (int shift = 18; shift >= 0; shift -= 6) text += kDigits[bits >> shift & 63];
  }
  for (std::size_t i = 0; i < (3 - bytes.size() % 3) % 3; ++i) text[text.size() - 1 - i] = '=';
  return text;
}

// Tokens that share beginnings and ends, so that the order of merges matters.
std::string vocabulary_file() {
  std::vector<std::string> tokens;
  tokens.reserve(256);
  for (int byte = 0; byte < 256; ++byte) tokens.emplace_back(1, static_cast<char>(byte));
  for (const char* token :
       {"aa",       "ab",       "ba",       "aaaa",     "aba",          "bab",      "abab",
        "aaaaaaaa", "  ",       "    ",     " a",       " aa",          "\n\n",     "\r\n",
        "'s",       "th",       "he",       "the",      " the",         "in",       "ing",
        "12",       "\xC3\xA9", "\xCC\x81", "\xE2\x82", "\xE2\x82\xAC", "\xF0\x9F", "\xF0\x9F\x98",
        "==",       "====",     "->",       "e\xCC\x81"}) {
    tokens.emplace_back(token);
  }
  std::string file;
  for (std::size_t rank = 0; rank < tokens.size(); ++rank) {
    file += base64(tokens[rank]) + " " + std::to_string(rank) + "\n";
  }
  return file;
}

struct Both {
  Both() {
    fuzz::write_file("small.tiktoken", vocabulary_file());
    const Vocabulary vocabulary = read_vocabulary("small.tiktoken");
    ours = open_tokenizer("small.tiktoken");
    plain = std::make_unique<PlainTokenizer>(vocabulary);
  }
  std::unique_ptr<Tokenizer> ours;
  std::unique_ptr<PlainTokenizer> plain;
};

// ICU's own reading of UTF-8: where the first fault is, or -1.
std::int64_t first_fault(std::string_view text) {
  const auto size = static_cast<std::int32_t>(text.size());
  for (std::int32_t at = 0; at < size;) {
    const std::int32_t begin = at;
    UChar32 character = 0;
    U8_NEXT(text.data(), at, size, character);
    if (character < 0) return begin;
  }
  return -1;
}

// The plain tokenizer is right where ICU and the tokenizer's tables know the same characters.
bool in_both_versions(std::string_view text) {
  const auto size = static_cast<std::int32_t>(text.size());
  for (std::int32_t at = 0; at < size;) {
    UChar32 character = 0;
    U8_NEXT(text.data(), at, size, character);
    if (u_charType(character) == U_UNASSIGNED) return false;
  }
  return true;
}

}  // namespace

void fuzz::take(std::string_view input) {
  static const Both both;
  const std::string_view text = input;
  std::vector<std::uint32_t> ids;
  const bool taken = fuzz::accepts({ExitCode::kData}, [&] { both.ours->encode(text, ids, false); });
  fuzz::require(taken == (first_fault(text) < 0), "valid UTF-8 is refused, or invalid taken");
  if (!taken) return;
  fuzz::require(both.ours->decode(ids.data(), ids.size()) == plain_nfc(text),
                "a text doesn't come back in its normal form");
  if (in_both_versions(text)) {
    fuzz::require(both.plain->encode(text) == ids, "the plain tokenizer gives other ids");
  }
  // What other texts left in the working memory mustn't matter.
  std::vector<std::uint32_t> again;
  both.ours->encode(text, again, true);
  fuzz::require(again == ids, "the second time gives other ids");
}
