#include "layers/configuration.h"

#include <cmath>
#include <sstream>

#include "runtime/error.h"

namespace tessera {

void refuse(const std::string& path, const std::string& expected, const std::string& found) {
  throw Error(ExitCode::kUsage, path + ": " + expected + ", is " + found);
}

std::int64_t require_range(const std::string& path, std::int64_t value, std::int64_t least,
                           std::int64_t most) {
  if (value < least)
    refuse(path, "must be at least " + std::to_string(least), std::to_string(value));
  if (value > most) refuse(path, "must be at most " + std::to_string(most), std::to_string(value));
  return value;
}

double require_positive(const std::string& path, double value) {
  if (!std::isfinite(value) || value <= 0) {
    std::ostringstream found;
    found << value;
    refuse(path, "must be a finite number above 0", found.str());
  }
  return value;
}

void validate(const ModelConfig& config) {
  require_range("model.width", config.width(), 1, kMaxWidth);
  require_range("model.vocabulary", config.vocabulary(), 1, kMaxVocabulary);
  require_range("model.length", config.length(), 1, kMaxLength);
  require_range("model.feed_forward.width", config.feed_forward().width(), 1, kMaxFeedForwardWidth);
  require_range("model.feed_forward.wider_layers", config.feed_forward().wider_layers(), 0,
                kMaxLayers);
  require_positive("model.norm_epsilon", config.norm_epsilon());
  require_positive("model.init_deviation", config.init_deviation());
}

}  // namespace tessera
