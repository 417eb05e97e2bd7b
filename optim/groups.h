// Parameter groups: which learning rate and weight decay a parameter gets.
#pragma once

#include <cstdint>

#include "optim/optim.pb.h"

namespace tessera {

enum class ModelPart : std::uint8_t { kEmbedding, kBlock, kHead };  // kHead: with the final norm

struct ParameterGroup {
  double rate_scale = 1.0;    // multiplies the schedule's learning rate
  double weight_decay = 0.0;  // of OptimConfig, or 0
};

// The group of a parameter of `part`; `layer` of `layers` counts for blocks alone. `decays` is the
// layer's own word on whether weight decay applies to the parameter.
ParameterGroup parameter_group(const OptimConfig& config, ModelPart part, std::int64_t layer,
                               std::int64_t layers, bool decays);

}  // namespace tessera
