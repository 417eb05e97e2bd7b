// The learning rate as a pure function of the step, so that a resume can't change it.
#pragma once

#include <cstdint>

#include "optim/optim.pb.h"

namespace tessera {

// The rate of step `step`, counted from 0, of a run of `total_steps` = S; in double. A step that is
// skipped for a non-finite loss uses up its number all the same. With w = warmup_steps, peak p =
// learning_rate, f = final_learning_rate:
//   s < w                    p (s + 1) / w: step 0 already moves, step w - 1 has the peak
//   COSINE                   f + (p - f) (1 + cos(pi (s - w) / (S - w))) / 2
//                            (docs/architecture.md; w = 0 is the formula of the source paper)
//   CONSTANT                 p
//   WARMUP_STABLE_DECAY      p, and from step S - decay_steps on f + (p - f) (S - s) / decay_steps
// so that f itself would be the rate of step S, the first that isn't run; it is returned from there
// on. Throws kInternal for a negative step.
double learning_rate(const OptimConfig& config, std::int64_t step, std::int64_t total_steps);

// Throws Error(kUsage) naming the field when the parts of the schedule don't fit into total_steps.
void check_schedule(const OptimConfig& config, std::int64_t total_steps);

}  // namespace tessera
