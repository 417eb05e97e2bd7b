// Runs of every instruction set that this machine has: the vector kernels of the others are what
// users elsewhere run.
#pragma once

#include <hwy/targets.h>

#include <cstdint>

namespace tessera::testing {

// 0: what the processor has.
inline void choose_targets(std::int64_t targets) {
  hwy::SetSupportedTargetsForTest(targets);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

// Calls body once for the best instruction set, then for each by itself.
template <class Body>
void for_targets(const Body& body) {
  choose_targets(0);
  const std::int64_t supported = hwy::SupportedTargets() & HWY_TARGETS;
  body("the best");
  for (int bit = 0; bit < 63; ++bit) {
    const std::int64_t target = supported & (std::int64_t{1} << bit);
    if (target == 0) continue;
    choose_targets(target);
    body(hwy::TargetName(target));
  }
  choose_targets(0);
}

}  // namespace tessera::testing
