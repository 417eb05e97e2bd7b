// tessera: one program with subcommands.
#include <glog/logging.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <iostream>
#include <new>
#include <string>
#include <vector>

#include "launch/audit_command.h"
#include "launch/ckpt_command.h"
#include "launch/data_command.h"
#include "launch/numbers.h"
#include "launch/plan_command.h"
#include "launch/probe_command.h"
#include "launch/profile_command.h"
#include "launch/signals.h"
#include "launch/tokenize.h"
#include "launch/train_command.h"
#include "launch/version.h"
#include "runtime/device.h"
#include "runtime/disk_error.h"

namespace tessera {
namespace {

// A result that didn't fit on the disk must not look like one that did.
void finish_output() {
  errno = 0;
  std::cout.flush();
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0 && std::cout) return;
  throw Error(ExitCode::kCheckpoint, "standard output can't be written: " +
                                         (errno != 0 ? disk_reason(errno) : "is its disk full?"));
}

}  // namespace
}  // namespace tessera

namespace {

// What Open MPI's launcher tells a process of its job, before MPI is initialised; 0 without one.
int launched(const char* variable) {
  const char* value = std::getenv(variable);
  return value == nullptr ? 0 : std::atoi(value);
}

// Every process of a job finds the same fault: rank 0 says it. The others wait for their end by the
// launcher, which ends the job at the first that leaves, so that rank 0 gets to say it.
int usage_fault(const std::string& line) {
  if (launched("OMPI_COMM_WORLD_RANK") == 0) {
    std::fprintf(stderr, "tessera: %s\n", tessera::one_line(line).c_str());
  } else {
    sleep(10);
  }
  return static_cast<int>(tessera::ExitCode::kUsage);
}

// "data verify"; "" where the line names no command or only a part of one.
std::string command_name(const CLI::App& app, int argc, char** argv) {
  std::string name;
  const CLI::App* at = &app;
  for (int i = 1; i < argc; ++i) {
    const auto next =
        at->get_subcommands([&](const CLI::App* each) { return each->check_name(argv[i]); });
    if (next.empty()) break;
    name += (at == &app ? "" : " ") + next[0]->get_name();
    at = next[0];
  }
  return at->get_subcommands({}).empty() ? name : "";
}

// The processes of these work together; those of any other would each do all of its work.
bool runs_on_ranks(const std::string& command) {
  return command == "train" || command == "audit" || command == "data build" || command.empty();
}

}  // namespace

int main(int argc, char** argv) {
  // A signal in the first instants of a run must find its handler.
  if (argc > 1 && std::strcmp(argv[1], "train") == 0) tessera::install_stop_signals();
  // So that a file that grows past its limit (ulimit -f) is an error with a name, not a death.
  std::signal(SIGXFSZ, SIG_IGN);
  tessera::keep_large_allocations();
  google::InitGoogleLogging(argv[0]);
  google::SetStderrLogging(google::GLOG_FATAL);
  for (const auto severity :
       {google::GLOG_INFO, google::GLOG_WARNING, google::GLOG_ERROR, google::GLOG_FATAL}) {
    google::SetLogDestination(severity, "");  // `train` names its own file
  }

  CLI::App app{"Tessera pre-trains language models whose layers mix sequences in different ways."};
  app.footer("Example:\n  tessera plan --config launch/configs/quickstart.textproto");
  app.set_version_flag("--version", tessera::kVersion);
  app.require_subcommand(1);
  int exit_code = 0;
  try {
    tessera::add_train_command(app, exit_code);
    tessera::add_plan_command(app);
    tessera::add_data_command(app);
    tessera::add_tokenize_command(app);
    tessera::add_ckpt_command(app, exit_code);
    tessera::add_audit_command(app, exit_code);
    tessera::add_profile_command(app);
    tessera::add_probe_command(app, exit_code);
    tessera::check_values(app);
    const int ranks = launched("OMPI_COMM_WORLD_SIZE");
    const std::string command = command_name(app, argc, argv);
    if (ranks > 1 && !runs_on_ranks(command)) {
      return usage_fault(command + " runs as one process, and mpirun has started " +
                         std::to_string(ranks) + ": start it without mpirun");
    }
    app.parse(argc, argv);
    // What they say on the terminal is not their result.
    const bool writes_files =
        app.got_subcommand("train") || app.get_subcommand("data")->got_subcommand("build");
    if (!writes_files) tessera::finish_output();
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    // CLI11 says only that a command is needed when it is misspelt, and lists what it didn't expect
    // from the last to the first.
    const std::vector<std::string> unknown = app.remaining(true);
    std::string what = error.what();
    if (!unknown.empty() && unknown[0][0] != '-' && app.got_subcommand("tokenize")) {
      what = "not expected: " + unknown[0] + ": the text comes on standard input (< FILE)";
    } else if (!unknown.empty() && dynamic_cast<const CLI::RequiredError*>(&error) != nullptr) {
      what = "unknown command or option \"" + unknown[0] + "\"";
    } else if (dynamic_cast<const CLI::ExtrasError*>(&error) != nullptr) {
      what = "not expected:";
      for (const std::string& argument : unknown) what += " " + argument;
    }
    return usage_fault(
        what + "; see tessera " +
        (app.get_subcommands().empty() ? "" : app.get_subcommands()[0]->get_name() + " ") +
        "--help");
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::filesystem::filesystem_error& error) {
    std::fprintf(stderr, "tessera: %s: %s\n", tessera::one_line(error.path1().string()).c_str(),
                 error.code().message().c_str());
    return static_cast<int>(tessera::ExitCode::kCheckpoint);
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tessera: out of memory\n");
    return static_cast<int>(tessera::ExitCode::kUsage);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: internal error: %s\n", error.what());
    return static_cast<int>(tessera::ExitCode::kInternal);
  }
  return exit_code;
}
