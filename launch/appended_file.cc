#include "launch/appended_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "runtime/disk_error.h"

namespace tessera {

AppendedFile::AppendedFile(std::string path, NoRoom no_room)
    : path_(std::move(path)),
      no_room_(no_room),
      file_(::open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666)) {
  if (file_ < 0) throw disk_error(path_, "opened for writing", errno);
}

AppendedFile::~AppendedFile() { ::close(file_); }

void AppendedFile::append(std::string_view bytes) {
  unwritten_ += bytes;
  const int code = write_unwritten();
  const bool waits = no_room_ == NoRoom::kWait && (code == ENOSPC || code == EDQUOT);
  if (code != 0 && !waits) throw disk_error(path_, "written", code);
}

void AppendedFile::sync() {
  int code = write_unwritten();
  while (code == 0 && ::fsync(file_) != 0) {
    if (errno != EINTR) code = errno;
  }
  // Not every file can be synced: /dev/null can't.
  if (code != 0 && code != EINVAL) throw disk_error(path_, "written", code);
}

bool AppendedFile::in_place() const {
  struct stat opened = {}, found = {};
  return ::fstat(file_, &opened) == 0 && ::stat(path_.c_str(), &found) == 0 &&
         opened.st_dev == found.st_dev && opened.st_ino == found.st_ino;
}

int AppendedFile::write_unwritten() {
  std::size_t done = 0;
  int code = 0;
  while (done < unwritten_.size() && code == 0) {
    const ssize_t put = ::write(file_, unwritten_.data() + done, unwritten_.size() - done);
    if (put > 0) {
      done += static_cast<std::size_t>(put);
    } else if (put == 0) {
      code = EIO;
    } else if (errno != EINTR) {
      code = errno;
    }
  }
  unwritten_.erase(0, done);
  return code;
}

}  // namespace tessera
