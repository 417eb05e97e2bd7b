// Files that appear under their name only when they are complete and on disk.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace tessera {

// Writes PATH.partial; publish() syncs it and gives it its name. Without it, nothing of that name
// appears, and the partial file goes. Every failure throws Error(kCheckpoint) naming the file, the
// reason and what to do.
class PublishedFile {
 public:
  explicit PublishedFile(const std::string& path);
  ~PublishedFile();
  PublishedFile(const PublishedFile&) = delete;
  PublishedFile& operator=(const PublishedFile&) = delete;
  void write(const void* bytes, std::size_t count);
  void publish();

 private:
  [[noreturn]] void fail(const char* operation, int code) const;

  std::string path_;
  std::string partial_;
  int file_ = -1;
  bool published_ = false;
};

void publish_file(const std::string& path, std::string_view bytes);
// Throws Error(kCheckpoint) when the folder, or one above it, is a file: "FILE is a file; choose
// another OPTION", the option of the command line that named it.
void check_no_file(const std::string& folder, const std::string& option);
// Makes the folder and those above it; throws as check_no_file.
void make_folders(const std::string& folder, const std::string& option);
// Makes names that were added to or taken from a folder durable.
void sync_folder(const std::string& folder);
void remove_file(const std::string& path);

// Held by the one process that may write to a folder; given back at its end, however it ends.
class FolderLock {
 public:
  // Throws Error(kCheckpoint): "FOLDER: TAKEN" when another process holds it.
  FolderLock(const std::string& folder, const std::string& taken);
  ~FolderLock();
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int file_;
};

}  // namespace tessera
