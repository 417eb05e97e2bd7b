// The allocation of expert shapes over the blocks of a latent mixture of experts: narrow experts in
// a shallow prefix, wide ones in the rest, at equal budgets. Sources and what is chosen:
// docs/probe.md.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "layers/model.pb.h"

namespace tessera {

// Of one block's experts.
struct Regime {
  std::int64_t active = 0;   // K
  std::int64_t experts = 0;  // N
  std::int64_t latent = 0;   // l
  std::int64_t inner = 0;    // m
  std::int64_t shared = 0;   // m_s
  bool operator==(const Regime&) const = default;
  std::int64_t capacity() const { return latent < inner ? latent : inner; }  // q
  // |l/m - 1| <= 0.4, without rounding.
  bool near_square() const;
};

// Of one block, or of several together, at model width d.
struct Budgets {
  std::int64_t pool = 0;      // P = 3 N l m: parameters of the routed experts
  std::int64_t rest = 0;      // Q = 2 d l + d N + 3 d m_s: of maps, router and shared expert
  std::int64_t products = 0;  // C = 3 K l m: multiply-adds of a token in its experts
  std::int64_t dispatch = 0;  // K l: scalars that a token sends one way
  Budgets& operator+=(const Budgets& other);
};
Budgets budgets(const Regime& regime, std::int64_t width);

// The m_s with which the rest comes nearest to `rest`: at most 1.5 d away. Throws Error(kUsage)
// when maps and router alone are larger than that.
std::int64_t matching_shared(const Regime& regime, std::int64_t width, std::int64_t rest);

// By how much the regimes' blocks differ, each as a share of the narrow's.
struct RegimeMatch {
  double pool = 0.0, rest = 0.0, products = 0.0, dispatch = 0.0;
  std::int64_t residual = 0;  // Q of wide less Q of narrow, in parameters
  // Nothing is off by more than kMatchTolerance.
  bool matched() const;
};
constexpr double kMatchTolerance = 0.02;
RegimeMatch match_regimes(const Regime& narrow, const Regime& wide, std::int64_t width);

// Where the largest dimension of a prefix lies below the smallest of the rest.
struct ProfileSplit {
  std::int64_t prefix = 0;  // blocks
  std::size_t below = 0;    // the block of the largest in the prefix
  std::size_t above = 0;    // the block of the smallest in the rest
};
// A shallow prefix: at most half of the blocks. Of several such places the one with the widest gap,
// the first of equals; none where there is none.
std::optional<ProfileSplit> find_split(std::span<const double> dimensions);

// One model: which blocks are wide, shallowest first.
struct AllocationArm {
  std::string name;  // "two_regime"
  std::vector<bool> wide;
  bool operator==(const AllocationArm&) const = default;
};
// The allocation with `narrow_blocks` of `blocks` narrow, and its controls: uniform_narrow,
// uniform_wide, fixed_split_exchange, matched_count_exchange, boundary_earlier, boundary_later,
// last_block_narrow. A control that is the same as one before it is left out. With no narrow block
// or no wide one: the uniform ones alone.
std::vector<AllocationArm> allocation_arms(std::int64_t blocks, std::int64_t narrow_blocks);

Budgets budgets(const AllocationArm& arm, const Regime& narrow, const Regime& wide,
                std::int64_t width);

// The ranges of a config that make the arm of a model whose blocks with experts are these layers
// (ascending, one a block), their balancing the original's: a loss of 1e-4 beside the bias.
ModelConfig ranges_of(const AllocationArm& arm, std::span<const std::int64_t> layers,
                      const Regime& narrow, const Regime& wide);

// What an allocation is made of.
struct Allocation {
  std::int64_t width = 0;  // d
  Regime narrow, wide;
  std::vector<std::int64_t> layers;  // with experts, ascending
  std::string origin;                // of the number of narrow blocks, in words
  std::int64_t narrow_blocks = 0;    // 0: no place to split was found
};
// Regimes and their budgets, the arms with what they cost, and each as lines of a config.
std::string allocation_table(const Allocation& allocation);
nlohmann::ordered_json allocation_json(const Allocation& allocation);

}  // namespace tessera
