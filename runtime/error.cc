#include "runtime/error.h"

namespace tessera {

void fail_check(const char* file, int line, const char* condition) {
  throw Error(ExitCode::kInternal, std::string("internal error: ") + condition +
                                       " does not hold at " + file + ":" + std::to_string(line));
}

}  // namespace tessera
