// `tessera probe id`, `rank` and `allocate`: the geometry probe of a trained model's experts, and
// the allocation of their shapes that follows from it.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

void add_probe_command(CLI::App& app, int& exit_code);

}  // namespace tessera
