// See full.md.
#pragma once

#include <memory>
#include <string>

#include "layers/mixers/mixers.h"

namespace tessera {

std::unique_ptr<Layer> make_full(const MixerConfig& config, const MixerContext& context,
                                 const std::string& path);

}  // namespace tessera
