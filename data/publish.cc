#include "data/publish.h"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <utility>

#include "runtime/disk_error.h"

namespace tessera {
namespace {

// Again, as long as a signal comes in between. Returns an errno, 0 when it is done.
int sync_file(int file) {
  while (::fsync(file) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

std::string folder_of(const std::string& path) {
  const std::string folder = std::filesystem::path(path).parent_path().string();
  return folder.empty() ? "." : folder;
}

}  // namespace

PublishedFile::PublishedFile(const std::string& path) : path_(path), partial_(path + ".partial") {
  file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
  if (file_ < 0) fail("created", errno);
}

PublishedFile::~PublishedFile() {
  if (file_ >= 0) ::close(file_);
  if (!published_) ::unlink(partial_.c_str());
}

void PublishedFile::fail(const char* operation, int code) const {
  throw disk_error(partial_, operation, code);
}

void PublishedFile::write(const void* bytes, std::size_t count) {
  const char* next = static_cast<const char*>(bytes);
  while (count > 0) {
    const ssize_t put = ::write(file_, next, count);
    if (put < 0 && errno == EINTR) continue;
    if (put <= 0) fail("written", put < 0 ? errno : EIO);
    next += put;
    count -= static_cast<std::size_t>(put);
  }
}

void PublishedFile::publish() {
  const int synced = sync_file(file_);
  if (synced != 0) fail("written", synced);
  const int closed = ::close(std::exchange(file_, -1));
  // One that was interrupted has closed it, and nothing was left to write.
  if (closed != 0 && errno != EINTR) fail("written", errno);
  if (::rename(partial_.c_str(), path_.c_str()) != 0) fail("renamed", errno);
  published_ = true;
  sync_folder(folder_of(path_));
}

void publish_file(const std::string& path, std::string_view bytes) {
  PublishedFile file(path);
  file.write(bytes.data(), bytes.size());
  file.publish();
}

void check_no_file(const std::string& folder, const std::string& option) {
  std::filesystem::path part;
  for (const std::filesystem::path& name : std::filesystem::path(folder)) {
    part /= name;
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(part, error);
    if (!std::filesystem::exists(status)) return;
    if (!std::filesystem::is_directory(status)) {
      throw Error(ExitCode::kCheckpoint, part.string() + " is a file; choose another " + option);
    }
  }
}

void make_folders(const std::string& folder, const std::string& option) {
  check_no_file(folder, option);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) throw disk_error(folder, "made", error.value());
}

void sync_folder(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw disk_error(folder, "opened", errno);
  const int code = sync_file(file);
  ::close(file);
  // Some file systems can't sync a folder, and say so by EINVAL.
  if (code != 0 && code != EINVAL) throw disk_error(folder, "synced", code);
}

void remove_file(const std::string& path) {
  if (::unlink(path.c_str()) != 0 && errno != ENOENT) throw disk_error(path, "removed", errno);
}

FolderLock::FolderLock(const std::string& folder, const std::string& taken)
    : file_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
  if (file_ < 0) throw disk_error(folder, "opened", errno);
  // A file system without locks can't be helped.
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(file_);
    throw Error(ExitCode::kCheckpoint, folder + ": " + taken);
  }
}

FolderLock::~FolderLock() { ::close(file_); }

}  // namespace tessera
