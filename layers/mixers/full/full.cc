#include "layers/mixers/full/full.h"

#include "layers/attention/attention_mixer.h"

namespace tessera {

std::unique_ptr<Layer> make_full(const MixerConfig& config, const MixerContext& context,
                                 const std::string& path) {
  return std::make_unique<AttentionMixer>(config.full(), AttentionShape::kNoWindow, context, path);
}

}  // namespace tessera
