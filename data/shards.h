// Components on disk: a folder of headerless little-endian uint32 shards and a manifest.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "data/manifest.pb.h"
#include "data/recipe.h"

namespace tessera {

// An ordered list of tokens. Thread-safe.
class TokenSource {
 public:
  virtual ~TokenSource() = default;
  virtual std::int64_t tokens() const = 0;
  // Tokens [first, first + count) to `out`. Allocates nothing. Throws Error(kData) that names the
  // file when the tokens can't be read.
  virtual void read(std::int64_t first, std::int64_t count, std::uint32_t* out) const = 0;
};

constexpr char kManifestName[] = "manifest.textproto";

// The text of a manifest's file. Throws Error(kData) naming it.
std::string read_manifest_text(const std::string& path);
// Reads and checks a manifest: fields present, counts that add up, plain file names. Throws
// Error(kData) naming the file.
Manifest read_manifest(const std::string& folder);
// The size of every shard against the manifest: one line a fault, naming file, expected and found
// bytes. Empty when all is well.
std::vector<std::string> check_sizes(const std::string& folder, const Manifest& manifest);

// The open descriptors of a corpus's shards: a bounded number of them, whatever the shards'.
class ShardFiles;
std::shared_ptr<ShardFiles> make_shard_files();

class ShardedTokens : public TokenSource {
 public:
  // Opens `folder`; throws Error(kData) for the first missing, short, long or misaligned shard.
  ShardedTokens(const std::string& folder, std::shared_ptr<ShardFiles> files);
  ~ShardedTokens() override;
  std::int64_t tokens() const override { return manifest_.tokens(); }
  void read(std::int64_t first, std::int64_t count, std::uint32_t* out) const override;

  struct Place {
    std::string file;
    std::int64_t byte_offset = 0;
  };
  // Where a token lies, 0 <= token < tokens().
  Place place(std::int64_t token) const;
  const Manifest& manifest() const { return manifest_; }

 private:
  std::int64_t shard_of(std::int64_t token) const;

  std::string folder_;
  Manifest manifest_;
  std::shared_ptr<ShardFiles> files_;
  std::vector<std::int64_t> starts_;  // first token of each shard, and one past the last
  std::int64_t first_file_ = 0;       // of this component in files_
};

// All components of a recipe that lie on disk.
struct Corpus {
  std::vector<std::unique_ptr<ShardedTokens>> components;  // recipe's order; null for a stream
  std::int64_t end_of_sequence = -1;
  std::int64_t vocabulary = 0;   // every id is below it
  std::string tokenizer_digest;  // 64 hex digits
  std::string digest;            // SHA-256 over all manifests, in the recipe's order
};

// Opens `root`/<component> for every component. Throws Error(kData) naming the file; components
// made with different tokenizers or ends of sequence are refused.
Corpus open_corpus(const Recipe& recipe, const std::string& root);

// Checks sizes, then SHA-256s on `threads` threads, of every component below `root`, and that those
// of the recipe there are all there. One line a fault, naming file, expected and found bytes or
// digest. Throws Error(kData) when a manifest can't be read or there is none.
std::vector<std::string> verify_corpus(const std::string& root, int threads);
// Names of the folders below `root` that hold a manifest, sorted.
std::vector<std::string> components_below(const std::string& root);

}  // namespace tessera
