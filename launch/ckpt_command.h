// `tessera ckpt ls|verify|diff`.
#pragma once

#include <CLI/CLI.hpp>

namespace tessera {

// `exit_code` outlives the parse: diff sets it to 1 when the answer is no, verify to 4 when a file
// is damaged.
void add_ckpt_command(CLI::App& app, int& exit_code);

}  // namespace tessera
