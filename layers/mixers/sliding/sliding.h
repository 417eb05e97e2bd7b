// See sliding.md.
#pragma once

#include <memory>
#include <string>

#include "layers/mixers/mixers.h"

namespace tessera {

std::unique_ptr<Layer> make_sliding(const MixerConfig& config, const MixerContext& context,
                                    const std::string& path);

}  // namespace tessera
