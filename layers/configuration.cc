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

double require_at_least_zero(const std::string& path, double value) {
  if (!std::isfinite(value) || value < 0) {
    std::ostringstream found;
    found << value;
    refuse(path, "must be a finite number of at least 0", found.str());
  }
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

namespace {

// Experts' shape is theirs to judge.
void validate_feed_forward(const std::string& path, const FeedForwardConfig& config) {
  if (config.has_experts()) {
    if (config.wider_layers() == 0) return;
    refuse(path + ".wider_layers", "must be 0 with experts, which have no width to add to",
           std::to_string(config.wider_layers()));
  }
  if (config.width() < 1) {
    refuse(path + ".width", "must be at least 1, unless there are experts in its place",
           std::to_string(config.width()));
  }
  require_range(path + ".width", config.width(), 1, kMaxFeedForwardWidth);
}

}  // namespace

void complete(ExpertsConfig& config) {
  if (!config.has_renormalise()) config.set_renormalise(!config.has_latent());
  if (!config.has_auxiliary_coefficient()) {
    config.set_auxiliary_coefficient(config.has_latent() || config.selection_bias() ? 1e-4 : 0.01);
  }
}

void complete(ModelConfig& config) {
  const auto complete_one = [](FeedForwardConfig& feed_forward) {
    if (feed_forward.has_experts()) complete(*feed_forward.mutable_experts());
  };
  if (config.has_feed_forward()) complete_one(*config.mutable_feed_forward());
  for (FeedForwardRange& range : *config.mutable_feed_forward_range()) {
    if (range.has_feed_forward()) complete_one(*range.mutable_feed_forward());
  }
}

void validate(const ModelConfig& config) {
  require_range("model.width", config.width(), 1, kMaxWidth);
  require_range("model.vocabulary", config.vocabulary(), 1, kMaxVocabulary);
  require_range("model.length", config.length(), 1, kMaxLength);
  validate_feed_forward("model.feed_forward", config.feed_forward());
  require_range("model.feed_forward.wider_layers", config.feed_forward().wider_layers(), 0,
                kMaxLayers);
  for (int i = 0; i < config.feed_forward_range_size(); ++i) {
    const std::string path = "model.feed_forward_range[" + std::to_string(i) + "]";
    const FeedForwardRange& range = config.feed_forward_range(i);
    require_range(path + ".first", range.first(), 0, kMaxLayers);
    require_range(path + ".last", range.last(), range.first(), kMaxLayers);
    for (int j = 0; j < i; ++j) {
      const FeedForwardRange& other = config.feed_forward_range(j);
      if (range.first() > other.last() || other.first() > range.last()) continue;
      refuse(path + ".first",
             "its layers must not be those of model.feed_forward_range[" + std::to_string(j) + "]",
             std::to_string(range.first()));
    }
    validate_feed_forward(path + ".feed_forward", range.feed_forward());
    if (range.feed_forward().wider_layers() != 0) {
      refuse(path + ".feed_forward.wider_layers",
             "must be 0: a range has one width, give its wider layers a range of their own",
             std::to_string(range.feed_forward().wider_layers()));
    }
  }
  require_positive("model.norm_epsilon", config.norm_epsilon());
  require_positive("model.init_deviation", config.init_deviation());
}

}  // namespace tessera
