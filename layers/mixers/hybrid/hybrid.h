// Two mechanisms side by side on the same input under one gate a head; the mixer `hybrid` is nsa
// and differential. See hybrid.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/mixers/mechanism.h"
#include "layers/mixers/mixers.h"

namespace tessera {

// out = g * first + (1 - g) * second, g = sigmoid(x W_h') of each head.
// Parameters: each mechanism's behind its name and a dot, then gate_proj.weight [H, d].
// Saved: both outputs, the gates, then what each mechanism saves.
class Hybrid : public Mechanism {
 public:
  struct Part {
    std::string name;
    std::unique_ptr<Mechanism> mechanism;
  };
  // Both of the same out_width, a multiple of `heads`.
  Hybrid(Part first, Part second, std::int64_t heads, const MixerContext& context);

  std::int64_t out_width() const override { return first_.mechanism->out_width(); }
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
  // A mechanism's share of the lists.
  LayerMemory first_memory(const LayerMemory& memory) const;
  LayerMemory second_memory(const LayerMemory& memory) const;

  Part first_, second_;
  std::int64_t heads_, width_;
  DType dtype_;
  double deviation_;
  std::size_t parameters_of_first_, saved_of_first_;
};

std::unique_ptr<Layer> make_hybrid(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path);

}  // namespace tessera
