#include "data/stream.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <exception>
#include <mutex>
#include <thread>

#include "data/sha256.h"

namespace tessera {
namespace {

using Wide = unsigned __int128;
constexpr std::uint64_t kGold = 0x9E3779B97F4A7C15ULL;
constexpr Wide kWideMax = ~Wide{0};
constexpr std::int64_t kTokensLimit = std::int64_t{1} << 40;
constexpr std::int64_t kSmallestBlock = 1024;
constexpr std::int64_t kLargestBlock = std::int64_t{1} << 62;

Wide gcd(Wide a, Wide b) {
  while (b != 0) {
    const Wide rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

[[noreturn]] void refuse(const std::string& what) { throw Error(ExitCode::kUsage, what); }

// A component that is a stream over others.
class NestedTokens : public TokenSource {
 public:
  NestedTokens(const NestedStream& stream, Mixture mixture)
      : tokens_(stream.tokens()),
        length_(stream.sequence_length),
        mixture_(std::move(mixture)),
        sources_(stream.parts.size(), nullptr) {}

  void set_source(std::size_t part, const TokenSource* source) { sources_[part] = source; }

  std::int64_t tokens() const override { return tokens_; }

  void read(std::int64_t first, std::int64_t count, std::uint32_t* out) const override {
    TESSERA_CHECK(first >= 0 && count >= 0 && count <= tokens_ - first);
    while (count > 0) {
      const std::int64_t offset = first % length_;
      const std::int64_t piece = std::min(count, length_ - offset);
      const Location place = mixture_.locate(first / length_);
      sources_[static_cast<std::size_t>(place.component)]->read(place.window * length_ + offset,
                                                                piece, out);
      first += piece;
      count -= piece;
      out += piece;
    }
  }

 private:
  std::int64_t tokens_;
  std::int64_t length_;
  Mixture mixture_;
  std::vector<const TokenSource*> sources_;
};

std::vector<std::int64_t> token_counts(const Corpus& corpus) {
  std::vector<std::int64_t> tokens;
  for (const auto& component : corpus.components) {
    tokens.push_back(component ? component->tokens() : 0);
  }
  return tokens;
}

// The mixture of a stream that is component `index` of the recipe: of each source it sees the
// tokens that the outer stream's own windows cover, and so none that are held out.
Mixture nested_mixture(const Recipe& recipe, const Mixture& outer, std::size_t index) {
  const Component& component = recipe.components[index];
  std::vector<Mixture::Part> parts;
  for (const auto& part : component.stream->parts) {
    const std::int64_t seen = outer.windows(part.component) * recipe.sequence_length + 1;
    parts.push_back(
        {component.name + "/" + recipe.components[static_cast<std::size_t>(part.component)].name,
         seen, part.weight, 0});
  }
  return Mixture(std::move(parts), component.stream->sequence_length, component.stream->seed,
                 component.stream->tokens() / component.stream->sequence_length);
}

void hash_samples(const TokenStream& stream, std::int64_t from, std::int64_t to, Sha256& sha,
                  std::vector<std::uint32_t>& window) {
  static_assert(std::endian::native == std::endian::little, "shards are little-endian");
  window.resize(static_cast<std::size_t>(stream.sequence_length() + 1));
  for (std::int64_t sample = from; sample < to; ++sample) {
    stream.read(sample, window.data());
    sha.update(window.data(), window.size() * sizeof(std::uint32_t));
  }
}

void check_range(std::int64_t from, std::int64_t to) {
  if (from >= 0 && from <= to) return;
  refuse("expected samples from A to B with 0 <= A <= B, found A = " + std::to_string(from) +
         ", B = " + std::to_string(to));
}

}  // namespace

std::uint64_t mix64(std::uint64_t z) {
  z ^= z >> 30;
  z *= 0xBF58476D1CE4E5B9ULL;
  z ^= z >> 27;
  z *= 0x94D049BB133111EBULL;
  z ^= z >> 31;
  return z;
}

std::uint64_t derive(std::uint64_t seed, std::initializer_list<std::uint64_t> words) {
  std::uint64_t k = mix64(seed + kGold);
  for (const std::uint64_t word : words) k = mix64((k ^ word) + kGold);
  return k;
}

std::uint64_t permute(std::uint64_t x, std::uint64_t n, std::uint64_t key) {
  if (n <= 1) return 0;
  const int bits = std::max(2, static_cast<int>(std::bit_width(n - 1)));
  const int half = (bits + 1) / 2;
  const std::uint64_t mask = (std::uint64_t{1} << half) - 1;
  do {
    std::uint64_t left = x >> half;
    std::uint64_t right = x & mask;
    for (std::uint64_t round = 1; round <= 6; ++round) {
      const std::uint64_t f = mix64(right + mix64(key + round * kGold)) & mask;
      const std::uint64_t swapped = left ^ f;
      left = right;
      right = swapped;
    }
    x = (left << half) | right;
  } while (x >= n);
  return x;
}

Mixture::Mixture(std::vector<Part> parts, std::int64_t sequence_length, std::uint64_t seed,
                 std::int64_t samples)
    : parts_(std::move(parts)), length_(sequence_length), seed_(seed) {
  std::vector<Wide> masses;
  Wide divisor = 0;
  for (const Part& part : parts_) {
    if (part.tokens < 0 || part.tokens >= kTokensLimit) {
      refuse("component " + part.name + ": expected fewer than 2^40 tokens, found " +
             std::to_string(part.tokens));
    }
    const std::int64_t all = part.tokens > 0 ? (part.tokens - 1) / length_ : 0;
    if (part.held_out_windows > all) {
      refuse("component " + part.name + ": held_out_windows is " +
             std::to_string(part.held_out_windows) + ", but its " + std::to_string(part.tokens) +
             " tokens make only " + std::to_string(all) + " windows");
    }
    windows_.push_back(all - part.held_out_windows);
    if (part.weight > 0 && windows_.back() == 0) {
      refuse("component " + part.name + ": its weight is above 0, but of its " +
             std::to_string(part.tokens) + " tokens no window of " + std::to_string(length_) +
             " + 1 is left to draw");
    }
    masses.push_back(static_cast<Wide>(part.weight) * static_cast<Wide>(part.tokens));
    divisor = gcd(divisor, masses.back());
  }
  if (divisor == 0) refuse("the weights of the components sum to 0");

  sums_.push_back(0);
  Wide smallest = kWideMax;
  for (const Wide mass : masses) {
    sums_.push_back(sums_.back() + mass / divisor);
    if (mass > 0) smallest = std::min(smallest, mass / divisor);
  }
  const Wide block = (2 * sums_.back() + smallest - 1) / smallest;
  if (block > static_cast<Wide>(kLargestBlock)) {
    refuse("the weights are too uneven: a block of the stream would pass 2^62 samples");
  }
  block_ = std::max(kSmallestBlock, static_cast<std::int64_t>(block));
  if (samples > 0) locate(samples - 1);
}

std::int64_t Mixture::windows(std::int64_t component) const {
  return windows_[static_cast<std::size_t>(component)];
}

Mixture::Wide Mixture::before(std::size_t k, Wide position) const {
  return position * sums_[k] / sums_.back();
}

std::int64_t Mixture::drawn_before(std::int64_t component, std::int64_t position) const {
  TESSERA_CHECK(position >= 0 && static_cast<Wide>(position) <= kWideMax / sums_.back());
  const auto c = static_cast<std::size_t>(component);
  return static_cast<std::int64_t>(before(c + 1, static_cast<Wide>(position)) -
                                   before(c, static_cast<Wide>(position)));
}

double Mixture::share(std::int64_t component) const {
  const auto c = static_cast<std::size_t>(component);
  return static_cast<double>(sums_[c + 1] - sums_[c]) / static_cast<double>(sums_.back());
}

Location Mixture::locate(std::int64_t sample) const {
  const std::int64_t b = sample / block_;
  const Wide start = static_cast<Wide>(b) * static_cast<Wide>(block_);
  const Wide end = start + static_cast<Wide>(block_);
  constexpr Wide kPositionLimit = Wide{1} << 63;
  if (sample < 0 || end >= kPositionLimit || end > kWideMax / sums_.back()) {
    refuse("sample " + std::to_string(sample) +
           " lies outside of what the stream's 128-bit arithmetic can number");
  }
  std::uint64_t rest =
      permute(static_cast<std::uint64_t>(sample % block_), static_cast<std::uint64_t>(block_),
              derive(seed_, {1, static_cast<std::uint64_t>(b)}));
  Wide start_before = 0;  // G_c and G_{c+1} at both ends of the block
  Wide end_before = 0;
  for (std::size_t c = 0; c < parts_.size(); ++c) {
    const Wide start_after = before(c + 1, start);
    const Wide end_after = before(c + 1, end);
    const Wide drawn = start_after - start_before;  // C_c(b*B)
    const auto count = static_cast<std::uint64_t>((end_after - end_before) - drawn);
    if (rest < count) {
      const std::uint64_t draw = static_cast<std::uint64_t>(drawn) + rest;
      const auto windows = static_cast<std::uint64_t>(windows_[c]);
      const std::uint64_t epoch = draw / windows;
      const std::uint64_t window = permute(draw % windows, windows, derive(seed_, {2, c, epoch}));
      return {static_cast<std::int64_t>(c), static_cast<std::int64_t>(epoch),
              static_cast<std::int64_t>(window)};
    }
    rest -= count;
    start_before = start_after;
    end_before = end_after;
  }
  TESSERA_CHECK(!"a block's counts sum to its length");
  return {};
}

Mixture make_mixture(const Recipe& recipe, const std::vector<std::int64_t>& tokens) {
  TESSERA_CHECK(tokens.size() == recipe.components.size());
  std::vector<Mixture::Part> parts;
  for (std::size_t c = 0; c < tokens.size(); ++c) {
    const Component& component = recipe.components[c];
    parts.push_back({component.name, component.stream ? component.stream->tokens() : tokens[c],
                     component.weight, component.held_out_windows});
  }
  return Mixture(std::move(parts), recipe.sequence_length, recipe.seed, recipe.samples());
}

TokenStream::TokenStream(Recipe recipe, Corpus corpus)
    : recipe_(std::move(recipe)),
      corpus_(std::move(corpus)),
      mixture_(make_mixture(recipe_, token_counts(corpus_))) {
  for (std::size_t c = 0; c < recipe_.components.size(); ++c) {
    if (recipe_.components[c].stream) {
      auto nested = std::make_unique<NestedTokens>(*recipe_.components[c].stream,
                                                   nested_mixture(recipe_, mixture_, c));
      sources_.push_back(nested.get());
      nested_.push_back(std::move(nested));
    } else {
      sources_.push_back(corpus_.components[c].get());
      nested_.push_back(nullptr);
    }
  }
  for (std::size_t c = 0; c < recipe_.components.size(); ++c) {
    if (!nested_[c]) continue;
    const auto& parts = recipe_.components[c].stream->parts;
    for (std::size_t p = 0; p < parts.size(); ++p) {
      static_cast<NestedTokens&>(*nested_[c])
          .set_source(p, sources_[static_cast<std::size_t>(parts[p].component)]);
    }
  }
}

TokenStream::~TokenStream() = default;

void TokenStream::read(std::int64_t sample, std::uint32_t* out) const {
  const Location place = mixture_.locate(sample);
  const std::int64_t length = recipe_.sequence_length;
  sources_[static_cast<std::size_t>(place.component)]->read(place.window * length, length + 1, out);
}

const std::string& TokenStream::component_name(std::int64_t component) const {
  return recipe_.components[static_cast<std::size_t>(component)].name;
}

std::int64_t TokenStream::component_tokens(std::int64_t component) const {
  return sources_[static_cast<std::size_t>(component)]->tokens();
}

std::int64_t TokenStream::held_out_windows(std::int64_t component) const {
  return recipe_.components[static_cast<std::size_t>(component)].held_out_windows;
}

void TokenStream::read_held_out(std::int64_t component, std::int64_t k, std::uint32_t* out) const {
  TESSERA_CHECK(k >= 0 && k < held_out_windows(component));
  const std::int64_t length = recipe_.sequence_length;
  const std::int64_t window = mixture_.windows(component) + k;
  sources_[static_cast<std::size_t>(component)]->read(window * length, length + 1, out);
}

std::string stream_digest(const TokenStream& stream, std::int64_t from, std::int64_t to) {
  check_range(from, to);
  Sha256 sha;
  std::vector<std::uint32_t> window;
  hash_samples(stream, from, to, sha, window);
  return sha.finish_hex();
}

std::string merkle_leaves(const TokenStream& stream, std::int64_t from, std::int64_t to,
                          int threads) {
  check_range(from, to);
  if (from == to) return "";
  const std::int64_t first = from / kMerkleSamples;
  const std::int64_t pieces = (to - 1) / kMerkleSamples + 1 - first;
  std::vector<std::string> digests(static_cast<std::size_t>(pieces));
  std::atomic<std::int64_t> next{0};
  std::mutex mutex;
  std::exception_ptr failure;
  const auto work = [&] {
    Sha256 sha;
    std::vector<std::uint32_t> window;
    try {
      for (std::int64_t i = next++; i < pieces; i = next++) {
        const std::int64_t begin = std::max(from, (first + i) * kMerkleSamples);
        const std::int64_t end = std::min(to - (first + i) * kMerkleSamples, kMerkleSamples) +
                                 (first + i) * kMerkleSamples;
        hash_samples(stream, begin, end, sha, window);
        digests[static_cast<std::size_t>(i)] = sha.finish();
      }
    } catch (...) {
      next = pieces;
      const std::lock_guard lock(mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  if (failure) std::rethrow_exception(failure);
  std::string leaves;
  for (const std::string& digest : digests) leaves += digest;
  return leaves;
}

std::string merkle_root(const std::string& leaves) { return sha256_hex(leaves); }

}  // namespace tessera
