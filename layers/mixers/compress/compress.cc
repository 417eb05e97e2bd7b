#include "layers/mixers/compress/compress.h"

#include "layers/rope/rope.h"
#include "runtime/products.h"

namespace tessera {
namespace {

// Places in the scratch; CompressedAttention's stand behind them.
enum Scratch : std::size_t { kDQ, kOwn };

}  // namespace

Compress::Compress(const CompressConfig& config, const MixerContext& context,
                   const std::string& path)
    : width_(context.model.width()),
      heads_(config.heads()),
      head_width_(config.head_width()),
      deviation_(context.model.init_deviation()),
      dtype_(context.compute),
      attention_(config.compression(), heads_, config.key_value_heads(), head_width_, context, path,
                 path + ".compression") {}

std::vector<ParameterSpec> Compress::parameters() const {
  std::vector<ParameterSpec> list = {
      {"q_proj.weight", {heads_ * head_width_, width_}, {Init::Kind::kNormal, deviation_}, true}};
  for (ParameterSpec& parameter : attention_.parameters()) list.push_back(std::move(parameter));
  return list;
}

std::vector<BufferSpec> Compress::saved(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"q", dtype_, attention_.shape_of(shape).queries()}};
  for (BufferSpec& buffer : attention_.saved(shape)) list.push_back(std::move(buffer));
  return list;
}

std::vector<BufferSpec> Compress::scratch(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"d_q", DType::kF32, attention_.shape_of(shape).queries()}};
  for (BufferSpec& buffer : attention_.scratch(shape)) list.push_back(std::move(buffer));
  return list;
}

double Compress::flops_per_token(std::int64_t length) const {
  return 2 * static_cast<double>(width_ * heads_ * head_width_) +
         attention_.flops_per_token(length);
}

void Compress::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                       const LayerMemory& memory) const {
  // The rows of q need their room only until they are split.
  linear_forward(queue, matrix(in), matrix(memory.parameters[0]), matrix(out));
  split_heads(queue, batch.shape, nullptr, out, memory.saved[0]);
  attention_.forward(
      queue, batch, in, memory.saved[0], out,
      {memory.parameters.subspan(1), memory.saved.subspan(1), memory.scratch.subspan(kOwn)});
}

void Compress::backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                        const View& d_out, const View& d_in, bool accumulate,
                        std::span<const View> d_parameters, const LayerMemory& memory) const {
  const View d_q =
      shaped(memory.scratch[kDQ], DType::kF32, attention_.shape_of(batch.shape).queries());
  attention_.backward(
      queue, batch, in, memory.saved[0], out, d_out, d_q, d_in, accumulate, d_parameters.subspan(1),
      {memory.parameters.subspan(1), memory.saved.subspan(1), memory.scratch.subspan(kOwn)});
  const View& rows_q = d_out;  // done with: the rows of d_q take its room
  merge_heads(queue, batch.shape, nullptr, 1, d_q, rows_q);
  linear_backward_weight(queue, matrix(rows_q), matrix(in), matrix(d_parameters[0]), false);
  linear_backward_input(queue, matrix(rows_q), matrix(memory.parameters[0]), matrix(d_in), true);
}

std::unique_ptr<Layer> make_compress(const MixerConfig& config, const MixerContext& context,
                                     const std::string& path) {
  return std::make_unique<ProjectedMixer>(
      std::make_unique<Compress>(config.compress(), context, path), context.model.width(),
      context.compute, context.output_deviation());
}

}  // namespace tessera
