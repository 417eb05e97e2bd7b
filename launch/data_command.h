// `tessera data build|verify|inspect|stream|locate`.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

void add_data_command(CLI::App& app);

}  // namespace tessera
