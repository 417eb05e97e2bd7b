// tessera: one program with subcommands.
#include <glog/logging.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "launch/audit_command.h"
#include "launch/ckpt_command.h"
#include "launch/data_command.h"
#include "launch/plan_command.h"
#include "launch/probe_command.h"
#include "launch/profile_command.h"
#include "launch/signals.h"
#include "launch/tokenize.h"
#include "launch/train_command.h"
#include "launch/version.h"
#include "runtime/device.h"
#include "runtime/error.h"

int main(int argc, char** argv) {
  // A signal in the first instants of a run must find its handler.
  if (argc > 1 && std::strcmp(argv[1], "train") == 0) tessera::install_stop_signals();
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
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() == 0) return app.exit(error);  // --help, --version
    // Of a command that doesn't exist CLI11 says only that one is needed.
    const std::vector<std::string> unknown = app.remaining(true);
    const bool misspelt = dynamic_cast<const CLI::RequiredError*>(&error) && !unknown.empty();
    const std::string what =
        misspelt ? "unknown command or option \"" + unknown[0] + "\"" : error.what();
    std::fprintf(
        stderr, "tessera: %s; see tessera %s--help\n", what.c_str(),
        app.get_subcommands().empty() ? "" : (app.get_subcommands()[0]->get_name() + " ").c_str());
    return static_cast<int>(tessera::ExitCode::kUsage);
  } catch (const tessera::Error& error) {
    std::fprintf(stderr, "tessera: %s\n", error.what());
    return static_cast<int>(error.code());
  } catch (const std::bad_alloc&) {
    std::fprintf(stderr, "tessera: out of memory\n");
    return static_cast<int>(tessera::ExitCode::kUsage);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tessera: internal error: %s\n", error.what());
    return static_cast<int>(tessera::ExitCode::kInternal);
  }
  return exit_code;
}
