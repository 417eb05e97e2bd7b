// `tessera train`.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

// `exit_code` outlives the parse.
void add_train_command(CLI::App& app, int& exit_code);

}  // namespace tessera
