// Softmax attention in tiles: no T x T array exists; what is kept grows with T alone. Key j is
// visible from position i iff segments[i] <= j <= i and i - j < window. Heads are grouped: query
// head h uses key/value head h div (heads / key_value_heads). Formulas and the order of every sum:
// attention.md.
#pragma once

#include <cstdint>
#include <limits>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// Positions of a tile of queries or keys. Every product is of whole tiles, so that an element's
// bits depend on neither T nor the other rows.
constexpr std::int64_t kAttentionTile = 128;

struct AttentionShape {
  static constexpr std::int64_t kNoWindow = std::numeric_limits<std::int64_t>::max();
  BatchShape batch;
  std::int64_t heads = 0;
  std::int64_t key_value_heads = 0;
  std::int64_t head_width = 0;
  std::int64_t window = kNoWindow;
  std::int64_t tiles() const { return (batch.length + kAttentionTile - 1) / kAttentionTile; }
  std::int64_t padded() const { return tiles() * kAttentionTile; }
  std::int64_t group() const { return heads / key_value_heads; }
  Shape queries() const { return {batch.batch, heads, padded(), head_width}; }
  Shape keys() const { return {batch.batch, key_value_heads, padded(), head_width}; }
  Shape rows() const { return {batch.batch, heads, padded()}; }
  // Each thread's own tiles, the scratch of both passes.
  Shape tile_room() const;
};

// q [queries()], k, v [keys()], zero from position T on, all f32 or all bf16, as are out and d_out;
// segments [B, T] i32; log_sum_exp, delta and the gradients are f32.
// out [B*T, heads*head_width] = softmax(q k' scale) v; log_sum_exp [rows()]. Both are overwritten.
// A position that sees nothing gives 0.
void attention_forward(Queue& queue, const AttentionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v, const View& out,
                       const View& log_sum_exp, const View& tile_room);

// The probabilities are computed again from log_sum_exp. d_out [B*T, heads*head_width].
// d_q, d_k, d_v [queries()], overwritten; those of keys and values are per *query* head, to be
// summed over each group (merge_heads). Scratch: d_out_by_head [queries()] of q's type, delta
// [rows()].
void attention_backward(Queue& queue, const AttentionShape& shape, const View& segments,
                        double scale, const View& q, const View& k, const View& v, const View& out,
                        const View& log_sum_exp, const View& d_out, const View& d_out_by_head,
                        const View& delta, const View& d_q, const View& d_k, const View& d_v,
                        const View& tile_room);

// Keys that a position sees, averaged over the positions of one segment of this length.
double mean_visible_keys(std::int64_t length, std::int64_t window);

}  // namespace tessera
