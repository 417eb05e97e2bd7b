// Numbers on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <charconv>
#include <cstdint>
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

}  // namespace tessera
