#include "layers/mixers/full/full.h"

#include "layers/attention/softmax_attention.h"

namespace tessera {

std::unique_ptr<Layer> make_full(const MixerConfig& config, const MixerContext& context,
                                 const std::string& path) {
  return std::make_unique<ProjectedMixer>(
      std::make_unique<SoftmaxAttention>(config.full(), Visibility::kNoWindow, context, path),
      context.model.width(), context.compute, context.output_deviation());
}

}  // namespace tessera
