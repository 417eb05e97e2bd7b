// Documents from files: which files a component is made of, and the records in them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "data/recipe.h"

namespace tessera {

// Does a pattern name this path? Both are relative, with '/' between parts. A part of the pattern
// matches as a shell's would (*, ?, [a-z]; a leading dot only by a dot); ** stands for any number
// of folders, or at the end for any file below. A pattern whose last part has no wildcard also
// names everything below the folder of that name.
bool glob_matches(const std::string& glob, const std::string& path);

// The folders before a pattern's first wildcard: where its files are looked for. "" is the root.
std::string fixed_prefix(const std::string& glob);

// Files of `component` below `root`, relative to it: the globs in turn, within each by path
// compared as bytes, every file once. Links to files are followed, links to folders only where a
// glob names them before its first wildcard. Throws Error(kData) for a glob that names nothing, and
// for what can't be listed.
std::vector<std::string> list_sources(const std::string& root, const Component& component);

class DamagedArchive : public Error {
 public:
  DamagedArchive(const std::string& path, const std::string& what)
      : Error(ExitCode::kData, path + ": " + what), what_(what) {}
  const std::string& why() const { return what_; }  // without the path

 private:
  std::string what_;
};

// The bytes of a file, unpacked when its name ends in .gz or .zst. Throws Error(kData), naming the
// file, for one that can't be read, and DamagedArchive for one that is cut off or damaged.
class SourceFile {
 public:
  explicit SourceFile(const std::string& path);
  ~SourceFile();
  SourceFile(const SourceFile&) = delete;
  SourceFile& operator=(const SourceFile&) = delete;
  // Up to `count` bytes; 0 at the end.
  std::size_t read(char* out, std::size_t count);
  // Of the file as it lies there; complete once read() returned 0.
  std::int64_t bytes() const;
  std::string sha256_hex();

 private:
  class Unpacker;
  class Gzip;
  class Zstd;
  std::size_t read_packed(char* out, std::size_t count);

  struct Raw;
  std::unique_ptr<Raw> raw_;
  std::unique_ptr<Unpacker> unpacker_;
};

// What is wrong with an archive (.gz, .zst) that is cut off or damaged; nothing for a whole one and
// for a file of another kind. Unpacks all of it, since damage may show at the very end. Throws
// Error(kData) for a file that can't be read.
std::optional<std::string> archive_fault(const std::string& path);

struct Record {
  std::string bytes;      // of the file, or of the line
  std::int64_t line = 0;  // 1-based; 0 for a whole file
  std::string fault;      // why it can't be used: above kLongestRecord; then `bytes` is empty
};
constexpr std::int64_t kLongestRecord = std::int64_t{1} << 32;

// Does the name say JSONL (.jsonl, .jsonl.gz, .jsonl.zst)? Everything else is text.
bool is_jsonl(const std::string& path);

// Calls `take` for each record in order: the whole file, or every line that isn't blank.
void read_records(SourceFile& file, bool jsonl, const std::function<void(Record)>& take);

// The string under `field` of a JSON object. Empty, with `why` set, when there is none.
std::optional<std::string> text_of_json(std::string_view line, const std::string& field,
                                        std::string& why);

}  // namespace tessera
