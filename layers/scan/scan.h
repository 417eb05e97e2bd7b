// A linear recurrence over the positions of each document, in chunks: for every head
//   S_t = exp(log_decay_t) S_{t-1} + dt_t k_t v_t'      o_t = S_t' q_t + skip v_t
// with S of [state width n, head width p], zero before a document's start. Matrix products within a
// chunk, a scan over the chunks; time and memory grow with T alone. Formulas, backward and the
// order of every sum: scan.md.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// Columns of every row of an array [rows, width], from `first` on.
struct Columns {
  View rows;
  std::int64_t first = 0;
};

// What the recurrence runs over. q, k, v and out are of the scan's compute type; log_decay (at most
// 0) and dt are f32 [B*T, heads]; skip f32 [heads], or empty for none.
struct ScanInput {
  Columns q;  // query_heads * state_width columns
  Columns k;  // key_heads * state_width
  Columns v;  // value_heads * head_width
  View dt;
  View log_decay;
  View skip;
};

// All overwritten; of the shapes and types of what they are gradients of.
struct ScanGradient {
  Columns q, k, v;
  View dt;
  View log_decay;
  View skip;  // empty where there is none
};

struct ScanConfig {
  std::int64_t heads = 0;
  // Head h uses head h div (heads / query_heads) of q, and so on. Each divides heads, and of
  // query_heads and key_heads one divides the other; value_heads is heads or key_heads.
  std::int64_t query_heads = 0, key_heads = 0, value_heads = 0;
  std::int64_t state_width = 0;  // of q and k
  std::int64_t head_width = 0;   // of v
  std::int64_t chunk = 0;        // a multiple of 16, and of kScanTile where it is larger
  DType compute = DType::kF32;
};

// Rows of a chunk whose scores are made together: what lies right of them is never computed.
constexpr std::int64_t kScanTile = 64;

class Scan {
 public:
  explicit Scan(const ScanConfig& config);

  // The states that chunks begin with, of the compute type: B * (chunks - 1) * heads * n * p.
  std::vector<BufferSpec> saved(BatchShape shape) const;
  std::vector<BufferSpec> scratch(BatchShape shape) const;
  // Products of one forward pass: scores and their sums over the positions that are visible within
  // a chunk, the chunks' states and what is read from them.
  double flops_per_token(std::int64_t length) const;
  std::vector<LayerSize> sizes() const;

  // out: [B*T, heads * head_width], overwritten.
  void forward(Queue& queue, const Batch& batch, const ScanInput& in, const View& out,
               std::span<const View> saved, std::span<const View> scratch) const;
  // d_out: as out.
  void backward(Queue& queue, const Batch& batch, const ScanInput& in, const View& d_out,
                const ScanGradient& gradient, std::span<const View> saved,
                std::span<const View> scratch) const;

 private:
  struct Room;
  struct Piece;
  std::int64_t chunks(std::int64_t length) const { return (length + c_.chunk - 1) / c_.chunk; }
  std::int64_t blocks() const { return c_.heads / block_; }
  // Gradients of q, k and v that are to be added up over heads, per row.
  std::int64_t query_parts() const { return c_.heads / run_; }
  std::int64_t key_parts() const { return c_.heads / block_; }
  std::int64_t value_parts() const;
  std::int64_t room_bytes() const;
  template <class Body>
  void for_states(Queue& queue, const Batch& batch, const Body& body) const;

  ScanConfig c_;
  std::int64_t tile_;   // rows whose scores are made together
  std::int64_t run_;    // heads that share their scores in one piece of work
  std::int64_t block_;  // heads of one piece of work: runs that share k
};

}  // namespace tessera
