// `tessera plan`: what a config amounts to, before anything is started.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

// The callback throws Error.
void add_plan_command(CLI::App& app);

}  // namespace tessera
