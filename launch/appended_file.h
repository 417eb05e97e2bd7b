// A file that grows line by line over a run: nothing that is appended to it is lost unseen.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// What a run does when a file of it finds no room.
enum class NoRoom { kFail, kWait };

// Not thread-safe. All failures throw Error(kCheckpoint) naming the file, the reason and what to
// do.
class AppendedFile {
 public:
  // Opens `path`, or makes it. With kWait, what finds no room (a full disk, a quota) waits in
  // memory and goes first the next time.
  AppendedFile(std::string path, NoRoom no_room);
  ~AppendedFile();
  AppendedFile(const AppendedFile&) = delete;
  AppendedFile& operator=(const AppendedFile&) = delete;

  void append(std::string_view bytes);
  // Throws unless all that was appended is on the disk.
  void sync();
  // Whether something of it waits for room.
  bool waits() const { return !unwritten_.empty(); }
  // Whether `path` is still this file: else it was removed, replaced, or its file system unmounted.
  bool in_place() const;

 private:
  int write_unwritten();  // an errno; 0: nothing waits any more

  const std::string path_;
  const NoRoom no_room_;
  int file_;
  std::string unwritten_;
};

}  // namespace tessera
