// Linear attention with a decaying state per head, or softmax attention, under a gate and a norm
// per head. See linear.md.
#pragma once

#include <memory>
#include <string>

#include "layers/mixers/mixers.h"

namespace tessera {

std::unique_ptr<Layer> make_linear(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path);

}  // namespace tessera
