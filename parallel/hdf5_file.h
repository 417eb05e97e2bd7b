// HDF5 as checkpoints use it: handles that close themselves, errors as text, flat ranges of arrays
// as selections, and a serial reader of one checkpoint. Private to the room.
#pragma once

#include <hdf5.h>

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "parallel/checkpoint.h"
#include "runtime/view.h"

namespace tessera::hdf5 {

// Owns an HDF5 identifier. A negative one is a failed call.
class Handle {
 public:
  using Close = herr_t (*)(hid_t);
  Handle() = default;
  Handle(hid_t id, Close close) : id_(id), close_(close) {}
  Handle(Handle&& other) noexcept
      : id_(std::exchange(other.id_, H5I_INVALID_HID)), close_(other.close_) {}
  Handle& operator=(Handle&& other) noexcept {
    std::swap(id_, other.id_);
    std::swap(close_, other.close_);
    return *this;
  }
  ~Handle() { close(); }
  Handle(const Handle&) = delete;
  Handle& operator=(const Handle&) = delete;

  hid_t get() const { return id_; }
  bool valid() const { return id_ >= 0; }
  // Returns false when closing fails.
  bool close() { return id_ < 0 || close_(std::exchange(id_, H5I_INVALID_HID)) >= 0; }

 private:
  hid_t id_ = H5I_INVALID_HID;
  Close close_ = nullptr;
};

// Keeps HDF5's error stacks off stderr; called before any other use.
void silence();
// The library's last error, as one line: what was tried and the innermost reason.
std::string reason();

// How files are opened: without HDF5's own locks, which nobody needs and which fail or hang on
// network file systems.
Handle file_access();
// A file that HDF5 makes in memory: what it never writes, as the bytes of arrays that aren't
// filled, takes no room. HDF5 crashes or hangs once a write to a disk has failed; here none fails.
class MemoryFile {
 public:
  // For H5Fcreate, whose handle must not outlive this.
  Handle access();
  // Of the closed file.
  std::int64_t bytes() const { return bytes_; }
  // What was written, in order: first byte and content of each stretch.
  std::vector<std::pair<std::int64_t, std::string>> stretches() const;

  // For HDF5's driver.
  void read(std::int64_t at, std::span<char> data) const;
  void write(std::int64_t at, std::span<const char> data);
  void resize(std::int64_t bytes) { bytes_ = bytes; }

 private:
  static constexpr std::int64_t kPage = 4096;
  std::map<std::int64_t, std::string> pages_;  // by first byte
  std::int64_t bytes_ = 0;
};

// A dataspace of the shape, all of it selected.
Handle space_of(const Shape& shape);
// Selects elements [begin, end), flat and row-major, of a dataspace of that shape: up to
// 2 * rank - 1 boxes; nothing when begin == end. False on failure.
bool select_flat(const Handle& space, const Shape& shape, std::int64_t begin, std::int64_t end);

// The crc32 of zlib and gzip of elements, and of the joined bytes of two parts.
std::uint32_t crc_of(std::uint32_t before, const void* data, std::int64_t bytes);
std::uint32_t crc_joined(std::uint32_t first, std::uint32_t second, std::int64_t second_bytes);
// Bytes of an array that one checksum covers.
constexpr std::int64_t kChecksumBytes = std::int64_t{16} << 20;

// One checkpoint, opened for reading without MPI. All failures throw Error(kCheckpoint) naming the
// file and the array.
class CheckpointFile {
 public:
  explicit CheckpointFile(const std::string& path);
  const std::string& path() const { return path_; }

  CheckpointMeta meta() const;
  // Names of the arrays, sorted; with what = "params", "adamw" or "state".
  std::vector<std::string> arrays(const std::string& what) const;
  bool has(const std::string& array) const;
  Shape shape(const std::string& array) const;
  // Under "state" stand single numbers, and f32 arrays.
  bool is_number(const std::string& array) const;
  // `data` gets elements [begin, end) of an f32 array.
  void read(const std::string& array, std::int64_t begin, std::int64_t end, float* data) const;
  // A single number, held against its checksum.
  std::int64_t read_state(const std::string& array) const;
  // One per kChecksumBytes.
  std::vector<std::uint32_t> checksums(const std::string& array, std::int64_t bytes) const;

 private:
  [[noreturn]] void fail(const std::string& what) const;
  Handle open_array(const std::string& array) const;

  std::string path_;
  std::int64_t bytes_ = 0;
  Handle file_;
};

}  // namespace tessera::hdf5
