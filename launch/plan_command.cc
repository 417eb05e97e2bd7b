#include "launch/plan_command.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "data/recipe.h"
#include "launch/match.h"
#include "launch/numbers.h"
#include "launch/plan.h"
#include "launch/trainer.h"
#include "layers/mixers/mixers.h"

namespace tessera {
namespace {

struct PlanArguments {
  std::string config;
  std::vector<std::string> overrides;
  int ranks = 0;         // 0: as many as hold the experts
  int expert_ranks = 0;  // 0: the config's
  std::int64_t memory = 0;
  std::int64_t match = 0;
  bool json = false;
};

// "12,345,678".
std::string grouped(std::int64_t number) {
  std::string digits = std::to_string(number);
  for (int i = static_cast<int>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<std::size_t>(i), ",");
  }
  return digits;
}

void line(const std::string& name, const std::string& value) {
  std::printf("  %-34s %20s\n", name.c_str(), value.c_str());
}

struct Layout {
  int ranks = 1, expert_ranks = 1;
};

void print_json(const RunSummary& summary, const Layout& layout) {
  nlohmann::ordered_json json;
  json["total_parameters"] = summary.total_parameters;
  json["active_parameters"] = summary.active_parameters;
  json["embedding_parameters"] = summary.embedding_parameters;
  json["head_parameters"] = summary.head_parameters;
  json["layers"] = nlohmann::ordered_json::array();
  for (const LayerSummary& layer : summary.layers) {
    json["layers"].push_back(
        {{"mixer", layer.mixer},
         {"mixer_parameters", layer.mixer_parameters},
         {"feed_forward_parameters", layer.feed_forward_parameters},
         {"norm_parameters", layer.norm_parameters},
         {"active_parameters", layer.active_parameters},
         {"mixer_flops_per_token", layer.mixer_flops_per_token},
         {"feed_forward_flops_per_token", layer.feed_forward_flops_per_token}});
  }
  json["forward_flops_per_token"] = summary.forward_flops_per_token;
  json["train_flops_per_token"] = summary.train_flops_per_token;
  json["ranks"] = layout.ranks;
  json["expert_ranks"] = layout.expert_ranks;
  json["bytes_per_rank"] = summary.bytes_per_rank;
  for (const auto& [category, bytes] : summary.memory) json["memory"][category] = bytes;
  json["expert_row_bytes"] = summary.expert_row_bytes;
  json["gather_bytes_per_step"] = summary.gather_bytes_per_step;
  json["reduce_bytes_per_step"] = summary.reduce_bytes_per_step;
  json["exchange_bytes_per_step"] = summary.exchange_bytes_per_step;
  std::printf("%s\n", json.dump(2).c_str());
}

// The layers by letter, N in a row in a Latin square of N types.
void print_square(const RunSummary& summary, const Schedule& schedule) {
  const std::size_t row = schedule.has_latin()
                              ? static_cast<std::size_t>(schedule.latin().order_size())
                              : std::min<std::size_t>(summary.layers.size(), 16);
  std::printf("Schedule (");
  std::map<std::string, char> seen;
  for (const LayerSummary& layer : summary.layers) {
    const char letter = find_mixer_type(layer.mixer)->letter;
    if (seen.emplace(layer.mixer, letter).second) {
      std::printf("%s%c %s", seen.size() > 1 ? ", " : "", letter, layer.mixer.c_str());
    }
  }
  std::printf(")\n");
  for (std::size_t l = 0; l < summary.layers.size(); ++l) {
    if (l % row == 0) std::printf("%s  %5zu  ", l > 0 ? "\n" : "", l);
    std::printf(" %c", find_mixer_type(summary.layers[l].mixer)->letter);
  }
  std::printf("\n");
}

void print_table(const RunSummary& summary, const Layout& layout) {
  std::printf("Layers (FLOPs per token of one forward pass)\n");
  std::printf("  %5s  %-14s %16s %16s %14s %14s\n", "layer", "mixer", "mixer", "feed-forward",
              "mixer FLOPs", "f.-f. FLOPs");
  std::map<std::string, std::int64_t> by_type;
  std::int64_t feed_forward = 0, norms = 0;
  for (std::size_t l = 0; l < summary.layers.size(); ++l) {
    const LayerSummary& layer = summary.layers[l];
    std::printf("  %5zu  %-14s %16s %16s %14.4g %14.4g\n", l, layer.mixer.c_str(),
                grouped(layer.mixer_parameters).c_str(),
                grouped(layer.feed_forward_parameters).c_str(), layer.mixer_flops_per_token,
                layer.feed_forward_flops_per_token);
    by_type[layer.mixer] += layer.mixer_parameters;
    feed_forward += layer.feed_forward_parameters;
    norms += layer.norm_parameters;
  }
  std::printf("Parameters\n");
  line("embedding", grouped(summary.embedding_parameters));
  for (const auto& [type, parameters] : by_type) line("mixers: " + type, grouped(parameters));
  line("feed-forward", grouped(feed_forward));
  line("norms of the blocks", grouped(norms));
  line("head with the final norm", grouped(summary.head_parameters));
  line("total", grouped(summary.total_parameters));
  line("active per token", grouped(summary.active_parameters));
  std::printf("FLOPs per token\n");
  char text[32];
  std::snprintf(text, sizeof(text), "%.6g", summary.forward_flops_per_token);
  line("forward", text);
  std::snprintf(text, sizeof(text), "%.6g", summary.train_flops_per_token);
  line("forward and backward", text);
  std::printf("Bytes per rank, %d rank%s", layout.ranks, layout.ranks == 1 ? "" : "s");
  if (layout.expert_ranks > 1) std::printf(", experts over %d of them", layout.expert_ranks);
  std::printf(" (of the rank that needs most)\n");
  for (const auto& [category, bytes] : summary.memory) line(category, grouped(bytes));
  line("total", grouped(summary.bytes_per_rank));
  if (summary.expert_row_bytes > 0) {
    line("of it experts' rows at worst", grouped(summary.expert_row_bytes));
  }
  std::printf("Bytes sent per rank and step\n");
  line("gather", grouped(summary.gather_bytes_per_step));
  line("reduce", grouped(summary.reduce_bytes_per_step));
  if (layout.expert_ranks > 1) {
    line("exchange, if experts are balanced", grouped(summary.exchange_bytes_per_step));
  }
}

// What to give as --set for this number of parameters.
void print_match(const ModelConfig& model, const PlanArguments& arguments) {
  const ParameterMatch match = match_parameters(model, arguments.match);
  const std::int64_t off = match.parameters - arguments.match;
  if (arguments.json) {
    const nlohmann::ordered_json json = {{"width", match.width},
                                         {"wider_layers", match.wider_layers},
                                         {"total_parameters", match.parameters},
                                         {"target", arguments.match},
                                         {"difference", off}};
    std::printf("%s\n", json.dump(2).c_str());
    return;
  }
  std::printf("model.feed_forward.width=%lld\nmodel.feed_forward.wider_layers=%lld\n",
              static_cast<long long>(match.width), static_cast<long long>(match.wider_layers));
  std::printf("%s parameters, %+.5f %% off the target\n", grouped(match.parameters).c_str(),
              100.0 * static_cast<double>(off) / static_cast<double>(arguments.match));
}

void plan(const PlanArguments& arguments) {
  Config config = load_config(arguments.config, arguments.overrides);
  // The recipe says how long the sequences are; without its file the model's own length is planned.
  std::int64_t length = config.model().length();
  std::error_code none;
  if (length == 0 || std::filesystem::exists(config.data().recipe(), none)) {
    const Recipe recipe = read_recipe(config.data().recipe());
    length = recipe.sequence_length;
    resolve(config, recipe, recipe.vocabulary_limit > 0 ? recipe.vocabulary_limit + 1 : 0);
  }
  if (arguments.expert_ranks > 0) {
    config.mutable_parallel()->set_expert_ranks(arguments.expert_ranks);
  }
  const auto expert_ranks = static_cast<int>(config.parallel().expert_ranks());
  const Layout layout = {arguments.ranks > 0 ? arguments.ranks : expert_ranks, expert_ranks};
  const Stack stack(config.model(), compute_type(config));
  if (arguments.match > 0) {
    print_match(config.model(), arguments);
    return;
  }
  const RunSummary summary = summarise(stack, config, length, layout.ranks);
  if (arguments.json) {
    print_json(summary, layout);
  } else {
    print_square(summary, config.model().schedule());
    print_table(summary, layout);
  }
  check_memory(summary,
               arguments.memory > 0 ? arguments.memory : config.execution().memory_limit_bytes());
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto arguments = std::make_shared<PlanArguments>();
  CLI::App* command = app.add_subcommand(
      "plan", "Exact parameters, FLOPs, memory and communication of a config; starts nothing");
  command->footer("Example:\n  tessera plan --config aether_7b --ranks 16 --memory 80000000000");
  command->add_option("--config", arguments->config, "Config: a file or a ready one's name")
      ->required();
  command->add_option("--set", arguments->overrides, "path=value, overrides a field; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option("--ranks", arguments->ranks,
                   "Ranks to plan for; default: as many as hold the experts between them, or 1")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--expert-ranks", arguments->expert_ranks,
                   "Ranks that hold the experts between them; else the config's")
      ->check(CLI::Range(1, 1 << 20));
  command
      ->add_option("--memory", arguments->memory,
                   "Bytes a rank may use; a config that needs more is refused")
      ->check(whole_number());
  command
      ->add_option("--match", arguments->match,
                   "Print the feed-forward widths that make so many parameters, and nothing else")
      ->check(whole_number(1));
  command->add_flag("--json", arguments->json, "One JSON object instead of tables");
  command->callback([arguments] { plan(*arguments); });
}

}  // namespace tessera
