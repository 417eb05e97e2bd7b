// Reading a run's configuration: protobuf text format, `--set path=value` on top, every fault
// reported as one line a user can act on.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "launch/config.pb.h"

namespace tessera {

// The file that a --config names: a file, or a ready config of launch/configs by its name
// ("latin7_small"). Throws Error(kUsage) with the names when it is neither.
std::string find_config(const std::string& name);

// A path, "" excepted, against the working folder. Throws Error(kUsage) when there is none any
// more.
std::string absolute_path(const std::string& path);

// Reads the file that find_config finds, applies the overrides in order and validates. An override
// is "path=value": "optim.learning_rate=3e-4", "model.mixer[1].sliding.window=64",
// "checkpoint.archive_steps=[10, 20]", "parallel.gather=PER_STEP"; the value is what would stand in
// the file, but a string needs no quotes. An index one past the end appends. Throws Error(kUsage)
// with the first fault: file and line (or the override), field path, what was expected, and for an
// unknown name the nearest valid one.
Config load_config(const std::string& name, const std::vector<std::string>& overrides = {});

// Everything that can be said without the data: required fields, ranges, shapes. Throws
// Error(kUsage) naming the field path.
void validate(const Config& config);

// The fields marked NUMERICS with their defaults, one "path=value" line each, in order of the
// schema's field numbers: "optim.beta1=0.9\n". Doubles are the shortest decimals that read back the
// same; strings are quoted and escaped. An unset member of a oneof has no line. The same config
// gives the same bytes on every machine: this is what a checkpoint keeps.
std::string numerics(const Config& config);

struct Difference {
  std::string path;
  std::string saved;  // the value's text; "" where the path doesn't exist
  std::string now;
};
// The lines that differ between two texts of "path=value" lines, in order of first appearance.
std::vector<Difference> compare_numerics(std::string_view saved, std::string_view now);

// The rule for a resume. Throws Error(kUsage) naming the first path that differs and isn't allowed;
// an entry of `allowed` covers its path and everything below ("optim" covers "optim.beta1").
void check_resume(std::string_view saved, std::string_view now,
                  const std::vector<std::string>& allowed);

// The config with every default written out, in protobuf text format that load_config reads back;
// the same bytes for the same config.
std::string resolved_text(const Config& config);

}  // namespace tessera
