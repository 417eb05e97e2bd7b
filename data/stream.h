// Stream v1 (docs/data.md): which window of which component is sample i. Exact integer arithmetic,
// no index files: any sample is found in O(components) time and O(1) memory.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

#include "data/recipe.h"
#include "data/shards.h"

namespace tessera {

// The splitmix64 finaliser.
std::uint64_t mix64(std::uint64_t z);
// A key from a seed and words.
std::uint64_t derive(std::uint64_t seed, std::initializer_list<std::uint64_t> words);
// A bijection of [0, n), 0 <= x < n; a six-round Feistel network that walks its cycle into range.
std::uint64_t permute(std::uint64_t x, std::uint64_t n, std::uint64_t key);

// Where a sample comes from.
struct Location {
  std::int64_t component = 0;
  std::int64_t epoch = 0;
  std::int64_t window = 0;
  bool operator==(const Location&) const = default;
};

// The arithmetic of the stream, without any data. Immutable, thread-safe.
class Mixture {
 public:
  struct Part {
    std::string name;  // for errors
    std::int64_t tokens = 0;
    Weight weight = 0;
    std::int64_t held_out_windows = 0;
  };
  // Throws Error(kUsage), naming the component, when the mixture can't be satisfied: weights that
  // sum to 0, a weight above 0 and no window to draw, more held out than there is, a product
  // beyond 128 bits within the first `samples` samples.
  Mixture(std::vector<Part> parts, std::int64_t sequence_length, std::uint64_t seed,
          std::int64_t samples);

  // sample >= 0; throws Error(kUsage) where the arithmetic would overflow.
  Location locate(std::int64_t sample) const;

  std::int64_t components() const { return static_cast<std::int64_t>(parts_.size()); }
  // W_c: windows that are drawn, those held out not counted.
  std::int64_t windows(std::int64_t component) const;
  std::int64_t block() const { return block_; }  // B, in samples
  // C_c(p): samples of the component before position p, a block boundary.
  std::int64_t drawn_before(std::int64_t component, std::int64_t position) const;
  // The component's exact share of the stream, rounded.
  double share(std::int64_t component) const;

 private:
  using Wide = unsigned __int128;
  Wide before(std::size_t k, Wide position) const;  // G_k

  std::vector<Part> parts_;
  std::vector<std::int64_t> windows_;
  std::vector<Wide> sums_;  // Q_0 .. Q_n; the last is Z
  std::int64_t length_ = 0;
  std::uint64_t seed_ = 0;
  std::int64_t block_ = 0;
};

// The mixture of a recipe whose components have these token counts; those of nested streams are
// the recipe's and are not read.
Mixture make_mixture(const Recipe& recipe, const std::vector<std::int64_t>& tokens);

// The training stream over opened components. Immutable; every const function is thread-safe.
class TokenStream {
 public:
  // Throws Error(kUsage) for a recipe that this data can't satisfy.
  TokenStream(Recipe recipe, Corpus corpus);
  ~TokenStream();

  std::int64_t sequence_length() const { return recipe_.sequence_length; }  // L
  std::int64_t samples() const { return recipe_.samples(); }  // where the stream stops
  // The L+1 tokens of a sample: the first L are inputs, the last L labels. Samples past samples()
  // are well defined too. Allocates nothing. Throws Error(kData) when a shard can't be read.
  void read(std::int64_t sample, std::uint32_t* out) const;
  Location locate(std::int64_t sample) const { return mixture_.locate(sample); }

  std::int64_t components() const { return mixture_.components(); }
  const std::string& component_name(std::int64_t component) const;
  std::int64_t component_tokens(std::int64_t component) const;
  // Windows held out for validation: the component's last ones, k = 0 .. held_out_windows - 1.
  std::int64_t held_out_windows(std::int64_t component) const;
  void read_held_out(std::int64_t component, std::int64_t k, std::uint32_t* out) const;

  const Recipe& recipe() const { return recipe_; }
  const Corpus& corpus() const { return corpus_; }  // end of sequence, vocabulary, digests
  const Mixture& mixture() const { return mixture_; }

 private:
  Recipe recipe_;
  Corpus corpus_;
  std::vector<std::unique_ptr<TokenSource>> nested_;  // where the recipe has a stream
  std::vector<const TokenSource*> sources_;           // one a component
  Mixture mixture_;
};

// SHA-256, in hex, of the bytes of samples [from, to): L+1 little-endian uint32 each.
std::string stream_digest(const TokenStream& stream, std::int64_t from, std::int64_t to);

// Raw SHA-256s (32 bytes each) of the pieces of [from, to) cut at sample numbers divisible by
// kMerkleSamples; those of adjoining ranges cut there follow one another. On `threads` threads.
constexpr std::int64_t kMerkleSamples = 4096;
std::string merkle_leaves(const TokenStream& stream, std::int64_t from, std::int64_t to,
                          int threads);
// SHA-256, in hex, of the leaves one after another.
std::string merkle_root(const std::string& leaves);

}  // namespace tessera
