// Differential attention: the difference of two softmax maps of half the head's width, normed.
// See differential.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/attention/softmax_attention.h"
#include "layers/mixers/mechanism.h"
#include "layers/mixers/mixers.h"

namespace tessera {

// 0.8 - 0.6 exp(-0.3 layer), layer from 0 in the whole stack.
double differential_lambda_init(std::int64_t layer);

// Parameters: AttentionMaps' with two maps, then lambda_q1, lambda_k1, lambda_q2, lambda_k2 [dh/2],
// f32. Saved: both maps' outputs, the norm's inverse rms, then AttentionMaps'.
class Differential : public Mechanism {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  Differential(const DifferentialConfig& config, const MixerContext& context,
               const std::string& path);

  std::int64_t out_width() const override { return maps_.heads() * maps_.head_width(); }
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
  LayerMemory maps_memory(const LayerMemory& memory) const;

  AttentionMaps maps_;
  DType dtype_;
  double lambda_init_;
};

std::unique_ptr<Layer> make_differential(const MixerConfig& config, const MixerContext& context,
                                         const std::string& path);

}  // namespace tessera
