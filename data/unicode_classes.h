// The classes of characters that the pre-tokenizer tells apart.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace tessera {

enum class CharacterClass : std::uint8_t {
  kOther,    // punctuation, symbols, combining marks, unassigned
  kLetter,   // \p{L}
  kNumber,   // \p{N}
  kSpace,    // White_Space, without the two below
  kNewline,  // CR and LF
};

// A table of two stages: which block a code point lies in, then its class within the block; equal
// blocks are kept once.
class CharacterClasses {
 public:
  CharacterClasses();
  // `c` is at most U+10FFFF.
  CharacterClass operator[](char32_t c) const {
    return blocks_[index_[c / kBlock] * kBlock + c % kBlock];
  }

 private:
  static constexpr std::uint32_t kCodePoints = 0x110000;
  static constexpr std::uint32_t kBlock = 128;
  std::array<std::uint16_t, kCodePoints / kBlock> index_{};
  std::vector<CharacterClass> blocks_;
};

const CharacterClasses& character_classes();

}  // namespace tessera
