#include "data/byte_pair.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <cstring>
#include <functional>

#include "runtime/error.h"

namespace tessera {
namespace {

constexpr std::size_t kShortPiece = 16;  // bytes that two words hold
constexpr std::size_t kScanned = 64;     // bytes up to which looking at every pair beats a queue
constexpr std::size_t kWindow = std::size_t{1} << 13;  // bytes of a long piece merged at once
constexpr int kRecentBits = 13;

int bits_for(std::size_t entries) { return static_cast<int>(std::bit_width(entries * 2 + 1)); }

std::array<std::uint32_t, 256> ids_of_bytes(const std::vector<std::string>& tokens) {
  std::array<std::uint32_t, 256> ids{};
  for (std::uint32_t id = 0; id < tokens.size(); ++id) {
    if (tokens[id].size() == 1) ids[static_cast<unsigned char>(tokens[id][0])] = id;
  }
  return ids;
}

struct Key {
  std::uint64_t low;
  std::uint64_t high;
};

// The bytes of a piece of 1 to 16 bytes, padded with zeros.
Key make_key(std::string_view piece) {
  const std::size_t size = piece.size();
  Key key{0, 0};
  if (size >= 8) {
    std::memcpy(&key.low, piece.data(), 8);
    if (size > 8) {
      std::uint64_t tail = 0;  // the last eight bytes: some of them are in `low` already
      std::memcpy(&tail, piece.data() + size - 8, 8);
      key.high = tail >> (8 * (16 - size));
    }
  } else if (size >= 4) {
    std::uint32_t head = 0;
    std::uint32_t tail = 0;
    std::memcpy(&head, piece.data(), 4);
    std::memcpy(&tail, piece.data() + size - 4, 4);
    key.low = head | static_cast<std::uint64_t>(tail) << (8 * (size - 4));
  } else {
    const auto byte = [&piece](std::size_t i) {
      return static_cast<std::uint64_t>(static_cast<unsigned char>(piece[i]));
    };
    key.low = byte(0) | byte(size / 2) << (8 * (size / 2)) | byte(size - 1) << (8 * (size - 1));
  }
  return key;
}

std::uint64_t hash(const Key& key) {
  return (key.low ^ std::rotl(key.high * 0xBF58476D1CE4E5B9ULL, 29)) * 0x9E3779B97F4A7C15ULL;
}

// Merges the symbols in place and returns how many are left. `ranks` is room for as many.
template <typename MadeBy>
std::size_t merge_by_scanning(std::uint32_t* symbols, std::uint32_t* ranks, std::size_t count,
                              const PairTable& pairs, const MadeBy& made_by) {
  for (std::size_t i = 0; i + 1 < count; ++i) ranks[i] = pairs.rank(symbols[i], symbols[i + 1]);
  while (count > 1) {
    std::size_t best = 0;
    for (std::size_t i = 1; i + 1 < count; ++i) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == PairTable::kNone) break;
    symbols[best] = made_by(ranks[best]);
    --count;
    for (std::size_t i = best + 1; i < count; ++i) symbols[i] = symbols[i + 1];
    for (std::size_t i = best + 1; i + 1 < count; ++i) ranks[i] = ranks[i + 1];
    if (best + 1 < count) ranks[best] = pairs.rank(symbols[best], symbols[best + 1]);
    if (best > 0) ranks[best - 1] = pairs.rank(symbols[best - 1], symbols[best]);
  }
  return count;
}

}  // namespace

PairTable::PairTable(std::size_t pairs)
    : slots_(std::size_t{1} << bits_for(pairs), Slot{0, kNone}),
      mask_(slots_.size() - 1),
      shift_(64 - bits_for(pairs)) {}

bool PairTable::insert(std::uint32_t left, std::uint32_t right, std::uint32_t rank) {
  const std::uint64_t key = join(left, right);
  std::size_t slot = home(key);
  for (; slots_[slot].rank != kNone; slot = (slot + 1) & mask_) {
    if (slots_[slot].key == key) return false;
  }
  slots_[slot] = {key, rank};
  return true;
}

std::vector<Merge> merges_of_ranked_tokens(const std::vector<std::string>& tokens) {
  const std::array<std::uint32_t, 256> byte_ids = ids_of_bytes(tokens);
  std::vector<Merge> merges;
  PairTable pairs(tokens.size());
  std::vector<std::uint32_t> symbols;
  std::vector<std::uint32_t> ranks;
  for (std::uint32_t id = 0; id < tokens.size(); ++id) {
    const std::string& token = tokens[id];
    if (token.size() == 1) continue;
    symbols.resize(token.size());
    ranks.resize(token.size());
    for (std::size_t i = 0; i < token.size(); ++i) {
      symbols[i] = byte_ids[static_cast<unsigned char>(token[i])];
    }
    const std::size_t parts =
        merge_by_scanning(symbols.data(), ranks.data(), token.size(), pairs,
                          [&merges](std::uint32_t rank) { return merges[rank].made; });
    if (parts != 2) {
      throw Error(ExitCode::kData,
                  "token " + std::to_string(id) + " is made of " + std::to_string(parts) +
                      " tokens of lower rank, not of two: not a byte-pair vocabulary");
    }
    pairs.insert(symbols[0], symbols[1], static_cast<std::uint32_t>(merges.size()));
    merges.push_back({symbols[0], symbols[1], id});
  }
  return merges;
}

BytePairEncoder::Workspace::Workspace() : recent_(std::size_t{1} << kRecentBits) {}

BytePairEncoder::BytePairEncoder(const Vocabulary& vocabulary)
    : byte_ids_(ids_of_bytes(vocabulary.tokens)),
      pairs_(vocabulary.merges.size()),
      whole_(std::size_t{1} << bits_for(vocabulary.tokens.size())),
      whole_shift_(64 - bits_for(vocabulary.tokens.size())) {
  static std::atomic<std::uint32_t> encoders{0};
  serial_ = ++encoders;
  for (std::uint32_t rank = 0; rank < vocabulary.merges.size(); ++rank) {
    const Merge& merge = vocabulary.merges[rank];
    TESSERA_CHECK(pairs_.insert(merge.left, merge.right, rank));
    made_.push_back(merge.made);
  }
  for (std::uint32_t id = 0; id < vocabulary.tokens.size(); ++id) {
    const std::string& token = vocabulary.tokens[id];
    if (token.size() > kShortPiece) continue;
    std::uint32_t ids[kShortPiece];
    if (merge_short(token, ids) != 1 || ids[0] != id) continue;
    const Key key = make_key(token);
    std::size_t slot = hash(key) >> whole_shift_;
    while (whole_[slot].length != 0) slot = (slot + 1) & (whole_.size() - 1);
    whole_[slot] = {key.low, key.high, id, static_cast<std::uint32_t>(token.size())};
  }
}

std::size_t BytePairEncoder::merge_short(std::string_view piece, std::uint32_t* ids) const {
  std::uint32_t ranks[kScanned];
  const std::size_t count = piece.size();
  for (std::size_t i = 0; i < count; ++i) {
    ids[i] = byte_ids_[static_cast<unsigned char>(piece[i])];
  }
  return merge_by_scanning(ids, ranks, count, pairs_,
                           [this](std::uint32_t rank) { return made_[rank]; });
}

// Encodes piece[begin, begin + size) by itself.
void BytePairEncoder::merge_window(std::string_view piece, std::size_t begin, std::size_t size,
                                   Workspace& workspace,
                                   std::vector<Workspace::Placed>& tokens) const {
  constexpr std::uint32_t kEnd = UINT32_MAX;
  if (size >= kEnd) {
    throw Error(ExitCode::kData, "one word of the text has 4 GiB or more and can't be cut");
  }
  // The symbols are a linked list over the bytes. The queue holds each pair as its rank and place;
  // an entry counts only while the pair at its place still has that rank.
  std::vector<Workspace::Symbol>& symbols = workspace.symbols_;
  std::vector<std::uint64_t>& queue = workspace.queue_;
  const auto entry = [](std::uint32_t rank, std::uint32_t place) {
    return std::uint64_t{rank} << 32 | place;
  };
  const auto count = static_cast<std::uint32_t>(size);
  symbols.resize(count);
  queue.clear();
  for (std::uint32_t i = 0; i < count; ++i) {
    symbols[i] = {byte_ids_[static_cast<unsigned char>(piece[begin + i])], PairTable::kNone,
                  i == 0 ? kEnd : i - 1, i + 1 == count ? kEnd : i + 1};
  }
  for (std::uint32_t i = 0; i + 1 < count; ++i) {
    symbols[i].rank = pairs_.rank(symbols[i].id, symbols[i + 1].id);
    if (symbols[i].rank != PairTable::kNone) queue.push_back(entry(symbols[i].rank, i));
  }
  workspace.queue_operations_ += static_cast<std::int64_t>(queue.size());
  std::make_heap(queue.begin(), queue.end(), std::greater<>());
  const auto renew = [&](std::uint32_t place) {
    Workspace::Symbol& symbol = symbols[place];
    symbol.rank =
        symbol.next == kEnd ? PairTable::kNone : pairs_.rank(symbol.id, symbols[symbol.next].id);
    if (symbol.rank == PairTable::kNone) return;
    queue.push_back(entry(symbol.rank, place));
    std::push_heap(queue.begin(), queue.end(), std::greater<>());
    ++workspace.queue_operations_;
  };
  while (!queue.empty()) {
    const auto rank = static_cast<std::uint32_t>(queue.front() >> 32);
    const auto place = static_cast<std::uint32_t>(queue.front());
    std::pop_heap(queue.begin(), queue.end(), std::greater<>());
    queue.pop_back();
    ++workspace.queue_operations_;
    Workspace::Symbol& symbol = symbols[place];
    if (symbol.rank != rank) continue;
    Workspace::Symbol& right = symbols[symbol.next];
    right.rank = PairTable::kNone;
    symbol.id = made_[rank];
    symbol.next = right.next;
    if (symbol.next != kEnd) symbols[symbol.next].previous = place;
    renew(place);
    if (symbol.previous != kEnd) renew(symbol.previous);
  }
  tokens.clear();
  for (std::uint32_t i = 0; i != kEnd; i = symbols[i].next) {
    const std::uint32_t end = symbols[i].next == kEnd ? count : symbols[i].next;
    tokens.push_back({symbols[i].id, begin + i, begin + end});
  }
}

// A sequence of tokens is the encoding of its bytes exactly when every two neighbours are the
// encoding of theirs: a merge across the border of two would be the first of its kind in both. So
// encodings of windows that overlap may be joined at a token that both have at the same place, and
// a long piece costs no more memory than a window. False, and `ids` as before, where two windows
// have no such token.
bool BytePairEncoder::merge_windows(std::string_view piece, std::size_t window,
                                    std::vector<std::uint32_t>& ids, Workspace& workspace) const {
  const std::size_t before = ids.size();
  std::vector<Workspace::Placed>& tokens = workspace.window_;
  std::vector<Workspace::Placed>& following = workspace.next_window_;
  merge_window(piece, 0, std::min(window, piece.size()), workspace, tokens);
  std::size_t first = 0;  // of `tokens` that aren't in `ids` yet
  while (tokens.back().end < piece.size()) {
    const std::size_t overlap_begin = tokens.back().end - window / 8;
    std::size_t at = first;
    while (at + 1 < tokens.size() && tokens[at].begin < overlap_begin) ++at;
    const std::size_t begin = tokens[at].begin;
    merge_window(piece, begin, std::min(window, piece.size() - begin), workspace, following);
    std::size_t same = 0;
    while (at < tokens.size() && same < following.size() &&
           (tokens[at].begin != following[same].begin || tokens[at].end != following[same].end)) {
      if (tokens[at].end <= following[same].end) {
        ++at;
      } else {
        ++same;
      }
    }
    if (at == tokens.size() || same == following.size() ||
        following.back().end == tokens.back().end) {
      ids.resize(before);
      return false;
    }
    for (; first <= at; ++first) ids.push_back(tokens[first].id);
    tokens.swap(following);
    first = same + 1;
  }
  for (; first < tokens.size(); ++first) ids.push_back(tokens[first].id);
  return true;
}

void BytePairEncoder::encode(std::string_view piece, std::vector<std::uint32_t>& ids,
                             Workspace& workspace) const {
  if (piece.size() > kScanned) {
    std::size_t window = kWindow;
    while (!merge_windows(piece, window, ids, workspace)) window *= 2;
    return;
  }
  std::uint32_t found[kScanned];
  if (piece.size() > kShortPiece) {
    ids.insert(ids.end(), found, found + merge_short(piece, found));
    return;
  }
  if (piece.empty()) return;
  const Key key = make_key(piece);
  const std::uint64_t hashed = hash(key);
  Workspace::Recent& recent = workspace.recent_[hashed >> (64 - kRecentBits)];
  if (recent.low == key.low && recent.high == key.high && recent.encoder == serial_ &&
      recent.length == piece.size()) {
    ids.insert(ids.end(), recent.ids.begin(), recent.ids.begin() + recent.count);
    return;
  }
  std::size_t count = 0;
  for (std::size_t slot = hashed >> whole_shift_; whole_[slot].length != 0;
       slot = (slot + 1) & (whole_.size() - 1)) {
    const Whole& whole = whole_[slot];
    if (whole.low == key.low && whole.high == key.high && whole.length == piece.size()) {
      found[count++] = whole.id;
      break;
    }
  }
  if (count == 0) count = merge_short(piece, found);
  ids.insert(ids.end(), found, found + count);
  if (count <= recent.ids.size()) {
    recent.low = key.low;
    recent.high = key.high;
    recent.encoder = serial_;
    recent.length = static_cast<std::uint16_t>(piece.size());
    recent.count = static_cast<std::uint16_t>(count);
    std::copy(found, found + count, recent.ids.begin());
  }
}

}  // namespace tessera
