// Which keys a position sees. Key b stands for the tokens [stride b, stride b + block) and is
// visible from position i iff the last of them isn't behind i, the first lies in i's segment, and
// i is less than `window` ahead of the first: always one run of keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

namespace tessera {

// [begin, end); empty when begin >= end.
struct Range {
  std::int64_t begin = 0, end = 0;
};

class Visibility {
 public:
  static constexpr std::int64_t kNoWindow = std::numeric_limits<std::int64_t>::max();
  // Key j is token j: segment <= j <= i and i - j < window.
  static constexpr Visibility tokens(std::int64_t window = kNoWindow) { return {1, 1, window}; }
  // Overlapping blocks, complete ones only; one that spans two segments is visible to nobody.
  static constexpr Visibility blocks(std::int64_t block, std::int64_t stride) {
    return {block, stride, kNoWindow};
  }

  // Of a sequence of this many tokens.
  std::int64_t keys(std::int64_t length) const {
    return length < block_ ? 0 : (length - block_) / stride_ + 1;
  }
  // What position i sees, whose segment starts at `segment`.
  Range keys_of(std::int64_t i, std::int64_t segment) const {
    const std::int64_t first = std::max(segment, i < window_ ? 0 : i - window_ + 1);
    return {divide(first + stride_ - 1), i + 1 < block_ ? 0 : divide(i + 1 - block_) + 1};
  }
  // The positions that see one of the keys [keys.begin, keys.end) when all are of one segment.
  Range queries_of(Range keys, std::int64_t length) const {
    const std::int64_t last = (keys.end - 1) * stride_;
    return {keys.begin * stride_ + block_ - 1, last < length - window_ ? last + window_ : length};
  }
  // Keys that a position sees, averaged over the positions of one segment of this length.
  double mean_keys(std::int64_t length) const;

 private:
  constexpr Visibility(std::int64_t block, std::int64_t stride, std::int64_t window)
      : block_(block), stride_(stride), window_(window) {}
  // Tokens are met far more often than blocks, and a division is slow.
  std::int64_t divide(std::int64_t n) const { return stride_ == 1 ? n : n / stride_; }

  std::int64_t block_, stride_, window_;
};

}  // namespace tessera
