#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <sys/time.h>
#include <unistd.h>

#include <csignal>

namespace tessera::fuzz {

void write_file(const char* path, std::string_view bytes) {
  // Overwritten and cut rather than cut and written, which some file systems sync.
  const int file = ::open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
  require(file >= 0, "a file can't be created in the working folder");
  const auto size = static_cast<ssize_t>(bytes.size());
  require(::pwrite(file, bytes.data(), bytes.size(), 0) == size, "a file can't be written");
  require(::ftruncate(file, size) == 0, "a file can't be cut");
  ::close(file);
}

}  // namespace tessera::fuzz

// libFuzzer calls it with every input; the return value says nothing. Time is the CPU's, for the
// machine may be busy with other work.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const bool ready = std::signal(SIGVTALRM, [](int) { std::abort(); }) != SIG_ERR;
  tessera::fuzz::require(ready, "no handler");
  const itimerval limit = {{0, 0}, {2, 0}}, none = {};
  setitimer(ITIMER_VIRTUAL, &limit, nullptr);
  tessera::fuzz::take({reinterpret_cast<const char*>(data), size});
  setitimer(ITIMER_VIRTUAL, &none, nullptr);
  return 0;
}
