// Cuts text into the pieces that byte pairs are merged within, as the regular expression of the
// Qwen2 and Qwen3 family does:
//   (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*
//   |\s*[\r\n]+|\s+(?!\S)|\s+
// Written out by hand: linear in the text, whatever it is.
#pragma once

#include <cstddef>
#include <string_view>

#include "data/unicode_classes.h"

namespace tessera {

// The expression as tokenizer.json spells it.
extern const char* const kPretokenizerPattern;

class PieceIterator {
 public:
  // `text` is valid UTF-8 and outlives the iterator.
  explicit PieceIterator(std::string_view text)
      : at_(text.data()), end_(text.data() + text.size()), classes_(character_classes()) {}

  // The next piece, never empty; false at the end. The pieces in turn are the text.
  bool next(std::string_view& piece);

 private:
  struct Character {
    CharacterClass kind;
    const char* end;
  };
  Character read(const char* at) const;
  const char* skip(const char* at, CharacterClass kind) const;
  const char* contraction_end(const char* at) const;
  const char* piece_end(const char* at) const;

  const char* at_;
  const char* end_;
  const CharacterClasses& classes_;
};

}  // namespace tessera
