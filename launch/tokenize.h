// The command `tokenize`: text to token ids and back, from standard input to standard output.
#pragma once

#include <CLI/CLI.hpp>
#include <iosfwd>

#include "data/tokenizer.h"

namespace tessera {

struct TokenizeOptions {
  bool decode = false;         // ids to text
  bool json_lines = false;     // one JSON object a line
  bool parse_special = false;  // control strings in the text become their ids
};

// Plain: all of `in` is one text, bytes unchanged (a last newline counts), and becomes one line of
// ids, blanks between; decoding reads ids between white space and writes their bytes, nothing more.
// JSON lines: every object's `text` becomes `ids` (decoding: the other way round), its other
// members stay, lines keep their order, blank lines are left out. Error(kData) names line or place.
void tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options, std::istream& in,
              std::ostream& out);

void add_tokenize_command(CLI::App& app);

}  // namespace tessera
