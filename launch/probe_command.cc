#include "launch/probe_command.h"

#include <cmath>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "data/publish.h"
#include "launch/allocation.h"
#include "launch/checkpoint_model.h"
#include "launch/config.h"
#include "launch/layer_progress.h"
#include "launch/numbers.h"
#include "launch/plan.h"
#include "launch/probe.h"
#include "launch/trainer.h"
#include "layers/configuration.h"
#include "parallel/checkpoint.h"
#include "parallel/communicator.h"
#include "runtime/error.h"

namespace tessera {
namespace {

struct ProbeArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string checkpoint;
  std::int64_t tokens = 0;
  std::uint64_t seed = 0;
  std::string svg;
  bool json = false;
};

void publish(const std::string& svg, const std::string& path) {
  if (!path.empty()) publish_file(path, svg);
}

void print(const ProbeArguments& arguments, const nlohmann::ordered_json& json,
           const std::string& table) {
  std::fputs(arguments.json ? (json.dump(2) + "\n").c_str() : table.c_str(), stdout);
}

// Walks the experts of the checkpoint's model; returns what the results are about.
ProbeContext walk(ProbeArguments arguments, Communicator& alone,
                  const std::function<void(Queue&, const ProbedExperts&)>& visit,
                  const std::function<void(Queue&)>& before) {
  const CheckpointMeta meta = read_checkpoint_meta(arguments.checkpoint);
  if (arguments.config.empty()) arguments.config = config_of_checkpoint(arguments.checkpoint);
  Config config = load_config(arguments.config, arguments.overrides);
  check_model(config, meta, arguments.checkpoint);
  const Recipe recipe = read_recipe(config.data().recipe());
  const TokenStream stream(recipe, open_corpus(recipe, config.data().directory()));
  resolve(config, recipe, stream.corpus().vocabulary);
  const ProbeText text = choose_text(stream, arguments.tokens, arguments.seed);
  ProbeSubject subject;
  subject.model = config.model();
  subject.end_of_sequence = stream.corpus().end_of_sequence;
  subject.document_masking = config.data().document_masking();
  subject.parameters = parameters_of(arguments.checkpoint, alone);
  subject.selection_bias = selection_bias_of(arguments.checkpoint, alone);
  Device device(static_cast<int>(config.execution().threads()),
                config.execution().memory_limit_bytes(), kLibraryBytes);
  before(device.queue());
  const LayerProgress progress(!arguments.json);
  walk_experts(
      subject, text, device, [&](const ProbedExperts& block) { visit(device.queue(), block); },
      [&](std::int64_t layer) { progress.show(layer); });
  return {arguments.config,
          arguments.checkpoint,
          meta.step,
          config.model().width(),
          stream.sequence_length(),
          static_cast<std::int64_t>(text.windows.size()),
          text.tokens(),
          arguments.seed,
          text.source};
}

void probe_id(const ProbeArguments& arguments, Communicator& alone) {
  std::vector<BlockDimension> blocks;
  const ProbeContext context = walk(
      arguments, alone,
      [&](Queue& queue, const ProbedExperts& block) {
        blocks.push_back(probe_dimension(queue, block));
      },
      [](Queue&) {});
  publish(dimension_svg(context, blocks), arguments.svg);
  print(arguments, dimension_json(context, blocks), dimension_table(context, blocks));
}

void probe_rank(const ProbeArguments& arguments, Communicator& alone) {
  std::vector<BlockRanks> blocks;
  RankControl control;
  const ProbeContext context = walk(
      arguments, alone,
      [&](Queue& queue, const ProbedExperts& block) {
        blocks.push_back(probe_ranks(queue, block));
      },
      [&](Queue& queue) { control = rank_control(queue, arguments.seed); });
  publish(rank_svg(context, blocks), arguments.svg);
  print(arguments, rank_json(context, blocks, control), rank_table(context, blocks, control));
}

// Needs a Communicator, of one rank: main refuses more.
int run_alone(const ProbeArguments& arguments,
              const std::function<void(const ProbeArguments&, Communicator&)>& probe) {
  const MpiSession session(nullptr, nullptr);
  Communicator communicator(MPI_COMM_WORLD);
  try {
    probe(arguments, communicator);
  } catch (const Error& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}

void add_probe(CLI::App& app, const std::string& name, const std::string& what, std::int64_t tokens,
               int& exit_code, void (*probe)(const ProbeArguments&, Communicator&)) {
  auto arguments = std::make_shared<ProbeArguments>();
  arguments->tokens = tokens;
  CLI::App* command = app.add_subcommand(name, what);
  command->footer("Example:\n  tessera probe " + name +
                  " --checkpoint runs/first/checkpoints/step-00001000.h5 --svg " + name + ".svg");
  command->add_option("--checkpoint", arguments->checkpoint, "Parameters from here")->required();
  command->add_option(
      "--config", arguments->config,
      "Config: a file or a ready one's name; default: that of the checkpoint's run");
  command->add_option("--set", arguments->overrides, "path=value, overrides a field; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command
      ->add_option("--tokens", arguments->tokens,
                   "Positions of held-out windows, or of the stream where none are held out")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 24))
      ->capture_default_str();
  command->add_option("--seed", arguments->seed, "Of windows and positions")
      ->check(whole_number())
      ->capture_default_str();
  command->add_option("--svg", arguments->svg, "Write a chart here");
  command->add_flag("--json", arguments->json, "One JSON object instead of the table");
  command->callback([arguments, probe, &exit_code] { exit_code = run_alone(*arguments, probe); });
}

struct AllocateArguments {
  std::string profile;
  std::int64_t width = 0;
  std::vector<std::int64_t> layers;
  std::int64_t narrow_blocks = 0;
  std::vector<std::int64_t> narrow, wide;
  std::int64_t shared = 0;
  bool json = false;
};

[[noreturn]] void refuse_argument(const std::string& option, const std::string& message) {
  throw Error(ExitCode::kUsage, option + ": " + message);
}

Regime regime_of(const std::string& option, const std::vector<std::int64_t>& numbers) {
  const Regime regime = {numbers[0], numbers[1], numbers[2], numbers[3], 0};
  if (regime.active > regime.experts) {
    refuse_argument(option, "a token can't use K = " + std::to_string(regime.active) +
                                " of N = " + std::to_string(regime.experts) + " experts");
  }
  return regime;
}

// Width, layers and the split by what `probe id --json` wrote.
void read_profile(const std::string& path, Allocation& allocation) {
  std::vector<double> likelihood, error, line, line_error;
  try {
    std::ifstream file(path);
    if (!file) refuse_argument(path, "can't be read");
    const nlohmann::json json = nlohmann::json::parse(file);
    allocation.width = json.at("width").get<std::int64_t>();
    for (const nlohmann::json& block : json.at("blocks")) {
      allocation.layers.push_back(block.at("layer").get<std::int64_t>());
      likelihood.push_back(block.at("likelihood").get<double>());
      error.push_back(block.at("standard_error").get<double>());
      line.push_back(block.at("line_fit").get<double>());
      line_error.push_back(kLineError * error.back() * line.back() / likelihood.back());
    }
  } catch (const nlohmann::json::exception&) {
    refuse_argument(path, "isn't what `tessera probe id --json` prints");
  }
  const auto in_words = [](const std::vector<double>& values, const std::vector<double>& errors) {
    const std::optional<ProfileSplit> split = find_split(values);
    if (!split) return std::string("no shallow prefix lies below the rest");
    const double gap = values[split->above] - values[split->below];
    char text[160];
    std::snprintf(text, sizeof(text), "after block %lld, %.3f below %.3f, %.1f standard errors",
                  static_cast<long long>(split->prefix), values[split->below], values[split->above],
                  gap / std::hypot(errors[split->above], errors[split->below]));
    return std::string(text);
  };
  const std::optional<ProfileSplit> split = find_split(likelihood);
  allocation.narrow_blocks = split ? split->prefix : 0;
  allocation.origin = in_words(likelihood, error) +
                      " (by the likelihood; by the line fit: " + in_words(line, line_error) + ")";
}

void allocate(const AllocateArguments& arguments) {
  Allocation allocation;
  if (!arguments.profile.empty()) read_profile(arguments.profile, allocation);
  if (arguments.width > 0 && !arguments.profile.empty()) {
    refuse_argument("--width", "the profile says it");
  }
  if (arguments.width > 0) allocation.width = arguments.width;
  if (!arguments.layers.empty()) {
    if (arguments.layers[0] > arguments.layers[1]) {
      refuse_argument("--layers", "the first comes before the last");
    }
    if (!arguments.profile.empty()) refuse_argument("--layers", "the profile says them");
    for (std::int64_t l = arguments.layers[0]; l <= arguments.layers[1]; ++l) {
      allocation.layers.push_back(l);
    }
  }
  if (arguments.narrow_blocks > 0) {
    allocation.narrow_blocks = arguments.narrow_blocks;
    allocation.origin = "after block " + std::to_string(arguments.narrow_blocks) + ", as asked";
  }
  const auto blocks = static_cast<std::int64_t>(allocation.layers.size());
  if (arguments.profile.empty() &&
      (allocation.width == 0 || blocks == 0 || allocation.narrow_blocks == 0)) {
    refuse_argument("--profile", "required, or else --width, --layers and --narrow-blocks");
  }
  if (blocks == 0) refuse_argument(arguments.profile, "has no blocks");
  require_range(arguments.width > 0 ? "--width" : arguments.profile + ": width", allocation.width,
                1, kMaxWidth);
  if (allocation.narrow_blocks >= blocks && allocation.narrow_blocks > 0) {
    refuse_argument("--narrow-blocks", "must be below the number of blocks, " +
                                           std::to_string(blocks) + ": the last one is wide");
  }
  allocation.narrow = regime_of("--narrow", arguments.narrow);
  allocation.wide = regime_of("--wide", arguments.wide);
  if (allocation.narrow.capacity() >= allocation.wide.capacity()) {
    refuse_argument("--narrow", "its q = min(l, m) must be below the wide one's " +
                                    std::to_string(allocation.wide.capacity()) + ", is " +
                                    std::to_string(allocation.narrow.capacity()));
  }
  allocation.narrow.shared = arguments.shared;
  allocation.wide.shared = matching_shared(allocation.wide, allocation.width,
                                           budgets(allocation.narrow, allocation.width).rest);
  std::fputs(arguments.json ? (allocation_json(allocation).dump(2) + "\n").c_str()
                            : allocation_table(allocation).c_str(),
             stdout);
}

void add_allocate(CLI::App& app) {
  auto arguments = std::make_shared<AllocateArguments>();
  CLI::App* command = app.add_subcommand(
      "allocate", "Narrow experts in a shallow prefix, wide ones in the rest, at equal budgets");
  command->footer(
      "Example (the reconstructed 3.4B):\n  tessera probe allocate --width 1024 --layers 1,11 "
      "--narrow-blocks 4 --narrow 22,704,320,448 --wide 14,448,512,440 --shared 2560");
  command->add_option("--profile", arguments->profile,
                      "What `probe id --json` printed of the base model: width, layers and split");
  const auto size = CLI::Range(std::int64_t{1}, std::int64_t{1} << 16);
  command->add_option("--width", arguments->width, "d")
      ->check(CLI::Range(std::int64_t{1}, kMaxWidth));
  command->add_option("--layers", arguments->layers, "First and last layer with experts")
      ->delimiter(',')
      ->expected(2)
      ->check(CLI::Range(std::int64_t{0}, kMaxLayers));
  command->add_option("--narrow-blocks", arguments->narrow_blocks, "Blocks of the narrow prefix")
      ->check(CLI::Range(std::int64_t{1}, kMaxLayers));
  for (auto* const regime : {&arguments->narrow, &arguments->wide}) {
    const bool narrow = regime == &arguments->narrow;
    command->add_option(narrow ? "--narrow" : "--wide", *regime, "K,N,l,m of a block")
        ->delimiter(',')
        ->expected(4)
        ->check(size)
        ->required();
  }
  command
      ->add_option("--shared", arguments->shared,
                   "m_s of the narrow regime; the wide one's follows from the budget")
      ->check(CLI::Range(std::int64_t{0}, kMaxFeedForwardWidth))
      ->required();
  command->add_flag("--json", arguments->json, "One JSON object instead of the table");
  command->callback([arguments] { allocate(*arguments); });
}

}  // namespace

void add_probe_command(CLI::App& app, int& exit_code) {
  CLI::App* command = app.add_subcommand(
      "probe", "Geometry of a trained model's experts, and the allocation that follows from it");
  command->footer("Example:\n  tessera probe id --help");
  command->require_subcommand(1);
  add_probe(*command, "id", "Intrinsic dimension of what enters the experts, block by block", 2000,
            exit_code, probe_id);
  add_probe(*command, "rank", "Ranks of the experts' Jacobians, beside the published ranges", 64,
            exit_code, probe_rank);
  add_allocate(*command);
}

}  // namespace tessera
