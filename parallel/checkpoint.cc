#include "parallel/checkpoint.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <set>
#include <sstream>
#include <thread>

#include "parallel/hdf5_file.h"
#include "runtime/disk_error.h"

namespace tessera {

namespace fs = std::filesystem;

namespace {

using hdf5::Handle;
using hdf5::kChecksumBytes;

constexpr std::int64_t kElement = sizeof(float);
constexpr std::int64_t kChecksumElements = kChecksumBytes / kElement;
// More than the headers, links and heaps that an object was seen to take in the file.
constexpr std::int64_t kBytesPerObject = 2048;
constexpr const char* kPartial = ".partial";

std::string array_at(const std::string& array, std::int64_t element) {
  return "array " + array + " at element " + std::to_string(element);
}

Error damaged(const std::string& path, const std::string& place) {
  std::string message = "checkpoint " + path + ": " + place;
  message += " is damaged: its checksum differs";
  return {ExitCode::kCheckpoint, message};
}

// A stretch of an array that one rank holds, within one checksum's piece.
struct Fragment {
  std::int64_t array = 0;  // index in order of names
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t crc = 0;
};
static_assert(sizeof(Fragment) == 32);

std::vector<const CheckpointArray*> sorted(std::span<const CheckpointArray> arrays) {
  std::vector<const CheckpointArray*> order;
  for (const CheckpointArray& array : arrays) order.push_back(&array);
  std::sort(order.begin(), order.end(),
            [](const auto* a, const auto* b) { return a->name < b->name; });
  for (std::size_t i = 0; i + 1 < order.size(); ++i) {
    TESSERA_CHECK(order[i]->name != order[i + 1]->name);
  }
  return order;
}

void add_fragments(std::int64_t array, const CheckpointArray::Part& part,
                   std::vector<Fragment>& fragments) {
  for (std::int64_t begin = part.begin; begin < part.end;) {
    const std::int64_t end =
        std::min(part.end, (begin / kChecksumElements + 1) * kChecksumElements);
    fragments.push_back(
        {array, begin, end,
         hdf5::crc_of(0, part.data + (begin - part.begin), (end - begin) * kElement)});
    begin = end;
  }
}

// Collective. Proves that the fragments of all ranks tile every array exactly once, and joins their
// checksums. Throws the same on all ranks.
std::vector<std::vector<std::uint32_t>> join(Communicator& communicator, const std::string& path,
                                             const std::vector<const CheckpointArray*>& arrays,
                                             const std::vector<Fragment>& mine) {
  const std::vector<std::string> by_rank = communicator.all_gather_strings(
      "checkpoint tiling",
      std::string(reinterpret_cast<const char*>(mine.data()), mine.size() * sizeof(Fragment)));
  std::vector<Fragment> all;
  for (const std::string& bytes : by_rank) {
    const std::size_t before = all.size();
    all.resize(before + bytes.size() / sizeof(Fragment));
    if (!bytes.empty()) std::memcpy(all.data() + before, bytes.data(), bytes.size());
  }
  std::sort(all.begin(), all.end(), [](const Fragment& a, const Fragment& b) {
    return a.array != b.array ? a.array < b.array : a.begin < b.begin;
  });
  std::vector<std::vector<std::uint32_t>> checksums(arrays.size());
  std::size_t next = 0;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const std::int64_t count = arrays[i]->shape.count();
    const auto fail = [&](std::int64_t element, const char* what) {
      throw Error(ExitCode::kCheckpoint,
                  "checkpoint " + path + ": " + array_at(arrays[i]->name, element) + " " + what);
    };
    std::int64_t at = 0;
    for (; next < all.size() && all[next].array == static_cast<std::int64_t>(i); ++next) {
      const Fragment& fragment = all[next];
      if (fragment.begin > at) fail(at, "is held by no rank");
      if (fragment.begin < at) fail(fragment.begin, "is held by more than one rank");
      if (fragment.end > count) fail(count, "doesn't exist, but a rank holds it");
      const auto crc = static_cast<std::uint32_t>(fragment.crc);
      if (at % kChecksumElements == 0) {
        checksums[i].push_back(crc);
      } else {
        checksums[i].back() =
            hdf5::crc_joined(checksums[i].back(), crc, (fragment.end - fragment.begin) * kElement);
      }
      at = fragment.end;
    }
    if (at != count) fail(at, "is held by no rank");
  }
  return checksums;
}

// Parts cut into transfers that HDF5 and MPI-IO take.
std::vector<CheckpointArray::Part> transfers(const CheckpointArray& array, std::int64_t bytes) {
  const std::int64_t elements = std::max<std::int64_t>(bytes / kElement, 1);
  std::vector<CheckpointArray::Part> cut;
  for (const CheckpointArray::Part& part : array.parts) {
    for (std::int64_t begin = part.begin; begin < part.end; begin += elements) {
      cut.push_back(
          {begin, std::min(begin + elements, part.end), part.data + (begin - part.begin)});
    }
  }
  return cut;
}

Error checkpoint_error(const std::string& path, const std::string& what, int code) {
  return disk_error("checkpoint " + path, what, code);
}

// Of an open file. Returns an errno, 0 when it is done.
int sync_file(int file) {
  while (::fsync(file) != 0) {
    if (errno != EINTR) return errno;
  }
  return 0;
}

void sync_folder(const std::string& folder) {
  const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file < 0) throw checkpoint_error(folder, "opened", errno);
  const int code = sync_file(file);
  ::close(file);
  // Some file systems can't sync a folder, and say so by EINVAL.
  if (code != 0 && code != EINVAL) throw checkpoint_error(folder, "synced", code);
}

// A file that is open, for as long as this lives.
class OpenFile {
 public:
  OpenFile(std::string path, int flags) : path_(std::move(path)) {
    file_ = ::open(path_.c_str(), flags | O_CLOEXEC, 0666);
    if (file_ < 0) {
      throw checkpoint_error(path_, (flags & O_CREAT) != 0 ? "created" : "opened", errno);
    }
  }
  ~OpenFile() { ::close(file_); }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;

  int get() const { return file_; }
  const std::string& path() const { return path_; }

  // Writes all of the bytes from byte `at` on: what is interrupted or falls short is gone on with.
  // Returns an errno, 0 when it is done.
  int write(const void* data, std::int64_t bytes, std::int64_t at) const {
    // A client of a network file system may round a write to whole pages, over what another host
    // wrote into its part of them, but not while it holds a lock. Nobody else locks this range, and
    // a file system without locks has no such pages.
    lock(F_WRLCK, at, bytes);
    int code = 0;
    for (const char* next = static_cast<const char*>(data); bytes > 0 && code == 0;) {
      const ssize_t put = ::pwrite(file_, next, static_cast<std::size_t>(bytes), at);
      if (put < 0 && errno != EINTR) code = errno;
      if (put == 0) code = EIO;
      if (put <= 0) continue;
      next += put;
      at += put;
      bytes -= put;
    }
    lock(F_UNLCK, 0, 0);
    return code;
  }

 private:
  void lock(int how, std::int64_t at, std::int64_t bytes) const {
    struct flock range = {};
    range.l_type = static_cast<short>(how);
    range.l_whence = SEEK_SET;
    range.l_start = at;
    range.l_len = bytes;
    ::fcntl(file_, F_OFD_SETLK, &range);
  }

  std::string path_;
  int file_ = -1;
};

// Brings what this host holds of the file to the disk, piece by piece, so that a slow disk is seen
// to move.
void sync_checkpoint(const OpenFile& file, Activity* activity) {
  struct stat status = {};
  int code = ::fstat(file.get(), &status) == 0 ? 0 : errno;
  for (off64_t at = 0; at < status.st_size && code == 0; at += kChecksumBytes) {
    if (activity != nullptr) {
      activity->set("sync checkpoint", "the MiB from " + std::to_string(at >> 20));
    }
    const bool done = ::sync_file_range(file.get(), at, kChecksumBytes,
                                        SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE |
                                            SYNC_FILE_RANGE_WAIT_AFTER) == 0;
    // Not every file system has ranges.
    if (!done && (errno == EINVAL || errno == ENOSYS || errno == ESPIPE)) break;
    if (!done && errno != EINTR) code = errno;
  }
  if (code == 0) code = sync_file(file.get());
  if (code != 0) throw checkpoint_error(file.path(), "written", code);
}

// Makes sure that `bytes` fit in the file, without changing its size.
void reserve(const OpenFile& file, std::int64_t bytes) {
  const auto lack = [&](const std::string& why) {
    throw Error(ExitCode::kCheckpoint, "checkpoint " + file.path() + " needs " +
                                           std::to_string(bytes) +
                                           " bytes, which can't be had: " + why);
  };
  // fallocate that keeps the size doesn't look at this limit, writing does.
  rlimit limit = {};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY &&
      limit.rlim_cur < static_cast<rlim_t>(bytes)) {
    lack("the limit on a file's size is " + std::to_string(limit.rlim_cur) +
         "; raise it (ulimit -f)");
  }
  int result = 0;
  do {
    result = ::fallocate(file.get(), FALLOC_FL_KEEP_SIZE, 0, bytes);
  } while (result != 0 && errno == EINTR);
  if (result == 0) return;
  if (errno != EOPNOTSUPP && errno != ENOSYS) lack(disk_reason(errno));
  struct statvfs space = {};
  if (::fstatvfs(file.get(), &space) == 0 &&
      static_cast<std::int64_t>(space.f_bavail) * static_cast<std::int64_t>(space.f_frsize) <
          bytes) {
    lack(disk_reason(ENOSPC));
  }
}

// Runs `work` on rank 0; its error is thrown on all ranks.
template <class Work>
void on_first_rank(Communicator& communicator, const char* unit, const Work& work) {
  std::string error;
  if (communicator.rank() == 0) {
    try {
      work();
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  communicator.broadcast(unit, error, 0);
  if (!error.empty()) throw Error(ExitCode::kCheckpoint, error);
}

// A checkpoint's file but for the bytes of its f32 arrays. Made in memory by rank 0.
class Structure {
 public:
  Structure(const CheckpointMeta& meta, const std::vector<const CheckpointArray*>& arrays,
            const std::vector<std::vector<std::uint32_t>>& checksums) {
    const Handle create(H5Pcreate(H5P_FILE_CREATE), H5Pclose);
    require(H5Pset_obj_track_times(create.get(), false) >= 0, "set up");
    const Handle access = memory_.access();
    require(H5Pset_libver_bounds(access.get(), H5F_LIBVER_V110, H5F_LIBVER_V110) >= 0, "set up");
    file_ = Handle(H5Fcreate("checkpoint", H5F_ACC_TRUNC, create.get(), access.get()), H5Fclose);
    require(file_.valid(), "created");

    std::set<std::string> groups{"params", "adamw", "state", "meta", "meta/checksums"};
    const auto add_groups = [&](const std::string& array) {
      for (std::size_t slash = array.find('/'); slash != std::string::npos;
           slash = array.find('/', slash + 1)) {
        groups.insert(array.substr(0, slash));
      }
    };
    for (const CheckpointArray* array : arrays) {
      add_groups(array->name);
      add_groups("meta/checksums/" + array->name);
    }
    if (!meta.state.empty()) add_groups("meta/checksums/state/");
    const Handle group_create(H5Pcreate(H5P_GROUP_CREATE), H5Pclose);
    // Many links and attributes would otherwise go into heaps, which no checksum guards, and HDF5
    // trusts what it finds there as far as to crash. In a group's header one does.
    constexpr unsigned kMost = 65535;
    require(H5Pset_obj_track_times(group_create.get(), false) >= 0 &&
                H5Pset_link_phase_change(group_create.get(), kMost, kMost) >= 0 &&
                H5Pset_attr_phase_change(group_create.get(), kMost, kMost) >= 0,
            "set up");
    for (const std::string& group : groups) {
      const Handle made(
          H5Gcreate2(file_.get(), group.c_str(), H5P_DEFAULT, group_create.get(), H5P_DEFAULT),
          H5Gclose);
      require(made.valid(), "extended by group " + group);
    }

    data_create_ = Handle(H5Pcreate(H5P_DATASET_CREATE), H5Pclose);
    require(H5Pset_obj_track_times(data_create_.get(), false) >= 0 &&
                H5Pset_layout(data_create_.get(), H5D_CONTIGUOUS) >= 0 &&
                H5Pset_alloc_time(data_create_.get(), H5D_ALLOC_TIME_EARLY) >= 0 &&
                H5Pset_fill_time(data_create_.get(), H5D_FILL_TIME_NEVER) >= 0,
            "set up");
    for (const CheckpointArray* array : arrays) {
      Handle dataset = add(array->name, H5T_IEEE_F32LE, array->shape);
      const haddr_t place = H5Dget_offset(dataset.get());
      require(dataset.close() && (place != HADDR_UNDEF || array->shape.count() == 0),
              "extended by array " + array->name);
      places_.push_back(static_cast<std::int64_t>(place));
    }
    for (const auto& [name, value] : meta.state) {
      write("state/" + name, H5T_STD_I64LE, Shape{}, H5T_NATIVE_INT64, &value);
    }
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      write("meta/checksums/" + arrays[i]->name, H5T_STD_U32LE,
            Shape{static_cast<std::int64_t>(checksums[i].size())}, H5T_NATIVE_UINT32,
            checksums[i].data());
    }
    for (const auto& [name, value] : meta.state) {
      const std::uint32_t checksum = hdf5::crc_of(0, &value, sizeof(value));
      write("meta/checksums/state/" + name, H5T_STD_U32LE, Shape{1}, H5T_NATIVE_UINT32, &checksum);
    }
    write_attributes(meta);
    require(file_.close(), "closed");
  }
  // The byte of the file at which each array starts.
  const std::vector<std::int64_t>& places() const { return places_; }

  // Throws where it can't be written.
  void copy_to(const OpenFile& file) const {
    int code = ::ftruncate(file.get(), memory_.bytes()) == 0 ? 0 : errno;
    for (const auto& [at, content] : memory_.stretches()) {
      if (code == 0) code = file.write(content.data(), std::ssize(content), at);
    }
    if (code != 0) throw checkpoint_error(file.path(), "written", code);
  }

 private:
  static void require(bool done, const std::string& what) {
    if (done) return;
    throw Error(ExitCode::kCheckpoint, "checkpoint: its structure can't be " + what +
                                           " in memory by HDF5: " + hdf5::reason());
  }

  Handle add(const std::string& name, hid_t type, const Shape& shape) const {
    const Handle space = hdf5::space_of(shape);
    Handle dataset(H5Dcreate2(file_.get(), name.c_str(), type, space.get(), H5P_DEFAULT,
                              data_create_.get(), H5P_DEFAULT),
                   H5Dclose);
    require(dataset.valid(), "extended by array " + name);
    return dataset;
  }

  void write(const std::string& name, hid_t type, const Shape& shape, hid_t type_in_memory,
             const void* values) const {
    Handle dataset = add(name, type, shape);
    require(H5Dwrite(dataset.get(), type_in_memory, H5S_ALL, H5S_ALL, H5P_DEFAULT, values) >= 0 &&
                dataset.close(),
            "written at array " + name);
  }

  void write_attributes(const CheckpointMeta& meta) const {
    const Handle group(H5Gopen2(file_.get(), "meta", H5P_DEFAULT), H5Gclose);
    const Handle scalar(H5Screate(H5S_SCALAR), H5Sclose);
    std::map<std::string, std::int64_t> numbers = meta.numbers;
    numbers["format_version"] = kCheckpointFormat;
    numbers["step"] = meta.step;
    for (const auto& [name, number] : numbers) {
      const Handle attribute(H5Acreate2(group.get(), name.c_str(), H5T_STD_I64LE, scalar.get(),
                                        H5P_DEFAULT, H5P_DEFAULT),
                             H5Aclose);
      require(attribute.valid() && H5Awrite(attribute.get(), H5T_NATIVE_INT64, &number) >= 0,
              "extended by /meta/" + name);
    }
    for (const auto& [name, text] : meta.texts) {
      const Handle type(H5Tcopy(H5T_C_S1), H5Tclose);
      require(H5Tset_size(type.get(), text.size() + 1) >= 0 &&
                  H5Tset_cset(type.get(), H5T_CSET_UTF8) >= 0,
              "set up");
      const Handle attribute(
          H5Acreate2(group.get(), name.c_str(), type.get(), scalar.get(), H5P_DEFAULT, H5P_DEFAULT),
          H5Aclose);
      require(attribute.valid() && H5Awrite(attribute.get(), type.get(), text.c_str()) >= 0,
              "extended by /meta/" + name);
    }
  }

  hdf5::MemoryFile memory_;
  Handle file_, data_create_;
  std::vector<std::int64_t> places_;
};

// Each rank for itself: its parts of the arrays, which start at the bytes `places` of the file.
void write_arrays(const Communicator& communicator, const OpenFile& file,
                  const std::vector<const CheckpointArray*>& arrays,
                  const std::vector<std::int64_t>& places, std::int64_t transfer_bytes) {
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    for (const CheckpointArray::Part& part : transfers(*arrays[i], transfer_bytes)) {
      if (communicator.activity() != nullptr) {
        communicator.activity()->set("write checkpoint",
                                     arrays[i]->name + " from " + std::to_string(part.begin));
      }
      const int code = file.write(part.data, (part.end - part.begin) * kElement,
                                  places[i] + part.begin * kElement);
      if (code == 0) continue;
      throw checkpoint_error(file.path(),
                             "written at array " + arrays[i]->name + " by rank " +
                                 std::to_string(communicator.rank()) + " on " + communicator.host(),
                             code);
    }
  }
}

// What is to be the same on all ranks, for creation is collective with identical arguments.
std::uint32_t description(const std::string& folder, const CheckpointMeta& meta,
                          const std::vector<const CheckpointArray*>& arrays) {
  std::ostringstream text;
  text << folder << ' ' << meta.step << '\n';
  for (const auto& [name, number] : meta.numbers) text << name << ' ' << number << '\n';
  for (const auto& [name, value] : meta.texts) text << name << ' ' << value << '\n';
  for (const auto& [name, number] : meta.state) text << name << ' ' << number << '\n';
  for (const CheckpointArray* array : arrays) {
    text << array->name << ' ' << array->shape.to_string() << '\n';
  }
  const std::string all = text.str();
  return hdf5::crc_of(0, all.data(), static_cast<std::int64_t>(all.size()));
}

std::int64_t bytes_needed(const CheckpointMeta& meta,
                          const std::vector<const CheckpointArray*>& arrays) {
  std::int64_t bytes = 1 << 20;
  for (const CheckpointArray* array : arrays) {
    const std::int64_t data = array->shape.count() * kElement;
    const std::int64_t checksums = (data / kChecksumBytes + 1) * 4;
    bytes +=
        data + checksums + 2 * (kBytesPerObject + static_cast<std::int64_t>(array->name.size()));
  }
  bytes += static_cast<std::int64_t>(meta.state.size() + meta.numbers.size()) * 2 * kBytesPerObject;
  for (const auto& [name, text] : meta.texts) {
    bytes += 2 * static_cast<std::int64_t>(text.size()) + kBytesPerObject;
  }
  return bytes;
}

// The step of "step-00000100.h5" or, with `partial`, of a leftover: its .partial, or one of the
// files that Open MPI puts beside that while it is open.
std::optional<std::int64_t> step_of(const std::string& name, bool& partial) {
  constexpr const char* kPrefix = "step-";
  std::string stem = name.substr(0, name.find(kPartial));
  partial = stem.size() < name.size();
  if (!stem.starts_with(kPrefix) || !stem.ends_with(".h5")) return std::nullopt;
  stem = stem.substr(std::strlen(kPrefix), stem.size() - std::strlen(kPrefix) - 3);
  if (stem.empty() || stem.size() > 18 ||
      stem.find_first_not_of("0123456789") != std::string::npos) {
    return std::nullopt;
  }
  return std::stoll(stem);
}

// Calls `work` with the path, the step and whether it is a leftover, for each checkpoint of a
// folder; not at all when there is no such folder.
template <class Work>
void for_each_checkpoint(const std::string& folder, const Work& work) {
  std::error_code error;
  for (fs::directory_iterator at(folder, error), end; !error && at != end; at.increment(error)) {
    bool partial = false;
    const std::optional<std::int64_t> step = step_of(at->path().filename().string(), partial);
    if (step) work(at->path().string(), *step, partial);
  }
  if (error && error.value() != ENOENT) throw checkpoint_error(folder, "listed", error.value());
}

// What saves that were cut short left takes room, and is of no use.
void remove_leftovers(const std::string& folder) {
  std::vector<std::string> leftovers;
  for_each_checkpoint(folder, [&](const std::string& path, std::int64_t, bool partial) {
    if (partial) leftovers.push_back(path);
  });
  for (const std::string& path : leftovers) {
    if (::unlink(path.c_str()) != 0) throw checkpoint_error(path, "removed", errno);
  }
}

std::vector<std::string> f32_arrays(const hdf5::CheckpointFile& file) {
  std::vector<std::string> arrays;
  for (const char* group : {"params", "adamw", "state"}) {
    for (const std::string& array : file.arrays(group)) {
      if (!file.is_number(array)) arrays.push_back(array);
    }
  }
  return arrays;
}
std::vector<std::string> state_numbers(const hdf5::CheckpointFile& file) {
  std::vector<std::string> numbers = file.arrays("state");
  std::erase_if(numbers, [&](const std::string& array) { return !file.is_number(array); });
  return numbers;
}

// Structure only: every array has checksums of the right number, and the other way round.
CheckpointMeta check_structure(const hdf5::CheckpointFile& file) {
  CheckpointMeta meta = file.meta();
  for (const std::string& array : f32_arrays(file)) {
    file.checksums(array, file.shape(array).count() * kElement);
  }
  const std::string sums = "meta/checksums/";
  for (const std::string& name : file.arrays("meta/checksums")) {
    const std::string array = name.substr(sums.size());
    if (!file.has(array)) {
      throw Error(ExitCode::kCheckpoint, "checkpoint " + file.path() + ": has no array " + array +
                                             ", but its checksums: it was taken out");
    }
  }
  return meta;
}

void pause(const CheckpointOptions& options) { std::this_thread::sleep_for(options.pause); }

// Collective. The whole file, on the disk, but under a name that isn't final. Throws the same on
// all ranks.
void write_partial(Communicator& communicator, const std::string& path, const CheckpointMeta& meta,
                   const std::vector<const CheckpointArray*>& arrays,
                   const std::vector<std::vector<std::uint32_t>>& checksums,
                   const CheckpointOptions& options) {
  on_first_rank(communicator, "checkpoint space", [&] {
    // The file's size stays 0, so that nothing is cut off and the space stays reserved.
    reserve(OpenFile(path, O_CREAT | O_TRUNC | O_WRONLY), bytes_needed(meta, arrays));
  });
  pause(options);
  std::vector<std::int64_t> places(arrays.size());
  on_first_rank(communicator, "checkpoint structure", [&] {
    const Structure structure(meta, arrays, checksums);
    structure.copy_to(OpenFile(path, O_WRONLY));
    places = structure.places();
  });
  communicator.broadcast("checkpoint structure", std::as_writable_bytes(std::span(places)), 0);
  pause(options);
  std::string error;
  try {
    const OpenFile file(path, O_WRONLY);
    write_arrays(communicator, file, arrays, places, options.transfer_bytes);
    pause(options);
    sync_checkpoint(file, communicator.activity());
  } catch (const Error& caught) {
    error = caught.what();
  }
  communicator.agree("checkpoint", ExitCode::kCheckpoint, error);
  pause(options);
  on_first_rank(communicator, "checkpoint structure", [&] {
    // What HDF5 made by itself is read back.
    if (check_structure(hdf5::CheckpointFile(path)) != meta) {
      throw Error(ExitCode::kCheckpoint, "checkpoint " + path +
                                             " doesn't say what was written; check the disk and "
                                             "start again");
    }
    const OpenFile file(path, O_WRONLY);
    struct stat status = {};
    // Gives back what was reserved past the end.
    if (::fstat(file.get(), &status) != 0 || ::ftruncate(file.get(), status.st_size) != 0) {
      throw checkpoint_error(path, "closed", errno);
    }
    sync_checkpoint(file, communicator.activity());
  });
}

}  // namespace

std::string checkpoint_name(std::int64_t step) {
  std::array<char, 48> name{};
  std::snprintf(name.data(), name.size(), "step-%08lld.h5", static_cast<long long>(step));
  return name.data();
}

std::string write_checkpoint(Communicator& communicator, const std::string& folder,
                             const CheckpointMeta& meta, std::span<const CheckpointArray> arrays,
                             const CheckpointOptions& options) {
  hdf5::silence();
  const std::vector<const CheckpointArray*> order = sorted(arrays);
  std::string path = (fs::path(folder) / checkpoint_name(meta.step)).string();
  const std::string partial = path + kPartial;
  const std::int64_t same = description(folder, meta, order);
  TESSERA_CHECK(communicator.all_reduce("checkpoint arguments", Reduction::kMin, same) ==
                communicator.all_reduce("checkpoint arguments", Reduction::kMax, same));

  std::vector<Fragment> fragments;
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (const CheckpointArray::Part& part : order[i]->parts) {
      add_fragments(static_cast<std::int64_t>(i), part, fragments);
    }
  }
  const std::vector<std::vector<std::uint32_t>> checksums =
      join(communicator, path, order, fragments);

  on_first_rank(communicator, "checkpoint space", [&] {
    std::error_code error;
    fs::create_directories(folder, error);
    if (error) throw checkpoint_error(folder, "made", error.value());
    remove_leftovers(folder);
  });
  try {
    write_partial(communicator, partial, meta, order, checksums, options);
    pause(options);
    on_first_rank(communicator, "checkpoint rename", [&] {
      if (::rename(partial.c_str(), path.c_str()) != 0) {
        throw checkpoint_error(path, "put in place", errno);
      }
      sync_folder(folder);
    });
  } catch (const Error&) {
    // All ranks are here. It takes room that may be what is lacking.
    if (communicator.rank() == 0) ::unlink(partial.c_str());
    throw;
  }
  return path;
}

void read_checkpoint(Communicator& communicator, const std::string& path,
                     std::span<const CheckpointArray> arrays) {
  const std::vector<const CheckpointArray*> order = sorted(arrays);
  std::vector<Fragment> fragments;
  std::vector<std::vector<std::uint32_t>> stored;
  std::string error;
  try {
    const hdf5::CheckpointFile file(path);
    for (std::size_t i = 0; i < order.size(); ++i) {
      const CheckpointArray& array = *order[i];
      if (communicator.activity() != nullptr) {
        communicator.activity()->set("read checkpoint", array.name);
      }
      const Shape saved = file.shape(array.name);
      if (saved != array.shape) {
        throw Error(ExitCode::kCheckpoint, "checkpoint " + path + ": array " + array.name +
                                               " has shape " + saved.to_string() +
                                               ", the run's has " + array.shape.to_string());
      }
      const CheckpointOptions options;
      for (const CheckpointArray::Part& part : transfers(array, options.transfer_bytes)) {
        file.read(array.name, part.begin, part.end, part.data);
      }
      for (const CheckpointArray::Part& part : array.parts) {
        add_fragments(static_cast<std::int64_t>(i), part, fragments);
      }
      stored.push_back(file.checksums(array.name, array.shape.count() * kElement));
    }
  } catch (const Error& caught) {
    error = caught.what();
  }
  communicator.agree("checkpoint", ExitCode::kCheckpoint, error);
  const std::vector<std::vector<std::uint32_t>> found = join(communicator, path, order, fragments);
  for (std::size_t i = 0; i < order.size(); ++i) {
    for (std::size_t piece = 0; piece < found[i].size(); ++piece) {
      if (found[i][piece] == stored[i][piece]) continue;
      error = damaged(path, array_at(order[i]->name,
                                     static_cast<std::int64_t>(piece) * kChecksumElements) +
                                " or in the 16 MiB from there")
                  .what();
      break;
    }
    if (!error.empty()) break;
  }
  communicator.agree("checkpoint", ExitCode::kCheckpoint, error);
}

CheckpointMeta read_checkpoint_meta(const std::string& path) {
  return hdf5::CheckpointFile(path).meta();
}

std::vector<std::string> checkpoint_parameters(const std::string& path) {
  const hdf5::CheckpointFile file(path);
  std::vector<std::string> arrays = f32_arrays(file);
  std::erase_if(arrays, [](const std::string& array) { return array.starts_with("adamw/"); });
  return arrays;
}

std::vector<CheckpointEntry> list_checkpoints(const std::string& folder) {
  std::vector<CheckpointEntry> entries;
  for_each_checkpoint(folder, [&](const std::string& path, std::int64_t step, bool partial) {
    CheckpointEntry entry;
    entry.path = path;
    entry.step = step;
    std::error_code no_size;
    const auto size = fs::file_size(path, no_size);
    if (!no_size) entry.bytes = static_cast<std::int64_t>(size);
    if (partial) {
      entry.fault = "a save that was cut short";
    } else {
      try {
        const CheckpointMeta meta = check_structure(hdf5::CheckpointFile(entry.path));
        const auto tokens = meta.numbers.find("tokens");
        if (tokens != meta.numbers.end()) entry.tokens = tokens->second;
        if (meta.step != step) entry.fault = "its own step is " + std::to_string(meta.step);
      } catch (const Error& caught) {
        entry.fault = caught.what();
      }
    }
    entries.push_back(std::move(entry));
  });
  std::sort(entries.begin(), entries.end(), [](const CheckpointEntry& a, const CheckpointEntry& b) {
    return a.step != b.step ? a.step > b.step : a.path < b.path;
  });
  return entries;
}

Retired apply_retention(const std::string& folder, const Retention& retention) {
  TESSERA_CHECK(retention.keep_last >= 1);
  Retired retired;
  std::int64_t usable = 0;
  for (const CheckpointEntry& entry : list_checkpoints(folder)) {
    if (!entry.fault.empty()) continue;
    const auto& archive = retention.archive_steps;
    const bool kept = usable++ < retention.keep_last ||
                      std::find(archive.begin(), archive.end(), entry.step) != archive.end() ||
                      (retention.keep_every > 0 && entry.step % retention.keep_every == 0);
    if (kept) continue;
    if (::unlink(entry.path.c_str()) == 0) {
      retired.deleted.push_back(entry.path);
    } else {
      retired.faults.emplace_back(checkpoint_error(entry.path, "deleted", errno).what());
    }
  }
  return retired;
}

std::vector<std::string> verify_checkpoint(const std::string& path) {
  std::vector<std::string> faults;
  const auto attempt = [&](const auto& work) {
    try {
      work();
    } catch (const Error& error) {
      // What stops the reading of /meta may be met again.
      if (std::find(faults.begin(), faults.end(), error.what()) == faults.end()) {
        faults.emplace_back(error.what());
      }
    }
  };
  attempt([&] {
    const hdf5::CheckpointFile file(path);
    attempt([&] { check_structure(file); });
    std::vector<float> piece;
    for (const std::string& array : f32_arrays(file)) {
      attempt([&] {
        const std::int64_t count = file.shape(array).count();
        const std::vector<std::uint32_t> sums = file.checksums(array, count * kElement);
        for (std::int64_t begin = 0; begin < count; begin += kChecksumElements) {
          const std::int64_t end = std::min(count, begin + kChecksumElements);
          piece.resize(static_cast<std::size_t>(end - begin));
          file.read(array, begin, end, piece.data());
          if (hdf5::crc_of(0, piece.data(), (end - begin) * kElement) !=
              sums[static_cast<std::size_t>(begin / kChecksumElements)]) {
            throw damaged(path, array_at(array, begin) + " or in the 16 MiB from there");
          }
        }
      });
    }
    for (const std::string& array : state_numbers(file)) attempt([&] { file.read_state(array); });
  });
  return faults;
}

namespace {

std::string hexadecimal(float value) {
  std::array<char, 48> text{};
  std::snprintf(text.data(), text.size(), "%a", static_cast<double>(value));
  return text.data();
}

std::optional<CheckpointDifference> diff_array(const hdf5::CheckpointFile& a,
                                               const hdf5::CheckpointFile& b,
                                               const std::string& array) {
  if (array.starts_with("state/") && a.is_number(array) && b.is_number(array)) {
    const std::int64_t first = a.read_state(array);
    const std::int64_t second = b.read_state(array);
    if (first == second) return std::nullopt;
    return CheckpointDifference{
        array, {}, std::to_string(first) + " against " + std::to_string(second)};
  }
  const Shape shape = a.shape(array);
  if (b.shape(array) != shape) {
    return CheckpointDifference{
        array, {}, "shape " + shape.to_string() + " against " + b.shape(array).to_string()};
  }
  std::vector<float> first, second;
  for (std::int64_t begin = 0; begin < shape.count(); begin += kChecksumElements) {
    const std::int64_t end = std::min(shape.count(), begin + kChecksumElements);
    const auto count = static_cast<std::size_t>(end - begin);
    first.resize(count);
    second.resize(count);
    a.read(array, begin, end, first.data());
    b.read(array, begin, end, second.data());
    for (std::size_t i = 0; i < count; ++i) {
      // Bits, so that NaN equals itself and -0 doesn't equal 0.
      if (std::bit_cast<std::uint32_t>(first[i]) == std::bit_cast<std::uint32_t>(second[i]))
        continue;
      std::int64_t flat = begin + static_cast<std::int64_t>(i);
      std::vector<std::int64_t> index(static_cast<std::size_t>(shape.rank()));
      for (int axis = shape.rank() - 1; axis >= 0; --axis) {
        index[static_cast<std::size_t>(axis)] = flat % shape[axis];
        flat /= shape[axis];
      }
      return CheckpointDifference{array, std::move(index),
                                  hexadecimal(first[i]) + " against " + hexadecimal(second[i])};
    }
  }
  return std::nullopt;
}

}  // namespace

std::optional<CheckpointDifference> diff_checkpoints(const std::string& a, const std::string& b) {
  const hdf5::CheckpointFile first(a);
  const hdf5::CheckpointFile second(b);
  first.meta();
  second.meta();
  for (const char* group : {"params", "adamw", "state"}) {
    const std::vector<std::string> of_first = first.arrays(group);
    const std::vector<std::string> of_second = second.arrays(group);
    std::set<std::string> names(of_first.begin(), of_first.end());
    names.insert(of_second.begin(), of_second.end());
    for (const std::string& array : names) {
      if (!first.has(array)) return CheckpointDifference{array, {}, "missing in " + a};
      if (!second.has(array)) return CheckpointDifference{array, {}, "missing in " + b};
      std::optional<CheckpointDifference> difference = diff_array(first, second, array);
      if (difference) return difference;
    }
  }
  return std::nullopt;
}

}  // namespace tessera
