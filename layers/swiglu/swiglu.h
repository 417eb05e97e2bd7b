// The feed-forward: y = (SiLU(x W_gate) * x W_up) W_down. Parameters: gate_proj.weight,
// up_proj.weight [f, d], down_proj.weight [d, f]. Saved: x W_gate and x W_up. Derivation:
// swiglu.md.
#pragma once

#include "layers/layer.h"

namespace tessera {

class SwiGlu : public Layer {
 public:
  // width: of input and output; inner: f; deviations of the initialisation, the second W_down's;
  // compute: the type of the products' operands.
  SwiGlu(std::int64_t width, std::int64_t inner, double deviation, double output_deviation,
         DType compute = DType::kF32)
      : width_(width),
        inner_(inner),
        deviation_(deviation),
        output_deviation_(output_deviation),
        dtype_(compute) {}
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
  std::int64_t width_, inner_;
  double deviation_, output_deviation_;
  DType dtype_;
};

}  // namespace tessera
