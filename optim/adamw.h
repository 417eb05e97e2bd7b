// AdamW on flat arrays, and the rule that decides whether a step is applied at all.
#pragma once

#include <cstdint>

#include "optim/groups.h"
#include "optim/optim.pb.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// What is saved with a checkpoint under /state.
struct OptimState {
  std::int64_t adam_steps = 0;          // steps applied: Adam's own count
  std::int64_t bad_steps_in_a_row = 0;  // steps not applied since the last that was
};

struct StepDecision {
  bool apply = false;           // false: leave weights and moments alone
  double gradient_scale = 0.0;  // multiplies every gradient: the clip; 1 when nothing is clipped
  bool stop = false;            // bad_steps_limit bad steps in a row: end with kNumerics
};

// Decides on the step's loss and global gradient norm (before clipping), which are the same on all
// ranks, and moves `state` on: adam_steps is the count that the step's update must use. A step is
// applied unless the loss or the norm isn't finite, or the gradient is so large (norm above 1e18
// after clipping) that its square can't be kept in an f32 moment. The clip is
// clip_norm / norm when the norm is larger, with nothing added to the norm.
StepDecision decide_step(const OptimConfig& config, double loss, double gradient_norm,
                         OptimState& state);

// The numbers of one step for one parameter group.
struct AdamWStep {
  double learning_rate = 0.0;  // the schedule's times the group's rate_scale
  double weight_decay = 0.0;   // 0 for a group that doesn't decay
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  std::int64_t count = 1;  // Adam's own step count with this step in it, >= 1
  double gradient_scale = 1.0;
};
AdamWStep adamw_step(const OptimConfig& config, double scheduled_rate, const ParameterGroup& group,
                     std::int64_t adam_steps, double gradient_scale);

// weights, first, second, gradient: f32 views of equal count that don't overlap, any shape;
// gradient is read, the others are updated in place. rounded: empty, or bf16 of the same count,
// which becomes the updated weights rounded to nearest even. With t = count, formulas of Loshchilov
// and Hutter 2019, algorithm 2:
//   g = gradient_scale * gradient
//   m += (1 - beta1) (g - m)
//   v += (1 - beta2) (g^2 - v)
//   w -= learning_rate * (m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + epsilon)
//                         + weight_decay * w)
// epsilon is added after the bias correction, as PyTorch does (not as in Kingma and Ba's
// efficient variant). The step's factors are computed in double, the elements in f32. A moment
// whose magnitude falls below the smallest normal number becomes 0. An element's bits depend on
// that element alone: any cut of an array into pieces gives the same. Throws kInternal for views
// of another type or count.
void adamw_update(Queue& queue, const AdamWStep& step, const View& weights, const View& first,
                  const View& second, const View& gradient, const View& rounded = {});

}  // namespace tessera
