// Native sparse attention: compressed, selected and sliding branches under a gate each. See nsa.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/compression/compressed_attention.h"
#include "layers/mixers/mechanism.h"
#include "layers/mixers/mixers.h"
#include "layers/mixers/nsa/selected_attention.h"
#include "layers/rope/rope.h"

namespace tessera {

// Parameters: q_proj.weight [H*dh, d], gate_proj.weight [3H, d] (row 3h+b of head h and branch b:
// compressed, selected, sliding), selected_k_proj.weight, selected_v_proj.weight,
// sliding_k_proj.weight, sliding_v_proj.weight [Hk*dh, d]; with query_key_norm q_norm.weight,
// selected_k_norm.weight, sliding_k_norm.weight [dh]; then CompressedAttention's behind
// compressed_. Saved, among others: "choice", the selected blocks (selected_attention.h), and
// "products", what the selected branch computed.
class Nsa : public Mechanism {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  Nsa(const NsaConfig& config, const MixerContext& context, const std::string& path);

  std::int64_t out_width() const override { return heads_ * head_width_; }
  std::vector<ParameterSpec> parameters() const override;
  std::vector<BufferSpec> saved(BatchShape shape) const override;
  std::vector<BufferSpec> scratch(BatchShape shape) const override;
  double flops_per_token(std::int64_t length) const override;
  std::vector<LayerSize> sizes() const override;
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override;

 private:
  // Where the rotated keys and the values of a branch stand in the lists.
  struct Branch {
    std::size_t parameters, saved;  // W_k and W_v; k and v by head
    std::size_t norm, saved_norm;   // the norm's weight; keys before it and their inverse rms
  };
  static const Branch kSelected, kSliding;

  AttentionShape window_shape(BatchShape batch) const;
  SelectionShape selection(BatchShape batch) const;
  // What is the compressed branch's own.
  LayerMemory compressed_memory(const LayerMemory& memory) const;
  // q of the compressed branch and, normed and rotated, of the other two, both by head; the norm's
  // statistics are computed when `first`.
  void split_queries(Queue& queue, BatchShape batch, bool first, const View& plain,
                     const View& rotated, const LayerMemory& memory) const;
  void forward_keys(Queue& queue, BatchShape batch, const Branch& branch, const View& in,
                    const LayerMemory& memory) const;
  void backward_keys(Queue& queue, BatchShape batch, const Branch& branch, const View& in,
                     const View& d_k, const View& d_v, const View& d_in, bool accumulate,
                     std::span<const View> d_parameters, const LayerMemory& memory) const;

  std::int64_t width_, heads_, key_value_heads_, head_width_;
  std::int64_t selected_block_, selected_blocks_, window_;
  bool norm_;
  double deviation_, scale_;
  DType dtype_;
  CompressedAttention compressed_;
  std::shared_ptr<const RopeTable> rope_;
};

std::unique_ptr<Layer> make_nsa(const MixerConfig& config, const MixerContext& context,
                                const std::string& path);

}  // namespace tessera
