#include "launch/audit_command.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "data/publish.h"
#include "data/recipe.h"
#include "launch/audit.h"
#include "launch/audit_certificate.h"
#include "launch/checkpoint_model.h"
#include "launch/config.h"
#include "launch/layer_progress.h"
#include "launch/numbers.h"
#include "launch/plan.h"
#include "launch/together.h"
#include "parallel/checkpoint.h"
#include "runtime/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct AuditArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string checkpoint;
  std::string out;
  AuditOptions options;
  bool json = false;
};

// Rank 0 reads the config; the others get it.
Config read_config(AuditArguments& arguments, AuditedModel& model, Communicator& communicator) {
  std::string bytes, step;
  together(communicator, "read config", [&] {
    if (communicator.rank() != 0) return;
    const fs::path checkpoint = arguments.checkpoint;
    CheckpointMeta meta;
    if (!checkpoint.empty()) meta = read_checkpoint_meta(arguments.checkpoint);
    if (arguments.config.empty()) {
      if (checkpoint.empty()) {
        throw Error(ExitCode::kUsage, "--config or --checkpoint is required");
      }
      arguments.config = config_of_checkpoint(arguments.checkpoint);
    }
    Config config = load_config(arguments.config, arguments.overrides);
    if (config.model().length() == 0 && fs::exists(config.data().recipe())) {
      config.mutable_model()->set_length(read_recipe(config.data().recipe()).sequence_length);
    }
    if (!checkpoint.empty()) {
      check_model(config, meta, arguments.checkpoint);
      step = std::to_string(meta.step);
    }
    if (arguments.out.empty()) {
      arguments.out =
          checkpoint.empty()
              ? "runs/" + fs::path(arguments.config).stem().string() + "/audit"
              : (fs::absolute(checkpoint).parent_path().parent_path() / "audit").string();
    }
    bytes = config.SerializeAsString();
  });
  communicator.broadcast("config", bytes, 0);
  communicator.broadcast("config", arguments.config, 0);
  communicator.broadcast("config", step, 0);
  Config config;
  TESSERA_CHECK(config.ParseFromString(bytes));
  model.config = arguments.config;
  model.checkpoint = arguments.checkpoint;
  model.step = step.empty() ? 0 : std::stoll(step);
  model.seed = config.train().seed();
  model.length = config.model().length();
  return config;
}

void print(const AuditedModel& model, const AuditResult& result, const std::string& folder) {
  std::printf("%s: %lld layers, %lld parameters%s, f32, length %lld, %zu + %zu changed tokens\n",
              model.config.c_str(), static_cast<long long>(result.layers.size()),
              static_cast<long long>(model.parameters),
              model.checkpoint.empty() ? (" from seed " + std::to_string(model.seed)).c_str()
                                       : (" of " + model.checkpoint).c_str(),
              static_cast<long long>(result.plan.length), result.plan.positions.size(),
              result.plan.in_document.size());
  double largest = 0.0;
  for (const AuditLayer& layer : result.layers) {
    largest = std::max({largest, layer.time.largest, layer.document.largest});
  }
  std::printf("largest difference %.3g; ", largest);
  if (result.sweep) std::printf("it grows with slope %.2f; ", result.sweep->slope);
  std::printf("control %lld/%zu\n", static_cast<long long>(result.localised),
              result.control.size());
  for (const AuditInjection& injection : result.control) {
    if (injection.localised()) continue;
    std::printf("  not localised: %s in layer %lld, delta %.3g\n", name_of(injection.fault),
                static_cast<long long>(injection.layer), injection.largest);
  }
  std::printf("certificate: %s/audit.json, audit.md\n%s\n", folder.c_str(),
              verdict_line(result).c_str());
}

AuditResult audit_visibly(const AuditSubject& subject, const AuditOptions& options, bool speaks,
                          Device& device, Communicator& communicator) {
  const LayerProgress progress(speaks);
  return audit(subject, options, device, communicator,
               [&](std::int64_t layer) { progress.show(layer); });
}

int audit_command(AuditArguments arguments, Communicator& communicator) {
  AuditedModel model;
  const Config config = read_config(arguments, model, communicator);
  Device device(static_cast<int>(config.execution().threads()),
                config.execution().memory_limit_bytes(), kLibraryBytes);
  AuditSubject subject = initialised_subject(config.model(), config.train().seed(), device);
  Communicator alone(MPI_COMM_SELF);
  if (!arguments.checkpoint.empty()) {  // on each rank all of them
    subject.parameters = parameters_of(arguments.checkpoint, alone);
    subject.selection_bias = selection_bias_of(arguments.checkpoint, alone);
  }
  ModelConfig counted = config.model();
  counted.set_length(1);
  model.parameters = Stack(counted).parameter_count();
  together(communicator, "make folder", [&] {
    if (communicator.rank() == 0) make_folders(arguments.out, "--out");  // before the work
  });
  const bool speaks = communicator.rank() == 0 && !arguments.json;
  const AuditResult result =
      audit_visibly(subject, arguments.options, speaks, device, communicator);
  together(communicator, "write certificate", [&] {
    if (communicator.rank() != 0) return;
    const nlohmann::ordered_json json = certificate_json(model, result);
    publish_file(arguments.out + "/audit.json", json.dump(2) + "\n");
    publish_file(arguments.out + "/audit.md", certificate_page(model, result));
    if (arguments.json) {
      std::printf("%s\n", json.dump(2).c_str());
    } else {
      print(model, result, arguments.out);
    }
  });
  return static_cast<int>(result.verdict == AuditVerdict::kClean ? ExitCode::kDone : ExitCode::kNo);
}

int run_audit(const AuditArguments& arguments) {
  const MpiSession session(nullptr, nullptr);
  Communicator communicator(MPI_COMM_WORLD);
  try {
    return audit_command(arguments, communicator);
  } catch (const AgreedError& error) {
    if (communicator.rank() == 0) std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::exception& error) {
    // This rank's alone: the others can't be asked any more.
    const auto* ours = dynamic_cast<const Error*>(&error);
    std::fprintf(stderr, "tessera: %s\n", error.what());
    std::fflush(stderr);
    MpiSession::abort(ours != nullptr ? ours->code() : ExitCode::kInternal);
  }
}

}  // namespace

void add_audit_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<AuditArguments>();
  CLI::App* command = app.add_subcommand(
      "audit", "Prove that no position sees a later token or another document; exit 1 if one does");
  command->footer(
      "Examples:\n  tessera audit --config latin7_small\n"
      "  launch/run -n 2 build/release/tessera audit --checkpoint "
      "runs/first/checkpoints/step-00000100.h5");
  command->add_option("--config", arguments->config,
                      "Config: a file or a ready one's name; parameters from its train.seed");
  command->add_option("--set", arguments->overrides, "path=value, overrides a field; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--checkpoint", arguments->checkpoint,
                      "Parameters from here; its run's config unless --config names one");
  command
      ->add_option("--length", arguments->options.length,
                   "Positions; default: by the rule from the layers' windows, chunks and blocks")
      ->check(CLI::Range(2, 1 << 24));
  command->add_option("--seed", arguments->options.seed, "Of tokens and positions")
      ->check(whole_number())
      ->capture_default_str();
  command->add_option("--out", arguments->out,
                      "Folder for audit.json and audit.md; default: audit in the run's folder");
  command->add_flag("--json", arguments->json, "Print the certificate's JSON");
  command->callback([arguments, &exit_code] { exit_code = run_audit(*arguments); });
}

}  // namespace tessera
