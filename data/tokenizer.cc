#include "data/tokenizer.h"

#include <openssl/evp.h>

#include <algorithm>
#include <array>

#include "data/byte_pair.h"
#include "data/normalizer.h"
#include "data/pretokenizer.h"
#include "data/sha256.h"
#include "data/utf8.h"
#include "data/vocabulary.h"
#include "runtime/error.h"

namespace tessera {
namespace {

// SHA-256 over one line a token, `base64(bytes) id`, by id, then one an added token, `content id`.
std::string digest_of(const Vocabulary& vocabulary) {
  std::string lines;
  std::string base64;
  for (std::size_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string& token = vocabulary.tokens[id];
    base64.resize(4 * (token.size() / 3 + 1) + 1);  // and the zero that OpenSSL appends
    const int length = EVP_EncodeBlock(reinterpret_cast<unsigned char*>(base64.data()),
                                       reinterpret_cast<const unsigned char*>(token.data()),
                                       static_cast<int>(token.size()));
    lines.append(base64, 0, static_cast<std::size_t>(length)).append(" ");
    lines.append(std::to_string(id)).append("\n");
  }
  for (const AddedToken& added : vocabulary.added) {
    lines.append(added.content).append(" ").append(std::to_string(added.id)).append("\n");
  }
  return sha256_hex(lines);
}

// Finds added tokens in text: leftmost, then longest.
class AddedTokens {
 public:
  explicit AddedTokens(std::vector<AddedToken> tokens) : tokens_(std::move(tokens)) {
    std::sort(tokens_.begin(), tokens_.end(), [](const AddedToken& a, const AddedToken& b) {
      return a.content.size() > b.content.size();
    });
    for (const AddedToken& token : tokens_)
      starts_[static_cast<unsigned char>(token.content[0])] = true;
  }
  // The first one at or after `at`, moved there; null where there is none.
  const AddedToken* find(std::string_view text, std::size_t& at) const {
    for (; at < text.size(); ++at) {
      if (!starts_[static_cast<unsigned char>(text[at])]) continue;
      for (const AddedToken& token : tokens_) {
        if (text.substr(at, token.content.size()) == token.content) return &token;
      }
    }
    return nullptr;
  }

 private:
  std::vector<AddedToken> tokens_;
  std::array<bool, 256> starts_{};
};

// What all vocabularies share: everything but how text between added tokens becomes ids.
class VocabularyTokenizer : public Tokenizer {
 public:
  explicit VocabularyTokenizer(const Vocabulary& vocabulary)
      : added_(vocabulary.added),
        size_(static_cast<std::int64_t>(vocabulary.tokens.size())),
        end_of_sequence_(vocabulary.end_of_sequence),
        digest_(digest_of(vocabulary)) {
    if (!vocabulary.added.empty()) size_ = std::int64_t{vocabulary.added.back().id} + 1;
    starts_.push_back(0);
    for (const std::string& token : vocabulary.tokens) append(token);
    for (const AddedToken& added : vocabulary.added) {
      while (starts_.size() <= added.id) append("");
      append(added.content);
    }
  }

  void encode(std::string_view text, std::vector<std::uint32_t>& ids,
              bool parse_special) const override {
    const std::size_t invalid = first_invalid_utf8(text);
    if (invalid != std::string_view::npos) {
      throw Error(ExitCode::kData, "the text isn't valid UTF-8 at byte " + std::to_string(invalid));
    }
    std::size_t begin = 0;
    while (parse_special) {
      std::size_t at = begin;
      const AddedToken* token = added_.find(text, at);
      if (token == nullptr) break;
      encode_segment(text.substr(begin, at - begin), ids);
      ids.push_back(token->id);
      begin = at + token->content.size();
    }
    encode_segment(text.substr(begin), ids);
  }

  std::string decode(const std::uint32_t* ids, std::size_t count) const override {
    std::string text;
    for (std::size_t i = 0; i < count; ++i) {
      const std::size_t id = ids[i];
      if (id + 1 >= starts_.size() || starts_[id] == starts_[id + 1]) {
        throw Error(ExitCode::kData, "id " + std::to_string(id) + " at place " + std::to_string(i) +
                                         " isn't in the tokenizer, whose ids end at " +
                                         std::to_string(size_ - 1));
      }
      text.append(bytes_, starts_[id], starts_[id + 1] - starts_[id]);
    }
    return text;
  }

  std::int64_t size() const override { return size_; }
  std::int64_t end_of_sequence() const override { return end_of_sequence_; }
  const std::string& digest() const override { return digest_; }

 private:
  // Appends the ids of text in which no added token is looked for.
  virtual void encode_segment(std::string_view text, std::vector<std::uint32_t>& ids) const = 0;

  void append(std::string_view token) {
    bytes_.append(token);
    starts_.push_back(bytes_.size());
  }

  AddedTokens added_;
  std::int64_t size_;
  std::int64_t end_of_sequence_;
  std::string digest_;
  std::string bytes_;                // of all ids; those of id k are [starts_[k], starts_[k+1])
  std::vector<std::size_t> starts_;  // empty for an id between the added ones that isn't used
};

class BytePairTokenizer : public VocabularyTokenizer {
 public:
  explicit BytePairTokenizer(const Vocabulary& vocabulary)
      : VocabularyTokenizer(vocabulary), encoder_(vocabulary) {}

  std::string unicode_version() const override { return kNormalizerUnicodeVersion; }

 private:
  void encode_segment(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    static thread_local BytePairEncoder::Workspace workspace;
    std::string buffer;
    PieceIterator pieces(normalize_nfc(text, buffer));
    std::string_view piece;
    while (pieces.next(piece)) encoder_.encode(piece, ids, workspace);
  }

  BytePairEncoder encoder_;
};

class ByteTokenizer : public VocabularyTokenizer {
 public:
  explicit ByteTokenizer(const Vocabulary& vocabulary) : VocabularyTokenizer(vocabulary) {}

  std::string unicode_version() const override { return ""; }

 private:
  void encode_segment(std::string_view text, std::vector<std::uint32_t>& ids) const override {
    for (const char byte : text) ids.push_back(static_cast<unsigned char>(byte));
  }
};

Vocabulary byte_vocabulary() {
  Vocabulary vocabulary;
  for (int byte = 0; byte < 256; ++byte) {
    vocabulary.tokens.emplace_back(1, static_cast<char>(static_cast<unsigned char>(byte)));
  }
  return vocabulary;
}

}  // namespace

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& path,
                                          const TokenizerOptions& options) {
  if (path == "byte") {
    Vocabulary vocabulary = byte_vocabulary();
    cut_vocabulary(vocabulary, options.vocabulary_limit == 0 ? 256 : options.vocabulary_limit);
    return std::make_unique<ByteTokenizer>(vocabulary);
  }
  Vocabulary vocabulary = read_vocabulary(path);
  if (options.vocabulary_limit != 0) cut_vocabulary(vocabulary, options.vocabulary_limit);
  return std::make_unique<BytePairTokenizer>(vocabulary);
}

}  // namespace tessera
