#include "launch/ckpt_command.h"

#include <filesystem>
#include <iomanip>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "parallel/checkpoint.h"
#include "runtime/error.h"

namespace tessera {

namespace {

namespace fs = std::filesystem;

// A run dir stands for its checkpoints.
std::string checkpoint_folder(const std::string& folder) {
  if (!fs::is_directory(folder)) {
    throw Error(ExitCode::kCheckpoint,
                folder + " is not a folder: give a run dir or its checkpoints");
  }
  const fs::path inner = fs::path(folder) / "checkpoints";
  return fs::is_directory(inner) ? inner.string() : folder;
}

void list(const std::string& folder, bool json) {
  const std::vector<CheckpointEntry> entries = list_checkpoints(checkpoint_folder(folder));
  if (json) {
    nlohmann::ordered_json lines = nlohmann::ordered_json::array();
    for (const CheckpointEntry& entry : entries) {
      nlohmann::ordered_json line{{"step", entry.step},
                                  {"file", entry.path},
                                  {"bytes", entry.bytes},
                                  {"tokens", entry.tokens},
                                  {"usable", entry.fault.empty()}};
      if (!entry.fault.empty()) line["fault"] = entry.fault;
      lines.push_back(std::move(line));
    }
    std::cout << nlohmann::ordered_json{{"checkpoints", lines}}.dump(2) << '\n';
    return;
  }
  if (entries.empty()) {
    std::cout << "no checkpoints in " << folder << '\n';
    return;
  }
  std::cout << std::setw(10) << "step" << std::setw(16) << "tokens" << std::setw(16) << "bytes"
            << "  file\n";
  for (const CheckpointEntry& entry : entries) {
    std::cout << std::setw(10) << entry.step << std::setw(16) << entry.tokens << std::setw(16)
              << entry.bytes << "  " << fs::path(entry.path).filename().string();
    if (!entry.fault.empty()) std::cout << "  unusable: " << entry.fault;
    std::cout << '\n';
  }
}

// Files as they are; a folder stands for its checkpoints, newest first, without what saves that
// were cut short left there: the next save deletes it.
std::vector<std::string> files_to_verify(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    if (!fs::is_directory(path)) {
      files.push_back(path);
      continue;
    }
    const std::size_t before = files.size();
    for (const CheckpointEntry& entry : list_checkpoints(checkpoint_folder(path))) {
      if (entry.path.ends_with(".h5")) files.push_back(entry.path);
    }
    if (files.size() == before) throw Error(ExitCode::kCheckpoint, "no checkpoints in " + path);
  }
  return files;
}

bool verify(const std::vector<std::string>& paths) {
  bool whole = true;
  for (const std::string& file : files_to_verify(paths)) {
    const std::vector<std::string> faults = verify_checkpoint(file);
    if (faults.empty()) std::cout << file << ": every checksum is right\n";
    for (const std::string& fault : faults) std::cerr << fault << '\n';
    whole = whole && faults.empty();
  }
  return whole;
}

bool diff(const std::string& a, const std::string& b, bool json) {
  const std::optional<CheckpointDifference> difference = diff_checkpoints(a, b);
  if (json) {
    nlohmann::ordered_json answer{{"equal", !difference}};
    if (difference) {
      answer["array"] = difference->array;
      answer["index"] = difference->index;
      answer["difference"] = difference->what;
    }
    std::cout << answer.dump(2) << '\n';
  } else if (difference) {
    std::cout << difference->array;
    for (std::size_t i = 0; i < difference->index.size(); ++i) {
      std::cout << (i == 0 ? "[" : ", ") << difference->index[i];
    }
    if (!difference->index.empty()) std::cout << ']';
    std::cout << ": " << difference->what << '\n';
  } else {
    std::cout << "parameters and state are bitwise equal\n";
  }
  return !difference;
}

}  // namespace

void add_ckpt_command(CLI::App& app, int& exit_code) {
  CLI::App* ckpt = app.add_subcommand("ckpt", "List, verify and compare checkpoints");
  ckpt->require_subcommand(1);
  ckpt->footer("Example: tessera ckpt diff run/checkpoints/step-00000100.h5 other.h5");
  // Options live as long as the command does.
  struct Options {
    std::string folder, a, b;
    std::vector<std::string> paths;
    bool list_json = false, diff_json = false;
  };
  const auto options = std::make_shared<Options>();

  CLI::App* ls = ckpt->add_subcommand("ls", "List the checkpoints of a run, newest first");
  ls->add_option("DIR", options->folder, "A run dir or its checkpoints folder")->required();
  ls->add_flag("--json", options->list_json, "One JSON object instead of the table");
  ls->callback([options] { list(options->folder, options->list_json); });

  CLI::App* check = ckpt->add_subcommand("verify", "Read everything and check all checksums");
  check->add_option("PATH", options->paths, "Checkpoints, run dirs, checkpoints folders")
      ->required();
  check->callback([options, &exit_code] {
    if (!verify(options->paths)) exit_code = static_cast<int>(ExitCode::kCheckpoint);
  });

  CLI::App* compare =
      ckpt->add_subcommand("diff", "Exit 0 if parameters and state are bitwise equal, 1 if not");
  compare->add_option("A", options->a, "A checkpoint")->required();
  compare->add_option("B", options->b, "Another")->required();
  compare->add_flag("--json", options->diff_json, "One JSON object instead of a line");
  compare->callback([options, &exit_code] {
    if (!diff(options->a, options->b, options->diff_json)) {
      exit_code = static_cast<int>(ExitCode::kNo);
    }
  });
}

}  // namespace tessera
