#include "layers/mixers/sliding/sliding.h"

#include "layers/attention/softmax_attention.h"
#include "layers/configuration.h"

namespace tessera {

std::unique_ptr<Layer> make_sliding(const MixerConfig& config, const MixerContext& context,
                                    const std::string& path) {
  const std::int64_t window =
      require_range(path + ".window", config.sliding().window(), 1, kMaxLength);
  return std::make_unique<ProjectedMixer>(
      std::make_unique<SoftmaxAttention>(config.sliding().attention(), window, context,
                                         path + ".attention"),
      context.model.width(), context.compute, context.output_deviation());
}

}  // namespace tessera
