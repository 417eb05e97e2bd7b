// Byte-pair encoding: from the bytes of a piece, merge the adjacent pair of lowest rank, leftmost
// first, until no pair has a rank (Sennrich, Haddow, Birch 2016).
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/vocabulary.h"

namespace tessera {

// Pairs of ids to their merge; open addressing.
class PairTable {
 public:
  static constexpr std::uint32_t kNone = UINT32_MAX;

  explicit PairTable(std::size_t pairs);
  // False where the pair is there already.
  bool insert(std::uint32_t left, std::uint32_t right, std::uint32_t rank);
  // The pair's rank, kNone where it has none.
  std::uint32_t rank(std::uint32_t left, std::uint32_t right) const {
    const std::uint64_t key = join(left, right);
    for (std::size_t slot = home(key);; slot = (slot + 1) & mask_) {
      if (slots_[slot].key == key) return slots_[slot].rank;
      if (slots_[slot].rank == kNone) return kNone;
    }
  }

 private:
  struct Slot {
    std::uint64_t key;
    std::uint32_t rank;
  };
  static std::uint64_t join(std::uint32_t left, std::uint32_t right) {
    return std::uint64_t{left} << 32 | right;
  }
  std::size_t home(std::uint64_t key) const { return (key * 0x9E3779B97F4A7C15ULL) >> shift_; }

  std::vector<Slot> slots_;
  std::size_t mask_;
  int shift_;
};

// Makes the merges of a vocabulary that is only ranked: token k, taken in order, is made from the
// two that the earlier merges leave of its bytes. The 256 single bytes are among the tokens.
// Error(kData) names the token where they don't leave two.
std::vector<Merge> merges_of_ranked_tokens(const std::vector<std::string>& tokens);

// Immutable once made, so threads may share it.
class BytePairEncoder {
 public:
  // Working memory of one thread. Holds the ids of short pieces met lately, of any encoder:
  // bounded, about 0.5 MB. Long pieces need 25 bytes for each byte of a window.
  class Workspace {
   public:
    Workspace();
    // Queue operations done for long pieces so far: what bounds their time.
    std::int64_t queue_operations() const { return queue_operations_; }

   private:
    friend class BytePairEncoder;
    struct Recent {
      std::uint64_t low;
      std::uint64_t high;
      std::uint32_t encoder;  // 0: empty
      std::uint16_t length;   // bytes of the piece
      std::uint16_t count;    // ids
      std::array<std::uint32_t, 6> ids;
    };
    struct Symbol {
      std::uint32_t id;
      std::uint32_t rank;  // of the pair with the next one
      std::uint32_t previous;
      std::uint32_t next;
    };
    // A token where it stands in the piece.
    struct Placed {
      std::uint32_t id;
      std::size_t begin;
      std::size_t end;
    };
    std::vector<Recent> recent_;
    std::vector<Symbol> symbols_;
    std::vector<std::uint64_t> queue_;
    std::vector<Placed> window_;
    std::vector<Placed> next_window_;
    std::int64_t queue_operations_ = 0;
  };

  explicit BytePairEncoder(const Vocabulary& vocabulary);
  // Appends the ids of the piece. Linear in its length where windows meet, as they do in text (see
  // merge_windows); never worse than n log^2 n. Error(kData) where they don't meet within 4 GiB.
  void encode(std::string_view piece, std::vector<std::uint32_t>& ids, Workspace& workspace) const;

 private:
  // Tokens of up to 16 bytes, where a piece that equals one is encoded as it.
  struct Whole {
    std::uint64_t low;
    std::uint64_t high;
    std::uint32_t id;
    std::uint32_t length;  // 0: empty
  };
  std::size_t merge_short(std::string_view piece, std::uint32_t* ids) const;
  void merge_window(std::string_view piece, std::size_t begin, std::size_t size,
                    Workspace& workspace, std::vector<Workspace::Placed>& tokens) const;
  bool merge_windows(std::string_view piece, std::size_t window, std::vector<std::uint32_t>& ids,
                     Workspace& workspace) const;

  std::array<std::uint32_t, 256> byte_ids_;
  PairTable pairs_;
  std::vector<std::uint32_t> made_;  // by rank
  std::vector<Whole> whole_;
  int whole_shift_ = 0;
  std::uint32_t serial_;
};

}  // namespace tessera
