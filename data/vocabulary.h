// A byte-pair vocabulary as its files give it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// `made` replaces `left` beside `right`. Among the merges that a text allows the earliest in the
// list goes first.
struct Merge {
  std::uint32_t left;
  std::uint32_t right;
  std::uint32_t made;
};

// A string that has an id of its own outside the byte-pair vocabulary.
struct AddedToken {
  std::string content;
  std::uint32_t id;
};

struct Vocabulary {
  std::vector<std::string> tokens;    // bytes of each id; the 256 single bytes are among them
  std::vector<Merge> merges;          // in order of rank, no pair twice
  std::vector<AddedToken> added;      // by id, from tokens.size()
  std::int64_t end_of_sequence = -1;  // -1: the files name none
};

// The content of the end of sequence where the vocabulary's files name none: that of the byte
// tokenizer and of a cut vocabulary.
inline constexpr std::string_view kEndOfSequence = "<|end_of_sequence|>";

// Reads tokenizer.json of the Qwen2 and Qwen3 family (end of sequence: `eos_token` in the file
// tokenizer_config.json beside it, where there is one) or a .tiktoken file, told apart by their
// content. Error(kData) names the file and what is wrong: also where its normaliser or
// pre-tokenizer is another, since that would give other ids in silence.
Vocabulary read_vocabulary(const std::string& path);

// Drops the ids from `limit` on and the merges that need them; the end of sequence becomes `limit`.
// Error(kUsage) where a single byte would go or the vocabulary has no more than `limit` tokens.
void cut_vocabulary(Vocabulary& vocabulary, std::int64_t limit);

}  // namespace tessera
