#include "layers/mixers/mixers.h"

#include <array>
#include <cmath>

#include "layers/mixers/compress/compress.h"
#include "layers/mixers/differential/differential.h"
#include "layers/mixers/full/full.h"
#include "layers/mixers/hybrid/hybrid.h"
#include "layers/mixers/linear/linear.h"
#include "layers/mixers/mamba2/mamba2.h"
#include "layers/mixers/nsa/nsa.h"
#include "layers/mixers/sliding/sliding.h"
#include "runtime/error.h"

namespace tessera {
namespace {

constexpr std::array kMixerTypes = {
    MixerType{"full", 'F', make_full},
    MixerType{"sliding", 'S', make_sliding},
    MixerType{"differential", 'G', make_differential},
    MixerType{"linear", 'L', make_linear},
    MixerType{"mamba2", 'M', make_mamba2},
    MixerType{"nsa", 'N', make_nsa},
    MixerType{"compress", 'C', make_compress},
    MixerType{"hybrid", 'H', make_hybrid},
};

// The name of the type that a configuration holds; empty when it holds none.
std::string type_name(const MixerConfig& config) {
  const auto* const field = MixerConfig::descriptor()->FindFieldByNumber(config.type_case());
  return field == nullptr ? "" : field->name();
}

}  // namespace

double MixerContext::output_deviation() const {
  return model.init_deviation() / std::sqrt(2.0 * static_cast<double>(layers));
}

std::span<const MixerType> mixer_types() { return kMixerTypes; }

std::string mixer_names() {
  std::string names;
  for (const MixerType& type : kMixerTypes)
    names += (names.empty() ? "" : ", ") + std::string(type.name);
  return names;
}

const MixerType* find_mixer_type(const std::string& name) {
  for (const MixerType& type : kMixerTypes) {
    if (type.name == name) return &type;
  }
  return nullptr;
}

std::unique_ptr<Layer> make_mixer(const std::string& type, const MixerContext& context) {
  const MixerType* const made = find_mixer_type(type);
  TESSERA_CHECK(made != nullptr);
  int at = -1;
  for (int i = 0; i < context.model.mixer_size(); ++i) {
    if (type_name(context.model.mixer(i)) != type) continue;
    if (at >= 0) {
      throw Error(ExitCode::kUsage, "model.mixer[" + std::to_string(i) + "]: " + type +
                                        " is configured a second time (first in model.mixer[" +
                                        std::to_string(at) + "])");
    }
    at = i;
  }
  if (at < 0) {
    throw Error(ExitCode::kUsage, "model.mixer: the schedule names \"" + type +
                                      "\", but no mixer { " + type + " { ... } } configures it");
  }
  return made->make(context.model.mixer(at), context,
                    "model.mixer[" + std::to_string(at) + "]." + type);
}

}  // namespace tessera
