#include "launch/train_command.h"

#include <glog/logging.h>
#include <mpi.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "data/publish.h"
#include "data/sha256.h"
#include "launch/config.h"
#include "launch/plan.h"
#include "launch/signals.h"
#include "launch/together.h"
#include "launch/trainer.h"
#include "launch/watchdog.h"
#include "runtime/disk_error.h"
#include "runtime/products.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

struct TrainArguments {
  std::string config;
  std::vector<std::string> overrides;
  std::string run_folder;
  ResumeOptions resume;
  bool dump_batches = false;
};

// Rank 0 reads the config and resolves every relative path against its own working folder; the
// others get the result.
Config read_config(const TrainArguments& arguments, Communicator& communicator, RunFolder& folder,
                   ResumeOptions& resume) {
  std::string bytes;
  together(communicator, "read config", [&] {
    if (communicator.rank() != 0) return;
    Config config = load_config(arguments.config, arguments.overrides);
    DataConfig& data = *config.mutable_data();
    data.set_recipe(absolute_path(data.recipe()));
    data.set_directory(absolute_path(data.directory()));
    config.mutable_train()->set_init_from(absolute_path(config.train().init_from()));
    bytes = config.SerializeAsString();
    folder.path = absolute_path(arguments.run_folder.empty()
                                    ? "runs/" + fs::path(arguments.config).stem().string()
                                    : arguments.run_folder);
    if (resume.from != "auto" && resume.from != "never") {
      resume.from = absolute_path(resume.from);
      if (!fs::exists(resume.from)) {
        throw Error(ExitCode::kUsage, "--resume: there is no file " + resume.from +
                                          "; it takes auto, never or a checkpoint's file");
      }
    }
  });
  communicator.broadcast("config", bytes, 0);
  communicator.broadcast("config", folder.path, 0);
  communicator.broadcast("config", resume.from, 0);
  Config config;
  TESSERA_CHECK(config.ParseFromString(bytes));
  return config;
}

// Bytes of memory and swap.
std::int64_t memory_of_host() {
  struct sysinfo host {};
  if (sysinfo(&host) != 0) return std::numeric_limits<std::int64_t>::max();
  return static_cast<std::int64_t>((host.totalram + host.totalswap) * host.mem_unit);
}

// Returns rank 0's lock on the folder, which it holds for the whole run.
std::unique_ptr<FolderLock> make_run_folder(const RunFolder& folder, Communicator& communicator) {
  std::unique_ptr<FolderLock> lock;
  together(communicator, "make the run's folder", [&] {
    if (communicator.rank() != 0) return;
    for (const std::string& path : {folder.path, folder.checkpoints(), folder.logs()}) {
      make_folders(path, "--run-dir");
      if (access(path.c_str(), W_OK | X_OK) != 0) throw disk_error(path, "written to", errno);
    }
    lock = std::make_unique<FolderLock>(
        folder.path, "another run is at work here; wait for its end or choose another --run-dir");
  });
  // On another host the folder may not be the same one.
  together(communicator, "see the run's folder", [&] {
    if (!fs::is_directory(folder.logs())) {
      throw Error(ExitCode::kCheckpoint,
                  folder.logs() + ": made by rank 0 but not seen on host " + communicator.host() +
                      ": the run's folder must lie on a file system that all hosts share");
    }
  });
  return lock;
}

void write_resolved(const Config& config, const RunFolder& folder, Communicator& communicator) {
  together(communicator, "write config", [&] {
    if (communicator.rank() != 0) return;
    publish_file(folder.path + "/config.textproto", resolved_text(config));
  });
}

void start_log(const RunFolder& folder, int rank) {
  const std::string base = folder.logs() + "/rank-" + std::to_string(rank) + ".log.";
  google::SetLogDestination(google::GLOG_INFO, base.c_str());
  for (const auto severity : {google::GLOG_WARNING, google::GLOG_ERROR, google::GLOG_FATAL}) {
    google::SetLogDestination(severity, "");
  }
  google::SetStderrLogging(google::GLOG_FATAL);
}

// What equal bits depend on besides the config.
std::string numerical_environment() {
  char mpi[MPI_MAX_LIBRARY_VERSION_STRING];
  int length = 0;
  MPI_Get_library_version(mpi, &length);
  const std::string library(mpi, static_cast<std::size_t>(length));
  return instruction_set() + "; " + products_library() + "; " +
         library.substr(0, library.find(','));
}

// Warns when the run began elsewhere, and keeps where it is now in the file.
void compare_environment(const std::string& path, const std::string& mine) {
  std::string before;
  {
    std::ifstream file(path);
    std::getline(file, before);
  }
  if (!before.empty() && before != mine) {
    std::printf(
        "warning: this run began on %s and goes on on %s: its bits may differ from an "
        "unbroken run's\n",
        before.c_str(), mine.c_str());
  }
  if (before != mine) publish_file(path, mine + "\n");
}

void check_environment(const RunFolder& folder, Communicator& communicator) {
  const std::string mine = numerical_environment();
  const std::vector<std::string> all = communicator.all_gather_strings("environment", mine);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank] != all[0]) {
      throw AgreedError(ExitCode::kUsage,
                        "rank " + std::to_string(rank) + " (" + communicator.hosts()[rank] +
                            ") runs on " + all[rank] + ", rank 0 (" + communicator.hosts()[0] +
                            ") on " + all[0] + ": equal bits need equal machines");
    }
  }
  LOG(INFO) << "environment: " << mine;
  together(communicator, "write environment", [&] {
    if (communicator.rank() == 0) compare_environment(folder.logs() + "/environment.txt", mine);
  });
}

// Prints, step by step and rank by rank, each sample's number and the SHA-256 of its tokens.
void dump_batches(const Config& config, const TokenStream& stream, Communicator& communicator) {
  const EngineOptions options =
      engine_options(config, stream.sequence_length(), communicator.rank(), communicator.size());
  const QuantumShare share(options.accumulate, options.quanta, options.ranks);
  const std::int64_t micro_batch = config.train().micro_batch();
  std::int64_t last = config.train().steps();
  if (config.train().stop_at_step() > 0) last = std::min(last, config.train().stop_at_step());
  std::vector<std::uint32_t> window(static_cast<std::size_t>(stream.sequence_length() + 1));
  for (std::int64_t step = 0; step < last; ++step) {
    std::string lines;
    together(communicator, "dump batches", [&] {
      for (std::int64_t round = 0; round < share.count(options.rank); ++round) {
        const std::int64_t quantum = step * options.quanta + share.quantum(round, options.rank);
        for (std::int64_t i = quantum * micro_batch; i < (quantum + 1) * micro_batch; ++i) {
          stream.read(i, window.data());
          Sha256 hash;
          hash.update(window.data(), window.size() * sizeof(window[0]));
          lines += "step " + std::to_string(step) + " rank " + std::to_string(options.rank) +
                   " sample " + std::to_string(i) + " " + hash.finish_hex() + "\n";
        }
      }
    });
    for (const std::string& text : communicator.all_gather_strings("dump batches", lines)) {
      if (communicator.rank() == 0) std::fputs(text.c_str(), stdout);
    }
  }
}

// What the run draws from each component, so that repeats are no surprise.
void print_mixture(const Config& config, const TokenStream& stream) {
  const Mixture& mixture = stream.mixture();
  const auto samples = static_cast<double>(config.train().steps() * config.train().global_batch());
  for (std::int64_t c = 0; c < mixture.components(); ++c) {
    const double share = mixture.share(c);
    if (share == 0.0) continue;
    std::printf("  %-24s %5.1f %% of the samples, %.2f epochs over the run\n",
                stream.component_name(c).c_str(), 100 * share,
                share * samples / static_cast<double>(mixture.windows(c)));
  }
}

void train(const TrainArguments& arguments, Communicator& communicator, Activity& activity) {
  activity.set("read config");
  RunFolder folder;
  ResumeOptions resume = arguments.resume;
  Config config = read_config(arguments, communicator, folder, resume);

  // All that can be wrong with config and data is found before anything is written or granted.
  std::unique_ptr<TokenStream> stream;
  std::unique_ptr<Stack> stack;
  activity.set("open data");
  together(communicator, "open data", [&] {
    const Recipe recipe = read_recipe(config.data().recipe());
    if (config.model().length() == 0) {
      config.mutable_model()->set_length(recipe.sequence_length);
    }
    stack = std::make_unique<Stack>(config.model(), compute_type(config));
    Corpus corpus = open_corpus(recipe, config.data().directory());
    try {
      stream = std::make_unique<TokenStream>(recipe, std::move(corpus));
    } catch (const Error& error) {
      throw Error(error.code(), config.data().recipe() + ": " + error.what());
    }
    resolve(config, recipe, stream->corpus().vocabulary);
  });
  if (arguments.dump_batches) {
    give_back_stop_signals();
    dump_batches(config, *stream, communicator);
    return;
  }
  together(communicator, "memory limit", [&] {
    const RunSummary summary =
        summarise(*stack, config, stream->sequence_length(), communicator.size());
    check_memory(summary, config.execution().memory_limit_bytes());
    // The system grants more than there is, and kills a rank once that is touched.
    const auto& hosts = communicator.hosts();
    const auto ranks = std::count(hosts.begin(), hosts.end(), communicator.host());
    check_memory(summary, memory_of_host() / ranks,
                 "host " + communicator.host() + " has for each of its " + std::to_string(ranks) +
                     (ranks == 1 ? " rank: " : " ranks: "));
  });
  const std::unique_ptr<FolderLock> lock = make_run_folder(folder, communicator);
  start_log(folder, communicator.rank());
  write_resolved(config, folder, communicator);
  check_environment(folder, communicator);
  std::unique_ptr<Watchdog> watchdog;
  together(communicator, "start watchdog", [&] {
    watchdog = std::make_unique<Watchdog>(
        activity, folder.logs(), communicator.rank(), communicator.size(), communicator.host(),
        std::chrono::seconds(config.execution().watchdog_seconds()));
  });
  Device device(static_cast<int>(config.execution().threads()),
                config.execution().memory_limit_bytes(), kLibraryBytes);
  if (communicator.rank() == 0) {
    const std::int64_t step_tokens = config.train().global_batch() * stream->sequence_length();
    const std::int64_t expert_ranks = config.parallel().expert_ranks();
    const std::string groups =
        expert_ranks > 1 ? ", experts over " + std::to_string(expert_ranks) + " of them" : "";
    std::printf("%s parameters on %d rank%s%s, %s each; %s steps of %s tokens; run in %s\n",
                std::to_string(stack->parameter_count()).c_str(), communicator.size(),
                communicator.size() == 1 ? "" : "s", groups.c_str(), device.description().c_str(),
                std::to_string(config.train().steps()).c_str(), std::to_string(step_tokens).c_str(),
                folder.path.c_str());
    print_mixture(config, *stream);
    std::fflush(stdout);
  }
  Trainer trainer(config, *stream, *stack, folder, resume, communicator, device, activity);
  trainer.run();
}

int run_train(const TrainArguments& arguments) {
  Activity activity;
  int rank = 0;
  std::string host = "this host";
  try {
    const MpiSession session(nullptr, nullptr);
    Communicator communicator(MPI_COMM_WORLD, &activity);
    rank = communicator.rank();
    host = communicator.host();
    try {
      train(arguments, communicator, activity);
    } catch (const AgreedError& error) {
      LOG(INFO) << "ends with exit code " << static_cast<int>(error.code()) << ": " << error.what();
      if (rank == 0) std::fprintf(stderr, "tessera: %s\n", error.what());
      return static_cast<int>(error.code());
    } catch (const std::exception& error) {
      // This rank's alone: the others can't be asked any more.
      const auto* ours = dynamic_cast<const Error*>(&error);
      std::fprintf(stderr, "tessera: %s: %s\n", describe(activity.state(), rank, host).c_str(),
                   one_line(error.what()).c_str());
      std::fflush(stderr);
      MpiSession::abort(ours != nullptr ? ours->code() : ExitCode::kInternal);
    }
  } catch (const Error& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(error.code());
  }
  return 0;
}

}  // namespace

void add_train_command(CLI::App& app, int& exit_code) {
  auto arguments = std::make_shared<TrainArguments>();
  CLI::App* command = app.add_subcommand(
      "train", "Train a model, alone, under mpirun or through launch/run; resumes by itself");
  command->footer(
      "Example:\n  launch/run -n 2 build/release/tessera train --config my.textproto "
      "--set optim.learning_rate=3e-4 --run-dir runs/first");
  command->add_option("--config", arguments->config, "Config (launch/config.proto, text format)")
      ->required();
  command->add_option("--set", arguments->overrides, "path=value, overrides a field; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_option("--run-dir", arguments->run_folder,
                      "Checkpoints, metrics and logs; default runs/<config's name>");
  command->add_option("--resume", arguments->resume.from, "auto, never, or a checkpoint file")
      ->capture_default_str();
  command
      ->add_option("--allow-change", arguments->resume.allow_change,
                   "A config path that may differ from the checkpoint's; repeatable")
      ->expected(1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  command->add_flag("--dump-batches", arguments->dump_batches,
                    "Print each step's samples and their digests, and train nothing");
  command->callback([arguments, &exit_code] { exit_code = run_train(*arguments); });
}

}  // namespace tessera
