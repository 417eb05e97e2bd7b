// Text to token ids and back. Thread-safe once made.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

struct TokenizerOptions {
  // Keep only the ids below this (0: all). A prefix of a byte-pair vocabulary is one itself: the
  // merges that make later tokens are left out. The end-of-sequence id then becomes this number.
  std::int64_t vocabulary_limit = 0;
};

class Tokenizer {
 public:
  virtual ~Tokenizer() = default;
  // Appends the ids of `text`, which must be valid UTF-8 (Error(kData) names the byte offset
  // otherwise). Control strings in the text are text, unless parse_special.
  virtual void encode(std::string_view text, std::vector<std::uint32_t>& ids,
                      bool parse_special = false) const = 0;
  // The bytes of the ids; an id out of range is Error(kData).
  virtual std::string decode(const std::uint32_t* ids, std::size_t count) const = 0;
  virtual std::int64_t size() const = 0;             // one past the largest id
  virtual std::int64_t end_of_sequence() const = 0;  // -1: the file names none, the recipe must
  virtual const std::string& digest() const = 0;     // 64 lowercase hex digits; docs/data.md
  virtual std::string unicode_version() const = 0;   // of the normaliser, "" where there is none
};

// Opens tokenizer.json (Qwen2/Qwen3 family) or a .tiktoken file by its content, or, for the path
// "byte", the tokenizer whose ids are bytes and whose end of sequence is 256. Error(kData) names
// the file and what is wrong with it.
std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path,
                                          const TokenizerOptions& options = {});

}  // namespace tessera
