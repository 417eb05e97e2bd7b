#include "data/utf8.h"

#include <cstdint>
#include <cstring>

namespace tessera {
namespace {

bool continues(unsigned char byte) { return (byte & 0xC0) == 0x80; }

// Length of the valid sequence that starts at `at`, 0 where there is none.
std::size_t sequence_length(const unsigned char* at, std::size_t left) {
  const unsigned char lead = at[0];
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return left >= 2 && continues(at[1]) ? 2 : 0;
  if (lead < 0xF0) {
    if (left < 3 || !continues(at[1]) || !continues(at[2])) return 0;
    if (lead == 0xE0 && at[1] < 0xA0) return 0;
    if (lead == 0xED && at[1] >= 0xA0) return 0;
    return 3;
  }
  if (lead < 0xF5) {
    if (left < 4 || !continues(at[1]) || !continues(at[2]) || !continues(at[3])) return 0;
    if (lead == 0xF0 && at[1] < 0x90) return 0;
    if (lead == 0xF4 && at[1] >= 0x90) return 0;
    return 4;
  }
  return 0;
}

}  // namespace

std::size_t first_invalid_utf8(std::string_view text) {
  const auto* bytes = reinterpret_cast<const unsigned char*>(text.data());
  const std::size_t size = text.size();
  std::size_t at = 0;
  while (at < size) {
    if (bytes[at] < 0x80) {
      while (at + 32 <= size) {
        std::uint64_t words[4];
        std::memcpy(words, bytes + at, sizeof words);
        if (((words[0] | words[1] | words[2] | words[3]) & 0x8080808080808080ULL) != 0) break;
        at += 32;
      }
      while (at < size && bytes[at] < 0x80) ++at;
    } else {
      const std::size_t length = sequence_length(bytes + at, size - at);
      if (length == 0) return at;
      at += length;
    }
  }
  return std::string_view::npos;
}

}  // namespace tessera
