// `tessera profile`: what each mixer costs, alone.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

// The callback throws Error.
void add_profile_command(CLI::App& app);

}  // namespace tessera
