// The mechanism around the tiled attention: projections, optional norm of queries and keys,
// rotation, attention. `full` and `sliding` are this with their own window.
// Parameters: q_proj.weight [H*dh, d], k_proj.weight, v_proj.weight [Hk*dh, d]; with
// query_key_norm also q_norm.weight, k_norm.weight [dh].
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/attention/attention.h"
#include "layers/layer.h"
#include "layers/mixers/mechanism.h"
#include "layers/mixers/mixers.h"
#include "layers/rope/rope.h"

namespace tessera {

// What SoftmaxAttention and the differential attention share: x -> the outputs of all maps. With
// two maps each head's width is split in halves that are normed (by one weight of dh/2) and rotated
// by themselves; values keep dh.
// Saved: q, k (after norm and rotation), v, log-sum-exp; with the norm also q and k before it.
class AttentionMaps {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  AttentionMaps(const AttentionConfig& config, Visibility visibility, std::int64_t maps,
                const MixerContext& context, const std::string& path);

  std::int64_t heads() const { return heads_; }
  std::int64_t head_width() const { return head_width_; }
  AttentionShape shape_of(BatchShape batch) const;
  std::vector<ParameterSpec> parameters() const;
  std::vector<BufferSpec> saved(BatchShape batch) const;
  std::vector<BufferSpec> scratch(BatchShape batch) const;
  double flops_per_token(std::int64_t length) const;

  // out [B*T, H*maps*dh], overwritten.
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const;
  // d_out [B*T, H*dh]: the gradient of the sum over maps of weights[m] * out of map m; undefined
  // afterwards. The rest as Mechanism's.
  void backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                std::span<const float> weights, const View& d_out, const View& d_in,
                bool accumulate, std::span<const View> d_parameters,
                const LayerMemory& memory) const;

 private:
  std::int64_t width_, heads_, key_value_heads_, head_width_, maps_;
  Visibility visibility_;
  bool norm_;
  DType dtype_;
  double deviation_;
  std::shared_ptr<const RopeTable> rope_;
};

class SoftmaxAttention : public Mechanism {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  SoftmaxAttention(const AttentionConfig& config, std::int64_t window, const MixerContext& context,
                   const std::string& path);

  std::int64_t out_width() const override { return maps_.heads() * maps_.head_width(); }
  std::vector<ParameterSpec> parameters() const override { return maps_.parameters(); }
  std::vector<BufferSpec> saved(BatchShape shape) const override { return maps_.saved(shape); }
  std::vector<BufferSpec> scratch(BatchShape shape) const override { return maps_.scratch(shape); }
  double flops_per_token(std::int64_t length) const override {
    return maps_.flops_per_token(length);
  }
  std::vector<LayerSize> sizes() const override;
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override;

 private:
  std::int64_t window_;
  AttentionMaps maps_;
};

}  // namespace tessera
