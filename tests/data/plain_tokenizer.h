// The tokenizer a second time, as plainly as its definition and with no thought of speed: ICU's
// normaliser on spans of characters that Unicode 9 has, ICU's regular expressions, and byte pairs
// by looking at all pairs for every merge.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/vocabulary.h"

namespace tessera {

std::string plain_nfc(std::string_view text);

// Right for text whose characters are assigned in ICU's version of Unicode.
std::vector<std::string> plain_pieces(std::string_view text);

class PlainTokenizer {
 public:
  explicit PlainTokenizer(const Vocabulary& vocabulary);
  std::vector<std::uint32_t> merge(std::string_view piece) const;
  std::vector<std::uint32_t> encode(std::string_view text) const;

 private:
  std::map<std::string, std::uint32_t> bytes_;
  std::map<std::pair<std::uint32_t, std::uint32_t>, std::pair<std::size_t, std::uint32_t>> merges_;
};

}  // namespace tessera
