#include "data/vocabulary.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <unordered_map>
#include <unordered_set>

#include "data/byte_pair.h"
#include "data/pretokenizer.h"
#include "data/text_format.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr std::int64_t kLargestFile = std::int64_t{256} << 20;
// Ids that added tokens may take, used or not; each costs memory.
constexpr std::int64_t kMostAddedIds = std::int64_t{1} << 20;
// Bytes of a token of a .tiktoken file: finding out what it is made of takes time by their square.
// Qwen3's longest has 128.
constexpr std::size_t kLongestRankedToken = 1024;

// What Qwen3 adds to the 151643 byte-pair tokens, from its tokenizer.json: a .tiktoken file holds
// the byte pairs only.
constexpr std::size_t kQwenTokens = 151643;
constexpr const char* kQwen3Added[] = {"<|endoftext|>",
                                       "<|im_start|>",
                                       "<|im_end|>",
                                       "<|object_ref_start|>",
                                       "<|object_ref_end|>",
                                       "<|box_start|>",
                                       "<|box_end|>",
                                       "<|quad_start|>",
                                       "<|quad_end|>",
                                       "<|vision_start|>",
                                       "<|vision_end|>",
                                       "<|vision_pad|>",
                                       "<|image_pad|>",
                                       "<|video_pad|>",
                                       "<tool_call>",
                                       "</tool_call>",
                                       "<|fim_prefix|>",
                                       "<|fim_middle|>",
                                       "<|fim_suffix|>",
                                       "<|fim_pad|>",
                                       "<|repo_name|>",
                                       "<|file_sep|>",
                                       "<tool_response>",
                                       "</tool_response>",
                                       "<think>",
                                       "</think>"};

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ExitCode::kData, "tokenizer file '" + path + "': " + what);
}

std::string read_file(const std::string& path) {
  return read_text_file(path, ExitCode::kData, "a tokenizer.json or .tiktoken file", kLargestFile);
}

json parse_json(const std::string& path, const std::string& content) {
  try {
    return json::parse(content);
  } catch (const json::exception& error) {
    fail(path, "is not JSON, or cut off: " + printable(error.what()));
  }
}

// tokenizer.json writes each byte as a printable character: bytes that are printable in Latin-1 as
// themselves, the others in turn from U+0100 on.
class ByteCharacters {
 public:
  ByteCharacters() {
    values_.fill(-1);
    std::size_t next = 256;
    for (int byte = 0; byte < 256; ++byte) {
      const bool printable =
          (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
      values_[printable ? static_cast<std::size_t>(byte) : next++] = byte;
    }
  }
  // The bytes that `text` (valid UTF-8) stands for; false where a character stands for none.
  bool decode(std::string_view text, std::string& bytes) const {
    bytes.clear();
    for (std::size_t at = 0; at < text.size(); ++at) {
      auto c = static_cast<unsigned char>(text[at]);
      std::size_t value = c;
      if (c >= 0xC0) {
        if (c >= 0xE0) return false;
        value = static_cast<std::size_t>(c & 0x1F) << 6 |
                (static_cast<unsigned char>(text[++at]) & 0x3F);
      }
      if (value >= values_.size() || values_[value] < 0) return false;
      bytes.push_back(static_cast<char>(values_[value]));
    }
    return true;
  }

 private:
  std::array<int, 512> values_;
};

void require_all_bytes(const std::string& path, const std::vector<std::string>& tokens) {
  std::array<bool, 256> there{};
  for (const std::string& token : tokens) {
    if (token.size() == 1) there[static_cast<unsigned char>(token[0])] = true;
  }
  for (std::size_t byte = 0; byte < there.size(); ++byte) {
    if (!there[byte]) fail(path, "has no token for the single byte " + std::to_string(byte));
  }
}

// One line of a message for a JSON value that may be long.
std::string shorten(const json& value) {
  std::string text =
      value.is_structured() ? std::string(value.type_name()) : value.dump(-1, ' ', true);
  if (text.size() > 60) text = text.substr(0, 57) + "...";
  return text;
}

const json& member(const std::string& path, const json& object, const char* name,
                   json::value_t type) {
  const auto found = object.find(name);
  if (found == object.end()) fail(path, std::string("has no '") + name + "'");
  if (found->type() != type) {
    fail(path, std::string("'") + name + "' is " + found->type_name() + ", not " +
                   json(type).type_name());
  }
  return *found;
}

// Fails unless `object` at the pointer has the value; null stands for absent too.
void expect(const std::string& path, const json& object, const char* pointer, const json& value) {
  const json::json_pointer place(pointer);
  const json found = object.contains(place) ? object.at(place) : json();
  if (found != value) {
    fail(path, std::string("'") + pointer + "' is " + shorten(found) + ", not " + shorten(value) +
                   ": not a tokenizer of the Qwen2 and Qwen3 family");
  }
}

void expect_family(const std::string& path, const json& root) {
  expect(path, root, "/normalizer/type", "NFC");
  expect(path, root, "/pre_tokenizer/type", "Sequence");
  expect(path, root, "/pre_tokenizer/pretokenizers/0/type", "Split");
  expect(path, root, "/pre_tokenizer/pretokenizers/0/pattern/Regex", kPretokenizerPattern);
  expect(path, root, "/pre_tokenizer/pretokenizers/0/behavior", "Isolated");
  expect(path, root, "/pre_tokenizer/pretokenizers/0/invert", false);
  expect(path, root, "/pre_tokenizer/pretokenizers/1/type", "ByteLevel");
  expect(path, root, "/pre_tokenizer/pretokenizers/1/add_prefix_space", false);
  expect(path, root, "/pre_tokenizer/pretokenizers/1/use_regex", false);
  expect(path, root, "/pre_tokenizer/pretokenizers/2", nullptr);
  expect(path, root, "/post_processor/type", "ByteLevel");
  expect(path, root, "/model/type", "BPE");
  expect(path, root, "/model/dropout", nullptr);
  expect(path, root, "/model/unk_token", nullptr);
  // Each of these may be absent, or say "no" in its own way.
  const json no = json::array({nullptr, "", false});
  for (const char* pointer : {"/model/continuing_subword_prefix", "/model/end_of_word_suffix",
                              "/model/byte_fallback", "/model/ignore_merges"}) {
    const json::json_pointer place(pointer);
    if (!root.contains(place)) continue;
    const json& value = root.at(place);
    if (std::find(no.begin(), no.end(), value) == no.end()) expect(path, root, pointer, nullptr);
  }
}

std::int64_t whole_number(const json& value) {
  if (!value.is_number_integer()) return -1;
  if (value.is_number_unsigned() && value.get<std::uint64_t>() > UINT32_MAX) return -1;
  return value.get<std::int64_t>();
}

void read_json_tokens(const std::string& path, const json& vocab, Vocabulary& vocabulary) {
  const ByteCharacters characters;
  vocabulary.tokens.resize(vocab.size());
  std::string bytes;
  for (const auto& [text, value] : vocab.items()) {
    const std::int64_t id = whole_number(value);
    const std::string token = shorten(json(text));
    if (id < 0 || id >= static_cast<std::int64_t>(vocab.size())) {
      fail(path, "'model.vocab' gives token " + token + " the id " + shorten(value) + "; its " +
                     std::to_string(vocab.size()) +
                     " tokens must have the ids from 0 on, each once");
    }
    std::string& place = vocabulary.tokens[static_cast<std::size_t>(id)];
    if (!characters.decode(text, bytes) || bytes.empty()) {
      fail(path, "'model.vocab': token " + token + " isn't written in the byte-level alphabet");
    }
    if (!place.empty())
      fail(path, "'model.vocab' gives id " + std::to_string(id) + " to two tokens");
    place = bytes;
  }
}

void read_json_merges(const std::string& path, const json& merges, Vocabulary& vocabulary) {
  const ByteCharacters characters;
  std::unordered_map<std::string_view, std::uint32_t> ids;
  ids.reserve(vocabulary.tokens.size());
  for (std::uint32_t id = 0; id < vocabulary.tokens.size(); ++id)
    ids.emplace(vocabulary.tokens[id], id);
  PairTable pairs(merges.size());
  std::string left;
  std::string right;
  for (const json& merge : merges) {
    const std::string name = "merge " + std::to_string(vocabulary.merges.size());
    std::string_view parts[2];
    if (merge.is_string()) {
      const std::string_view text = merge.get_ref<const std::string&>();
      const std::size_t blank = text.find(' ');
      if (blank == std::string_view::npos) fail(path, name + " isn't two tokens");
      parts[0] = text.substr(0, blank);
      parts[1] = text.substr(blank + 1);
    } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
               merge[1].is_string()) {
      parts[0] = merge[0].get_ref<const std::string&>();
      parts[1] = merge[1].get_ref<const std::string&>();
    } else {
      fail(path, name + " isn't two tokens");
    }
    if (!characters.decode(parts[0], left) || !characters.decode(parts[1], right)) {
      fail(path, name + " isn't written in the byte-level alphabet");
    }
    const auto left_id = ids.find(left);
    const auto right_id = ids.find(right);
    left += right;
    const auto made_id = ids.find(left);
    if (left_id == ids.end() || right_id == ids.end() || made_id == ids.end()) {
      fail(path, name + ": a part or what they make isn't in 'model.vocab'");
    }
    if (!pairs.insert(left_id->second, right_id->second, 0)) fail(path, name + " is there twice");
    vocabulary.merges.push_back({left_id->second, right_id->second, made_id->second});
  }
}

void read_json_added(const std::string& path, const json& added, Vocabulary& vocabulary) {
  std::unordered_set<std::string> contents;
  for (const json& entry : added) {
    if (!entry.is_object()) fail(path, "'added_tokens' holds something that isn't an object");
    AddedToken token;
    token.content = member(path, entry, "content", json::value_t::string).get<std::string>();
    const auto id = entry.find("id");
    const std::int64_t number = id == entry.end() ? -1 : whole_number(*id);
    const std::string name = "added token " + shorten(json(token.content));
    if (token.content.empty() || number < static_cast<std::int64_t>(vocabulary.tokens.size()) ||
        number >= static_cast<std::int64_t>(vocabulary.tokens.size()) + kMostAddedIds) {
      fail(path,
           name + " must have an id from " + std::to_string(vocabulary.tokens.size()) +
               " on, and below " +
               std::to_string(static_cast<std::int64_t>(vocabulary.tokens.size()) + kMostAddedIds));
    }
    token.id = static_cast<std::uint32_t>(number);
    for (const char* flag : {"normalized", "lstrip", "rstrip", "single_word"}) {
      if (entry.value(flag, json(false)) != false) {
        fail(path, name + " has '" + flag + "' set, which isn't supported");
      }
    }
    if (!contents.insert(token.content).second) fail(path, name + " is there twice");
    vocabulary.added.push_back(std::move(token));
  }
  std::sort(vocabulary.added.begin(), vocabulary.added.end(),
            [](const AddedToken& a, const AddedToken& b) { return a.id < b.id; });
  for (std::size_t i = 1; i < vocabulary.added.size(); ++i) {
    if (vocabulary.added[i].id == vocabulary.added[i - 1].id) {
      fail(path, "two added tokens have the id " + std::to_string(vocabulary.added[i].id));
    }
  }
}

// The id that `eos_token` in tokenizer_config.json beside the file names; -1 where it names none.
std::int64_t read_end_of_sequence(const std::string& tokenizer_path, const Vocabulary& vocabulary) {
  const std::filesystem::path beside =
      std::filesystem::path(tokenizer_path).parent_path() / "tokenizer_config.json";
  std::error_code ignored;
  if (!std::filesystem::exists(beside, ignored)) return -1;
  const std::string path = beside.string();
  const json root = parse_json(path, read_file(path));
  if (!root.is_object()) fail(path, "isn't a JSON object");
  json token = root.value("eos_token", json());
  if (token.is_object()) token = token.value("content", json());
  if (token.is_null()) return -1;
  for (const AddedToken& added : vocabulary.added) {
    if (token == added.content) return added.id;
  }
  fail(path, "'eos_token' is " + shorten(token) + ", which isn't among the added tokens of '" +
                 tokenizer_path + "'");
}

Vocabulary read_tokenizer_json(const std::string& path, const std::string& content) {
  const json root = parse_json(path, content);
  expect_family(path, root);
  const json& model = root.at("model");
  Vocabulary vocabulary;
  read_json_tokens(path, member(path, model, "vocab", json::value_t::object), vocabulary);
  require_all_bytes(path, vocabulary.tokens);
  read_json_merges(path, member(path, model, "merges", json::value_t::array), vocabulary);
  read_json_added(path, member(path, root, "added_tokens", json::value_t::array), vocabulary);
  vocabulary.end_of_sequence = read_end_of_sequence(path, vocabulary);
  return vocabulary;
}

// Strict base64 with padding; false where `text` isn't that.
bool decode_base64(std::string_view text, std::string& bytes) {
  bytes.clear();
  if (text.empty() || text.size() % 4 != 0) return false;
  const auto value = [](char c) {
    if (c >= 'A' && c <= 'Z') return c - 'A';
    if (c >= 'a' && c <= 'z') return c - 'a' + 26;
    if (c >= '0' && c <= '9') return c - '0' + 52;
    if (c == '+') return 62;
    return c == '/' ? 63 : -1;
  };
  std::size_t padding = 0;
  while (padding < 2 && text[text.size() - 1 - padding] == '=') ++padding;
  std::uint32_t bits = 0;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const int six = i < text.size() - padding ? value(text[i]) : 0;
    if (six < 0) return false;
    bits = bits << 6 | static_cast<std::uint32_t>(six);
    if (i % 4 == 3) {
      for (int shift = 16; shift >= 0; shift -= 8)
        bytes.push_back(static_cast<char>(bits >> shift & 0xFF));
      bits = 0;
    }
  }
  bytes.resize(bytes.size() - padding);
  return true;
}

Vocabulary read_tiktoken(const std::string& path, std::string_view content) {
  std::vector<std::pair<std::uint32_t, std::string>> ranked;
  std::unordered_set<std::string> seen;
  std::string bytes;
  for (std::size_t begin = 0, line = 1; begin < content.size(); ++line) {
    const std::size_t end = std::min(content.find('\n', begin), content.size());
    std::string_view text = content.substr(begin, end - begin);
    begin = end + 1;
    if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
    const std::size_t blank = text.find(' ');
    std::uint32_t rank = 0;
    bool good = blank != std::string_view::npos && decode_base64(text.substr(0, blank), bytes);
    if (good) {
      const char* last = text.data() + text.size();
      const auto [stop, error] = std::from_chars(text.data() + blank + 1, last, rank);
      good = error == std::errc() && stop == last;
    }
    const std::string where = "line " + std::to_string(line);
    if (!good) {
      fail(path, where +
                     " isn't a token in base64, a blank and its rank (neither a .tiktoken file "
                     "nor tokenizer.json, or cut off)");
    }
    if (bytes.size() > kLongestRankedToken) {
      fail(path, where + " has a token of " + std::to_string(bytes.size()) + " bytes; at most " +
                     std::to_string(kLongestRankedToken) + " are read");
    }
    if (!seen.insert(bytes).second) fail(path, where + " has a token that was there before");
    ranked.emplace_back(rank, bytes);
  }
  std::sort(ranked.begin(), ranked.end());
  Vocabulary vocabulary;
  for (auto& [rank, token] : ranked) {
    if (rank != vocabulary.tokens.size()) {
      fail(path, "rank " + std::to_string(vocabulary.tokens.size()) +
                     " is missing or another is there twice: cut off or not a vocabulary");
    }
    vocabulary.tokens.push_back(std::move(token));
  }
  require_all_bytes(path, vocabulary.tokens);
  try {
    vocabulary.merges = merges_of_ranked_tokens(vocabulary.tokens);
  } catch (const Error& error) {
    fail(path, error.what());
  }
  if (vocabulary.tokens.size() == kQwenTokens) {
    auto id = static_cast<std::uint32_t>(kQwenTokens);
    for (const char* added : kQwen3Added) vocabulary.added.push_back({added, id++});
  }
  return vocabulary;
}

}  // namespace

Vocabulary read_vocabulary(const std::string& path) {
  const std::string content = read_file(path);
  const std::size_t first = content.find_first_not_of(" \t\r\n");
  if (first == std::string::npos) fail(path, "is empty");
  if (content[first] == '{') return read_tokenizer_json(path, content);
  return read_tiktoken(path, content);
}

void cut_vocabulary(Vocabulary& vocabulary, std::int64_t limit) {
  const auto size = static_cast<std::int64_t>(vocabulary.tokens.size());
  std::int64_t bytes_end = 0;
  for (std::int64_t id = 0; id < size; ++id) {
    if (vocabulary.tokens[static_cast<std::size_t>(id)].size() == 1) bytes_end = id + 1;
  }
  if (limit < bytes_end || limit > size) {
    throw Error(ExitCode::kUsage, "vocabulary_limit is " + std::to_string(limit) +
                                      "; this tokenizer can be cut to between " +
                                      std::to_string(bytes_end) + " and " + std::to_string(size) +
                                      " tokens");
  }
  vocabulary.tokens.resize(static_cast<std::size_t>(limit));
  std::erase_if(vocabulary.merges, [limit](const Merge& merge) {
    return merge.left >= limit || merge.right >= limit || merge.made >= limit;
  });
  vocabulary.added = {{std::string(kEndOfSequence), static_cast<std::uint32_t>(limit)}};
  vocabulary.end_of_sequence = limit;
}

}  // namespace tessera
