// What mixes the sequence, without the projection back into the residual stream: so that a mixer
// can be made of two that share one. The conventions are those of layer.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/layer.h"

namespace tessera {

// [B*T, d] -> [B*T, out_width()].
class Mechanism {
 public:
  virtual ~Mechanism() = default;
  virtual std::int64_t out_width() const = 0;  // heads * head width
  virtual std::vector<ParameterSpec> parameters() const = 0;
  // What the backward needs besides in and out.
  virtual std::vector<BufferSpec> saved(BatchShape shape) const = 0;
  virtual std::vector<BufferSpec> scratch(BatchShape shape) const = 0;
  // As Layer's, of one forward pass.
  virtual double flops_per_token(std::int64_t length) const = 0;
  virtual std::vector<LayerSize> sizes() const = 0;

  // in: [B*T, d], out: [B*T, out_width()], both of the compute type; out is overwritten and kept by
  // the caller until backward.
  virtual void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                       const LayerMemory& memory) const = 0;
  // d_out: [B*T, out_width()] of the compute type, the caller's, and undefined afterwards;
  // d_in: f32, overwritten, or added to when `accumulate`; d_parameters f32, overwritten.
  virtual void backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                        const View& d_out, const View& d_in, bool accumulate,
                        std::span<const View> d_parameters, const LayerMemory& memory) const = 0;
};

// A mixer: a mechanism and its output projection. Parameters: the mechanism's, then
// `projection` [d, out_width()]. Saved: the mechanism's output, then what the mechanism saves.
class ProjectedMixer : public Layer {
 public:
  ProjectedMixer(std::unique_ptr<Mechanism> mechanism, std::int64_t width, DType compute,
                 double output_deviation, std::string projection = "o_proj.weight");

  std::vector<ParameterSpec> parameters() const override;
  std::vector<BufferSpec> saved(BatchShape shape) const override;
  std::vector<BufferSpec> scratch(BatchShape shape) const override;
  double flops_per_token(std::int64_t length) const override;
  std::vector<LayerSize> sizes() const override;
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                const View& d_in, std::span<const View> d_parameters,
                const LayerMemory& memory) const override;

 private:
  std::unique_ptr<Mechanism> mechanism_;
  std::int64_t width_;
  DType dtype_;
  double output_deviation_;
  std::string projection_;
};

}  // namespace tessera
