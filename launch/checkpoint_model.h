// The model that a checkpoint's parameters belong to.
#pragma once

#include <string>

#include "launch/config.h"
#include "parallel/checkpoint.h"

namespace tessera {

// The config of the run that wrote this checkpoint: config.textproto in the run's folder. Throws
// Error(kUsage) where there is none.
std::string config_of_checkpoint(const std::string& checkpoint);

// Throws Error(kUsage) naming the first field of the model in which `config` differs from what the
// checkpoint was trained with; its length may, for no parameter depends on it.
void check_model(const Config& config, const CheckpointMeta& meta, const std::string& checkpoint);

}  // namespace tessera
