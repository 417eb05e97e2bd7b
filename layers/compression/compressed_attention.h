// Softmax attention over compressed blocks, without rotation: keys and values are projected, each
// compressed by a phi of its own, and seen from the block's last token on. The queries are the
// caller's: `compress` is this with its own, `nsa` has it as one of three branches.
// Parameters: k_proj.weight, v_proj.weight [Hk*dh, d], then those of phi behind k_compression. and
// v_compression. .
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layers/attention/attention.h"
#include "layers/compression/compression.h"
#include "layers/layer.h"
#include "layers/mixers/mixers.h"

namespace tessera {

class CompressedAttention {
 public:
  // Throws Error(kUsage) naming the field that can't be: heads, key_value_heads or head_width below
  // `heads_path`, or one of the compression's below `path`.
  CompressedAttention(const CompressionConfig& config, std::int64_t heads,
                      std::int64_t key_value_heads, std::int64_t head_width,
                      const MixerContext& context, const std::string& heads_path,
                      const std::string& path);

  const Compression& compression() const { return k_compression_; }
  AttentionShape shape_of(BatchShape batch) const;
  std::vector<ParameterSpec> parameters() const;
  std::vector<BufferSpec> saved(BatchShape batch) const;
  std::vector<BufferSpec> scratch(BatchShape batch) const;
  // Projections, phi and attention, without those of the queries.
  double flops_per_token(std::int64_t length) const;
  std::vector<LayerSize> sizes() const;

  // in [B*T, d]; q: shape_of().queries(), zero behind the last position; out: shape_of().out(),
  // overwritten; all of the compute type.
  void forward(Queue& queue, const Batch& batch, const View& in, const View& q, const View& out,
               const LayerMemory& memory) const;
  // d_out as out. d_q: f32, shape_of().queries(), overwritten; d_in [B*T, d] f32, overwritten, or
  // added to when `accumulate`; d_parameters f32, overwritten.
  void backward(Queue& queue, const Batch& batch, const View& in, const View& q, const View& out,
                const View& d_out, const View& d_q, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const;

  // The compressed keys as saved, shape_of().keys(), and the log-sum-exp of the scores, rows().
  const View& keys(std::span<const View> saved) const { return saved[kKeys]; }
  const View& log_sum_exp(std::span<const View> saved) const { return saved[kLogSumExp]; }

 private:
  enum Saved : std::size_t { kKRows, kVRows, kKeys, kValues, kLogSumExp, kHidden };

  std::int64_t width_, heads_, key_value_heads_, head_width_;
  double deviation_, scale_;
  DType dtype_;
  Compression k_compression_, v_compression_;
};

}  // namespace tessera
