#include "tests/fuzz/fuzz.h"

#include <fcntl.h>
#include <unistd.h>

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
