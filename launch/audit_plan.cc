// Where an audit looks.
#include <algorithm>
#include <set>

#include "launch/audit.h"
#include "runtime/error.h"
#include "runtime/random.h"

namespace tessera {
namespace {

constexpr std::size_t kMultiples = 16;  // of one size, at most
constexpr std::int64_t kRandomPositions = 8;
constexpr std::int64_t kShortest = 64;
constexpr std::int64_t kLongestSize = std::int64_t{1} << 20;

class Draws {
 public:
  Draws(std::uint64_t seed, const std::string& name) : stream_(seed, name) {}
  // Uniform on [low, high].
  std::int64_t between(std::int64_t low, std::int64_t high) {
    const double share = stream_.uniform(index_++);
    return low + static_cast<std::int64_t>(share * static_cast<double>(high - low + 1));
  }

 private:
  RandomStream stream_;
  std::uint64_t index_ = 0;
};

bool is_tile(const AuditSize& size) { return size.name.ends_with("tile"); }

// No sequence as long as the model's meets the end of such a size.
bool is_never_met(const AuditSize& size, std::int64_t model_length) {
  const bool ends = is_tile(size) || size.name == "window";
  return ends && model_length > 0 && size.positions >= model_length;
}

// A window ends, a selection is full and a tile is followed by another once; chunks and blocks must
// have a boundary between two whole ones. One more position is a part of the next.
std::int64_t length_for(const AuditSize& size) {
  const bool once = size.name == "window" || size.name == "selection" || is_tile(size);
  return once ? size.positions + size.positions / 16 + 1 : 2 * size.positions + 1;
}

// The first, the last and random ones between them.
std::vector<std::int64_t> multiples(std::int64_t size, std::int64_t length) {
  const std::int64_t last = (length - 1) / size;
  std::set<std::int64_t> chosen;
  if (last <= static_cast<std::int64_t>(kMultiples)) {
    for (std::int64_t m = 1; m <= last; ++m) chosen.insert(m * size);
  } else {
    chosen = {size, last * size};
    Draws draws(0, "audit multiples of " + std::to_string(size));
    while (chosen.size() < kMultiples) chosen.insert(draws.between(2, last - 1) * size);
  }
  return {chosen.begin(), chosen.end()};
}

// Documents that start just anywhere, and in the middle of a chunk, block or window.
std::vector<std::int64_t> document_starts(const AuditPlan& plan, std::uint64_t seed) {
  constexpr std::int64_t kAnywhere = 3;
  Draws draws(seed, "audit documents");
  std::set<std::int64_t> starts = {0};
  for (std::int64_t i = 0; i < kAnywhere; ++i) starts.insert(draws.between(1, plan.length - 1));
  for (const AuditSize& size : plan.sizes) {
    if (size.positions >= plan.length) continue;
    const std::int64_t last = (plan.length - 1 - size.positions / 2) / size.positions;
    const std::int64_t start = draws.between(0, last) * size.positions + size.positions / 2;
    if (start > 0 && start < plan.length) starts.insert(start);
  }
  return {starts.begin(), starts.end()};
}

}  // namespace

AuditPlan plan_audit(const std::vector<AuditSize>& sizes, std::int64_t model_length,
                     const AuditOptions& options) {
  AuditPlan plan;
  plan.sizes = sizes;
  std::sort(plan.sizes.begin(), plan.sizes.end(), [](const AuditSize& a, const AuditSize& b) {
    return a.positions != b.positions ? a.positions > b.positions : a.name < b.name;
  });
  plan.length = kShortest + 1;
  const AuditSize* largest = nullptr;
  for (AuditSize& size : plan.sizes) {
    size.counts = !is_never_met(size, model_length);
    if (!size.counts) continue;
    if (size.positions < 1 || size.positions > kLongestSize) {
      throw Error(ExitCode::kUsage, "an audit can't be longer than the " + size.name + " of " +
                                        std::to_string(size.positions) + " positions");
    }
    plan.length = std::max(plan.length, length_for(size));
    if (largest == nullptr) largest = &size;
  }
  if (options.length > 0) {
    plan.length = options.length;
    const std::int64_t least = largest == nullptr ? 1 : largest->positions;
    if (plan.length <= least) {
      throw Error(ExitCode::kUsage,
                  "--length: must be above every size of the model for a verdict, and its " +
                      (largest == nullptr ? "shortest sequence" : largest->name) + " is " +
                      std::to_string(least) + "; is " + std::to_string(options.length));
    }
  }

  std::set<std::int64_t> positions = {plan.length - 1};
  const auto add = [&](std::int64_t p) {
    if (p >= 1 && p < plan.length) positions.insert(p);
  };
  add(plan.length - 2);
  for (const AuditSize& size : plan.sizes) {
    for (const std::int64_t multiple : multiples(size.positions, plan.length)) {
      add(multiple);
      add(multiple - 1);
    }
  }
  Draws draws(options.seed, "audit positions");
  for (std::int64_t i = 0; i < kRandomPositions; ++i) add(draws.between(1, plan.length - 1));
  plan.positions.assign(positions.begin(), positions.end());

  plan.starts = document_starts(plan, options.seed);
  std::set<std::int64_t> in_document;
  for (std::size_t i = 1; i < plan.starts.size(); ++i) {
    in_document.insert(plan.starts[i] - 1);  // the last of the document before
    in_document.insert(plan.starts[i - 1]);  // its first
  }
  plan.in_document.assign(in_document.begin(), in_document.end());
  return plan;
}

}  // namespace tessera
