#include "layers/mixers/mechanism.h"

#include <utility>

#include "runtime/products.h"

namespace tessera {

ProjectedMixer::ProjectedMixer(std::unique_ptr<Mechanism> mechanism, std::int64_t width,
                               DType compute, double output_deviation, std::string projection)
    : mechanism_(std::move(mechanism)),
      width_(width),
      dtype_(compute),
      output_deviation_(output_deviation),
      projection_(std::move(projection)) {}

std::vector<ParameterSpec> ProjectedMixer::parameters() const {
  std::vector<ParameterSpec> list = mechanism_->parameters();
  list.push_back({projection_,
                  {width_, mechanism_->out_width()},
                  {Init::Kind::kNormal, output_deviation_},
                  true});
  return list;
}

std::vector<BufferSpec> ProjectedMixer::saved(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"mixed", dtype_, {shape.rows(), mechanism_->out_width()}}};
  for (BufferSpec& buffer : mechanism_->saved(shape)) list.push_back(std::move(buffer));
  return list;
}

std::vector<BufferSpec> ProjectedMixer::scratch(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"d_mixed", dtype_, {shape.rows(), mechanism_->out_width()}}};
  for (BufferSpec& buffer : mechanism_->scratch(shape)) list.push_back(std::move(buffer));
  return list;
}

double ProjectedMixer::flops_per_token(std::int64_t length) const {
  return mechanism_->flops_per_token(length) +
         2 * static_cast<double>(width_) * static_cast<double>(mechanism_->out_width());
}

std::vector<LayerSize> ProjectedMixer::sizes() const { return mechanism_->sizes(); }

void ProjectedMixer::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                             const LayerMemory& memory) const {
  const View& mixed = memory.saved[0];
  mechanism_->forward(queue, batch, in, mixed,
                      {memory.parameters.first(memory.parameters.size() - 1),
                       memory.saved.subspan(1), memory.scratch.subspan(1)});
  linear_forward(queue, matrix(mixed), matrix(memory.parameters.back()), matrix(out));
}

void ProjectedMixer::backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                              const View& d_in, std::span<const View> d_parameters,
                              const LayerMemory& memory) const {
  const View& mixed = memory.saved[0];
  const View d_mixed =
      shaped(memory.scratch[0], dtype_, {batch.shape.rows(), mechanism_->out_width()});
  linear_backward_weight(queue, matrix(d_out), matrix(mixed), matrix(d_parameters.back()), false);
  linear_backward_input(queue, matrix(d_out), matrix(memory.parameters.back()), matrix(d_mixed),
                        false);
  mechanism_->backward(queue, batch, in, mixed, d_mixed, d_in, false,
                       d_parameters.first(d_parameters.size() - 1),
                       {memory.parameters.first(memory.parameters.size() - 1),
                        memory.saved.subspan(1), memory.scratch.subspan(1)});
}

}  // namespace tessera
