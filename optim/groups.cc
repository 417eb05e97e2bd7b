#include "optim/groups.h"

#include <cmath>

namespace tessera {

ParameterGroup parameter_group(const OptimConfig& config, ModelPart part, std::int64_t layer,
                               std::int64_t layers, bool decays) {
  ParameterGroup group;
  group.weight_decay = decays ? config.weight_decay() : 0.0;
  if (part == ModelPart::kEmbedding) {
    group.rate_scale = config.embedding_rate_scale();
  } else if (part == ModelPart::kBlock) {
    group.rate_scale = std::pow(config.layer_decay(), static_cast<double>(layers - 1 - layer));
  }
  return group;
}

}  // namespace tessera
