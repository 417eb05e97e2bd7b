// Rotary position embedding, half-split, and the move between rows of positions and heads: the
// attention keeps its operands by head, padded to whole tiles. Formulas: rope.md.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// cos and sin of position * theta^(-2f/width), f < width/2, computed in double, stored in f32.
class RopeTable {
 public:
  RopeTable(std::int64_t length, std::int64_t width, double theta);
  std::int64_t length() const { return length_; }
  std::int64_t width() const { return width_; }
  // width/2 values each.
  const float* cosines(std::int64_t position) const {
    return cosines_.data() + position * width_ / 2;
  }
  const float* sines(std::int64_t position) const { return sines_.data() + position * width_ / 2; }

 private:
  std::int64_t length_, width_;
  std::vector<float> cosines_, sines_;
};

// Layers that need the same table share it.
std::shared_ptr<const RopeTable> shared_rope_table(std::int64_t length, std::int64_t width,
                                                   double theta);

// x [B*T, heads*width] -> by_head [B, heads, padded, width], padded >= T; rotated by the table
// where one is given. Positions from T on become zero. Both f32 or both bf16; by_head is
// overwritten.
void split_heads(Queue& queue, BatchShape shape, const RopeTable* table, const View& x,
                 const View& by_head);

// The transpose: by_head [B, heads*group, padded, width] f32 -> x [B*T, heads*width] f32 or bf16,
// rotated back where a table is given, the `group` heads that share one summed in ascending order.
// x is overwritten, and each group's first head in by_head.
void merge_heads(Queue& queue, BatchShape shape, const RopeTable* table, std::int64_t group,
                 const View& by_head, const View& x);

}  // namespace tessera
