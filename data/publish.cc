#include "data/publish.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>

#include "runtime/error.h"

namespace tessera {
namespace {

[[noreturn]] void fail_at(const std::string& path, const std::string& operation, int code) {
  throw Error(ExitCode::kCheckpoint,
              path + ": cannot be " + operation + ": " + std::strerror(code));
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

PublishedFile::PublishedFile(const std::string& path) : path_(path), partial_(path + ".partial") {
  file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail("created");
}

PublishedFile::~PublishedFile() {
  if (file_ < 0) return;
  ::close(file_);
  ::unlink(partial_.c_str());
}

void PublishedFile::fail(const char* operation) const { fail_at(partial_, operation, errno); }

void PublishedFile::write(const void* bytes, std::size_t count) {
  const char* next = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t put = ::write(file_, next, count);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("written");
    next += put;
    count -= static_cast<std::size_t>(put);
  }
}

void PublishedFile::publish() {
  if (::fsync(file_) != 0) fail("written");
  const int closed = ::close(file_);
  file_ = -1;
  if (closed != 0) fail("written");
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("renamed");
  sync_folder(folder_of(path_));
}

void publish_file(const std::string& path, std::string_view bytes) {
  PublishedFile file(path);
  file.write(bytes.data(), bytes.size());
  file.publish();
}

void make_folders(const std::string& folder) {
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) fail_at(folder, "made", error.value());
}

void sync_folder(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) fail_at(folder, "opened", errno);
  // Some file systems can't sync a folder, and say so by EINVAL.
  const int result = ::fsync(file);
  const int code = errno;
  ::close(file);
  if (result != 0 && code != EINVAL) fail_at(folder, "synced", code);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) fail_at(path, "removed", errno);
}

FolderLock::FolderLock(const std::string& folder, const std::string& taken)
    : file_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (file_ < 0) {
    throw Error(ExitCode::kCheckpoint, folder + ": cannot be opened: " + std::strerror(errno));
  }
  // A file system without locks can't be helped.
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(file_);
    throw Error(ExitCode::kCheckpoint, folder + ": " + taken);
  }
}

FolderLock::~FolderLock() { ::close(file_); }

}  // namespace tessera
