// What a user is told when a file can't be written.
#pragma once

#include <cerrno>
#include <cstring>
#include <string>

#include "runtime/error.h"

namespace tessera {

// The system's words for an errno, and what to do: "No space left on device; make room and start
// again: what is complete is kept".
inline std::string disk_reason(int code) {
  const auto advice = [&] {
    switch (code) {
      case ENOSPC:
        return "make room (df, df -i) and start again: what is complete is kept";
      case EDQUOT:
        return "free some of the quota and start again: what is complete is kept";
      case EFBIG:
        return "raise the limit on a file's size (ulimit -f) and start again";
      case EROFS:
        return "make the file system writable or choose another folder";
      case EACCES:
      case EPERM:
        return "change the permissions or choose another folder";
      case ENAMETOOLONG:
        return "choose a shorter path";
      case ENOENT:
      case ENOTDIR:
        return "is the folder still there?";
      case EMFILE:
        return "raise the limit on open files (ulimit -n) and start again";
      default:
        return "check the disk or its mount and start again";
    }
  };
  return std::string(std::strerror(code)) + "; " + advice();
}

// "PATH: can't be WRITTEN: REASON"; `what` is a participle, `code` an errno.
inline Error disk_error(const std::string& path, const std::string& what, int code) {
  return {ExitCode::kCheckpoint, path + ": can't be " + what + ": " + disk_reason(code)};
}

}  // namespace tessera
