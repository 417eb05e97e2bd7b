// Records of text and JSONL files, plain and packed. The first byte says how: its lowest bit JSONL
// or not, the next two what the rest of the input is: the file's bytes (plain, .gz, .zst), or
// a plan by which a sound packed file is made, which must give back what went in.
#include <zlib.h>
#include <zstd.h>

#include <algorithm>

#include "data/documents.h"
#include "data/sha256.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

namespace {

std::string gzip_member(std::string_view bytes) {
  z_stream stream{};
  fuzz::require(deflateInit2(&stream, 1, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY) == Z_OK,
                "zlib");
  std::string packed(deflateBound(&stream, bytes.size()) + 32, '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  fuzz::require(deflate(&stream, Z_FINISH) == Z_STREAM_END, "zlib");
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string zstd_frame(std::string_view bytes) {
  std::string packed(ZSTD_compressBound(bytes.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), 1));
  return packed;
}

// The records of the file, one after another with their lines.
std::vector<Record> records_of(const char* path, bool jsonl) {
  SourceFile file(path);
  std::vector<Record> records;
  read_records(file, jsonl, [&](Record record) { records.push_back(std::move(record)); });
  fuzz::require(file.sha256_hex() == sha256_of_file(path), "the digest isn't the file's");
  return records;
}

// What read_records says it does, plainly.
void check(const std::vector<Record>& records, std::string_view bytes, bool jsonl) {
  if (!jsonl) {
    fuzz::require(records.size() == 1 && records[0].line == 0 && records[0].bytes == bytes,
                  "a text isn't the file's bytes");
    return;
  }
  std::size_t next = 0;
  std::int64_t number = 0;
  for (const std::string& line : fuzz::split(bytes, '\n')) {
    ++number;
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    fuzz::require(next < records.size() && records[next].line == number &&
                      records[next].bytes == line && records[next].fault.empty(),
                  "a line is missing or another");
    ++next;
  }
  fuzz::require(next == records.size(), "there are more records than lines");
}

}  // namespace

void fuzz::take(std::string_view input) {
  if (input.empty()) return;
  const auto how = static_cast<unsigned char>(input[0]);
  input.remove_prefix(1);
  const bool jsonl = (how & 1) != 0;
  const bool zstd = (how & 2) != 0;
  const char* const packed_name = zstd ? "records.zst" : "records.gz";
  if ((how & 4) != 0) {
    // Each part is a member or frame of its own; making one costs more than reading it.
    constexpr std::size_t kMostParts = 8;
    std::vector<std::string> parts = fuzz::split(input, '\xFF');
    parts.resize(std::min(parts.size(), kMostParts));
    std::string whole, packed;
    for (const std::string& part : parts) {
      whole += part;
      packed += zstd ? zstd_frame(part) : gzip_member(part);
    }
    if (!zstd) packed.append(how >> 4, '\0');  // padding
    fuzz::write_file(packed_name, packed);
    check(records_of(packed_name, jsonl), whole, jsonl);
    // Cut anywhere, it is refused, unless the cut leaves whole members.
    fuzz::write_file(packed_name, std::string_view(packed).substr(0, packed.size() / 2));
    fuzz::accepts({ExitCode::kData}, [&] { records_of(packed_name, jsonl); });
    return;
  }
  fuzz::write_file("records", input);
  check(records_of("records", jsonl), input, jsonl);
  fuzz::write_file(packed_name, input);
  fuzz::accepts({ExitCode::kData}, [&] { records_of(packed_name, jsonl); });
}
