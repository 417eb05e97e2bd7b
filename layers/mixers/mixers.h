// The table of mixers: a new one costs its folder, one line in the schema's oneof, one line here.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "layers/layer.h"
#include "layers/model.pb.h"

namespace tessera {

// What a mixer may know besides its own configuration.
struct MixerContext {
  const ModelConfig& model;
  std::int64_t layer;           // in the whole stack, from 0
  std::int64_t layers;          // of the stack
  DType compute = DType::kF32;  // of the products' operands: kF32 or kBF16
  // Standard deviation of the projection back into the residual stream.
  double output_deviation() const;
};

struct MixerType {
  const char* name;  // as in the schema's oneof and in schedules
  char letter;       // in explicit schedules
  // `path` names the configuration's field for errors: "model.mixer[1].sliding".
  std::unique_ptr<Layer> (*make)(const MixerConfig& config, const MixerContext& context,
                                 const std::string& path);
};

std::span<const MixerType> mixer_types();
// "full, sliding", for errors.
std::string mixer_names();
// Null when there is none of that name.
const MixerType* find_mixer_type(const std::string& name);

// The mixer of a type as the model configures it. Throws Error(kUsage) when it is configured not
// exactly once, or in a way that can't be.
std::unique_ptr<Layer> make_mixer(const std::string& type, const MixerContext& context);

}  // namespace tessera
