// The selected branch of native sparse attention: which blocks of keys each position attends to,
// and softmax attention that gathers just those. Block j is the tokens [length j, length j +
// length). Formulas and the order of every sum: nsa.md.
#pragma once

#include <cstdint>

#include "layers/attention/visibility.h"
#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// Queries of one tile of the selected branch: every product is of this many rows, the missing ones
// zero, so that a row's bits don't depend on its neighbours.
constexpr std::int64_t kSelectedRows = 64;
// Positions whose sums one piece of the forward keeps.
constexpr std::int64_t kSelectedPositions = 2048;

struct SelectionShape {
  BatchShape batch;
  std::int64_t heads = 0;
  std::int64_t key_value_heads = 0;
  std::int64_t head_width = 0;
  std::int64_t block_length = 0;       // of a block to select
  std::int64_t most = 0;               // blocks that a position attends to, at least 3
  std::int64_t compressed_length = 0;  // of the blocks that importance comes from; both it and
  std::int64_t compressed_stride = 0;  // block_length are multiples of the stride

  std::int64_t group() const { return heads / key_value_heads; }
  std::int64_t blocks() const { return (batch.length + block_length - 1) / block_length; }
  std::int64_t tiles() const {
    return (batch.length + kSelectedPositions - 1) / kSelectedPositions;
  }
  Visibility compressed() const { return Visibility::blocks(compressed_length, compressed_stride); }
  // Keys and values, padded to whole blocks.
  Shape keys() const { return {batch.batch, key_value_heads, blocks() * block_length, head_width}; }
  // Their gradients, per query head.
  Shape d_keys() const { return {batch.batch, heads, blocks() * block_length, head_width}; }
  Shape rows() const { return {batch.batch, heads, batch.length}; }
  // Block numbers ascending, -1 behind the last.
  Shape choice() const { return {batch.batch, key_value_heads, batch.length, most}; }
  // The choice the other way round: the positions that chose block j of one sequence and head,
  // ascending, stand at [offsets[j], offsets[j + 1]).
  Shape offsets() const { return {batch.batch, key_value_heads, blocks() + 1}; }
  Shape positions() const { return choice(); }
  Shape products() const { return {batch.batch, heads, tiles()}; }
  // Each thread's own scratch.
  Shape choice_room() const;
  Shape tile_room() const;
  // Keys that a position sees, averaged over the positions of one segment of this length.
  double mean_keys(std::int64_t length) const;
};

// Chooses for each position and key/value head. With s the start of t's segment the candidates are
// the blocks from s div length to t div length. When there are more than `most`: the first, the
// last but one and the last, and of the others the most important, ties to the lower index. The
// importance of block j is the sum over the group's query heads and over the compressed blocks of
// the probability times the number of strides shared.
// q [B, H, padded, dh] unrotated, keys [B, Hk, padded, dh] compressed, both padded to tiles of the
// attention; log_sum_exp [B, H, padded] f32 of their attention; choice i32, overwritten.
void choose_blocks(Queue& queue, const SelectionShape& shape, const View& segments, double scale,
                   const View& q, const View& keys, const View& log_sum_exp, const View& choice,
                   const View& choice_room);

// offsets i64, positions i32: overwritten.
void invert_choice(Queue& queue, const SelectionShape& shape, const View& choice,
                   const View& offsets, const View& positions);

// q [B, H, padded, dh], k, v [keys()], all f32 or all bf16, zero behind the last position.
// out [B*T, H*dh] of their type, log_sum_exp [rows()] f32, products [products()] i64, all
// overwritten: how many products of kSelectedRows queries with a block's keys each piece made.
void selected_forward(Queue& queue, const SelectionShape& shape, const View& segments, double scale,
                      const View& q, const View& k, const View& v, const View& offsets,
                      const View& positions, const View& out, const View& log_sum_exp,
                      const View& products, const View& tile_room);

// d_out [B*T, H*dh] of q's type. d_q [B, H, padded, dh], d_k, d_v [d_keys()]: f32, overwritten;
// those of keys and values are per query head, to be summed over each group. Scratch: delta
// [rows()] f32.
void selected_backward(Queue& queue, const SelectionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v,
                       const View& offsets, const View& positions, const View& out,
                       const View& log_sum_exp, const View& d_out, const View& delta,
                       const View& d_q, const View& d_k, const View& d_v, const View& tile_room);

}  // namespace tessera
