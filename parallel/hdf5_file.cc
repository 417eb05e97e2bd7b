#include "parallel/hdf5_file.h"

#include <libdeflate.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>

#include "runtime/error.h"

namespace tessera::hdf5 {

namespace {

struct Box {
  std::array<hsize_t, Shape::kMaxRank> start{};
  std::array<hsize_t, Shape::kMaxRank> count{};
};

// Boxes of the flat range [begin, end) of the sub-array that `box` fixes on the axes before `axis`.
void add_boxes(const Shape& shape, int axis, std::int64_t begin, std::int64_t end, Box box,
               std::vector<Box>& boxes) {
  if (begin == end) return;
  std::int64_t stride = 1;
  for (int a = axis + 1; a < shape.rank(); ++a) stride *= shape[a];
  const auto here = static_cast<std::size_t>(axis);
  const auto inner = [&](std::int64_t index, std::int64_t from, std::int64_t to) {
    Box part = box;
    part.start[here] = static_cast<hsize_t>(index);
    part.count[here] = 1;
    add_boxes(shape, axis + 1, from, to, part, boxes);
  };
  std::int64_t first = begin / stride;
  const std::int64_t last = end / stride;
  if (begin % stride != 0) {
    inner(first, begin % stride, std::min(stride, end - first * stride));
    ++first;
  }
  if (first < last) {
    Box part = box;
    part.start[here] = static_cast<hsize_t>(first);
    part.count[here] = static_cast<hsize_t>(last - first);
    for (int a = axis + 1; a < shape.rank(); ++a) {
      part.start[static_cast<std::size_t>(a)] = 0;
      part.count[static_cast<std::size_t>(a)] = static_cast<hsize_t>(shape[a]);
    }
    boxes.push_back(part);
  }
  if (first <= last && end % stride != 0) inner(last, 0, end % stride);
}

extern "C" herr_t keep_innermost(unsigned, const H5E_error2_t* error, void* text) {
  // The walk goes upward, so the first one is the innermost.
  auto& reason = *static_cast<std::string*>(text);
  if (reason.empty() && error->desc != nullptr) reason = error->desc;
  return 0;
}

extern "C" herr_t keep_dataset(hid_t, const char* name, const H5O_info_t* info, void* names) {
  if (info->type == H5O_TYPE_DATASET)
    static_cast<std::vector<std::string>*>(names)->push_back(name);
  return 0;
}

extern "C" herr_t keep_attribute(hid_t, const char* name, const H5A_info_t*, void* names) {
  static_cast<std::vector<std::string>*>(names)->push_back(name);
  return 0;
}

// HDF5's driver for MemoryFile: H5FD_t first, as every driver's file has it.
struct OpenMemoryFile {
  H5FD_t base{};
  MemoryFile* file = nullptr;
  haddr_t end = 0;  // of what HDF5 has handed out
};

// What a list for access says of it.
struct MemoryAccess {
  MemoryFile* file = nullptr;
};

OpenMemoryFile& of(H5FD_t* file) { return *reinterpret_cast<OpenMemoryFile*>(file); }
const OpenMemoryFile& of(const H5FD_t* file) {
  return *reinterpret_cast<const OpenMemoryFile*>(file);
}

extern "C" H5FD_t* open_memory(const char*, unsigned, hid_t access, haddr_t) {
  auto* opened = new OpenMemoryFile;
  opened->file = static_cast<const MemoryAccess*>(H5Pget_driver_info(access))->file;
  return &opened->base;
}

extern "C" herr_t close_memory(H5FD_t* file) {
  delete &of(file);
  return 0;
}

extern "C" herr_t query_memory(const H5FD_t*, unsigned long* features) {
  *features = H5FD_FEAT_AGGREGATE_METADATA | H5FD_FEAT_AGGREGATE_SMALLDATA |
              H5FD_FEAT_DEFAULT_VFD_COMPATIBLE;
  return 0;
}

extern "C" haddr_t end_of_memory(const H5FD_t* file, H5FD_mem_t) { return of(file).end; }
extern "C" herr_t set_end_of_memory(H5FD_t* file, H5FD_mem_t, haddr_t end) {
  of(file).end = end;
  return 0;
}
extern "C" haddr_t size_of_memory(const H5FD_t* file, H5FD_mem_t) {
  return static_cast<haddr_t>(of(file).file->bytes());
}
extern "C" herr_t truncate_memory(H5FD_t* file, hid_t, hbool_t) {
  of(file).file->resize(static_cast<std::int64_t>(of(file).end));
  return 0;
}

extern "C" herr_t read_memory(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, std::size_t bytes,
                              void* data) {
  of(file).file->read(static_cast<std::int64_t>(at), {static_cast<char*>(data), bytes});
  return 0;
}
extern "C" herr_t write_memory(H5FD_t* file, H5FD_mem_t, hid_t, haddr_t at, std::size_t bytes,
                               const void* data) {
  of(file).file->write(static_cast<std::int64_t>(at), {static_cast<const char*>(data), bytes});
  return 0;
}

hid_t memory_driver() {
  static const hid_t kDriver = [] {
    static H5FD_class_t driver{};
    driver.name = "tessera memory";
    driver.maxaddr = static_cast<haddr_t>(std::numeric_limits<std::int64_t>::max());
    driver.fc_degree = H5F_CLOSE_WEAK;
    driver.fapl_size = sizeof(MemoryAccess);
    driver.open = open_memory;
    driver.close = close_memory;
    driver.query = query_memory;
    driver.get_eoa = end_of_memory;
    driver.set_eoa = set_end_of_memory;
    driver.get_eof = size_of_memory;
    driver.read = read_memory;
    driver.write = write_memory;
    driver.truncate = truncate_memory;
    constexpr H5FD_mem_t kMap[] = H5FD_FLMAP_DICHOTOMY;
    std::copy(std::begin(kMap), std::end(kMap), std::begin(driver.fl_map));
    return H5FDregister(&driver);
  }();
  return kDriver;
}

// What is wrong with the file before HDF5 is let near it; "" where nothing is. The library trusts
// what stands in a file of an older format, where a checksum guards none of it, as far as to crash;
// in ours one guards every header, link and attribute. A file says at byte 28 how long it is (HDF5
// File Format Specification, superblock of version 2 and 3).
std::string fault_of_start(const std::string& path) {
  constexpr std::string_view kSignature("\x89HDF\r\n\x1a\n");
  constexpr std::size_t kVersionAt = 8, kLengthAt = 28;
  constexpr int kVersion = 3;
  std::array<char, kLengthAt + sizeof(std::uint64_t)> head{};
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::string("can't be opened: ") + std::strerror(errno);
  file.read(head.data(), head.size());
  const auto got = static_cast<std::size_t>(file.gcount());
  if (got == 0) return "is empty";
  if (std::string_view(head.data(), kSignature.size()) != kSignature) {
    return "isn't an HDF5 file: damaged at its very start, or never a checkpoint";
  }
  file.clear();
  file.seekg(0, std::ios::end);
  const auto bytes = static_cast<std::uint64_t>(file.tellg());
  if (got < head.size()) return "is truncated: only " + std::to_string(bytes) + " bytes are left";
  if (head[kVersionAt] != kVersion) {
    return "is an HDF5 file of another format than checkpoints have: damaged at its start, or "
           "never a checkpoint";
  }
  std::uint64_t length = 0;
  std::memcpy(&length, head.data() + kLengthAt, sizeof(length));
  if (bytes < length) {
    return "is truncated: only " + std::to_string(bytes) + " of its " + std::to_string(length) +
           " bytes are left";
  }
  if (bytes > length) {
    return "has " + std::to_string(bytes - length) +
           " bytes behind its end, which nobody of ours wrote: truncate -s " +
           std::to_string(length) + " cuts them off";
  }
  return "";
}

}  // namespace

void silence() {
  // Without this a file of another kind would print a stack of C functions.
  H5Eset_auto2(H5E_DEFAULT, nullptr, nullptr);
}

std::string reason() {
  std::string text;
  H5Ewalk2(H5E_DEFAULT, H5E_WALK_UPWARD, keep_innermost, &text);
  for (char& c : text) {
    if (c == '\n') c = ' ';
  }
  return text.empty() ? "no reason given by HDF5" : text;
}

Handle file_access() {
  Handle access(H5Pcreate(H5P_FILE_ACCESS), H5Pclose);
  H5Pset_file_locking(access.get(), false, true);
  return access;
}

Handle MemoryFile::access() {
  Handle access = file_access();
  const MemoryAccess self{this};
  H5Pset_driver(access.get(), memory_driver(), &self);
  return access;
}

void MemoryFile::read(std::int64_t at, std::span<char> data) const {
  std::fill(data.begin(), data.end(), '\0');
  for (std::size_t done = 0; done < data.size();) {
    const std::int64_t within = at % kPage;
    const std::size_t count =
        std::min(data.size() - done, static_cast<std::size_t>(kPage - within));
    const auto page = pages_.find(at - within);
    if (page != pages_.end()) {
      page->second.copy(data.data() + done, count, static_cast<std::size_t>(within));
    }
    done += count;
    at += static_cast<std::int64_t>(count);
  }
}

void MemoryFile::write(std::int64_t at, std::span<const char> data) {
  bytes_ = std::max(bytes_, at + static_cast<std::int64_t>(data.size()));
  while (!data.empty()) {
    const std::int64_t within = at % kPage;
    const std::size_t count = std::min(data.size(), static_cast<std::size_t>(kPage - within));
    std::string& page = pages_[at - within];
    page.resize(kPage);
    page.replace(static_cast<std::size_t>(within), count, data.data(), count);
    data = data.subspan(count);
    at += static_cast<std::int64_t>(count);
  }
}

std::vector<std::pair<std::int64_t, std::string>> MemoryFile::stretches() const {
  std::vector<std::pair<std::int64_t, std::string>> joined;
  for (const auto& [at, page] : pages_) {
    const std::string_view content =
        std::string_view(page).substr(0, static_cast<std::size_t>(std::min(kPage, bytes_ - at)));
    if (!joined.empty() &&
        joined.back().first + static_cast<std::int64_t>(joined.back().second.size()) == at) {
      joined.back().second += content;
    } else {
      joined.emplace_back(at, content);
    }
  }
  return joined;
}

Handle space_of(const Shape& shape) {
  if (shape.rank() == 0) return {H5Screate(H5S_SCALAR), H5Sclose};
  std::array<hsize_t, Shape::kMaxRank> extents{};
  for (int axis = 0; axis < shape.rank(); ++axis) {
    extents[static_cast<std::size_t>(axis)] = static_cast<hsize_t>(shape[axis]);
  }
  return {H5Screate_simple(shape.rank(), extents.data(), nullptr), H5Sclose};
}

bool select_flat(const Handle& space, const Shape& shape, std::int64_t begin, std::int64_t end) {
  if (begin == end) return H5Sselect_none(space.get()) >= 0;
  if (shape.rank() == 0) return H5Sselect_all(space.get()) >= 0;
  std::vector<Box> boxes;
  add_boxes(shape, 0, begin, end, {}, boxes);
  for (std::size_t i = 0; i < boxes.size(); ++i) {
    const H5S_seloper_t how = i == 0 ? H5S_SELECT_SET : H5S_SELECT_OR;
    if (H5Sselect_hyperslab(space.get(), how, boxes[i].start.data(), nullptr, boxes[i].count.data(),
                            nullptr) < 0) {
      return false;
    }
  }
  return true;
}

std::uint32_t crc_of(std::uint32_t before, const void* data, std::int64_t bytes) {
  // The same sum as zlib's, with the CPU's own instructions: zlib's takes longer than the writing.
  return libdeflate_crc32(before, data, static_cast<std::size_t>(bytes));
}

std::uint32_t crc_joined(std::uint32_t first, std::uint32_t second, std::int64_t second_bytes) {
  return static_cast<std::uint32_t>(crc32_combine(first, second, second_bytes));
}

CheckpointFile::CheckpointFile(const std::string& path) : path_(path) {
  silence();
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error)) {
    fail(error ? error.message() : "not a file");
  }
  bytes_ = static_cast<std::int64_t>(std::filesystem::file_size(path, error));
  const std::string fault = fault_of_start(path);
  if (!fault.empty()) fail(fault);
  const Handle access = file_access();
  file_ = Handle(H5Fopen(path.c_str(), H5F_ACC_RDONLY, access.get()), H5Fclose);
  if (!file_.valid()) fail("is damaged: its header can't be read");
}

void CheckpointFile::fail(const std::string& what) const {
  throw Error(ExitCode::kCheckpoint, "checkpoint " + path_ + ": " + what);
}

CheckpointMeta CheckpointFile::meta() const {
  CheckpointMeta meta;
  const Handle group(H5Gopen2(file_.get(), "meta", H5P_DEFAULT), H5Gclose);
  if (!group.valid()) fail("has no /meta, so it isn't a checkpoint of this program");
  std::vector<std::string> names;
  hsize_t from = 0;
  if (H5Aiterate2(group.get(), H5_INDEX_NAME, H5_ITER_INC, &from, keep_attribute, &names) < 0) {
    fail("/meta is damaged: what stands in it can't be listed");
  }
  for (const std::string& name : names) {
    const Handle attribute(H5Aopen(group.get(), name.c_str(), H5P_DEFAULT), H5Aclose);
    const Handle type(H5Aget_type(attribute.get()), H5Tclose);
    const Handle space(H5Aget_space(attribute.get()), H5Sclose);
    if (H5Sget_simple_extent_npoints(space.get()) != 1 ||
        H5Tget_size(type.get()) > static_cast<std::size_t>(bytes_)) {
      fail("/meta/" + name + " is damaged: it isn't one value that the file has room for");
    }
    if (H5Tget_class(type.get()) == H5T_STRING && H5Tis_variable_str(type.get()) == 0) {
      std::string text(H5Tget_size(type.get()), '\0');
      if (H5Aread(attribute.get(), type.get(), text.data()) < 0) {
        fail("/meta/" + name + " is damaged: it can't be read");
      }
      meta.texts[name] = text.substr(0, text.find('\0'));
    } else if (H5Tget_class(type.get()) == H5T_INTEGER) {
      std::int64_t number = 0;
      if (H5Aread(attribute.get(), H5T_NATIVE_INT64, &number) < 0) {
        fail("/meta/" + name + " is damaged: it can't be read");
      }
      meta.numbers[name] = number;
    } else {
      fail("/meta/" + name + " is neither a number nor a text");
    }
  }
  const auto take = [&](const std::string& name) {
    const auto found = meta.numbers.find(name);
    if (found == meta.numbers.end()) fail("has no /meta/" + name);
    const std::int64_t number = found->second;
    meta.numbers.erase(found);
    return number;
  };
  const std::int64_t format = take("format_version");
  if (format != kCheckpointFormat) {
    fail("has format " + std::to_string(format) + ", this program reads " +
         std::to_string(kCheckpointFormat));
  }
  meta.step = take("step");
  for (const std::string& array : arrays("state")) {
    if (!is_number(array)) continue;
    meta.state[array.substr(std::strlen("state/"))] = read_state(array);
  }
  return meta;
}

std::vector<std::string> CheckpointFile::arrays(const std::string& what) const {
  std::vector<std::string> names;
  if (!has(what)) return names;
  const Handle group(H5Gopen2(file_.get(), what.c_str(), H5P_DEFAULT), H5Gclose);
  if (!group.valid() ||
      H5Ovisit(group.get(), H5_INDEX_NAME, H5_ITER_INC, keep_dataset, &names) < 0) {
    fail("/" + what + " is damaged: its arrays can't be listed");
  }
  for (std::string& name : names) name.insert(0, what + "/");
  std::sort(names.begin(), names.end());
  return names;
}

bool CheckpointFile::has(const std::string& array) const {
  // Every group on the way has to exist for the question to be one.
  for (std::size_t slash = array.find('/'); slash != std::string::npos;
       slash = array.find('/', slash + 1)) {
    if (H5Lexists(file_.get(), array.substr(0, slash).c_str(), H5P_DEFAULT) <= 0) return false;
  }
  return H5Lexists(file_.get(), array.c_str(), H5P_DEFAULT) > 0;
}

Handle CheckpointFile::open_array(const std::string& array) const {
  if (!has(array)) fail("has no array " + array);
  Handle data(H5Dopen2(file_.get(), array.c_str(), H5P_DEFAULT), H5Dclose);
  if (!data.valid()) fail("array " + array + " is damaged: its header can't be read");
  return data;
}

Shape CheckpointFile::shape(const std::string& array) const {
  const Handle data = open_array(array);
  const Handle space(H5Dget_space(data.get()), H5Sclose);
  const int rank = H5Sget_simple_extent_ndims(space.get());
  if (rank < 0 || rank > Shape::kMaxRank) {
    fail("array " + array + " has " + std::to_string(rank) + " axes");
  }
  std::array<hsize_t, Shape::kMaxRank> extents{};
  H5Sget_simple_extent_dims(space.get(), extents.data(), nullptr);
  // Below the size of the file no product of extents overflows, and memory for them can be had.
  auto room = static_cast<hsize_t>(bytes_);
  for (int axis = 0; axis < rank; ++axis) {
    const hsize_t extent = extents[static_cast<std::size_t>(axis)];
    if (extent > room) fail("array " + array + " is damaged: it is larger than the file");
    room /= std::max<hsize_t>(extent, 1);
  }
  return Shape(std::vector<std::int64_t>(extents.begin(), extents.begin() + rank));
}

void CheckpointFile::read(const std::string& array, std::int64_t begin, std::int64_t end,
                          float* data) const {
  if (begin == end) return;
  const Handle dataset = open_array(array);
  const Handle type(H5Dget_type(dataset.get()), H5Tclose);
  if (H5Tequal(type.get(), H5T_IEEE_F32LE) <= 0) fail("array " + array + " isn't 32-bit float");
  const Handle file_space(H5Dget_space(dataset.get()), H5Sclose);
  const Handle memory_space = space_of(Shape{end - begin});
  if (!select_flat(file_space, shape(array), begin, end) ||
      H5Dread(dataset.get(), H5T_NATIVE_FLOAT, memory_space.get(), file_space.get(), H5P_DEFAULT,
              data) < 0) {
    fail("array " + array + " is damaged: elements " + std::to_string(begin) + " to " +
         std::to_string(end - 1) + " can't be read");
  }
}

bool CheckpointFile::is_number(const std::string& array) const { return shape(array).rank() == 0; }

std::int64_t CheckpointFile::read_state(const std::string& array) const {
  std::int64_t value = 0;
  const Handle dataset = open_array(array);
  const Handle space(H5Dget_space(dataset.get()), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != 1 ||
      H5Dread(dataset.get(), H5T_NATIVE_INT64, H5S_ALL, H5S_ALL, H5P_DEFAULT, &value) < 0) {
    fail("array " + array + " is damaged: it can't be read as one number");
  }
  if (crc_of(0, &value, sizeof(value)) != checksums(array, sizeof(value))[0]) {
    fail("array " + array + " is damaged: its checksum differs");
  }
  return value;
}

std::vector<std::uint32_t> CheckpointFile::checksums(const std::string& array,
                                                     std::int64_t bytes) const {
  std::vector<std::uint32_t> sums(
      static_cast<std::size_t>((bytes + kChecksumBytes - 1) / kChecksumBytes));
  const std::string name = "meta/checksums/" + array;
  const Handle dataset = open_array(name);
  const Handle space(H5Dget_space(dataset.get()), H5Sclose);
  if (H5Sget_simple_extent_npoints(space.get()) != static_cast<hssize_t>(sums.size()) ||
      H5Dread(dataset.get(), H5T_NATIVE_UINT32, H5S_ALL, H5S_ALL, H5P_DEFAULT, sums.data()) < 0) {
    fail("array " + array + " is damaged: its " + std::to_string(sums.size()) +
         " checksums can't be read");
  }
  return sums;
}

}  // namespace tessera::hdf5
