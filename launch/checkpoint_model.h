// The model that a checkpoint's parameters belong to.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "launch/config.h"
#include "layers/layer.h"
#include "parallel/checkpoint.h"

namespace tessera {

// The config of the run that wrote this checkpoint: config.textproto in the run's folder. Throws
// Error(kUsage) where there is none.
std::string config_of_checkpoint(const std::string& checkpoint);

// Throws Error(kUsage) naming the first field of the model in which `config` differs from what the
// checkpoint was trained with; its length may, for no parameter depends on it.
void check_model(const Config& config, const CheckpointMeta& meta, const std::string& checkpoint);

// Fills a unit's parameters (full names, f32) from the checkpoint, read by this rank alone;
// `alone`, a communicator of this rank, outlives it.
std::function<void(std::span<const ParameterSpec> parameters, std::span<const View> values)>
parameters_of(const std::string& checkpoint, Communicator& alone);
// The same of a layer's selection bias [N].
std::function<void(std::int64_t layer, const View& bias)> selection_bias_of(
    const std::string& checkpoint, Communicator& alone);

}  // namespace tessera
