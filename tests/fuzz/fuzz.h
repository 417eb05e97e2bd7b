// What the fuzz targets share. A target is one parser: it either takes its input or refuses it by
// an Error of the right kind that a person can read, within two seconds; whatever else happens is a
// fault.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/error.h"

namespace tessera::fuzz {

inline void require(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "fuzz: %s\n", what);
  std::abort();
}

inline void check_error(const Error& error, std::initializer_list<ExitCode> codes) {
  const std::string_view what = error.what();
  bool right = false;
  for (const ExitCode code : codes) right = right || error.code() == code;
  if (!right || what.empty() || what.size() > Error::kLongestMessage ||
      what.find_first_of(std::string_view("\n\r\0\x1b", 4)) != std::string_view::npos) {
    std::fprintf(stderr, "fuzz: exit code %d and these %zu bytes: %s\n",
                 static_cast<int>(error.code()), what.size(), error.what());
    std::abort();
  }
}

// Runs `work`; false where it refused its input. An Error of another code than these, or one whose
// message isn't one line that a terminal can show, ends the program.
template <class Work>
bool accepts(std::initializer_list<ExitCode> codes, const Work& work) {
  try {
    work();
    return true;
  } catch (const Error& error) {
    check_error(error, codes);
    return false;
  }
}

// A file of these bytes in the working folder, which the runner makes for each target.
void write_file(const char* path, std::string_view bytes);

// The input cut at `separator`; at least one part.
inline std::vector<std::string> split(std::string_view input, char separator) {
  std::vector<std::string> parts;
  while (true) {
    const std::size_t end = input.find(separator);
    parts.emplace_back(input.substr(0, end));
    if (end == std::string_view::npos) return parts;
    input.remove_prefix(end + 1);
  }
}

// The target: what is done with one input.
void take(std::string_view input);

}  // namespace tessera::fuzz
