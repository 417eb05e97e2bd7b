#include "launch/allocation.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "runtime/error.h"

namespace tessera {
namespace {

double relative(std::int64_t value, std::int64_t to) {
  return static_cast<double>(value - to) / static_cast<double>(to);
}

void set_experts(const Regime& regime, ExpertsConfig& experts) {
  experts.set_experts(regime.experts);
  experts.set_active(regime.active);
  experts.set_width(regime.inner);
  if (regime.shared > 0) experts.set_shared_width(regime.shared);
  experts.set_selection_bias(true);
  experts.mutable_latent()->set_width(regime.latent);
}

}  // namespace

bool Regime::near_square() const { return 5 * std::abs(latent - inner) <= 2 * inner; }

Budgets& Budgets::operator+=(const Budgets& other) {
  pool += other.pool;
  rest += other.rest;
  products += other.products;
  dispatch += other.dispatch;
  return *this;
}

Budgets budgets(const Regime& regime, std::int64_t width) {
  return {3 * regime.experts * regime.latent * regime.inner,
          width * (2 * regime.latent + regime.experts + 3 * regime.shared),
          3 * regime.active * regime.latent * regime.inner, regime.active * regime.latent};
}

std::int64_t matching_shared(const Regime& regime, std::int64_t width, std::int64_t rest) {
  const std::int64_t left = rest - width * (2 * regime.latent + regime.experts);
  if (left < 0) {
    throw Error(ExitCode::kUsage,
                "--wide: maps and router of the wide regime alone have " + std::to_string(-left) +
                    " parameters more than all of the narrow's that isn't routed: give the narrow "
                    "a larger shared expert, or the wide a smaller l or N");
  }
  const std::int64_t step = 3 * width;
  return (2 * left + step) / (2 * step);
}

bool RegimeMatch::matched() const {
  return std::max({std::abs(pool), std::abs(rest), std::abs(products), std::abs(dispatch)}) <=
         kMatchTolerance;
}

RegimeMatch match_regimes(const Regime& narrow, const Regime& wide, std::int64_t width) {
  const Budgets of_narrow = budgets(narrow, width), of_wide = budgets(wide, width);
  return {relative(of_wide.pool, of_narrow.pool), relative(of_wide.rest, of_narrow.rest),
          relative(of_wide.products, of_narrow.products),
          relative(of_wide.dispatch, of_narrow.dispatch), of_wide.rest - of_narrow.rest};
}

std::optional<ProfileSplit> find_split(std::span<const double> dimensions) {
  std::optional<ProfileSplit> best;
  double widest = 0.0;
  for (std::size_t prefix = 1; prefix <= dimensions.size() / 2; ++prefix) {
    const auto rest = dimensions.begin() + static_cast<std::ptrdiff_t>(prefix);
    const auto below = std::max_element(dimensions.begin(), rest);
    const auto above = std::min_element(rest, dimensions.end());
    if (*above - *below <= widest) continue;
    widest = *above - *below;
    best = {static_cast<std::int64_t>(prefix), static_cast<std::size_t>(below - dimensions.begin()),
            static_cast<std::size_t>(above - dimensions.begin())};
  }
  return best;
}

std::vector<AllocationArm> allocation_arms(std::int64_t blocks, std::int64_t narrow_blocks) {
  // The first `first` blocks of one kind, the others of the other.
  const auto prefix = [&](std::string name, std::int64_t first, bool first_wide) {
    AllocationArm arm = {std::move(name), {}};
    for (std::int64_t block = 0; block < blocks; ++block) {
      arm.wide.push_back((block < first) == first_wide);
    }
    return arm;
  };
  std::vector<AllocationArm> arms;
  const auto add = [&](AllocationArm arm) {
    const bool there = std::any_of(arms.begin(), arms.end(), [&](const AllocationArm& other) {
      return other.wide == arm.wide;
    });
    if (!there) arms.push_back(std::move(arm));
  };
  const bool splits = narrow_blocks > 0 && narrow_blocks < blocks;
  if (splits) add(prefix("two_regime", narrow_blocks, false));
  add(prefix("uniform_narrow", blocks, false));
  add(prefix("uniform_wide", blocks, true));
  if (!splits) return arms;
  add(prefix("fixed_split_exchange", narrow_blocks, true));
  add(prefix("matched_count_exchange", blocks - narrow_blocks, true));
  add(prefix("boundary_earlier", narrow_blocks - 1, false));
  add(prefix("boundary_later", narrow_blocks + 1, false));
  AllocationArm given_back = prefix("last_block_narrow", narrow_blocks, false);
  given_back.wide.back() = false;
  add(std::move(given_back));
  return arms;
}

Budgets budgets(const AllocationArm& arm, const Regime& narrow, const Regime& wide,
                std::int64_t width) {
  Budgets sum;
  for (const bool is_wide : arm.wide) sum += budgets(is_wide ? wide : narrow, width);
  return sum;
}

ModelConfig ranges_of(const AllocationArm& arm, std::span<const std::int64_t> layers,
                      const Regime& narrow, const Regime& wide) {
  TESSERA_CHECK(arm.wide.size() == layers.size());
  ModelConfig model;
  for (std::size_t block = 0; block < layers.size(); ++block) {
    const bool goes_on = block > 0 && arm.wide[block] == arm.wide[block - 1] &&
                         layers[block] == layers[block - 1] + 1;
    if (!goes_on) {
      FeedForwardRange& range = *model.add_feed_forward_range();
      range.set_first(layers[block]);
      set_experts(arm.wide[block] ? wide : narrow,
                  *range.mutable_feed_forward()->mutable_experts());
    }
    model.mutable_feed_forward_range(model.feed_forward_range_size() - 1)->set_last(layers[block]);
  }
  return model;
}

}  // namespace tessera
