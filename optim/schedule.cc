#include "optim/schedule.h"

#include <cmath>
#include <numbers>
#include <string>

#include "runtime/error.h"

namespace tessera {

double learning_rate(const OptimConfig& config, std::int64_t step, std::int64_t total_steps) {
  TESSERA_CHECK(step >= 0);
  const double peak = config.learning_rate();
  const double last = config.final_learning_rate();
  const std::int64_t warmup = config.warmup_steps();
  if (step < warmup) {
    return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  }
  switch (config.schedule()) {
    case OptimConfig::CONSTANT:
      return peak;
    case OptimConfig::COSINE: {
      if (step >= total_steps) {
        return last;
      }
      const double done =
          static_cast<double>(step - warmup) / static_cast<double>(total_steps - warmup);
      return last + (peak - last) * (1.0 + std::cos(std::numbers::pi * done)) / 2.0;
    }
    case OptimConfig::WARMUP_STABLE_DECAY: {
      if (step < total_steps - config.decay_steps()) {
        return peak;
      }
      if (step >= total_steps) {
        return last;
      }
      const double left =
          static_cast<double>(total_steps - step) / static_cast<double>(config.decay_steps());
      return last + (peak - last) * left;
    }
  }
  TESSERA_CHECK(false);
}

void check_schedule(const OptimConfig& config, std::int64_t total_steps) {
  const std::string steps = " of the run's " + std::to_string(total_steps) + " steps";
  if (config.warmup_steps() > total_steps) {
    throw Error(ExitCode::kUsage, "optim.warmup_steps: expected at most all" + steps + ", got " +
                                      std::to_string(config.warmup_steps()));
  }
  if (config.schedule() == OptimConfig::WARMUP_STABLE_DECAY &&
      config.decay_steps() > total_steps - config.warmup_steps()) {
    throw Error(ExitCode::kUsage, "optim.decay_steps: expected at most the " +
                                      std::to_string(total_steps - config.warmup_steps()) + steps +
                                      " that the warm-up leaves, got " +
                                      std::to_string(config.decay_steps()));
  }
}

}  // namespace tessera
