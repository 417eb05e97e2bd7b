// Numbers on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <string>

namespace tessera {

// From `least` to 2^63 - 1 in digits and nothing else; CLI11 alone takes -1 for 2^64 - 1, and the
// largest number there is for any that is larger.
inline CLI::Validator whole_number(std::int64_t least = 0) {
  return {[least](std::string& text) -> std::string {
            std::int64_t value = 0;
            const char* const end = text.data() + text.size();
            const auto [stop, error] = std::from_chars(text.data(), end, value);
            if (error == std::errc() && stop == end && value >= least) return "";
            return "must be a whole number from " + std::to_string(least) +
                   " to 9223372036854775807, is " + text;
          },
          "WHOLE"};
}

// For every option that takes a value, of all commands. An empty one is an unset variable of the
// shell more often than it is meant, and as a path it would be the root folder. CLI11 takes a
// number that doesn't fit for the largest that does.
inline void check_values(CLI::App& app) {
  for (CLI::Option* const option : app.get_options()) {
    if (option->get_items_expected_max() == 0) continue;  // a flag
    // A transformation comes before the option's own checks.
    option->transform(CLI::Validator(
        [](std::string& text) -> std::string {
          return text.empty() ? "is empty; give it a value (an unset shell variable has none)" : "";
        },
        ""));
    if (!option->get_type_name().starts_with("INT")) continue;
    option->check([](const std::string& text) -> std::string {
      errno = 0;
      std::strtoll(text.c_str(), nullptr, 0);
      if (errno != ERANGE) return "";
      return "must be a whole number from -9223372036854775808 to 9223372036854775807, is " + text;
    });
  }
  for (CLI::App* const command : app.get_subcommands({})) check_values(*command);
}

}  // namespace tessera
