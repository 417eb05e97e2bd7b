#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "optim/adamw.cc"
#include <hwy/foreach_target.h>
// Highway's own header must come after foreach_target.h.
#include <hwy/highway.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "optim/adamw.h"
#include "runtime/bfloat16-inl.h"

#ifndef TESSERA_OPTIM_ADAMW_ONCE
#define TESSERA_OPTIM_ADAMW_ONCE
namespace tessera {
// A step's factors as the elements meet them.
struct AdamWFactors {
  float gradient_scale;
  float first_share;   // 1 - beta1
  float second_share;  // 1 - beta2
  float root_scale;    // 1 / sqrt(1 - beta2^t)
  float epsilon;
  float rate;   // learning rate / (1 - beta1^t)
  float decay;  // learning rate * weight decay
};
}  // namespace tessera
#endif

HWY_BEFORE_NAMESPACE();
namespace tessera::HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;
using Lanes = hn::ScalableTag<float>;

// One vector of elements.
HWY_INLINE void update_vector(const AdamWFactors& f, float* HWY_RESTRICT weights,
                              float* HWY_RESTRICT first, float* HWY_RESTRICT second,
                              const float* HWY_RESTRICT gradient,
                              std::uint16_t* HWY_RESTRICT rounded) {
  const Lanes d;
  const auto smallest = hn::Set(d, std::numeric_limits<float>::min());
  const auto g = hn::Mul(hn::Set(d, f.gradient_scale), hn::LoadU(d, gradient));
  auto m = hn::LoadU(d, first);
  auto v = hn::LoadU(d, second);
  m = hn::MulAdd(hn::Set(d, f.first_share), hn::Sub(g, m), m);
  v = hn::MulAdd(hn::Set(d, f.second_share), hn::Sub(hn::Mul(g, g), v), v);
  // A moment that fades would end as a denormal for good, and those cost many times the time.
  m = hn::IfThenElseZero(hn::Ge(hn::Abs(m), smallest), m);
  v = hn::IfThenElseZero(hn::Ge(v, smallest), v);
  const auto root = hn::MulAdd(hn::Sqrt(v), hn::Set(d, f.root_scale), hn::Set(d, f.epsilon));
  const auto move = hn::Mul(hn::Set(d, f.rate), hn::Div(m, root));
  const auto w = hn::LoadU(d, weights);
  const auto updated = hn::Sub(w, hn::MulAdd(hn::Set(d, f.decay), w, move));
  hn::StoreU(updated, d, weights);
  if (rounded != nullptr) {
    hn::StoreU(bfloat16_bits(updated), BFloat16Bits(), rounded);
  }
  hn::StoreU(m, d, first);
  hn::StoreU(v, d, second);
}

void update_piece(const AdamWFactors& f, std::int64_t count, float* HWY_RESTRICT weights,
                  float* HWY_RESTRICT first, float* HWY_RESTRICT second,
                  const float* HWY_RESTRICT gradient, std::uint16_t* HWY_RESTRICT rounded) {
  const Lanes d;
  const auto lanes = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + lanes <= count; i += lanes) {
    update_vector(f, weights + i, first + i, second + i, gradient + i,
                  rounded == nullptr ? nullptr : rounded + i);
  }
  if (i == count) {
    return;
  }
  // The tail takes the same path through a padded copy, so that its bits are the body's.
  HWY_ALIGN std::array<std::array<float, hn::MaxLanes(d)>, 4> tail{};
  std::copy(weights + i, weights + count, tail[0].begin());
  std::copy(first + i, first + count, tail[1].begin());
  std::copy(second + i, second + count, tail[2].begin());
  std::copy(gradient + i, gradient + count, tail[3].begin());
  HWY_ALIGN std::array<std::uint16_t, hn::MaxLanes(d)> rounded_tail{};
  update_vector(f, tail[0].data(), tail[1].data(), tail[2].data(), tail[3].data(),
                rounded == nullptr ? nullptr : rounded_tail.data());
  if (rounded != nullptr) std::copy_n(rounded_tail.begin(), count - i, rounded + i);
  std::copy_n(tail[0].begin(), count - i, weights + i);
  std::copy_n(tail[1].begin(), count - i, first + i);
  std::copy_n(tail[2].begin(), count - i, second + i);
}

}  // namespace tessera::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {
HWY_EXPORT(update_piece);

namespace {
constexpr std::int64_t kPiece = 16384;  // elements of one piece of a queue's work
constexpr double kLargestNorm = 1e18;   // its square is far inside f32
}  // namespace

StepDecision decide_step(const OptimConfig& config, double loss, double gradient_norm,
                         OptimState& state) {
  StepDecision decision;
  if (std::isfinite(loss) && std::isfinite(gradient_norm)) {
    const double limit = config.clip_norm();
    const bool clips = limit > 0.0 && gradient_norm > limit;
    decision.gradient_scale = clips ? limit / gradient_norm : 1.0;
    decision.apply = gradient_norm * decision.gradient_scale <= kLargestNorm;
  }
  if (decision.apply) {
    ++state.adam_steps;
    state.bad_steps_in_a_row = 0;
  } else {
    ++state.bad_steps_in_a_row;
    decision.gradient_scale = 0.0;
    decision.stop = state.bad_steps_in_a_row >= config.bad_steps_limit();
  }
  return decision;
}

AdamWStep adamw_step(const OptimConfig& config, double scheduled_rate, const ParameterGroup& group,
                     std::int64_t adam_steps, double gradient_scale) {
  AdamWStep step;
  step.learning_rate = scheduled_rate * group.rate_scale;
  step.weight_decay = group.weight_decay;
  step.beta1 = config.beta1();
  step.beta2 = config.beta2();
  step.epsilon = config.epsilon();
  step.count = adam_steps;
  step.gradient_scale = gradient_scale;
  return step;
}

void adamw_update(Queue& queue, const AdamWStep& step, const View& weights, const View& first,
                  const View& second, const View& gradient, const View& rounded) {
  TESSERA_CHECK(step.count >= 1);
  const std::int64_t count = weights.count();
  TESSERA_CHECK(first.count() == count && second.count() == count && gradient.count() == count);
  TESSERA_CHECK(rounded.empty() || rounded.count() == count);
  const auto t = static_cast<double>(step.count);
  const double correction1 = 1.0 - std::pow(step.beta1, t);
  const double correction2 = 1.0 - std::pow(step.beta2, t);
  const AdamWFactors factors = {
      .gradient_scale = static_cast<float>(step.gradient_scale),
      .first_share = static_cast<float>(1.0 - step.beta1),
      .second_share = static_cast<float>(1.0 - step.beta2),
      .root_scale = static_cast<float>(1.0 / std::sqrt(correction2)),
      .epsilon = static_cast<float>(step.epsilon),
      .rate = static_cast<float>(step.learning_rate / correction1),
      .decay = static_cast<float>(step.learning_rate * step.weight_decay)};
  auto* const w = weights.as<float>();
  auto* const m = first.as<float>();
  auto* const v = second.as<float>();
  const auto* const g = gradient.as<float>();
  auto* const r =
      rounded.empty() ? nullptr : reinterpret_cast<std::uint16_t*>(rounded.as<BFloat16>());
  queue.parallel_for((count + kPiece - 1) / kPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(update_piece)
    (factors, std::min(kPiece, count - begin), w + begin, m + begin, v + begin, g + begin,
     r == nullptr ? nullptr : r + begin);
  });
}

}  // namespace tessera
#endif
