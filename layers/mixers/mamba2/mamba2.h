// The state-space mixer of Mamba-2 (2405.21060). See mamba2.md.
#pragma once

#include <memory>
#include <string>

#include "layers/mixers/mixers.h"

namespace tessera {

std::unique_ptr<Layer> make_mamba2(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path);

}  // namespace tessera
