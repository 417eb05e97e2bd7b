// `tessera audit`: proof that no position sees the future.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

// The callback sets `exit_code`.
void add_audit_command(CLI::App& app, int& exit_code);

}  // namespace tessera
