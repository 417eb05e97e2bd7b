#include "data/pretokenizer.h"

#include <cstdint>

namespace tessera {

const char* const kPretokenizerPattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

PieceIterator::Character PieceIterator::read(const char* at) const {
  const auto byte = [at](int i) {
    return static_cast<std::uint32_t>(static_cast<unsigned char>(at[i]));
  };
  const std::uint32_t lead = byte(0);
  if (lead < 0x80) return {classes_[lead], at + 1};
  if (lead < 0xE0) return {classes_[(lead & 0x1F) << 6 | (byte(1) & 0x3F)], at + 2};
  if (lead < 0xF0) {
    return {classes_[(lead & 0x0F) << 12 | (byte(1) & 0x3F) << 6 | (byte(2) & 0x3F)], at + 3};
  }
  return {classes_[(lead & 0x07) << 18 | (byte(1) & 0x3F) << 12 | (byte(2) & 0x3F) << 6 |
                   (byte(3) & 0x3F)],
          at + 4};
}

const char* PieceIterator::skip(const char* at, CharacterClass kind) const {
  while (at < end_) {
    const Character character = read(at);
    if (character.kind != kind) break;
    at = character.end;
  }
  return at;
}

// The end of a contraction that starts at the apostrophe `at`; null where there is none.
const char* PieceIterator::contraction_end(const char* at) const {
  if (end_ - at < 2) return nullptr;
  // Right for letters; nothing but a letter becomes one of those below.
  const auto lower = [](char c) { return static_cast<char>(c | 0x20); };
  switch (lower(at[1])) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return at + 2;
    default:
      break;
  }
  if (end_ - at < 3) return nullptr;
  const char first = lower(at[1]);
  const char second = lower(at[2]);
  if ((first == 'r' && second == 'e') || (first == 'v' && second == 'e') ||
      (first == 'l' && second == 'l')) {
    return at + 3;
  }
  // U+017F, the long s, is an s when case is ignored.
  if (at[1] == '\xC5' && at[2] == '\xBF') return at + 3;
  return nullptr;
}

const char* PieceIterator::piece_end(const char* at) const {
  const Character first = read(at);
  if (first.kind == CharacterClass::kLetter) return skip(first.end, CharacterClass::kLetter);
  if (first.kind == CharacterClass::kNumber) return first.end;
  if (*at == '\'') {
    if (const char* end = contraction_end(at)) return end;
  }
  Character second{CharacterClass::kNewline, first.end};  // the end of the text joins nothing
  if (first.end < end_) second = read(first.end);
  if (first.kind != CharacterClass::kNewline && second.kind == CharacterClass::kLetter) {
    return skip(second.end, CharacterClass::kLetter);
  }
  if (first.kind == CharacterClass::kOther) {
    return skip(skip(first.end, CharacterClass::kOther), CharacterClass::kNewline);
  }
  if (*at == ' ' && second.kind == CharacterClass::kOther) {
    return skip(skip(second.end, CharacterClass::kOther), CharacterClass::kNewline);
  }
  // A run of white space: up to its last line break; else all but its last character, which goes to
  // what follows; else all.
  const char* last_break = first.kind == CharacterClass::kNewline ? first.end : nullptr;
  const char* last_character = at;
  const char* end = first.end;
  while (end < end_) {
    const Character character = read(end);
    if (character.kind != CharacterClass::kSpace && character.kind != CharacterClass::kNewline)
      break;
    if (character.kind == CharacterClass::kNewline) last_break = character.end;
    last_character = end;
    end = character.end;
  }
  if (last_break != nullptr) return last_break;
  return end == end_ || last_character == at ? end : last_character;
}

bool PieceIterator::next(std::string_view& piece) {
  if (at_ == end_) return false;
  const char* end = piece_end(at_);
  piece = std::string_view(at_, static_cast<std::size_t>(end - at_));
  at_ = end;
  return true;
}

}  // namespace tessera
