#include "launch/match.h"

#include "layers/configuration.h"
#include "runtime/error.h"

namespace tessera {
namespace {

std::int64_t parameters_at(ModelConfig model, std::int64_t width, std::int64_t wider_layers) {
  model.set_length(1);  // no parameter depends on it
  model.mutable_feed_forward()->set_width(width);
  model.mutable_feed_forward()->set_wider_layers(wider_layers);
  return Stack(model).parameter_count();
}

}  // namespace

// The count is linear in width * layers + r.
ParameterMatch match_parameters(const ModelConfig& model, std::int64_t target) {
  if (model.feed_forward().has_experts() || model.feed_forward_range_size() > 0) {
    throw Error(
        ExitCode::kUsage,
        "--match: finds one width for all layers' feed-forwards, and can't for a model with "
        "experts or feed_forward_range");
  }
  const auto layers = static_cast<std::int64_t>(schedule_types(model.schedule()).size());
  const std::int64_t least = parameters_at(model, 1, 0);
  const std::int64_t step = (parameters_at(model, 2, 0) - least) / layers;
  if (target < least) {
    throw Error(ExitCode::kUsage, "--match: the model has " + std::to_string(least) +
                                      " parameters with a feed-forward of width 1, more than " +
                                      std::to_string(target));
  }
  const std::int64_t steps = (target - least + step / 2) / step;
  ParameterMatch match;
  match.width = 1 + steps / layers;
  match.wider_layers = steps % layers;
  if (match.width >= kMaxFeedForwardWidth) {
    throw Error(ExitCode::kUsage, "--match: " + std::to_string(target) +
                                      " parameters would need a feed-forward of width " +
                                      std::to_string(match.width) + ", more than any model has");
  }
  match.parameters = parameters_at(model, match.width, match.wider_layers);
  return match;
}

}  // namespace tessera
