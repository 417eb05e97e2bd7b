// Errors that a user can act on, and the exit code that each kind ends the program with.
#pragma once

#include <cstddef>
#include <stdexcept>
#include <string>

namespace tessera {

// The program's exit codes. kNo is the answer "no" of `ckpt diff`.
enum class ExitCode : int {
  kDone = 0,
  kNo = 1,
  kUsage = 2,          // the command line or the config
  kData = 3,           // documents, shards, manifests, tokenizer
  kCheckpoint = 4,     // a checkpoint, or the disk it goes to
  kCommunication = 5,  // MPI, a lost rank, the watchdog
  kNumerics = 6,       // too many non-finite steps in a row
  kInternal = 70,      // a fault of ours: a broken invariant
};

// For the terminal or a list: '?' for control characters, and without the middle of what is longer
// than Error::kLongestMessage bytes.
std::string one_line(std::string text);

// `message` names the file, field, rank or step, and says what to do. It may quote what a file
// holds: what() is one_line of it.
class Error : public std::runtime_error {
 public:
  static constexpr std::size_t kLongestMessage = 1000;
  Error(ExitCode code, const std::string& message);
  ExitCode code() const { return code_; }

 private:
  ExitCode code_;
};

// Throws Error(kInternal): for invariants, never for input.
[[noreturn]] void fail_check(const char* file, int line, const char* condition);

}  // namespace tessera

#define TESSERA_CHECK(condition)                                             \
  do {                                                                       \
    if (!(condition)) ::tessera::fail_check(__FILE__, __LINE__, #condition); \
  } while (false)
