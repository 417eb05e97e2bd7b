// Parameter matching: arms of a study differ in their mixers, and the feed-forward's width makes up
// for it.
#pragma once

#include <cstdint>

#include "layers/stack.h"

namespace tessera {

struct ParameterMatch {
  std::int64_t width = 0;         // model.feed_forward.width
  std::int64_t wider_layers = 0;  // model.feed_forward.wider_layers
  std::int64_t parameters = 0;    // that come of it
};

// The width of all layers' feed-forwards, and one more in the first r < layers, that come nearest
// to `target` parameters; the model's own width is not looked at. Throws Error(kUsage) when the
// model is larger without them, or no width in range reaches the target.
ParameterMatch match_parameters(const ModelConfig& model, std::int64_t target);

}  // namespace tessera
