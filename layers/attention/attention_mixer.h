// The mixer around the tiled attention: projections, optional norm of queries and keys, rotation,
// attention, output projection. `full` and `sliding` are this with their own visibility.
// Parameters: q_proj.weight [H*dh, d], k_proj.weight, v_proj.weight [Hk*dh, d],
// o_proj.weight [d, H*dh]; with query_key_norm also q_norm.weight, k_norm.weight [dh].
// Saved: q, k (after norm and rotation), v, the attention's output and log-sum-exp; with the norm
// also q, k before it.
#pragma once

#include <memory>

#include "layers/attention/attention.h"
#include "layers/layer.h"
#include "layers/mixers/mixers.h"
#include "layers/rope/rope.h"

namespace tessera {

class AttentionMixer : public Layer {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  AttentionMixer(const AttentionConfig& config, std::int64_t window, const MixerContext& context,
                 const std::string& path);

  std::vector<ParameterSpec> parameters() const override;
  std::vector<BufferSpec> saved(BatchShape shape) const override;
  std::vector<BufferSpec> scratch(BatchShape shape) const override;
  double flops_per_token(std::int64_t length) const override;
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                const View& d_in, std::span<const View> d_parameters,
                const LayerMemory& memory) const override;

 private:
  AttentionShape shape_of(BatchShape batch) const;

  std::int64_t width_, heads_, key_value_heads_, head_width_, window_;
  bool norm_;
  DType dtype_;
  double scale_, deviation_, output_deviation_;
  std::shared_ptr<const RopeTable> rope_;
};

}  // namespace tessera
