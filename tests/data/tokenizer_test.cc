#include "data/tokenizer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unicode/uchar.h>
#include <unicode/utf8.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>
#include <thread>

#include "data/byte_pair.h"
#include "data/normalizer.h"
#include "data/pretokenizer.h"
#include "data/unicode_classes.h"
#include "data/utf8.h"
#include "data/vocabulary.h"
#include "launch/tokenize.h"
#include "runtime/error.h"
#include "tests/data/plain_tokenizer.h"
#include "tests/data/temp_folder.h"

namespace tessera {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;
using Ids = std::vector<std::uint32_t>;

Ids encode(const Tokenizer& tokenizer, std::string_view text, bool parse_special = false) {
  Ids ids;
  tokenizer.encode(text, ids, parse_special);
  return ids;
}

std::string decode(const Tokenizer& tokenizer, const Ids& ids) {
  return tokenizer.decode(ids.data(), ids.size());
}

std::string message_of(ExitCode code, const std::function<void()>& action) {
  try {
    action();
  } catch (const Error& error) {
    EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(code)) << error.what();
    EXPECT_EQ(std::string(error.what()).find('\n'), std::string::npos) << "not one line";
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

// ---- Random text. The raw numbers of mt19937_64 are the same everywhere.

class RandomText {
 public:
  explicit RandomText(std::uint64_t seed) : numbers_(seed) {}
  std::size_t below(std::size_t n) { return static_cast<std::size_t>(numbers_() % n); }

  // Characters that ICU has names for, so that it can stand for the reference's classes.
  std::string assigned_character() {
    for (;;) {
      // Half from the first planes' crowded part.
      const auto c = static_cast<UChar32>(below(2) == 0 ? below(0x3000) : below(0x110000));
      if (u_charType(c) == U_UNASSIGNED || u_charType(c) == U_SURROGATE) continue;
      return utf8(c);
    }
  }
  std::string mark() {
    static const std::vector<UChar32> marks = [] {
      std::vector<UChar32> found;
      for (UChar32 c = 0x300; c < 0x1F000; ++c) {
        if (u_getIntPropertyValue(c, UCHAR_LEAD_CANONICAL_COMBINING_CLASS) != 0) found.push_back(c);
      }
      return found;
    }();
    return utf8(marks[below(marks.size())]);
  }
  std::string one_of(const std::vector<std::string>& words) { return words[below(words.size())]; }

  std::string text(std::size_t parts) {
    const std::size_t kinds = 1 + below(7);
    std::string result;
    for (std::size_t i = 0; i < parts; ++i) {
      switch (below(kinds)) {
        case 0:
          result += one_of(
              {" the", " and", "ing", "tion", "'s", "'LL", "'\xC5\xBF", " ", "1", "42", "token"});
          break;
        case 1:
          result += one_of({" ", "  ", "\n", "\r\n", "\t", "\xC2\xA0", "\xE3\x80\x80", "\xC2\x85",
                            "\xE2\x80\xA8", "\xEF\xBB\xBF", "\xE2\x80\x8B", "\xE1\xA0\x8E"});
          break;
        case 2:
          result += static_cast<char>(32 + below(95));
          break;
        case 3:
          result += mark();
          break;
        case 4:
          result += utf8(static_cast<UChar32>(0x1100 + below(0x100)));  // Hangul jamo
          break;
        case 5:
          result += utf8(static_cast<UChar32>(0xAC00 + below(0x2BA4)));  // Hangul syllables
          break;
        default:
          result += assigned_character();
      }
    }
    return result;
  }

  static std::string utf8(UChar32 c) {
    char bytes[U8_MAX_LENGTH];
    std::int32_t length = 0;
    U8_APPEND_UNSAFE(bytes, length, c);
    return {bytes, static_cast<std::size_t>(length)};
  }

 private:
  std::mt19937_64 numbers_;
};

// ---- A small vocabulary, made here. Its ids aren't in the order of its merges, nor its bytes
// first.

constexpr char kSample[] =
    "the theory of the thing is that the other theme then bathes in the weather, and the rain in "
    "Spain stays mainly in the plain; aaaaaaaaaaaaaaaa bbbb          ======== \n\n\n\n don't "
    "you'll "
    "\xEB\x8A\x94 \xEB\x8A\x94 \xED\x95\x9C\xEA\xB8\x80 \xED\x95\x9C\xEA\xB5\xAD 12 12 12";

// Merges the commonest pair of the sample again and again.
Vocabulary make_vocabulary(std::size_t merges) {
  Vocabulary vocabulary;
  for (int byte = 255; byte >= 0; --byte) {
    vocabulary.tokens.emplace_back(1, static_cast<char>(static_cast<unsigned char>(byte)));
  }
  Ids text;
  for (const char byte : std::string_view(kSample))
    text.push_back(255U - static_cast<unsigned char>(byte));
  while (vocabulary.merges.size() < merges) {
    std::map<std::pair<std::uint32_t, std::uint32_t>, int> counts;
    for (std::size_t i = 0; i + 1 < text.size(); ++i) ++counts[{text[i], text[i + 1]}];
    auto best = counts.begin();
    for (auto pair = counts.begin(); pair != counts.end(); ++pair) {
      if (pair->second > best->second) best = pair;
    }
    const auto [left, right] = best->first;
    const std::string made_bytes = vocabulary.tokens[left] + vocabulary.tokens[right];
    const auto made = static_cast<std::uint32_t>(vocabulary.tokens.size());
    if (std::find(vocabulary.tokens.begin(), vocabulary.tokens.end(), made_bytes) !=
        vocabulary.tokens.end()) {
      throw std::logic_error("the sample makes one token in two ways");
    }
    vocabulary.tokens.push_back(made_bytes);
    vocabulary.merges.push_back({left, right, made});
    Ids shorter;
    for (std::size_t i = 0; i < text.size(); ++i) {
      if (i + 1 < text.size() && text[i] == left && text[i + 1] == right) {
        shorter.push_back(made);
        ++i;
      } else {
        shorter.push_back(text[i]);
      }
    }
    text = shorter;
  }
  const auto end = static_cast<std::uint32_t>(vocabulary.tokens.size());
  vocabulary.added = {{"<|end|>", end}, {"<|end|>more", end + 2}};
  return vocabulary;
}

// The alphabet of tokenizer.json, from its description: printable Latin-1 stands for itself.
std::string in_byte_alphabet(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) {
    const int byte = static_cast<unsigned char>(c);
    const auto printable = [](int b) {
      return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    };
    int value = byte;
    if (!printable(byte)) {
      value = 256;
      for (int b = 0; b < byte; ++b) value += printable(b) ? 0 : 1;
    }
    text += RandomText::utf8(value);
  }
  return text;
}

json tokenizer_json(const Vocabulary& vocabulary) {
  json vocab = json::object();
  for (std::size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    vocab[in_byte_alphabet(vocabulary.tokens[id])] = id;
  }
  json merges = json::array();
  for (const Merge& merge : vocabulary.merges) {
    merges.push_back({in_byte_alphabet(vocabulary.tokens[merge.left]),
                      in_byte_alphabet(vocabulary.tokens[merge.right])});
  }
  json added = json::array();
  for (const AddedToken& token : vocabulary.added) {
    added.push_back({{"id", token.id}, {"content", token.content}, {"special", true}});
  }
  const json split = {{"type", "Split"},
                      {"pattern", {{"Regex", kPretokenizerPattern}}},
                      {"behavior", "Isolated"},
                      {"invert", false}};
  const json bytes = {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}};
  return {{"added_tokens", added},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer", {{"type", "Sequence"}, {"pretokenizers", {split, bytes}}}},
          {"post_processor", bytes},
          {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}}}};
}

std::string base64(std::string_view bytes) {
  static constexpr char kDigits[] =
      "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
  std::string text;
  for (std::size_t i = 0; i < bytes.size(); i += 3) {
    std::uint32_t bits = 0;
    for (std::size_t j = 0; j < 3; ++j) {
      bits = bits << 8 | (i + j < bytes.size() ? static_cast<unsigned char>(bytes[i + j]) : 0U);
    }
    for (std::size_t j = 0; j < 4; ++j) {
      text += i + j <= bytes.size() ? kDigits[bits >> (18 - 6 * j) & 63] : '=';
    }
  }
  return text;
}

std::string tiktoken(const Vocabulary& vocabulary) {
  std::string lines;
  for (std::size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    lines += base64(vocabulary.tokens[id]) + " " + std::to_string(id) + "\n";
  }
  return lines;
}

// ---- UTF-8

TEST(Utf8, AgreesWithIcuOnEverySequenceOfUpToThreeBytesAndRandomOnes) {
  const auto icu_first_invalid = [](std::string_view text) {
    const auto* bytes = reinterpret_cast<const std::uint8_t*>(text.data());
    const auto length = static_cast<std::int32_t>(text.size());
    for (std::int32_t at = 0; at < length;) {
      const std::int32_t begin = at;
      UChar32 c = 0;
      U8_NEXT(bytes, at, length, c);
      if (c < 0) return static_cast<std::size_t>(begin);
    }
    return std::string_view::npos;
  };
  const auto check = [&](std::string_view text) {
    const std::size_t got = first_invalid_utf8(text);
    const std::size_t want = icu_first_invalid(text);
    if (got != want)
      ADD_FAILURE() << json(std::string(text)).dump(-1, ' ', true, json::error_handler_t::ignore)
                    << ": " << got << " " << want;
  };
  check("");
  for (int a = 0; a < 256; ++a) {
    for (int b = 0; b < 256; ++b) {
      const char two[] = {static_cast<char>(a), static_cast<char>(b), '\0'};
      check(std::string_view(two, 1));
      check(std::string_view(two, 2));
      if (a < 0x7F) continue;
      for (int c = 0; c < 256; ++c) {
        const char three[] = {static_cast<char>(a), static_cast<char>(b), static_cast<char>(c)};
        check(std::string_view(three, 3));
      }
    }
  }
  RandomText random(1);
  for (int i = 0; i < 20000; ++i) {
    std::string text(random.below(70), 'a');
    text += random.text(random.below(20));
    for (std::size_t faults = random.below(3); faults > 0 && !text.empty(); --faults) {
      text[random.below(text.size())] = static_cast<char>(random.below(256));
    }
    check(text);
  }
}

TEST(Utf8, RefusesOverlongFormsSurrogatesAndWhatIsAboveTheLastCodePoint) {
  for (const char* bad :
       {"\xC0\xAF", "\xE0\x80\xAF", "\xF0\x80\x80\xAF", "\xED\xA0\x80", "\xED\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE2\x82", "\x80"}) {
    EXPECT_EQ(first_invalid_utf8(std::string(37, 'x') + bad + "y"), 37U);
  }
  for (const char* good : {"\xC2\x80", "\xDF\xBF", "\xE0\xA0\x80", "\xED\x9F\xBF", "\xEE\x80\x80",
                           "\xF0\x90\x80\x80", "\xF4\x8F\xBF\xBF"}) {
    EXPECT_EQ(first_invalid_utf8(good), std::string_view::npos);
  }
}

// ---- Classes, normalisation, pieces

TEST(UnicodeClasses, AgreeWithIcuOnAllCodePointsThatItKnows) {
  const CharacterClasses& classes = character_classes();
  std::int64_t letters = 0;
  for (UChar32 c = 0; c < 0x110000; ++c) {
    const CharacterClass got = classes[static_cast<char32_t>(c)];
    letters += got == CharacterClass::kLetter ? 1 : 0;
    if (u_charType(c) == U_UNASSIGNED) continue;
    CharacterClass want = CharacterClass::kOther;
    if ((U_GET_GC_MASK(c) & U_GC_L_MASK) != 0) want = CharacterClass::kLetter;
    if ((U_GET_GC_MASK(c) & U_GC_N_MASK) != 0) want = CharacterClass::kNumber;
    if (u_hasBinaryProperty(c, UCHAR_WHITE_SPACE)) want = CharacterClass::kSpace;
    if (c == '\r' || c == '\n') want = CharacterClass::kNewline;
    ASSERT_EQ(static_cast<int>(got), static_cast<int>(want)) << "U+" << std::hex << c;
  }
  EXPECT_EQ(letters, 141028);  // of Unicode 16
  EXPECT_EQ(static_cast<int>(classes[0x16D43]),
            static_cast<int>(CharacterClass::kLetter));  // new in 16
}

TEST(Normalizer, AgreesWithIcuOnSpansOfUnicode9) {
  RandomText random(2);
  std::string buffer;
  for (int i = 0; i < 3000; ++i) {
    const std::string text = random.text(1 + random.below(60));
    ASSERT_EQ(normalize_nfc(text, buffer), plain_nfc(text)) << json(text).dump(-1, ' ', true);
  }
  // Long runs of marks, more than one, with characters that decompose into marks among them.
  for (int i = 0; i < 300; ++i) {
    std::string text;
    for (std::size_t runs = 1 + random.below(3); runs > 0; --runs) {
      text += random.text(random.below(10));
      for (std::size_t marks = random.below(200); marks > 0; --marks) text += random.mark();
    }
    ASSERT_EQ(normalize_nfc(text, buffer), plain_nfc(text)) << json(text).dump(-1, ' ', true);
  }
}

TEST(Normalizer, WorksInPartsThatDontShow) {
  RandomText random(3);
  std::string text;
  while (text.size() < 400000)
    text += random.text(50) + random.one_of({"", "e\xCC\x81", "\xE1\x84\x92\xE1\x85\xA1"});
  std::string buffer;
  EXPECT_EQ(normalize_nfc(text, buffer), plain_nfc(text));
  const std::string normal = plain_nfc(text);
  EXPECT_EQ(normalize_nfc(normal, buffer).data(), normal.data()) << "copied what needed no change";
}

TEST(Normalizer, LeavesMarksYoungerThanUnicode9WhereTheyAre) {
  std::string buffer;
  // U+1DF6 (Unicode 10, class 232) before U+0316 (class 220).
  EXPECT_EQ(normalize_nfc("a\xE1\xB7\xB6\xCC\x96", buffer), "a\xE1\xB7\xB6\xCC\x96");
  EXPECT_EQ(normalize_nfc("a\xCC\x81\xCC\x96", buffer), "\xC3\xA1\xCC\x96");
  EXPECT_STREQ(kNormalizerUnicodeVersion, "9.0");
}

TEST(Normalizer, B41_MillionsOfMarksInARow) {
  std::string text = "a";
  for (int i = 0; i < 1000000; ++i) text += "\xCC\x81";
  for (int i = 0; i < 1000000; ++i) text += "\xCC\x96";
  for (int i = 0; i < 1000000; ++i) text += "\xE0\xBD\xB3";  // decomposes into marks of two classes
  std::string buffer;
  // In place of a wall clock: by insertion this would take 10^12 moves, hours.
  const std::string_view normal = normalize_nfc(text, buffer);
  std::string want = "a";
  const auto add = [&want](int count, const char* mark) {
    for (int i = 0; i < count; ++i) want += mark;
  };
  add(1000000, "\xE0\xBD\xB1");
  add(1000000, "\xE0\xBD\xB2");
  add(1000000, "\xCC\x96");
  add(1000000, "\xCC\x81");
  EXPECT_TRUE(normal == plain_nfc(want));
}

std::vector<std::string> pieces_of(std::string_view text) {
  std::vector<std::string> pieces;
  PieceIterator iterator(text);
  std::string_view piece;
  while (iterator.next(piece)) pieces.emplace_back(piece);
  return pieces;
}

TEST(Pretokenizer, B39_CutsAsTheFamilyDoes) {
  using Pieces = std::vector<std::string>;
  EXPECT_EQ(pieces_of("1234567"), (Pieces{"1", "2", "3", "4", "5", "6", "7"}));
  EXPECT_EQ(pieces_of("a->b"), (Pieces{"a", "->", "b"}));
  EXPECT_EQ(pieces_of("(x):\n"), (Pieces{"(x", "):\n"}));
  EXPECT_EQ(pieces_of("I'M don'T you'LL he'\xC5\xBF"),
            (Pieces{"I", "'M", " don", "'T", " you", "'LL", " he", "'\xC5\xBF"}));
  EXPECT_EQ(pieces_of("a   b"), (Pieces{"a", "  ", " b"}));
  EXPECT_EQ(pieces_of("a   1"), (Pieces{"a", "  ", " ", "1"}));
  EXPECT_EQ(pieces_of("a  \t!"), (Pieces{"a", "  ", "\t", "!"}));
  EXPECT_EQ(pieces_of("x \n\n  y  "), (Pieces{"x", " \n\n", " ", " y", "  "}));
  EXPECT_EQ(pieces_of("x\r\n"), (Pieces{"x", "\r\n"}));
  EXPECT_EQ(pieces_of(" !!\r\n\nz"), (Pieces{" !!\r\n\n", "z"}));
  EXPECT_EQ(pieces_of("\xC2\xA0word\xE3\x80\x80word"),
            (Pieces{"\xC2\xA0word", "\xE3\x80\x80word"}));
  EXPECT_EQ(pieces_of("\xEF\xBB\xBFword"), (Pieces{"\xEF\xBB\xBFword"}));
  EXPECT_EQ(pieces_of(" \xCC\x81x"), (Pieces{" \xCC\x81", "x"}));
  EXPECT_EQ(pieces_of("'"), (Pieces{"'"}));
  EXPECT_EQ(pieces_of(""), (Pieces{}));
}

TEST(Pretokenizer, AgreesWithTheRegularExpression) {
  RandomText random(4);
  for (int i = 0; i < 5000; ++i) {
    const std::string text = random.text(1 + random.below(80));
    ASSERT_EQ(pieces_of(text), plain_pieces(text)) << json(text).dump(-1, ' ', true);
  }
}

// ---- Byte pairs over the small vocabulary

TEST(BytePair, AgreesWithThePlainMerges) {
  Vocabulary vocabulary = make_vocabulary(60);
  const PlainTokenizer plain(vocabulary);
  const BytePairEncoder encoder(vocabulary);
  BytePairEncoder::Workspace workspace;
  RandomText random(5);
  for (int i = 0; i < 3000; ++i) {
    std::string piece;
    const std::size_t size = 1 + random.below(i % 10 == 0 ? 900 : 70);
    while (piece.size() < size) {
      const std::size_t at = random.below(sizeof kSample - 1);
      piece += std::string(kSample).substr(at, 1 + random.below(6));
    }
    Ids ids;
    encoder.encode(piece, ids, workspace);
    ASSERT_EQ(ids, plain.merge(piece)) << json(piece).dump(-1, ' ', true);
    encoder.encode(piece, ids, workspace);  // and again, as remembered
    ASSERT_EQ(ids.size(), 2 * plain.merge(piece).size());
  }
}

// The order of merges decides, not the order of ids, and it need not be one that ranks could give.
TEST(BytePair, MergesInAnyOrder) {
  Vocabulary vocabulary = make_vocabulary(60);
  RandomText random(6);
  for (int round = 0; round < 20; ++round) {
    for (std::size_t i = vocabulary.merges.size(); i > 1; --i) {
      std::swap(vocabulary.merges[i - 1], vocabulary.merges[random.below(i)]);
    }
    const TempFolder folder;
    const Vocabulary read =
        read_vocabulary(folder.write("tokenizer.json", tokenizer_json(vocabulary).dump()));
    const PlainTokenizer plain(vocabulary);
    const BytePairEncoder encoder(read);
    BytePairEncoder::Workspace workspace;
    for (int i = 0; i < 100; ++i) {
      std::string piece;
      while (piece.size() < 300)
        piece += std::string(kSample).substr(random.below(sizeof kSample - 1), 9);
      piece.resize(1 + random.below(300));
      Ids ids;
      encoder.encode(piece, ids, workspace);
      ASSERT_EQ(ids, plain.merge(piece))
          << json(piece).dump(-1, ' ', true, json::error_handler_t::replace);
    }
  }
}

// Windows that can't meet: one token is longer than the first window.
TEST(BytePair, WindowsThatDontMeetAreWidened) {
  Vocabulary vocabulary = make_vocabulary(0);
  const std::uint32_t x = 255U - 'x';
  const std::uint32_t y = 255U - 'y';
  // y x x x x ... merges from the left only: (yx), (yxx), (yxxx) up to 20000 letters.
  std::uint32_t left = y;
  std::string bytes = "y";
  for (int i = 0; i < 20000; ++i) {
    bytes += 'x';
    const auto made = static_cast<std::uint32_t>(vocabulary.tokens.size());
    vocabulary.tokens.push_back(bytes);
    vocabulary.merges.push_back({left, x, made});
    left = made;
  }
  const BytePairEncoder encoder(vocabulary);
  BytePairEncoder::Workspace workspace;
  Ids ids;
  encoder.encode("y" + std::string(30000, 'x') + bytes, ids, workspace);
  Ids want(1, left);
  want.insert(want.end(), 10000, x);
  want.push_back(left);
  EXPECT_TRUE(ids == want);
}

// ---- The small vocabulary through the whole tokenizer

class SmallTokenizer : public testing::Test {
 protected:
  Vocabulary vocabulary_ = make_vocabulary(60);
  TempFolder folder_;
  std::string path_ = folder_.write("tokenizer.json", tokenizer_json(vocabulary_).dump());
};

TEST_F(SmallTokenizer, AgreesWithThePlainOneAndDecodesToTheNormalForm) {
  const auto tokenizer = open_tokenizer(path_);
  const PlainTokenizer plain(vocabulary_);
  RandomText random(7);
  for (int i = 0; i < 2000; ++i) {
    const std::string text = random.text(1 + random.below(60));
    const Ids ids = encode(*tokenizer, text);
    ASSERT_EQ(ids, plain.encode(text)) << json(text).dump(-1, ' ', true);
    ASSERT_EQ(decode(*tokenizer, ids), plain_nfc(text)) << json(text).dump(-1, ' ', true);
  }
}

TEST_F(SmallTokenizer, BothFilesGiveTheSameIds) {
  Vocabulary bare = vocabulary_;
  bare.added.clear();
  const auto from_json = open_tokenizer(folder_.write("bare.json", tokenizer_json(bare).dump()));
  const auto from_tiktoken = open_tokenizer(folder_.write("bare.tiktoken", tiktoken(bare)));
  EXPECT_EQ(from_json->digest(), from_tiktoken->digest());
  EXPECT_EQ(from_json->size(), 256 + 60);
  EXPECT_EQ(from_tiktoken->size(), 256 + 60);
  EXPECT_EQ(from_tiktoken->end_of_sequence(), -1);
  RandomText random(8);
  for (int i = 0; i < 500; ++i) {
    const std::string text = random.text(1 + random.below(60));
    ASSERT_EQ(encode(*from_json, text), encode(*from_tiktoken, text));
  }
}

TEST_F(SmallTokenizer, DigestTellsVocabulariesApart) {
  Vocabulary other = vocabulary_;
  other.added[0].content = "<|End|>";
  Vocabulary swapped = vocabulary_;
  std::swap(swapped.tokens[0], swapped.tokens[1]);
  const std::string digest = open_tokenizer(path_)->digest();
  EXPECT_NE(digest,
            open_tokenizer(folder_.write("other.json", tokenizer_json(other).dump()))->digest());
  swapped.merges.clear();
  Vocabulary without = vocabulary_;
  without.merges.clear();
  EXPECT_NE(digest,
            open_tokenizer(folder_.write("s.json", tokenizer_json(swapped).dump()))->digest());
  EXPECT_EQ(digest,
            open_tokenizer(folder_.write("w.json", tokenizer_json(without).dump()))->digest());
  EXPECT_EQ(digest.size(), 64U);
}

TEST_F(SmallTokenizer, EndOfSequenceIsWhatTheConfigBesideTheFileNames) {
  EXPECT_EQ(open_tokenizer(path_)->end_of_sequence(), -1);
  folder_.write("tokenizer_config.json", R"({"eos_token": "<|end|>"})");
  EXPECT_EQ(open_tokenizer(path_)->end_of_sequence(), 316);
  folder_.write("tokenizer_config.json", R"({"eos_token": {"content": "<|end|>more"}})");
  EXPECT_EQ(open_tokenizer(path_)->end_of_sequence(), 318);
  folder_.write("tokenizer_config.json", R"({"eos_token": null})");
  EXPECT_EQ(open_tokenizer(path_)->end_of_sequence(), -1);
  folder_.write("tokenizer_config.json", R"({"eos_token": "<|no|>"})");
  EXPECT_THAT(message_of(ExitCode::kData, [&] { open_tokenizer(path_); }),
              HasSubstr("tokenizer_config.json': 'eos_token' is \"<|no|>\""));
  folder_.write("tokenizer_config.json", "[");
  EXPECT_THAT(message_of(ExitCode::kData, [&] { open_tokenizer(path_); }),
              HasSubstr("is not JSON"));
}

TEST_F(SmallTokenizer, B40_ControlStringsAreTextUnlessAskedFor) {
  const auto tokenizer = open_tokenizer(path_);
  EXPECT_EQ(tokenizer->size(), 319);
  for (const char* text : {"<|end|>", "x<|end|>more", "<|END|>", "<|end|", "<|end|><|end|>"}) {
    for (const std::uint32_t id : encode(*tokenizer, text)) EXPECT_LT(id, 316U) << text;
    EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, text)), text);
    EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, text, true)), text);
  }
  EXPECT_EQ(encode(*tokenizer, "<|end|><|end|>more", true), (Ids{316, 318}));  // the longest
  // The normaliser doesn't look across: e and its accent stay apart.
  const std::string split = "e<|end|>\xCC\x81";
  EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, split, true)), split);
}

TEST_F(SmallTokenizer, RefusesInvalidTextAndUnknownIds) {
  const auto tokenizer = open_tokenizer(path_);
  Ids ids{7};
  EXPECT_THAT(message_of(ExitCode::kData, [&] { tokenizer->encode("abc\xFF", ids); }),
              HasSubstr("byte 3"));
  EXPECT_EQ(ids, (Ids{7}));
  for (const std::uint32_t id : {317U, 319U, UINT32_MAX}) {
    EXPECT_THAT(message_of(ExitCode::kData,
                           [&] {
                             decode(*tokenizer, {1, id});
                           }),
                HasSubstr("id " + std::to_string(id) + " at place 1"));
  }
  EXPECT_EQ(decode(*tokenizer, {}), "");
  EXPECT_EQ(encode(*tokenizer, ""), (Ids{}));
}

TEST_F(SmallTokenizer, CutIsATokenizerOfItsOwn) {
  const PlainTokenizer whole(vocabulary_);
  RandomText random(9);
  std::vector<std::string> digests;
  for (const std::int64_t limit : {256, 257, 280, 315, 316}) {
    const auto tokenizer = open_tokenizer(path_, {limit});
    Vocabulary cut = vocabulary_;
    cut_vocabulary(cut, limit);
    const PlainTokenizer plain(cut);
    EXPECT_EQ(tokenizer->size(), limit + 1);
    EXPECT_EQ(tokenizer->end_of_sequence(), limit);
    for (const std::string& digest : digests) EXPECT_NE(tokenizer->digest(), digest);
    digests.push_back(tokenizer->digest());
    for (int i = 0; i < 200; ++i) {
      const std::string text = random.text(1 + random.below(60));
      const Ids ids = encode(*tokenizer, text);
      ASSERT_EQ(ids, plain.encode(text));
      for (const std::uint32_t id : ids) ASSERT_LT(id, limit);
      ASSERT_EQ(decode(*tokenizer, ids), plain_nfc(text));
    }
  }
  for (const std::int64_t limit : {-1, 1, 255, 317}) {
    EXPECT_THAT(message_of(ExitCode::kUsage, [&] { open_tokenizer(path_, {limit}); }),
                HasSubstr("vocabulary_limit is " + std::to_string(limit)));
  }
}

TEST(ByteTokenizer, IdsAreBytes) {
  const auto tokenizer = open_tokenizer("byte");
  EXPECT_EQ(encode(*tokenizer, "a\xCC\x81"), (Ids{0x61, 0xCC, 0x81}));
  EXPECT_EQ(decode(*tokenizer, {0, 255, 65}), std::string("\0\xFF"
                                                          "A",
                                                          3));
  EXPECT_EQ(tokenizer->size(), 257);
  EXPECT_EQ(tokenizer->end_of_sequence(), 256);
  EXPECT_EQ(tokenizer->unicode_version(), "");
  // printf of the 257 lines through sha256sum.
  EXPECT_EQ(tokenizer->digest(),
            "3419a08ee0bb5efa86a02f946636d84bdead6cfb471b60460c137638fd7a7ca6");
  message_of(ExitCode::kData, [&] { encode(*tokenizer, "\xC0\x80"); });
  message_of(ExitCode::kUsage, [] { open_tokenizer("byte", {300}); });
}

// ---- Broken files

TEST_F(SmallTokenizer, CutOffFilesAreRefusedByName) {
  const std::string whole = tokenizer_json(vocabulary_).dump();
  Vocabulary bare = vocabulary_;
  const std::string lines = tiktoken(bare);
  RandomText random(10);
  for (std::size_t i = 0; i < 200; ++i) {
    const std::string path =
        folder_.write("cut", whole.substr(0, i < 20 ? i : random.below(whole.size())));
    EXPECT_THAT(message_of(ExitCode::kData, [&] { open_tokenizer(path); }), HasSubstr(path));
  }
  for (std::size_t i = 0; i < 200; ++i) {
    const std::size_t size = i < 20 ? i : random.below(lines.size());
    const std::string path = folder_.write("cut", lines.substr(0, size));
    // A file cut between two lines is a shorter vocabulary; the 256 bytes take 2194.
    if (size >= 2193 && (lines[size - 1] == '\n' || lines[size] == '\n')) continue;
    EXPECT_THAT(message_of(ExitCode::kData, [&] { open_tokenizer(path); }), HasSubstr(path));
  }
}

TEST_F(SmallTokenizer, DamagedFilesOpenOrAreRefusedButNeverCrash) {
  const std::string forms[] = {tokenizer_json(vocabulary_).dump(), tiktoken(vocabulary_)};
  RandomText random(11);
  int refused = 0;
  for (int i = 0; i < 1000; ++i) {
    std::string damaged = forms[i % 2];
    for (std::size_t faults = 1 + random.below(3); faults > 0; --faults) {
      damaged[random.below(damaged.size())] =
          static_cast<char>(random.below(i % 4 < 2 ? 256 : 128));
    }
    const std::string path = folder_.write("damaged", damaged);
    try {
      const auto tokenizer = open_tokenizer(path);
      EXPECT_EQ(decode(*tokenizer, encode(*tokenizer, kSample)), kSample);
    } catch (const Error& error) {
      EXPECT_EQ(static_cast<int>(error.code()), static_cast<int>(ExitCode::kData));
      EXPECT_THAT(error.what(), HasSubstr(path));
      ++refused;
    }
  }
  EXPECT_GT(refused, 900);
}

TEST_F(SmallTokenizer, WrongShapesAreNamed) {
  const json good = tokenizer_json(vocabulary_);
  const auto refused = [&](const std::function<void(json&)>& change) {
    json bad = good;
    change(bad);
    const std::string path = folder_.write("bad.json", bad.dump());
    return message_of(ExitCode::kData, [&] { open_tokenizer(path); });
  };
  EXPECT_THAT(refused([](json& j) { j.erase("model"); }), HasSubstr("/model/type"));
  EXPECT_THAT(refused([](json& j) { j["model"] = 3; }), HasSubstr("/model/type"));
  EXPECT_THAT(refused([](json& j) { j["model"].erase("vocab"); }), HasSubstr("no 'vocab'"));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"] = json::array(); }),
              HasSubstr("'vocab' is array"));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"]["a"] = -1; }),
              HasSubstr("\"a\" the id -1"));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"]["a"] = 1e300; }), HasSubstr("\"a\""));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"]["a"] = 18446744073709551615U; }),
              HasSubstr("\"a\""));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"]["a"] = "x"; }), HasSubstr("\"a\""));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"]["a"] = 5; }), HasSubstr("to two tokens"));
  EXPECT_THAT(refused([](json& j) { j["model"]["vocab"].erase("a"); }),
              HasSubstr("must have the ids from 0"));
  EXPECT_THAT(refused([](json& j) {
                j["model"]["vocab"]["a b"] = j["model"]["vocab"]["a"];
                j["model"]["vocab"].erase("a");
              }),
              HasSubstr("byte-level alphabet"));
  EXPECT_THAT(refused([](json& j) {
                j["model"]["vocab"]["zzz"] = j["model"]["vocab"]["a"];
                j["model"]["vocab"].erase("a");
              }),
              HasSubstr("single byte 97"));
  EXPECT_THAT(refused([](json& j) { j["model"].erase("merges"); }), HasSubstr("no 'merges'"));
  EXPECT_THAT(refused([](json& j) { j["model"]["merges"][3] = 7; }),
              HasSubstr("merge 3 isn't two tokens"));
  EXPECT_THAT(refused([](json& j) { j["model"]["merges"][3] = {"q"}; }),
              HasSubstr("merge 3 isn't two"));
  EXPECT_THAT(refused([](json& j) { j["model"]["merges"][3] = "q"; }),
              HasSubstr("merge 3 isn't two"));
  EXPECT_THAT(refused([](json& j) { j["model"]["merges"][3] = "q q"; }),
              HasSubstr("merge 3: a part"));
  EXPECT_THAT(refused([](json& j) { j["model"]["merges"].push_back(j["model"]["merges"][0]); }),
              HasSubstr("merge 60 is there twice"));
  EXPECT_THAT(refused([](json& j) { j.erase("added_tokens"); }), HasSubstr("no 'added_tokens'"));
  EXPECT_THAT(refused([](json& j) { j["added_tokens"][0] = 1; }), HasSubstr("isn't an object"));
  EXPECT_THAT(refused([](json& j) { j["added_tokens"][0]["id"] = 3; }),
              HasSubstr("\"<|end|>\" must have"));
  EXPECT_THAT(refused([](json& j) { j["added_tokens"][0]["id"] = 318; }), HasSubstr("the id 318"));
  // Each id up to it would take memory.
  EXPECT_THAT(refused([](json& j) { j["added_tokens"][0]["id"] = 4294967294U; }),
              HasSubstr("\"<|end|>\" must have an id from 316 on, and below 1048892"));
  EXPECT_THAT(refused([](json& j) { j["added_tokens"][0]["lstrip"] = true; }),
              HasSubstr("'lstrip'"));
  EXPECT_THAT(refused([](json& j) { j["added_tokens"].push_back(j["added_tokens"][0]); }),
              HasSubstr("there twice"));
  // Another normaliser, another expression: the ids would be wrong in silence.
  EXPECT_THAT(refused([](json& j) { j["normalizer"] = nullptr; }), HasSubstr("/normalizer/type"));
  EXPECT_THAT(refused([](json& j) { j["normalizer"]["type"] = "NFKC"; }),
              HasSubstr("\"NFKC\", not \"NFC\""));
  EXPECT_THAT(refused([](json& j) {
                j["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = "\\p{N}{1,3}";
              }),
              HasSubstr("/pattern/Regex"));
  EXPECT_THAT(refused([](json& j) { j["model"]["byte_fallback"] = true; }),
              HasSubstr("/model/byte_fallback"));
  EXPECT_THAT(refused([](json& j) { j["model"]["dropout"] = 0.1; }), HasSubstr("/model/dropout"));

  const auto refused_lines = [&](const std::string& content) {
    const std::string path = folder_.write("bad.tiktoken", content);
    return message_of(ExitCode::kData, [&] { open_tokenizer(path); });
  };
  const std::string lines = tiktoken(vocabulary_);
  EXPECT_THAT(refused_lines("IQ== 0\nIg==\n"), HasSubstr("line 2 isn't a token"));
  EXPECT_THAT(refused_lines("IQ== 0\nI!== 1\n"), HasSubstr("line 2 isn't a token"));
  EXPECT_THAT(refused_lines("IQ== 0\nIQ== 1\n"), HasSubstr("line 2 has a token that was there"));
  EXPECT_THAT(refused_lines("IQ== 0\nIg== 99999999999\n"), HasSubstr("line 2"));
  EXPECT_THAT(refused_lines(lines + "enp6 400\n"), HasSubstr("rank 316 is missing"));
  EXPECT_THAT(refused_lines(lines + base64("zqzq") + " 316\n"),
              HasSubstr("token 316 is made of 4"));
  // What a token is made of takes time by the square of its bytes: this one's, hours.
  EXPECT_THAT(refused_lines(lines + base64(std::string(3000000, 'z')) + " 316\n"),
              HasSubstr("line 317 has a token of 3000000 bytes; at most 1024"));
  EXPECT_THAT(refused_lines("IQ== 0\n"), HasSubstr("single byte 0"));
  EXPECT_THAT(refused_lines(""), HasSubstr("is empty"));
  EXPECT_THAT(refused_lines(std::string(5000, '\0')), HasSubstr("line 1"));
  EXPECT_THAT(refused_lines(std::string("\x1F\x8B\x08\0\0", 5)), HasSubstr("line 1"));
  EXPECT_THAT(refused_lines("{" + std::string(1000000, '[')), HasSubstr("is not JSON"));
  const std::string none = folder_.write("x", "") + "-none";
  EXPECT_THAT(message_of(ExitCode::kData, [&] { open_tokenizer(none); }),
              HasSubstr("no such file"));
  EXPECT_THAT(message_of(ExitCode::kData, [] { open_tokenizer("/tmp"); }),
              HasSubstr("is a folder"));
}

// ---- The command

TEST_F(SmallTokenizer, CommandConvertsPlainTextAndJsonLines) {
  const auto tokenizer = open_tokenizer(path_);
  const auto run = [&](const TokenizeOptions& options, const std::string& input) {
    std::istringstream in(input);
    std::ostringstream out;
    tokenize(*tokenizer, options, in, out);
    return out.str();
  };
  const Ids ids = encode(*tokenizer, "the \n<|end|>\n");
  std::string line;
  for (const std::uint32_t id : ids) line += (line.empty() ? "" : " ") + std::to_string(id);
  EXPECT_EQ(run({}, "the \n<|end|>\n"), line + "\n");
  EXPECT_EQ(run({.decode = true}, line + "\n"), "the \n<|end|>\n");
  EXPECT_EQ(run({.parse_special = true}, "<|end|>"), "316\n");
  EXPECT_EQ(run({}, ""), "\n");

  const std::string lines =
      "{\"text\":\"the\\ud83d\\ude00\",\"name\":{\"a\":[1,2.5]}}\n\n{\"name\":1,\"text\":\"\"}";
  const std::string made = run({.json_lines = true}, lines);
  std::istringstream each(made);
  std::string first;
  std::string second;
  std::string third;
  std::getline(each, first);
  std::getline(each, second);
  EXPECT_FALSE(std::getline(each, third));
  EXPECT_EQ(json::parse(first), (json{{"name", {{"a", {1, 2.5}}}},
                                      {"ids", encode(*tokenizer, "the\xF0\x9F\x98\x80")}}));
  EXPECT_EQ(json::parse(second), (json{{"name", 1}, {"ids", json::array()}}));
  std::istringstream back(run({.decode = true, .json_lines = true}, made));
  std::getline(back, first);
  EXPECT_EQ(json::parse(first), json::parse(lines.substr(0, lines.find('\n'))));

  const auto refused = [&](const TokenizeOptions& options, const std::string& input) {
    return message_of(ExitCode::kData, [&] { run(options, input); });
  };
  EXPECT_THAT(refused({.json_lines = true}, "{\"text\":\"a\"}\n{\"text\":1}\n"),
              HasSubstr("line 2: 'text' isn't"));
  EXPECT_THAT(refused({.json_lines = true}, "{}"), HasSubstr("line 1: has no 'text'"));
  EXPECT_THAT(refused({.json_lines = true}, "[]"), HasSubstr("line 1: isn't a JSON object"));
  EXPECT_THAT(refused({.json_lines = true}, "{\"text\":\"\xFF\"}"),
              HasSubstr("line 1: isn't JSON"));
  EXPECT_THAT(refused({.json_lines = true}, "{\"text\":\"\\ud800\"}"),
              HasSubstr("line 1: isn't JSON"));
  EXPECT_THAT(refused({.json_lines = true}, "{\"text\":\"\",\"x\":" + std::string(100000, '[')),
              HasSubstr("line 1: is nested"));
  EXPECT_THAT(refused({.decode = true}, "1 2 x"), HasSubstr("word 3, 'x'"));
  EXPECT_THAT(refused({.decode = true}, "1 -2"), HasSubstr("word 2"));
  EXPECT_THAT(refused({.decode = true}, "1 99999"), HasSubstr("id 99999"));
  EXPECT_THAT(refused({.decode = true, .json_lines = true}, "{\"ids\":[0]}"),
              HasSubstr("aren't UTF-8"));
  EXPECT_THAT(refused({.decode = true, .json_lines = true}, "{\"ids\":[1.5]}"),
              HasSubstr("isn't a token id"));
  EXPECT_THAT(refused({.decode = true, .json_lines = true}, "{\"ids\":3}"),
              HasSubstr("isn't an array"));
}

// ---- The Qwen3 vocabulary

// The file that TESSERA_TOKENIZER names, else the one in launch/fetch_tokenizer's cache folder.
std::string vocabulary_file() {
  if (const char* named = std::getenv("TESSERA_TOKENIZER")) return named;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::string folder =
      (cache != nullptr && *cache != '\0' ? std::string(cache)
                                          : std::string(home == nullptr ? "" : home) + "/.cache") +
      "/tessera/";
  for (const char* name : {"qwen.tiktoken", "tokenizer.json"}) {
    if (std::filesystem::exists(folder + name)) return folder + name;
  }
  return "";
}

class Qwen3 : public testing::Test {
 protected:
  // Opened once; a named file that can't be opened fails every test.
  struct Opened {
    Vocabulary vocabulary;
    std::unique_ptr<Tokenizer> tokenizer;
  };
  void SetUp() override {
    if (vocabulary_file().empty()) {
      GTEST_SKIP()
          << "needs the Qwen3 vocabulary: run launch/fetch_tokenizer, or set TESSERA_TOKENIZER "
             "to a tokenizer.json or .tiktoken file";
    }
    static const Opened opened{read_vocabulary(vocabulary_file()),
                               open_tokenizer(vocabulary_file())};
    vocabulary_ = &opened.vocabulary;
    tokenizer_ = opened.tokenizer.get();
  }
  const Vocabulary* vocabulary_ = nullptr;
  const Tokenizer* tokenizer_ = nullptr;
};

constexpr char kQwen3Digest[] = "7af1edf7618c1e3b4fe1a70d4cf606a5bc2c5798c8dcc74eaaa94410510da1a7";

TEST_F(Qwen3, DigestIsThatOfTheFamily) {
  EXPECT_EQ(tokenizer_->digest(), kQwen3Digest);
  EXPECT_EQ(tokenizer_->size(), 151669);
  EXPECT_EQ(tokenizer_->unicode_version(), "9.0");
}

TEST_F(Qwen3, BothFilesGiveTheSameDigestAndMerges) {
  const TempFolder folder;
  const std::string json_path = folder.write("tokenizer.json", tokenizer_json(*vocabulary_).dump());
  const std::string tiktoken_path = folder.write("qwen.tiktoken", tiktoken(*vocabulary_));
  EXPECT_EQ(open_tokenizer(json_path)->digest(), kQwen3Digest);
  EXPECT_EQ(open_tokenizer(tiktoken_path)->digest(), kQwen3Digest);
  const Vocabulary from_ranks = read_vocabulary(tiktoken_path);
  ASSERT_EQ(from_ranks.merges.size(), vocabulary_->merges.size());
  for (std::size_t i = 0; i < from_ranks.merges.size(); ++i) {
    ASSERT_EQ(from_ranks.merges[i].left, vocabulary_->merges[i].left) << i;
    ASSERT_EQ(from_ranks.merges[i].right, vocabulary_->merges[i].right) << i;
    ASSERT_EQ(from_ranks.merges[i].made, vocabulary_->merges[i].made) << i;
  }
}

TEST_F(Qwen3, B39_StoredCasesOfTheReference) {
  int cases = 0;
  for (const char* name : {"qwen3_tokenizer.jsonl", "qwen3_utf8_edges.jsonl"}) {
    std::ifstream file(std::string(TESSERA_SOURCE_DIR) + "/tests/data/cases/" + name);
    std::string line;
    while (std::getline(file, line)) {
      const json one = json::parse(line);
      const auto text = one.at("text").get<std::string>();
      EXPECT_EQ(encode(*tokenizer_, text, one.at("parse_special").get<bool>()),
                one.at("ids").get<Ids>())
          << one.at("id");
      if (one.contains("hex")) {
        std::string bytes;
        const auto hex = one.at("hex").get<std::string>();
        for (std::size_t i = 0; i < hex.size(); i += 2) {
          bytes += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
        }
        EXPECT_EQ(text, bytes) << one.at("id");
      }
      ++cases;
    }
  }
  EXPECT_EQ(cases, 548 + 15);
}

TEST_F(Qwen3, B39_RandomTextAgreesWithThePlainTokenizer) {
  const PlainTokenizer plain(*vocabulary_);
  RandomText random(20);
  for (int i = 0; i < 4000; ++i) {
    const std::string text = random.text(1 + random.below(100));
    const Ids ids = encode(*tokenizer_, text);
    ASSERT_EQ(ids, plain.encode(text)) << json(text).dump(-1, ' ', true);
    ASSERT_EQ(decode(*tokenizer_, ids), plain_nfc(text)) << json(text).dump(-1, ' ', true);
  }
}

TEST_F(Qwen3, B39_DecomposedAndComposedTextHaveTheSameIds) {
  const std::pair<const char*, const char*> forms[] = {
      {"caf\xC3\xA9", "cafe\xCC\x81"},
      {"\xED\x95\x9C\xEA\xB8\x80",
       "\xE1\x84\x92\xE1\x85\xA1\xE1\x86\xAB\xE1\x84\x80\xE1\x85\xB3\xE1\x86\xAF"},
      {"\xC3\x85", "\xE2\x84\xAB"},  // A with ring, the angstrom sign
      {"\xE1\xBA\xAD", "a\xCC\x82\xCC\xA3"}};
  for (const auto& [composed, decomposed] : forms) {
    EXPECT_EQ(encode(*tokenizer_, composed), encode(*tokenizer_, decomposed));
    EXPECT_EQ(decode(*tokenizer_, encode(*tokenizer_, decomposed)), composed);
  }
}

TEST_F(Qwen3, B40_NoControlIdComesOutOfADocument) {
  ASSERT_EQ(vocabulary_->added.size(), 26U);
  std::string all;
  for (const AddedToken& added : vocabulary_->added) {
    const std::string& content = added.content;
    EXPECT_EQ(encode(*tokenizer_, content, true), (Ids{added.id}));
    std::string thousand;
    for (int i = 0; i < 1000; ++i) thousand += content;
    EXPECT_EQ(encode(*tokenizer_, thousand, true), Ids(1000, added.id));
    std::string upper = content;
    for (char& c : upper) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
    for (const std::string& text :
         {content, thousand, upper, "glued" + content + "on", content + content}) {
      for (const std::uint32_t id : encode(*tokenizer_, text)) ASSERT_LT(id, 151643U) << text;
      ASSERT_EQ(decode(*tokenizer_, encode(*tokenizer_, text)), text);
    }
    // Split over two records neither half is one, even when asked for.
    for (std::size_t cut = 1; cut < content.size(); ++cut) {
      for (const std::uint32_t id : encode(*tokenizer_, content.substr(0, cut), true))
        ASSERT_LT(id, 151643U);
      for (const std::uint32_t id : encode(*tokenizer_, content.substr(cut), true))
        ASSERT_LT(id, 151643U);
    }
    all += content;
  }
  EXPECT_EQ(encode(*tokenizer_, all, true).size(), 26U);
}

// Texts of one piece, of `size` bytes or a few less.
std::vector<std::pair<std::string, std::string>> one_word_texts(std::size_t size) {
  RandomText random(21);
  std::vector<std::pair<std::string, std::string>> texts;
  texts.emplace_back("one letter", std::string(size, 'a'));
  std::string letters;
  for (std::size_t i = 0; i < size; ++i) letters += static_cast<char>('a' + random.below(26));
  texts.emplace_back("random letters", letters);
  std::string bytes;
  for (std::size_t i = 0; i < size / 4 * 3; ++i) bytes += static_cast<char>(random.below(256));
  texts.emplace_back("base64", base64(bytes));
  std::string ideographs;
  while (ideographs.size() + 3 <= size)
    ideographs += RandomText::utf8(static_cast<UChar32>(0x4E00 + random.below(0x5200)));
  texts.emplace_back("ideographs", ideographs);
  texts.emplace_back("blanks", std::string(size, ' '));
  texts.emplace_back("line breaks", std::string(size, '\n'));
  texts.emplace_back("equal signs", std::string(size, '='));
  return texts;
}

TEST_F(Qwen3, B41_LongWordsAgreeWithThePlainTokenizer) {
  const PlainTokenizer plain(*vocabulary_);
  // 10 kB, and lengths around which a window ends.
  for (const std::size_t size : {10000, 8192, 8193, 16300}) {
    for (const auto& [name, text] : one_word_texts(size)) {
      Ids want;
      for (const std::string& piece : pieces_of(text)) {
        const Ids some = plain.merge(piece);
        want.insert(want.end(), some.begin(), some.end());
      }
      EXPECT_EQ(encode(*tokenizer_, text), want) << name << " " << size;
    }
  }
}

TEST_F(Qwen3, B41_TenMegabytesOfOneWordAreLinearWork) {
  const BytePairEncoder encoder(*vocabulary_);
  const auto start = std::chrono::steady_clock::now();
  std::map<std::string, std::vector<std::int64_t>> work;
  for (const std::size_t size : {2500000, 5000000, 10000000}) {
    for (const auto& [name, text] : one_word_texts(size)) {
      if (name != "base64") {
        ASSERT_EQ(pieces_of(text).size(), 1U) << name;
      }
      BytePairEncoder::Workspace workspace;
      Ids ids;
      encoder.encode(text, ids, workspace);
      std::string back;
      for (const std::uint32_t id : ids) back += vocabulary_->tokens[id];
      ASSERT_TRUE(back == text) << name;
      // Each byte starts one entry of the queue, each merge at most two more; each is put in and
      // taken out once. Windows overlap by an eighth.
      EXPECT_LE(workspace.queue_operations(), static_cast<std::int64_t>(size) * 2 * 3 * 5 / 4)
          << name;
      work[name].push_back(workspace.queue_operations());
    }
  }
  for (const auto& [name, counts] : work) {
    for (std::size_t i = 1; i < counts.size(); ++i) {
      EXPECT_LE(static_cast<double>(counts[i]), 2.02 * static_cast<double>(counts[i - 1])) << name;
    }
  }
  // A wall limit for a crowded machine and sanitizers; quadratic work would take days.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::minutes(10));
}

TEST_F(Qwen3, CutVocabularyEncodesAllText) {
  RandomText random(22);
  for (const std::int64_t limit : {256, 4096, 32768}) {
    const auto tokenizer = open_tokenizer(vocabulary_file(), {limit});
    Vocabulary cut = *vocabulary_;
    cut_vocabulary(cut, limit);
    const PlainTokenizer plain(cut);
    EXPECT_EQ(tokenizer->size(), limit + 1);
    EXPECT_EQ(tokenizer->end_of_sequence(), limit);
    EXPECT_NE(tokenizer->digest(), kQwen3Digest);
    for (int i = 0; i < 500; ++i) {
      const std::string text = random.text(1 + random.below(60));
      const Ids ids = encode(*tokenizer, text);
      ASSERT_EQ(ids, plain.encode(text)) << json(text).dump(-1, ' ', true);
      for (const std::uint32_t id : ids) ASSERT_LT(id, limit);
      ASSERT_EQ(decode(*tokenizer, ids), plain_nfc(text));
    }
  }
}

// Two tokenizers and eight threads: what threads remember of pieces belongs to one tokenizer.
TEST_F(SmallTokenizer, ThreadsGiveTheSameIds) {
  const auto whole = open_tokenizer(path_);
  const auto cut = open_tokenizer(path_, {270});
  RandomText random(23);
  std::vector<std::string> texts(300);
  for (std::string& text : texts) text = random.text(1 + random.below(200));
  texts.emplace_back(50000, 'a');
  std::vector<Ids> want;
  for (const std::string& text : texts) {
    want.push_back(encode(*whole, text));
    want.push_back(encode(*cut, text));
  }
  std::vector<std::vector<Ids>> got(8);
  std::vector<std::thread> threads;
  threads.reserve(got.size());
  for (std::vector<Ids>& mine : got) {
    threads.emplace_back([&] {
      for (const std::string& text : texts) {
        mine.push_back(encode(*whole, text));
        mine.push_back(encode(*cut, text));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::vector<Ids>& mine : got) EXPECT_TRUE(mine == want);
}

}  // namespace
}  // namespace tessera
