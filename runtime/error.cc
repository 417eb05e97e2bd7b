#include "runtime/error.h"

#include <string_view>

namespace tessera {

std::string one_line(std::string text) {
  constexpr std::size_t kEnd = 300;  // where hints stand
  constexpr std::string_view kGap = " ... ";
  if (text.size() > Error::kLongestMessage) {
    text.replace(Error::kLongestMessage - kEnd - kGap.size(),
                 text.size() - Error::kLongestMessage + kGap.size(), kGap);
  }
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  return text;
}

Error::Error(ExitCode code, const std::string& message)
    : std::runtime_error(one_line(message)), code_(code) {}

void fail_check(const char* file, int line, const char* condition) {
  throw Error(ExitCode::kInternal, std::string("internal error: ") + condition +
                                       " does not hold at " + file + ":" + std::to_string(line));
}

}  // namespace tessera
