// An allocation as a table and as JSON.
#include <google/protobuf/text_format.h>

#include "launch/allocation.h"
#include "launch/format.h"

namespace tessera {
namespace {

using Long = long long;  // what %lld takes

std::string letters(const AllocationArm& arm) {
  std::string text;
  for (const bool wide : arm.wide) text += wide ? 'w' : 'n';
  return text;
}

// One line a range.
std::vector<std::string> config_lines(const Allocation& allocation, const AllocationArm& arm) {
  google::protobuf::TextFormat::Printer printer;
  printer.SetSingleLineMode(true);
  std::vector<std::string> lines;
  const ModelConfig model = ranges_of(arm, allocation.layers, allocation.narrow, allocation.wide);
  for (const FeedForwardRange& range : model.feed_forward_range()) {
    std::string text;
    printer.PrintToString(range, &text);
    lines.push_back("feed_forward_range { " + text + "}");
  }
  return lines;
}

std::string regime_line(const std::string& name, const Regime& regime, std::int64_t width) {
  const Budgets cost = budgets(regime, width);
  const std::int64_t activated = cost.products + cost.rest;
  return format("  %-7s %5lld %6lld %5lld %5lld %6lld %5lld", name.c_str(),
                static_cast<Long>(regime.active), static_cast<Long>(regime.experts),
                static_cast<Long>(regime.latent), static_cast<Long>(regime.inner),
                static_cast<Long>(regime.shared), static_cast<Long>(regime.capacity())) +
         format(" %6.3f%s", static_cast<double>(regime.latent) / static_cast<double>(regime.inner),
                regime.near_square() ? " " : "!") +
         format(" %14lld %13lld %11lld %9lld %11lld\n", static_cast<Long>(cost.pool),
                static_cast<Long>(cost.rest), static_cast<Long>(cost.products),
                static_cast<Long>(cost.dispatch), static_cast<Long>(activated));
}

nlohmann::ordered_json cost_json(const Budgets& cost) {
  return {{"pool", cost.pool},
          {"rest", cost.rest},
          {"products", cost.products},
          {"dispatch", cost.dispatch}};
}

nlohmann::ordered_json regime_json(const Regime& regime, std::int64_t width) {
  return {{"active", regime.active},
          {"experts", regime.experts},
          {"latent", regime.latent},
          {"inner", regime.inner},
          {"shared", regime.shared},
          {"capacity", regime.capacity()},
          {"near_square", regime.near_square()},
          {"budgets", cost_json(budgets(regime, width))}};
}

}  // namespace

std::string allocation_table(const Allocation& allocation) {
  const auto& [width, narrow, wide, layers, origin, narrow_blocks] = allocation;
  std::string text = format("Regimes at d = %lld, per block\n", static_cast<Long>(width));
  text += format("  %-7s %5s %6s %5s %5s %6s %5s %6s  %14s %13s %11s %9s %11s\n", "", "K", "N", "l",
                 "m", "m_s", "q", "l/m", "P", "Q", "C", "dispatch", "C + Q");
  text += regime_line("narrow", narrow, width) + regime_line("wide", wide, width);
  if (!narrow.near_square() || !wide.near_square()) {
    text += "  ! not near-square: |l/m - 1| is above 0.4\n";
  }
  const RegimeMatch match = match_regimes(narrow, wide, width);
  text += format("  wide against narrow: P %+.4f %%, Q %+.4f %% (%+lld parameters), ",
                 100 * match.pool, 100 * match.rest, static_cast<Long>(match.residual)) +
          format("C %+.4f %%, dispatch %+.4f %%: ", 100 * match.products, 100 * match.dispatch) +
          (match.matched() ? "matched" : "NOT MATCHED, something is off by more than 2 %") + "\n";
  text += "Split: " + origin + "\n";
  const std::vector<AllocationArm> arms =
      allocation_arms(static_cast<std::int64_t>(layers.size()), narrow_blocks);
  const Budgets first = budgets(arms[0], narrow, wide, width);
  text += format(
      "Models, shallowest block first (n narrow, w wide); each against the first\n"
      "  %-22s %-*s %16s %9s %9s %9s %9s\n",
      "", static_cast<int>(layers.size()), "", "P + Q", "P", "Q", "C", "dispatch");
  for (const AllocationArm& arm : arms) {
    const Budgets cost = budgets(arm, narrow, wide, width);
    const std::int64_t parameters = cost.pool + cost.rest;
    const auto off = [](std::int64_t value, std::int64_t to) {
      return format(" %+7.3f %%",
                    100.0 * static_cast<double>(value - to) / static_cast<double>(to));
    };
    text += format("  %-22s %s %16lld", arm.name.c_str(), letters(arm).c_str(),
                   static_cast<Long>(parameters)) +
            off(cost.pool, first.pool) + off(cost.rest, first.rest) +
            off(cost.products, first.products) + off(cost.dispatch, first.dispatch) + "\n";
  }
  text += "As lines of model { ... }\n";
  for (const AllocationArm& arm : arms) {
    text += "  # " + arm.name + "\n";
    for (const std::string& line : config_lines(allocation, arm)) text += "  " + line + "\n";
  }
  return text;
}

nlohmann::ordered_json allocation_json(const Allocation& allocation) {
  const auto& [width, narrow, wide, layers, origin, narrow_blocks] = allocation;
  const RegimeMatch match = match_regimes(narrow, wide, width);
  nlohmann::ordered_json json = {{"width", width},
                                 {"layers", layers},
                                 {"narrow", regime_json(narrow, width)},
                                 {"wide", regime_json(wide, width)},
                                 {"match",
                                  {{"pool", match.pool},
                                   {"rest", match.rest},
                                   {"products", match.products},
                                   {"dispatch", match.dispatch},
                                   {"residual", match.residual},
                                   {"matched", match.matched()}}},
                                 {"split", origin}};
  json["narrow_blocks"] =
      narrow_blocks > 0 ? nlohmann::ordered_json(narrow_blocks) : nlohmann::ordered_json();
  json["models"] = nlohmann::ordered_json::array();
  for (const AllocationArm& arm :
       allocation_arms(static_cast<std::int64_t>(layers.size()), narrow_blocks)) {
    nlohmann::ordered_json entry = {{"name", arm.name}, {"blocks", letters(arm)}};
    entry["budgets"] = cost_json(budgets(arm, narrow, wide, width));
    entry["config"] = config_lines(allocation, arm);
    json["models"].push_back(std::move(entry));
  }
  return json;
}

}  // namespace tessera
