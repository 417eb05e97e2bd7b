#include "data/normalizer.h"

#include <unicode/bytestream.h>
#include <unicode/normalizer2.h>
#include <unicode/uchar.h>
#include <unicode/uniset.h>
#include <unicode/unistr.h>
#include <unicode/utf8.h>

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "runtime/error.h"

namespace tessera {
namespace {

void check(UErrorCode status) {
  if (U_FAILURE(status)) {
    throw Error(ExitCode::kData, std::string("normalising the text: ") + u_errorName(status));
  }
}

// The reference tokenizer normalises by the tables of Unicode 9: characters that are younger stay
// where they are. By the stability policy of Unicode the filter makes every ICU agree with that.
class Unicode9 {
 public:
  static const Unicode9& get() {
    static const Unicode9 instance;
    return instance;
  }
  const icu::Normalizer2& nfc() const { return nfc_; }
  bool contains(UChar32 c) const { return characters_.contains(c) != 0; }

 private:
  Unicode9() : characters_(make_characters()), nfc_(full_nfc(), characters_) {}
  static icu::UnicodeSet make_characters() {
    UErrorCode status = U_ZERO_ERROR;
    icu::UnicodeSet characters(u"[:Age=9.0:]", status);
    check(status);
    characters.freeze();
    return characters;
  }
  static const icu::Normalizer2& full_nfc() {
    UErrorCode status = U_ZERO_ERROR;
    const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(status);
    check(status);
    return *nfc;
  }

  const icu::UnicodeSet characters_;
  const icu::FilteredNormalizer2 nfc_;
};

const icu::Normalizer2& nfc() { return Unicode9::get().nfc(); }

bool starts_character(char byte) { return (byte & 0xC0) != 0x80; }

UChar32 read(std::string_view text, std::size_t at) {
  UChar32 c = 0;
  U8_GET_UNSAFE(text.data(), at, c);
  return c;
}

std::size_t next_character(std::string_view text, std::size_t at) {
  do ++at;
  while (at < text.size() && !starts_character(text[at]));
  return at;
}

std::size_t previous_character(std::string_view text, std::size_t at) {
  do --at;
  while (!starts_character(text[at]));
  return at;
}

// Whether canonical ordering may move the character in front of the one before it.
bool is_combining(std::string_view text, std::size_t at) {
  const UChar32 c = read(text, at);
  return u_getIntPropertyValue(c, UCHAR_LEAD_CANONICAL_COMBINING_CLASS) != 0 &&
         Unicode9::get().contains(c);
}

// All code points below U+0300 are their own normal form and join nothing before them; those from
// U+0300 have a first byte of at least 0xCC.
bool all_below_combining(std::string_view text) {
  bool found = false;
  for (const char byte : text) found |= static_cast<unsigned char>(byte) >= 0xCC;
  return !found;
}

// ICU orders the marks behind a character by insertion, quadratic in their number, so a long run of
// marks is put into canonical order before ICU sees it. Every run this long covers one of the
// places a fixed step apart that are looked at.
constexpr std::size_t kLongRun = 64;  // bytes

// Appends the canonical decomposition of a run of marks, in canonical order.
void append_ordered(std::string_view run, std::string& out) {
  std::vector<std::pair<std::uint8_t, UChar32>> marks;
  icu::UnicodeString decomposition;
  for (std::size_t at = 0; at < run.size(); at = next_character(run, at)) {
    const UChar32 c = read(run, at);
    if (!nfc().getDecomposition(c, decomposition)) {
      marks.emplace_back(nfc().getCombiningClass(c), c);
      continue;
    }
    for (std::int32_t i = 0; i < decomposition.length(); i = decomposition.moveIndex32(i, 1)) {
      const UChar32 part = decomposition.char32At(i);
      marks.emplace_back(nfc().getCombiningClass(part), part);
    }
  }
  std::stable_sort(marks.begin(), marks.end(),
                   [](const auto& a, const auto& b) { return a.first < b.first; });
  for (const auto& mark : marks) {
    char bytes[U8_MAX_LENGTH];
    std::int32_t length = 0;
    U8_APPEND_UNSAFE(bytes, length, mark.second);
    out.append(bytes, static_cast<std::size_t>(length));
  }
}

// The text with its long runs of marks in canonical order; the text itself where it has none.
std::string_view order_long_runs(std::string_view text, std::string& buffer) {
  std::size_t done = 0;
  buffer.clear();
  for (std::size_t probe = kLongRun - 1; probe < text.size(); probe += kLongRun) {
    std::size_t first = probe;
    while (!starts_character(text[first])) --first;
    if (static_cast<unsigned char>(text[first]) < 0xCC || !is_combining(text, first)) continue;
    std::size_t last = next_character(text, first);
    while (last < text.size() && is_combining(text, last)) last = next_character(text, last);
    while (first > done) {
      const std::size_t before = previous_character(text, first);
      if (!is_combining(text, before)) break;
      first = before;
    }
    if (last - first >= kLongRun) {
      buffer.append(text, done, first - done);
      append_ordered(text.substr(first, last - first), buffer);
      done = last;
    }
    while (probe + kLongRun < last) probe += kLongRun;
  }
  if (done == 0) return text;
  buffer.append(text, done);
  return buffer;
}

// The end of the next part that ICU is given: its lengths are 32-bit, and parts that are in normal
// form are passed over. A part ends where normalisation can't look across.
std::size_t part_end(std::string_view text, std::size_t begin) {
  constexpr std::size_t kPart = std::size_t{1} << 16;
  if (text.size() - begin <= kPart) return text.size();
  std::size_t end = begin + kPart;
  while (end < text.size() &&
         !(starts_character(text[end]) && nfc().hasBoundaryBefore(read(text, end)))) {
    ++end;
  }
  if (end - begin > INT32_MAX / 4) {
    throw Error(ExitCode::kData, "the text has more than 512 MiB of combining marks in a row");
  }
  return end;
}

}  // namespace

std::string_view normalize_nfc(std::string_view text, std::string& buffer) {
  if (all_below_combining(text)) return text;
  std::string ordered_buffer;
  const std::string_view ordered = order_long_runs(text, ordered_buffer);
  bool same = true;
  buffer.clear();
  icu::StringByteSink<std::string> sink(&buffer);
  for (std::size_t begin = 0; begin < ordered.size();) {
    const std::size_t end = part_end(ordered, begin);
    const std::string_view part = ordered.substr(begin, end - begin);
    UErrorCode status = U_ZERO_ERROR;
    const bool normal = nfc().isNormalizedUTF8(
        icu::StringPiece(part.data(), static_cast<std::int32_t>(part.size())), status);
    check(status);
    if (!normal && same) {
      buffer.assign(ordered, 0, begin);
      same = false;
    }
    if (!normal) {
      nfc().normalizeUTF8(0, icu::StringPiece(part.data(), static_cast<std::int32_t>(part.size())),
                          sink, nullptr, status);
      check(status);
    } else if (!same) {
      buffer.append(part);
    }
    begin = end;
  }
  if (!same) return buffer;
  if (ordered.data() == text.data()) return text;
  buffer.swap(ordered_buffer);
  return buffer;
}

}  // namespace tessera
