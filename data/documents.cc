#include "data/documents.h"

#include <fcntl.h>
#include <fnmatch.h>
#include <unistd.h>
#include <zlib.h>
#include <zstd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>

#include "data/sha256.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;
constexpr std::size_t kChunk = std::size_t{1} << 18;

[[noreturn]] void fail(const std::string& what) { throw Error(ExitCode::kData, what); }

bool ends_with(const std::string& text, const std::string& end) {
  return text.size() >= end.size() && text.compare(text.size() - end.size(), end.size(), end) == 0;
}

std::vector<std::string> split_path(const std::string& path) {
  std::vector<std::string> parts;
  std::size_t begin = 0;
  while (true) {
    const std::size_t end = path.find('/', begin);
    parts.push_back(path.substr(begin, end == std::string::npos ? end : end - begin));
    if (end == std::string::npos) return parts;
    begin = end + 1;
  }
}

bool has_wildcard(const std::string& part) {
  return part.find_first_of("*?[\\") != std::string::npos;
}

std::vector<std::string> list_glob(const std::string& root, const std::string& glob) {
  const std::string prefix = fixed_prefix(glob);
  const fs::path start = prefix.empty() ? fs::path(root) : fs::path(root) / prefix;
  std::vector<std::string> found;
  std::error_code error;
  if (fs::is_regular_file(start, error)) {
    if (prefix == glob) found.push_back(glob);
    return found;
  }
  if (!fs::is_directory(start, error)) return found;
  fs::recursive_directory_iterator it(start, error);
  for (const fs::recursive_directory_iterator end; !error && it != end; it.increment(error)) {
    std::error_code none;
    const fs::file_status status = it->status(none);
    if (fs::is_directory(status)) continue;
    const std::string below = it->path().lexically_relative(start).string();
    const std::string path = prefix.empty() ? below : prefix + "/" + below;
    if (!glob_matches(glob, path)) continue;
    if (!fs::exists(status)) fail(it->path().string() + ": is a link to a file that isn't there");
    if (fs::is_regular_file(status)) found.push_back(path);
  }
  if (error) fail(start.string() + ": cannot be listed: " + error.message());
  std::sort(found.begin(), found.end());
  return found;
}

// Picks one string out of an object, without building the rest.
class TextField : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit TextField(const std::string& field) : field_(field) {}

  bool null() override { return other(); }
  bool boolean(bool /*value*/) override { return other(); }
  bool number_integer(number_integer_t /*value*/) override { return other(); }
  bool number_unsigned(number_unsigned_t /*value*/) override { return other(); }
  bool number_float(number_float_t /*value*/, const string_t& /*text*/) override { return other(); }
  bool binary(binary_t& /*value*/) override { return other(); }
  bool string(string_t& value) override {
    if (wanted()) {
      found_ = true;
      text_ = std::move(value);
    }
    return true;
  }
  bool start_object(std::size_t /*elements*/) override {
    other();
    if (depth_ == 0) object_ = true;
    ++depth_;
    return true;
  }
  bool end_object() override {
    --depth_;
    return true;
  }
  bool start_array(std::size_t /*elements*/) override {
    other();
    ++depth_;
    return true;
  }
  bool end_array() override {
    --depth_;
    return true;
  }
  bool key(string_t& value) override {
    if (depth_ == 1) in_field_ = value == field_;
    return true;
  }
  bool parse_error(std::size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) override {
    constexpr int kNumberOutOfRange = 406;
    fault_ = error.id == kNumberOutOfRange ? "holds a number beyond a double's range"
                                           : "is not valid JSON in UTF-8";
    fault_ += ", at byte " + std::to_string(position);
    return false;
  }

  std::optional<std::string> text(bool parsed, std::string& why) {
    if (!parsed) {
      why = fault_;
      return std::nullopt;
    }
    if (!found_) {
      why = !object_ ? "is not a JSON object"
            : seen_  ? "\"" + field_ + "\" is not a string"
                     : "has no \"" + field_ + "\"";
      return std::nullopt;
    }
    return std::move(text_);
  }

 private:
  bool wanted() {
    const bool yes = depth_ == 1 && object_ && in_field_;
    seen_ = seen_ || yes;
    return yes;
  }
  bool other() {
    if (wanted()) found_ = false;  // of a key that stands twice the last one counts
    return true;
  }

  const std::string& field_;
  std::int64_t depth_ = 0;
  bool object_ = false;
  bool in_field_ = false;
  bool seen_ = false;
  bool found_ = false;
  std::string fault_;
  std::string text_;
};

}  // namespace

std::string fixed_prefix(const std::string& glob) {
  std::string prefix;
  for (const std::string& part : split_path(glob)) {
    if (has_wildcard(part)) break;
    prefix += (prefix.empty() ? "" : "/") + part;
  }
  return prefix;
}

bool glob_matches(const std::string& glob, const std::string& path) {
  const std::vector<std::string> pattern = split_path(glob);
  const std::vector<std::string> parts = split_path(path);
  const std::size_t n = parts.size();
  // reached[i]: the pattern so far matches the first i parts.
  std::vector<bool> reached(n + 1, false);
  reached[0] = true;
  for (std::size_t g = 0; g < pattern.size(); ++g) {
    std::vector<bool> next(n + 1, false);
    for (std::size_t i = 0; i <= n; ++i) {
      if (pattern[g] == "**") {
        next[i] = next[i] || reached[i];
        if (next[i] && i < n && parts[i][0] != '.') next[i + 1] = true;
      } else if (reached[i] && i < n) {
        next[i + 1] = ::fnmatch(pattern[g].c_str(), parts[i].c_str(), FNM_PERIOD) == 0;
      }
    }
    reached = std::move(next);
  }
  if (pattern.back() == "**") return reached[n];
  if (reached[n]) return true;
  if (has_wildcard(pattern.back())) return false;
  for (std::size_t i = n; i-- > 0;) {
    if (parts[i][0] == '.') return false;
    if (reached[i] && i > 0) return true;
  }
  return false;
}

std::vector<std::string> list_sources(const std::string& root, const Component& component) {
  std::error_code error;
  if (!fs::is_directory(root, error)) fail(root + ": is not a folder of sources");
  std::vector<std::string> sources;
  std::set<std::string> taken;
  for (const std::string& glob : component.globs) {
    const std::vector<std::string> found = list_glob(root, glob);
    if (found.empty()) {
      fail("component " + component.name + ": glob \"" + glob + "\" names no file below " + root);
    }
    for (const std::string& path : found) {
      if (taken.insert(path).second) sources.push_back(path);
    }
  }
  return sources;
}

// The file's own bytes, hashed as they pass.
struct SourceFile::Raw {
  explicit Raw(const std::string& name)
      : path(name), descriptor(::open(name.c_str(), O_RDONLY | O_CLOEXEC)) {
    if (descriptor < 0) fail(path + ": cannot be opened: " + std::strerror(errno));
  }
  ~Raw() { ::close(descriptor); }
  Raw(const Raw&) = delete;
  Raw& operator=(const Raw&) = delete;

  std::size_t read(char* out, std::size_t count) {
    ssize_t got = 0;
    do {
      got = ::read(descriptor, out, count);
    } while (got < 0 && errno == EINTR);
    if (got < 0) fail(path + ": cannot be read: " + std::strerror(errno));
    sha.update(out, static_cast<std::size_t>(got));
    bytes += got;
    return static_cast<std::size_t>(got);
  }

  std::string path;
  int descriptor;
  std::int64_t bytes = 0;
  Sha256 sha;
};

class SourceFile::Unpacker {
 public:
  explicit Unpacker(Raw& raw) : raw_(raw), input_(kChunk) {}
  virtual ~Unpacker() = default;
  Unpacker(const Unpacker&) = delete;
  Unpacker& operator=(const Unpacker&) = delete;
  virtual std::size_t read(char* out, std::size_t count) = 0;

 protected:
  [[noreturn]] void damaged(const std::string& what) const {
    throw DamagedArchive(raw_.path,
                         what + " (within the first " + std::to_string(raw_.bytes) + " bytes)");
  }
  Raw& raw_;
  std::vector<char> input_;
};

// One or more gzip members; zeros after the last are padding.
class SourceFile::Gzip : public SourceFile::Unpacker {
 public:
  explicit Gzip(Raw& raw) : Unpacker(raw) {
    constexpr int kGzipOnly = 15 + 16;
    TESSERA_CHECK(inflateInit2(&stream_, kGzipOnly) == Z_OK);
  }
  ~Gzip() override { inflateEnd(&stream_); }

  std::size_t read(char* out, std::size_t count) override {
    stream_.next_out = reinterpret_cast<Bytef*>(out);
    stream_.avail_out = static_cast<uInt>(std::min(count, kChunk));
    const std::size_t room = stream_.avail_out;
    while (stream_.avail_out == room) {
      if (stream_.avail_in == 0) {
        stream_.next_in = reinterpret_cast<Bytef*>(input_.data());
        stream_.avail_in = static_cast<uInt>(raw_.read(input_.data(), input_.size()));
        if (stream_.avail_in == 0) {
          if (inside_ || members_ == 0) damaged("is cut off: its gzip data have no end");
          return 0;
        }
      }
      if (!inside_) {
        while (members_ > 0 && stream_.avail_in > 0 && *stream_.next_in == 0) {
          ++stream_.next_in;
          --stream_.avail_in;
          padding_ = true;
        }
        if (stream_.avail_in == 0) continue;
        if (padding_) damaged("has bytes after its end that aren't gzip data");
        inside_ = true;
      }
      const int result = inflate(&stream_, Z_NO_FLUSH);
      if (result == Z_STREAM_END) {
        inside_ = false;
        ++members_;
        TESSERA_CHECK(inflateReset(&stream_) == Z_OK);
      } else if (result == Z_MEM_ERROR) {
        throw std::bad_alloc();
      } else if (result != Z_OK && result != Z_BUF_ERROR) {
        damaged(std::string("is damaged: not valid gzip data") +
                (stream_.msg != nullptr ? std::string(": ") + stream_.msg : ""));
      }
    }
    return room - stream_.avail_out;
  }

 private:
  z_stream stream_{};
  bool inside_ = false;
  bool padding_ = false;
  std::int64_t members_ = 0;
};

// One or more zstd frames, with windows of up to 2 GiB (zstd --long=31).
class SourceFile::Zstd : public SourceFile::Unpacker {
 public:
  explicit Zstd(Raw& raw) : Unpacker(raw), context_(ZSTD_createDCtx()) {
    TESSERA_CHECK(context_ != nullptr);
    TESSERA_CHECK(!ZSTD_isError(ZSTD_DCtx_setParameter(context_, ZSTD_d_windowLogMax, 31)));
  }
  ~Zstd() override { ZSTD_freeDCtx(context_); }

  std::size_t read(char* out, std::size_t count) override {
    ZSTD_outBuffer output{out, count, 0};
    while (output.pos == 0) {
      if (in_.pos == in_.size && !flushing_) {
        in_ = {input_.data(), raw_.read(input_.data(), input_.size()), 0};
        if (in_.size == 0) {
          if (inside_ || raw_.bytes == 0) damaged("is cut off: its zstd data have no end");
          return 0;
        }
      }
      const std::size_t left = ZSTD_decompressStream(context_, &output, &in_);
      if (ZSTD_isError(left)) {
        damaged(std::string("is damaged: not valid zstd data: ") + ZSTD_getErrorName(left));
      }
      inside_ = left != 0;
      // A full output may hide more of the same input.
      flushing_ = inside_ && output.pos == output.size;
    }
    return output.pos;
  }

 private:
  ZSTD_DCtx* context_;
  ZSTD_inBuffer in_{nullptr, 0, 0};
  bool inside_ = false;
  bool flushing_ = false;
};

SourceFile::SourceFile(const std::string& path) : raw_(std::make_unique<Raw>(path)) {
  if (ends_with(path, ".gz")) unpacker_ = std::make_unique<Gzip>(*raw_);
  if (ends_with(path, ".zst")) unpacker_ = std::make_unique<Zstd>(*raw_);
}

SourceFile::~SourceFile() = default;

std::size_t SourceFile::read(char* out, std::size_t count) {
  return unpacker_ ? unpacker_->read(out, count) : raw_->read(out, count);
}

std::optional<std::string> archive_fault(const std::string& path) {
  if (!ends_with(path, ".gz") && !ends_with(path, ".zst")) return std::nullopt;
  try {
    SourceFile file(path);
    std::vector<char> chunk(kChunk);
    while (file.read(chunk.data(), chunk.size()) > 0) {
    }
  } catch (const DamagedArchive& damaged) {
    return damaged.why();
  }
  return std::nullopt;
}

std::int64_t SourceFile::bytes() const { return raw_->bytes; }

std::string SourceFile::sha256_hex() { return raw_->sha.finish_hex(); }

bool is_jsonl(const std::string& path) {
  return ends_with(path, ".jsonl") || ends_with(path, ".jsonl.gz") || ends_with(path, ".jsonl.zst");
}

void read_records(SourceFile& file, bool jsonl, const std::function<void(Record)>& take) {
  std::vector<char> chunk(kChunk);
  Record record;
  bool pending = !jsonl;  // even an empty file is a record
  record.line = jsonl ? 1 : 0;
  const auto add = [&](const char* begin, std::size_t count) {
    if (!record.fault.empty() ||
        static_cast<std::int64_t>(record.bytes.size() + count) > kLongestRecord) {
      record.fault = "is longer than " + std::to_string(kLongestRecord) + " bytes";
      record.bytes = std::string();
    } else {
      record.bytes.append(begin, count);
    }
  };
  const auto finish = [&] {
    const std::int64_t line = record.line;
    const bool blank = jsonl && record.fault.empty() &&
                       record.bytes.find_first_not_of(" \t\r") == std::string::npos;
    if (!blank) take(std::move(record));
    record = Record{};
    record.line = line + 1;
  };
  while (const std::size_t got = file.read(chunk.data(), chunk.size())) {
    const char* begin = chunk.data();
    const char* const end = begin + got;
    while (jsonl && begin < end) {
      const auto* newline =
          static_cast<const char*>(std::memchr(begin, '\n', static_cast<std::size_t>(end - begin)));
      if (newline == nullptr) break;
      add(begin, static_cast<std::size_t>(newline - begin));
      finish();
      pending = false;
      begin = newline + 1;
    }
    if (begin < end) {
      add(begin, static_cast<std::size_t>(end - begin));
      pending = true;
    }
  }
  if (pending) finish();
}

std::optional<std::string> text_of_json(std::string_view line, const std::string& field,
                                        std::string& why) {
  TextField handler(field);
  const bool parsed = nlohmann::json::sax_parse(line.begin(), line.end(), &handler);
  return handler.text(parsed, why);
}

}  // namespace tessera
