#include "launch/profile_command.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "data/publish.h"
#include "launch/config.h"
#include "launch/plan.h"
#include "launch/profile.h"
#include "launch/trainer.h"
#include "layers/configuration.h"
#include "layers/mixers/mixers.h"
#include "runtime/products.h"

namespace tessera {
namespace {

struct ProfileArguments {
  std::string config;
  std::vector<std::string> overrides;
  ProfileOptions options;
  bool forward_only = false;
  std::string out;
  bool json = false;
};

// The types that the model configures, in the order of the table of mixers, full first.
std::vector<std::string> configured(const ModelConfig& model) {
  std::vector<std::string> mixers;
  for (const MixerType& type : mixer_types()) {
    for (const MixerConfig& mixer : model.mixer()) {
      if (MixerConfig::descriptor()->FindFieldByNumber(mixer.type_case())->name() == type.name) {
        mixers.emplace_back(type.name);
      }
    }
  }
  std::stable_partition(mixers.begin(), mixers.end(),
                        [](const std::string& mixer) { return mixer == "full"; });
  return mixers;
}

void run_profile(ProfileArguments arguments) {
  const Config config = load_config(arguments.config, arguments.overrides);
  ProfileOptions& options = arguments.options;
  options.backward = !arguments.forward_only;
  const std::vector<std::string> all = configured(config.model());
  if (options.mixers.empty()) options.mixers = all;
  for (auto at = options.mixers.begin(); at != options.mixers.end(); ++at) {
    const std::string& mixer = *at;
    if (std::find(options.mixers.begin(), at, mixer) != at) {
      throw Error(ExitCode::kUsage, "--mixers: " + mixer + " stands there twice");
    }
    if (std::find(all.begin(), all.end(), mixer) == all.end()) {
      throw Error(ExitCode::kUsage, "--mixers: " + mixer + " isn't configured in model.mixer");
    }
  }
  std::sort(options.lengths.begin(), options.lengths.end());
  options.lengths.erase(std::unique(options.lengths.begin(), options.lengths.end()),
                        options.lengths.end());
  const DType compute = compute_type(config);
  if (arguments.out.empty()) {
    arguments.out = "runs/" + std::filesystem::path(arguments.config).stem().string() + "/profile";
  }
  make_folders(arguments.out, "--out");  // before the work: it may be impossible
  Device device(static_cast<int>(config.execution().threads()),
                config.execution().memory_limit_bytes(), kLibraryBytes);
  const std::vector<ProfileLine> lines =
      profile(config.model(), compute, options, device, [&](const ProfileLine& line) {
        if (arguments.json) return;
        std::fprintf(stderr, "%s at %lld: %.3g ms\n", line.mixer.c_str(),
                     static_cast<long long>(line.length), line.forward.seconds * 1e3);
      });
  const ProfileSubject subject = {
      arguments.config,        device.description(), config.model().width(), options.sequences,
      compute == DType::kBF16, options.backward,     options.repeats};
  const std::string json = profile_json(subject, lines).dump(2) + "\n";
  const std::string table = profile_table(subject, lines);
  publish_file(arguments.out + "/profile.json", json);
  publish_file(arguments.out + "/profile.csv", profile_csv(lines));
  publish_file(arguments.out + "/profile.svg", profile_svg(subject, lines));
  publish_file(arguments.out + "/profile.txt", table);
  std::fputs(arguments.json ? json.c_str() : table.c_str(), stdout);
  if (!arguments.json) {
    std::printf("\n%s/profile.svg, .csv, .json, .txt\n", arguments.out.c_str());
  }
}

}  // namespace

void add_profile_command(CLI::App& app) {
  auto arguments = std::make_shared<ProfileArguments>();
  CLI::App* command = app.add_subcommand(
      "profile", "Time and memory of each mixer alone, at several lengths, beside full attention");
  command->footer(
      "Example:\n  tessera profile --config latin7_small --lengths 2048,8192 "
      "--set execution.threads=2");
  command->add_option("--config", arguments->config, "Config: a file or a ready one's name")
      ->required();
  command->add_option("--set", arguments->overrides, "path=value, overrides a field; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--mixers", arguments->options.mixers, "Types; default: all configured ones")
      ->delimiter(',');
  command->add_option("--lengths", arguments->options.lengths, "Positions")
      ->delimiter(',')
      ->check(CLI::Range(std::int64_t{1}, kMaxLength))
      ->capture_default_str();
  command->add_option("--sequences", arguments->options.sequences, "Sequences at once")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command->add_option("--repeats", arguments->options.repeats, "Timed passes, after one that isn't")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_flag("--forward-only", arguments->forward_only, "Leave the backward pass out");
  command->add_option("--out", arguments->out,
                      "Folder for profile.json, .csv, .svg, .txt; default: runs/CONFIG/profile");
  command->add_flag("--json", arguments->json, "One JSON object instead of the tables");
  command->callback([arguments] { run_profile(*arguments); });
}

}  // namespace tessera
