#include "tests/data/plain_tokenizer.h"

#include <unicode/normalizer2.h>
#include <unicode/regex.h>
#include <unicode/uchar.h>
#include <unicode/unistr.h>

#include <algorithm>
#include <limits>
#include <stdexcept>

namespace tessera {
namespace {

void require(UErrorCode status) {
  if (U_FAILURE(status)) throw std::runtime_error(u_errorName(status));
}

bool in_unicode_9(UChar32 c) {
  UVersionInfo age;
  u_charAge(c, age);
  return age[0] >= 1 && age[0] <= 9;
}

std::string to_utf8(const icu::UnicodeString& text) {
  std::string bytes;
  text.toUTF8String(bytes);
  return bytes;
}

}  // namespace

std::string plain_nfc(std::string_view text) {
  UErrorCode status = U_ZERO_ERROR;
  const icu::Normalizer2* nfc = icu::Normalizer2::getNFCInstance(status);
  require(status);
  const icu::UnicodeString all =
      icu::UnicodeString::fromUTF8({text.data(), static_cast<std::int32_t>(text.size())});
  icu::UnicodeString result;
  for (std::int32_t begin = 0; begin < all.length();) {
    const bool known = in_unicode_9(all.char32At(begin));
    std::int32_t end = begin;
    while (end < all.length() && in_unicode_9(all.char32At(end)) == known)
      end = all.moveIndex32(end, 1);
    const icu::UnicodeString span(all, begin, end - begin);
    result += known ? nfc->normalize(span, status) : span;
    require(status);
    begin = end;
  }
  return to_utf8(result);
}

std::vector<std::string> plain_pieces(std::string_view text) {
  // The family's expression with White_Space spelled out, since ICU's \s is another set.
  const icu::UnicodeString pattern = icu::UnicodeString::fromUTF8(
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\p{White_Space}\p{L}\p{N}]+[\r\n]*)"
      R"(|\p{White_Space}*[\r\n]+|\p{White_Space}+(?!\P{White_Space})|\p{White_Space}+)");
  UErrorCode status = U_ZERO_ERROR;
  const icu::UnicodeString all =
      icu::UnicodeString::fromUTF8({text.data(), static_cast<std::int32_t>(text.size())});
  icu::RegexMatcher matcher(pattern, all, 0, status);
  require(status);
  std::vector<std::string> pieces;
  std::int32_t end = 0;
  while (matcher.find(status)) {
    if (matcher.start(status) != end) throw std::runtime_error("the expression left something out");
    end = matcher.end(status);
    pieces.push_back(to_utf8(matcher.group(status)));
  }
  require(status);
  if (end != all.length()) throw std::runtime_error("the expression left out the end");
  return pieces;
}

PlainTokenizer::PlainTokenizer(const Vocabulary& vocabulary) {
  for (std::uint32_t id = 0; id < vocabulary.tokens.size(); ++id) {
    if (vocabulary.tokens[id].size() == 1) bytes_[vocabulary.tokens[id]] = id;
  }
  for (std::size_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const Merge& merge = vocabulary.merges[rank];
    merges_[{merge.left, merge.right}] = {rank, merge.made};
  }
}

std::vector<std::uint32_t> PlainTokenizer::merge(std::string_view piece) const {
  constexpr std::size_t kNone = std::numeric_limits<std::size_t>::max();
  std::vector<std::uint32_t> ids;
  for (const char byte : piece) ids.push_back(bytes_.at(std::string(1, byte)));
  const auto rank_at = [&](std::size_t i) {
    const auto found = merges_.find({ids[i], ids[i + 1]});
    return found == merges_.end() ? kNone : found->second.first;
  };
  std::vector<std::size_t> ranks;
  for (std::size_t i = 0; i + 1 < ids.size(); ++i) ranks.push_back(rank_at(i));
  while (!ranks.empty()) {
    const auto best = std::min_element(ranks.begin(), ranks.end());  // the leftmost of the lowest
    if (*best == kNone) break;
    const std::size_t at = static_cast<std::size_t>(best - ranks.begin());
    ids[at] = merges_.at({ids[at], ids[at + 1]}).second;
    ids.erase(ids.begin() + static_cast<std::ptrdiff_t>(at) + 1);
    ranks.erase(best);
    if (at < ranks.size()) ranks[at] = rank_at(at);
    if (at > 0) ranks[at - 1] = rank_at(at - 1);
  }
  return ids;
}

std::vector<std::uint32_t> PlainTokenizer::encode(std::string_view text) const {
  std::vector<std::uint32_t> ids;
  for (const std::string& piece : plain_pieces(plain_nfc(text))) {
    const std::vector<std::uint32_t> some = merge(piece);
    ids.insert(ids.end(), some.begin(), some.end());
  }
  return ids;
}

}  // namespace tessera
