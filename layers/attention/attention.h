// Softmax attention in tiles: no T x T array exists; what is kept grows with T alone. Which keys a
// position sees is a rule (visibility.h). Heads are grouped: query head h uses key/value head h div
// (heads / key_value_heads). A head may have several maps, that is softmaxes over queries and keys
// of their own that share the head's values. Formulas and the order of every sum: attention.md.
#pragma once

#include <cstdint>
#include <span>

#include "layers/attention/visibility.h"
#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// Positions of a tile of queries or keys. Every product is of whole tiles, so that an element's
// bits depend on neither T nor the other rows.
constexpr std::int64_t kAttentionTile = 128;
constexpr std::int64_t kMaxAttentionMaps = 2;
constexpr std::int64_t attention_tiles(std::int64_t positions) {
  return (positions + kAttentionTile - 1) / kAttentionTile;
}

struct AttentionShape {
  BatchShape batch;
  std::int64_t heads = 0;
  std::int64_t key_value_heads = 0;
  std::int64_t key_width = 0;  // of queries and keys, one map's
  std::int64_t value_width = 0;
  Visibility visibility = Visibility::tokens();
  std::int64_t maps = 1;

  std::int64_t group() const { return heads / key_value_heads; }
  std::int64_t tiles() const { return attention_tiles(batch.length); }
  std::int64_t padded() const { return tiles() * kAttentionTile; }
  std::int64_t key_tiles() const { return attention_tiles(visibility.keys(batch.length)); }
  std::int64_t padded_keys() const { return key_tiles() * kAttentionTile; }
  // Map m of head h is at h*maps + m.
  Shape queries() const { return {batch.batch, heads * maps, padded(), key_width}; }
  Shape keys() const { return {batch.batch, key_value_heads * maps, padded_keys(), key_width}; }
  Shape values() const { return {batch.batch, key_value_heads, padded_keys(), value_width}; }
  Shape out() const { return {batch.rows(), heads * maps * value_width}; }
  Shape d_out() const { return {batch.rows(), heads * value_width}; }
  Shape rows() const { return {batch.batch, heads * maps, padded()}; }
  // The gradients of keys and values, which come per query head: the `group()` that share a key
  // head lie one behind the other (merge_heads sums them).
  Shape d_keys() const { return {batch.batch, heads * maps, padded_keys(), key_width}; }
  Shape d_values() const { return {batch.batch, heads, padded_keys(), value_width}; }
  Shape d_out_by_head() const { return {batch.batch, heads, padded(), value_width}; }
  // Each thread's own tiles, the scratch of both passes; at a multiple of 64 bytes.
  Shape tile_room() const;
};

// q [queries()], k [keys()], v [values()], zero behind the last position or key, all f32 or all
// bf16; segments [B, T] i32, never falling within a sequence; out [out()] f32 or bf16; log_sum_exp
// [rows()] f32; tile_room [tile_room()] f32. out = softmax(q k' scale) v of each head and map;
// log_sum_exp of the scaled scores. Both are overwritten. A position that sees nothing gives 0 and
// the log-sum-exp 0.
void attention_forward(Queue& queue, const AttentionShape& shape, const View& segments,
                       double scale, const View& q, const View& k, const View& v, const View& out,
                       const View& log_sum_exp, const View& tile_room);

// The backward of a head's sum over its maps of weights[m] * out of map m: d_out [d_out()] of q's
// type is the gradient of the sum. The probabilities are computed again from log_sum_exp.
// d_q [queries()], d_k [d_keys()], d_v [d_values()], f32, overwritten. Scratch: d_out_by_head
// [d_out_by_head()] of q's type; delta [rows()] f32, left as d_out . out of each map (without its
// weight).
void attention_backward(Queue& queue, const AttentionShape& shape, const View& segments,
                        double scale, std::span<const float> weights, const View& q, const View& k,
                        const View& v, const View& out, const View& log_sum_exp, const View& d_out,
                        const View& d_out_by_head, const View& delta, const View& d_q,
                        const View& d_k, const View& d_v, const View& tile_room);

}  // namespace tessera
