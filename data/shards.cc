#include "data/shards.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <filesystem>
#include <mutex>
#include <thread>

#include "data/sha256.h"
#include "data/text_format.h"
#include "data/tokenizer.h"

namespace tessera {
namespace {

constexpr std::int64_t kTokenBytes = sizeof(std::uint32_t);
static_assert(std::endian::native == std::endian::little, "shards are little-endian");

[[noreturn]] void fail(const std::string& what) { throw Error(ExitCode::kData, what); }

std::string reason() { return std::strerror(errno); }

// Size of a regular file, or the reason why there is none.
struct Found {
  std::int64_t bytes = -1;
  std::string missing;
};
Found find(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) return {-1, reason()};
  if (!S_ISREG(status.st_mode)) return {-1, "it is not a regular file"};
  return {status.st_size, ""};
}

bool is_plain_name(const std::string& name) {
  return !name.empty() && name[0] != '.' && name.find('/') == std::string::npos;
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

}  // namespace

std::string read_manifest_text(const std::string& path) {
  // One source file of a component takes about 250 bytes.
  constexpr std::int64_t kLargestManifest = std::int64_t{1} << 30;
  return read_text_file(path, ExitCode::kData, "a manifest, which `tessera data build` writes",
                        kLargestManifest);
}

// Descriptors of all shards of a corpus, opened when first read; the one that was used longest ago
// is closed when there are too many.
class ShardFiles {
 public:
  explicit ShardFiles(std::int64_t most) : most_(most) {}
  ~ShardFiles() {
    for (const File& file : files_) {
      if (file.descriptor >= 0) ::close(file.descriptor);
    }
  }
  ShardFiles(const ShardFiles&) = delete;
  ShardFiles& operator=(const ShardFiles&) = delete;

  // Before any read; returns the first one's number.
  std::int64_t add(const std::vector<std::string>& paths) {
    const auto first = static_cast<std::int64_t>(files_.size());
    for (const std::string& path : paths) files_.push_back(File{path});
    return first;
  }

  void read(std::int64_t number, std::int64_t offset, std::int64_t bytes, char* out) {
    const File& file = files_[static_cast<std::size_t>(number)];
    const Use use(*this, number);
    while (bytes > 0) {
      const ssize_t got = ::pread(use.descriptor, out, static_cast<std::size_t>(bytes), offset);
      if (got < 0 && errno == EINTR) continue;
      if (got < 0) fail(file.path + ": cannot be read: " + reason());
      if (got == 0) {
        fail(file.path + ": ends before byte " + std::to_string(offset + bytes) +
             "; it was cut since it was opened");
      }
      offset += got;
      bytes -= got;
      out += got;
    }
  }

 private:
  struct File {
    std::string path;
    int descriptor = -1;
    int users = 0;
    std::uint64_t last_use = 0;
  };

  // Keeps a descriptor open while it is read from.
  struct Use {
    Use(ShardFiles& all, std::int64_t number) : files(all), number(number) {
      descriptor = files.open(number);
    }
    ~Use() { files.close(number); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
    ShardFiles& files;
    std::int64_t number;
    int descriptor = -1;
  };

  int open(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    File& file = files_[static_cast<std::size_t>(number)];
    if (file.descriptor < 0) {
      if (open_ >= most_) close_one();
      file.descriptor = ::open(file.path.c_str(), O_RDONLY | O_CLOEXEC);
      if (file.descriptor < 0) fail(file.path + ": cannot be opened: " + reason());
      ++open_;
    }
    ++file.users;
    file.last_use = ++clock_;
    return file.descriptor;
  }

  void close(std::int64_t number) {
    const std::lock_guard lock(mutex_);
    --files_[static_cast<std::size_t>(number)].users;
  }

  void close_one() {
    File* oldest = nullptr;
    for (File& file : files_) {
      if (file.descriptor < 0 || file.users > 0) continue;
      if (oldest == nullptr || file.last_use < oldest->last_use) oldest = &file;
    }
    if (oldest == nullptr) return;  // all in use: one more than the limit does no harm
    ::close(oldest->descriptor);
    oldest->descriptor = -1;
    --open_;
  }

  const std::int64_t most_;
  std::vector<File> files_;
  std::mutex mutex_;
  std::int64_t open_ = 0;
  std::uint64_t clock_ = 0;
};

std::shared_ptr<ShardFiles> make_shard_files() {
  constexpr std::int64_t kMostOpen = 256;  // a process is commonly granted 1,024
  return std::make_shared<ShardFiles>(kMostOpen);
}

Manifest read_manifest(const std::string& folder) {
  const std::string path = folder + "/" + kManifestName;
  Manifest manifest;
  parse_text_format(read_manifest_text(path), path, ExitCode::kData, &manifest);
  const auto check = [&](bool ok, const std::string& what) {
    if (!ok) fail(path + ": " + what);
  };
  check(manifest.has_component() && manifest.has_tokens() && manifest.has_end_of_sequence() &&
            manifest.has_vocabulary() && manifest.has_tokenizer_digest(),
        "expected component, tokens, end_of_sequence, vocabulary and tokenizer_digest");
  const std::string name = std::filesystem::path(folder).filename().string();
  check(manifest.component() == name,
        "expected component \"" + name + "\", found \"" + printable(manifest.component()) + "\"");
  check(manifest.vocabulary() > 0 && manifest.vocabulary() <= (std::int64_t{1} << 32) &&
            manifest.end_of_sequence() >= 0 && manifest.end_of_sequence() < manifest.vocabulary(),
        "expected 0 <= end_of_sequence < vocabulary <= 2^32");
  check(
      manifest.documents() >= 0 && manifest.empty_documents() >= 0 && manifest.bad_documents() >= 0,
      "expected no count of documents below 0");
  check(is_digest(manifest.tokenizer_digest()), "tokenizer_digest: expected 64 hex digits");
  constexpr std::int64_t kLimit = std::int64_t{1} << 60;
  std::int64_t tokens = 0;
  for (const ManifestShard& shard : manifest.shard()) {
    check(is_plain_name(shard.file()),
          "shard.file: expected a plain name, found \"" + shard.file() + "\"");
    check(shard.tokens() > 0 && shard.tokens() < kLimit &&
              shard.bytes() == shard.tokens() * kTokenBytes,
          "shard " + shard.file() + ": expected bytes = 4 * tokens, found " +
              std::to_string(shard.bytes()) + " and " + std::to_string(shard.tokens()));
    check(is_digest(shard.sha256()), "shard " + shard.file() + ": sha256: expected 64 hex digits");
    tokens += shard.tokens();
    check(tokens < kLimit, "too many tokens");
  }
  check(tokens == manifest.tokens(), "tokens is " + std::to_string(manifest.tokens()) +
                                         ", but its shards' sum is " + std::to_string(tokens));
  return manifest;
}

std::vector<std::string> check_sizes(const std::string& folder, const Manifest& manifest) {
  std::vector<std::string> faults;
  for (const ManifestShard& shard : manifest.shard()) {
    const std::string path = folder + "/" + shard.file();
    const Found found = find(path);
    const std::string expected = path + ": expected " + std::to_string(shard.bytes()) + " bytes, ";
    if (found.bytes < 0) {
      faults.push_back(expected + "found none: " + found.missing);
    } else if (found.bytes != shard.bytes()) {
      std::string kind = found.bytes < shard.bytes() ? " (short" : " (long";
      if (found.bytes % kTokenBytes != 0) kind += ", and not whole tokens of 4 bytes";
      faults.push_back(expected + "found " + std::to_string(found.bytes) + kind + ")");
    }
  }
  return faults;
}

ShardedTokens::ShardedTokens(const std::string& folder, std::shared_ptr<ShardFiles> files)
    : folder_(folder), manifest_(read_manifest(folder)), files_(std::move(files)) {
  const std::vector<std::string> faults = check_sizes(folder_, manifest_);
  if (!faults.empty()) {
    fail(faults[0] +
         (faults.size() == 1 ? ""
                             : "; and " + std::to_string(faults.size() - 1) +
                                   " more such faults in this component") +
         "; `tessera data verify` lists all, `tessera data build` makes the component anew");
  }
  std::vector<std::string> paths;
  starts_.push_back(0);
  for (const ManifestShard& shard : manifest_.shard()) {
    paths.push_back(folder_ + "/" + shard.file());
    starts_.push_back(starts_.back() + shard.tokens());
  }
  first_file_ = files_->add(paths);
}

ShardedTokens::~ShardedTokens() = default;

std::int64_t ShardedTokens::shard_of(std::int64_t token) const {
  return std::upper_bound(starts_.begin(), starts_.end(), token) - starts_.begin() - 1;
}

void ShardedTokens::read(std::int64_t first, std::int64_t count, std::uint32_t* out) const {
  TESSERA_CHECK(first >= 0 && count >= 0 && count <= tokens() - first);
  const std::uint32_t* const ids = out;
  const std::int64_t begin = first, end = first + count;
  std::int64_t shard = shard_of(first);
  while (count > 0) {
    const auto s = static_cast<std::size_t>(shard);
    const std::int64_t piece = std::min(count, starts_[s + 1] - first);
    files_->read(first_file_ + shard, (first - starts_[s]) * kTokenBytes, piece * kTokenBytes,
                 reinterpret_cast<char*>(out));
    first += piece;
    count -= piece;
    out += piece;
    ++shard;
  }
  // Digests are checked on demand only; an id that nobody can use shows damage all the same.
  for (std::int64_t token = begin; token < end; ++token) {
    const std::int64_t id = ids[token - begin];
    if (id < manifest_.vocabulary()) continue;
    const Place damaged = place(token);
    fail(damaged.file + ": token id " + std::to_string(id) + " at byte " +
         std::to_string(damaged.byte_offset) + " isn't below the manifest's vocabulary of " +
         std::to_string(manifest_.vocabulary()) +
         ": the shard is damaged; `tessera data verify` finds all that are, `tessera data build` "
         "makes them anew once they are deleted");
  }
}

ShardedTokens::Place ShardedTokens::place(std::int64_t token) const {
  TESSERA_CHECK(token >= 0 && token < tokens());
  const std::int64_t shard = shard_of(token);
  return {folder_ + "/" + manifest_.shard(static_cast<int>(shard)).file(),
          (token - starts_[static_cast<std::size_t>(shard)]) * kTokenBytes};
}

namespace {

// The shards must be what this recipe would make, as far as their manifest tells: one that another
// program wrote needs no build digest, and a recipe may leave the sources out.
void check_origin(const Recipe& recipe, const Component& component, const Manifest& manifest,
                  const std::string& path) {
  const std::string again = "; run `tessera data build` with this recipe, or name the shards' own";
  const bool of_bytes = recipe.tokenizer == "byte";
  TokenizerOptions cut;
  cut.vocabulary_limit = of_bytes ? recipe.vocabulary_limit : 0;
  const std::string& found = manifest.tokenizer_digest();
  const bool same_kind = of_bytes == (found == open_tokenizer("byte", cut)->digest());
  // The recipe tells the whole tokenizer's digest, and a cut one has its own.
  const bool same_digest = recipe.tokenizer_digest.empty() || recipe.vocabulary_limit > 0 ||
                           found == recipe.tokenizer_digest;
  if (!same_kind || !same_digest) {
    fail(path + ": these shards were made with another tokenizer than the recipe's " +
         recipe.tokenizer + again);
  }
  if (!component.globs.empty() && !manifest.build_digest().empty() &&
      manifest.build_digest() != build_digest(recipe, component)) {
    fail(path +
         ": these shards were made by another recipe: its sources, vocabulary or options of "
         "building differ" +
         again);
  }
}

}  // namespace

Corpus open_corpus(const Recipe& recipe, const std::string& root) {
  Corpus corpus;
  const std::shared_ptr<ShardFiles> files = make_shard_files();
  Sha256 sha;
  std::string first_path;
  for (const Component& component : recipe.components) {
    if (component.stream) {
      corpus.components.push_back(nullptr);
      continue;
    }
    const std::string folder = root + "/" + component.name;
    const std::string path = folder + "/" + kManifestName;
    const Found found = find(path);
    if (found.bytes < 0) {
      fail(path + ": " + found.missing + "; `tessera data build` makes component " +
           component.name);
    }
    auto opened = std::make_unique<ShardedTokens>(folder, files);
    const Manifest& manifest = opened->manifest();
    check_origin(recipe, component, manifest, path);
    if (first_path.empty()) {
      first_path = path;
      corpus.end_of_sequence = manifest.end_of_sequence();
      corpus.vocabulary = manifest.vocabulary();
      corpus.tokenizer_digest = manifest.tokenizer_digest();
    }
    if (manifest.tokenizer_digest() != corpus.tokenizer_digest ||
        manifest.end_of_sequence() != corpus.end_of_sequence ||
        manifest.vocabulary() != corpus.vocabulary) {
      fail(path + ": was made with another tokenizer or end of sequence than " + first_path);
    }
    sha.update(sha256_hex(read_manifest_text(path)));
    corpus.components.push_back(std::move(opened));
  }
  corpus.digest = sha.finish_hex();
  return corpus;
}

std::vector<std::string> components_below(const std::string& root) {
  std::error_code error;
  std::vector<std::string> names;
  for (std::filesystem::directory_iterator it(root, error), end; !error && it != end;
       it.increment(error)) {
    const std::string folder = it->path().string();
    if (find(folder + "/" + kManifestName).bytes >= 0) names.push_back(it->path().filename());
  }
  if (error) fail(root + ": cannot be listed: " + error.message());
  std::sort(names.begin(), names.end());
  return names;
}

std::vector<std::string> verify_corpus(const std::string& root, int threads) {
  const std::vector<std::string> names = components_below(root);
  if (names.empty())
    fail(root + ": no component lies here (no */" + std::string(kManifestName) + ")");
  struct Piece {
    std::string path;
    std::string expected;
    std::string fault;
  };
  std::vector<std::string> faults;
  // One that can't be read is a fault like others, and hides none.
  const auto or_fault = [&](const auto& action) {
    try {
      action();
    } catch (const Error& error) {
      faults.push_back(error.what());
    }
  };
  or_fault([&] {
    if (find(root + "/" + kRecipeName).bytes < 0) return;
    for (const Component& component : read_recipe(root + "/" + kRecipeName).components) {
      if (!component.stream && !std::binary_search(names.begin(), names.end(), component.name)) {
        faults.push_back(root + "/" + component.name + "/" + kManifestName +
                         ": expected by the recipe, found none");
      }
    }
  });
  std::vector<Piece> pieces;
  for (const std::string& name : names) {
    const std::string folder = root + "/" + name;
    Manifest manifest;
    or_fault([&] { manifest = read_manifest(folder); });
    const std::vector<std::string> wrong = check_sizes(folder, manifest);
    faults.insert(faults.end(), wrong.begin(), wrong.end());
    for (const ManifestShard& shard : manifest.shard()) {
      const std::string path = folder + "/" + shard.file();
      if (find(path).bytes == shard.bytes()) pieces.push_back({path, shard.sha256(), ""});
    }
  }
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < pieces.size(); i = next++) {
      Piece& piece = pieces[i];
      try {
        const std::string found = sha256_of_file(piece.path);
        if (found != piece.expected) {
          piece.fault = piece.path + ": expected SHA-256 " + piece.expected + ", found " + found;
        }
      } catch (const Error& error) {
        piece.fault = error.what();
      }
    }
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  for (const Piece& piece : pieces) {
    if (!piece.fault.empty()) faults.push_back(piece.fault);
  }
  return faults;
}

}  // namespace tessera
