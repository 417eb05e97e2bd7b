#include "data/build.h"

#include <fcntl.h>
#include <google/protobuf/text_format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <exception>
#include <filesystem>
#include <map>
#include <mutex>
#include <optional>
#include <thread>

#include "data/documents.h"
#include "data/manifest.pb.h"
#include "data/publish.h"
#include "data/sha256.h"
#include "data/shards.h"
#include "data/text_format.h"
#include "data/utf8.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kBatchBytes = std::int64_t{1} << 20;   // of documents in a worker's piece
constexpr std::int64_t kBytesAhead = std::int64_t{16} << 20;  // read and not yet written, a thread
constexpr std::int64_t kReportedBadRecords = 10;              // of a component
constexpr std::size_t kWriteTokens = std::size_t{1} << 18;
constexpr std::chrono::seconds kProgressEvery{10};

[[noreturn]] void fail(const std::string& what) { throw Error(ExitCode::kData, what); }

// What of the tokenizer and the recipe a manifest states.
struct Encoding {
  const Tokenizer& tokenizer;
  std::uint32_t end_of_sequence;
  std::int64_t vocabulary;
};

Encoding make_encoding(const Recipe& recipe, const Tokenizer& tokenizer) {
  const std::int64_t end =
      recipe.end_of_sequence >= 0 ? recipe.end_of_sequence : tokenizer.end_of_sequence();
  if (end < 0) {
    fail("tokenizer " + recipe.tokenizer +
         " names no end of sequence: set end_of_sequence in the recipe");
  }
  return {tokenizer, static_cast<std::uint32_t>(end), std::max(tokenizer.size(), end + 1)};
}

// One piece of work: records of one source.
struct Batch {
  std::int64_t number = 0;
  std::size_t source = 0;
  std::vector<Record> records;
  std::int64_t bytes = 0;
};

// What became of a batch, or the failure that stands in its place.
struct Encoded {
  std::size_t source = 0;
  std::vector<std::uint32_t> ids;
  std::int64_t documents = 0;
  std::int64_t empty_documents = 0;
  std::vector<std::string> bad;
  std::int64_t bytes = 0;  // of the batch
  std::exception_ptr failure;
};

struct SourceFacts {
  std::string file;
  std::int64_t bytes = 0;
  std::string sha256;
  std::int64_t documents = 0;
};

// Cuts tokens into shard files of a fixed length.
class ShardWriter {
 public:
  ShardWriter(std::string folder, std::int64_t shard_tokens)
      : folder_(std::move(folder)), shard_tokens_(shard_tokens) {
    buffer_.reserve(kWriteTokens);
  }

  void append(const std::vector<std::uint32_t>& ids) {
    std::size_t begin = 0;
    while (begin < ids.size()) {
      if (!file_) open();
      const std::size_t room = std::min(kWriteTokens - buffer_.size(),
                                        static_cast<std::size_t>(shard_tokens_ - tokens_));
      const std::size_t piece = std::min(room, ids.size() - begin);
      buffer_.insert(buffer_.end(), ids.begin() + static_cast<std::ptrdiff_t>(begin),
                     ids.begin() + static_cast<std::ptrdiff_t>(begin + piece));
      begin += piece;
      tokens_ += static_cast<std::int64_t>(piece);
      if (buffer_.size() == kWriteTokens) flush();
      if (tokens_ == shard_tokens_) close();
    }
  }

  std::vector<ManifestShard> finish() {
    if (file_) close();
    return std::move(shards_);
  }

 private:
  void open() {
    char name[32];
    std::snprintf(name, sizeof name, "shard-%06zu.tokens", shards_.size());
    ManifestShard shard;
    shard.set_file(name);
    shards_.push_back(shard);
    file_.emplace(folder_ + "/" + name);
    tokens_ = 0;
  }
  void flush() {
    const std::size_t bytes = buffer_.size() * sizeof(std::uint32_t);
    file_->write(buffer_.data(), bytes);
    sha_.update(buffer_.data(), bytes);
    buffer_.clear();
  }
  void close() {
    flush();
    file_->publish();
    file_.reset();
    shards_.back().set_tokens(tokens_);
    shards_.back().set_bytes(tokens_ * static_cast<std::int64_t>(sizeof(std::uint32_t)));
    shards_.back().set_sha256(sha_.finish_hex());
  }

  std::string folder_;
  std::int64_t shard_tokens_;
  std::int64_t tokens_ = 0;
  std::vector<std::uint32_t> buffer_;
  Sha256 sha_;
  std::optional<PublishedFile> file_;
  std::vector<ManifestShard> shards_;
};

// One thread reads the sources, `threads` tokenize, and the caller's takes the results in order.
class Pipeline {
 public:
  Pipeline(const Recipe& recipe, const Component& component, const Encoding& encoding,
           const std::string& root, std::vector<SourceFacts>& sources, int threads)
      : recipe_(recipe),
        component_(component),
        encoding_(encoding),
        root_(root),
        sources_(sources),
        bytes_ahead_(kBytesAhead * threads) {
    threads_.emplace_back([this] { read(); });
    for (int t = 0; t < threads; ++t) threads_.emplace_back([this] { encode(); });
  }
  ~Pipeline() {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  // The next batch's result, in the order of the sources; nothing at the end.
  std::optional<Encoded> take() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock,
                  [&] { return done_.count(taken_) > 0 || (all_read_ && taken_ == batches_); });
    const auto found = done_.find(taken_);
    if (found == done_.end()) return std::nullopt;
    Encoded result = std::move(found->second);
    done_.erase(found);
    ++taken_;
    bytes_in_flight_ -= result.bytes;
    lock.unlock();
    changed_.notify_all();
    if (result.failure) std::rethrow_exception(result.failure);
    return result;
  }

 private:
  struct Stopped {};

  void read() {
    std::size_t source = 0;
    try {
      for (; source < sources_.size(); ++source) read_source(source);
    } catch (const Stopped&) {
      return;
    } catch (const std::bad_alloc&) {
      put_failure(std::make_exception_ptr(Error(
          ExitCode::kData, sources_[source].file + ": not enough memory for a record of it")));
    } catch (...) {
      put_failure(std::current_exception());
    }
    {
      const std::lock_guard lock(mutex_);
      all_read_ = true;
    }
    changed_.notify_all();
  }

  void read_source(std::size_t source) {
    SourceFacts& facts = sources_[source];
    const std::string path = root_ + "/" + facts.file;
    Batch batch;
    batch.source = source;
    if (!recipe_.fail_on_bad_documents) {
      // An archive is taken whole or not at all: what came out before the damage may be wrong too.
      if (const std::optional<std::string> fault = archive_fault(path)) {
        batch.records.push_back({"", 0, *fault});
        put(std::move(batch));
        std::error_code error;
        facts.bytes = static_cast<std::int64_t>(fs::file_size(path, error));
        facts.sha256 = sha256_of_file(path);
        return;
      }
    }
    SourceFile file(path);
    read_records(file, is_jsonl(facts.file), [&](Record record) {
      // A record without bytes takes memory too.
      const auto bytes = static_cast<std::int64_t>(record.bytes.size() + sizeof(Record));
      batch.bytes += bytes;
      batch.records.push_back(std::move(record));
      if (batch.bytes >= kBatchBytes) {
        put(std::move(batch));
        batch = Batch{};
        batch.source = source;
      }
    });
    if (!batch.records.empty()) put(std::move(batch));
    facts.bytes = file.bytes();
    facts.sha256 = file.sha256_hex();
  }

  void put(Batch batch) {
    {
      std::unique_lock lock(mutex_);
      // A batch larger than the bound goes alone.
      changed_.wait(lock, [&] {
        return stop_ || bytes_in_flight_ == 0 || bytes_in_flight_ + batch.bytes <= bytes_ahead_;
      });
      if (stop_) throw Stopped{};
      bytes_in_flight_ += batch.bytes;
      batch.number = batches_++;
      waiting_.push_back(std::move(batch));
    }
    changed_.notify_all();
  }

  void put_failure(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    Encoded result;
    result.failure = std::move(failure);
    done_.emplace(batches_++, std::move(result));
  }

  void encode() {
    while (true) {
      Batch batch;
      {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return stop_ || !waiting_.empty() || all_read_; });
        if (stop_ || waiting_.empty()) return;
        batch = std::move(waiting_.front());
        waiting_.pop_front();
      }
      Encoded result;
      result.source = batch.source;
      result.bytes = batch.bytes;
      const std::string& file = sources_[batch.source].file;
      try {
        for (Record& record : batch.records) encode_record(file, record, result);
      } catch (const std::bad_alloc&) {
        result.failure = std::make_exception_ptr(
            Error(ExitCode::kData, file + ": not enough memory for a record of it"));
      } catch (...) {
        result.failure = std::current_exception();
      }
      {
        const std::lock_guard lock(mutex_);
        done_.emplace(batch.number, std::move(result));
      }
      changed_.notify_all();
    }
  }

  void encode_record(const std::string& file, Record& record, Encoded& result) const {
    std::string why;
    std::string text;
    if (!record.fault.empty()) {
      why = std::move(record.fault);
    } else if (record.line > 0) {
      std::optional<std::string> found = text_of_json(record.bytes, component_.text_field, why);
      if (found) text = std::move(*found);
    } else {
      text = std::move(record.bytes);
    }
    record.bytes = std::string();
    if (why.empty()) {
      const std::size_t invalid = first_invalid_utf8(text);
      if (invalid != std::string::npos) {
        why = "is not valid UTF-8, at byte " + std::to_string(invalid);
      }
    }
    if (!why.empty()) {
      const std::string place = record.line > 0 ? file + ":" + std::to_string(record.line) : file;
      result.bad.push_back(one_line(place + ": " + why));
    } else if (text.empty()) {
      ++result.empty_documents;
    } else {
      encoding_.tokenizer.encode(text, result.ids, recipe_.parse_control_strings);
      result.ids.push_back(encoding_.end_of_sequence);
      ++result.documents;
    }
  }

  const Recipe& recipe_;
  const Component& component_;
  const Encoding& encoding_;
  const std::string& root_;
  std::vector<SourceFacts>& sources_;
  const std::int64_t bytes_ahead_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Batch> waiting_;
  std::map<std::int64_t, Encoded> done_;
  std::int64_t bytes_in_flight_ = 0;
  std::int64_t batches_ = 0;
  std::int64_t taken_ = 0;
  bool all_read_ = false;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

bool is_shard_name(const std::string& name) {
  constexpr std::string_view kStart = "shard-", kEnd = ".tokens";
  if (!name.starts_with(kStart) || !name.ends_with(kEnd)) return false;
  const std::string number = name.substr(kStart.size(), name.size() - kStart.size() - kEnd.size());
  // %06zu: six digits, or more without a leading zero
  return number.size() >= 6 && number.find_first_not_of("0123456789") == std::string::npos &&
         (number.size() == 6 || number[0] != '0');
}

// Is this a name of those that a build gives files in a component's folder?
bool is_ours(std::string name) {
  constexpr std::string_view kPartial = ".partial";
  if (name.ends_with(kPartial)) name.resize(name.size() - kPartial.size());
  return name == kManifestName || name == kBadDocumentsName || is_shard_name(name);
}

// A build that was killed, or one of other sources, may have left any of our files.
void remove_leftovers(const std::string& folder) {
  // The manifest first: without it nobody takes the rest for a component.
  remove_file(folder + "/" + kManifestName);
  sync_folder(folder);
  std::vector<std::string> ours;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (is_ours(name)) ours.push_back(it->path().string());
  }
  for (const std::string& path : ours) remove_file(path);
  sync_folder(folder);
}

Manifest describe(const Recipe& recipe, const Component& component, const Encoding& encoding) {
  Manifest manifest;
  manifest.set_recipe(recipe.name);
  manifest.set_component(component.name);
  manifest.set_build_digest(build_digest(recipe, component));
  manifest.set_tokenizer_digest(encoding.tokenizer.digest());
  manifest.set_vocabulary(encoding.vocabulary);
  manifest.set_end_of_sequence(encoding.end_of_sequence);
  manifest.set_unicode_version(encoding.tokenizer.unicode_version());
  manifest.set_text_field(component.text_field);
  manifest.set_parse_control_strings(recipe.parse_control_strings);
  manifest.set_shard_tokens(recipe.shard_tokens);
  return manifest;
}

bool describes_the_same(const Manifest& a, const Manifest& b) {
  return a.recipe() == b.recipe() && a.component() == b.component() &&
         a.build_digest() == b.build_digest() && a.tokenizer_digest() == b.tokenizer_digest() &&
         a.vocabulary() == b.vocabulary() && a.end_of_sequence() == b.end_of_sequence() &&
         a.unicode_version() == b.unicode_version();
}

// Are the sources, byte for byte, those that the manifest tells?
bool sources_are_the_same(const Manifest& manifest, const std::string& root,
                          const std::vector<std::string>& files, int threads) {
  if (manifest.source_size() != static_cast<int>(files.size())) return false;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const ManifestSource& source = manifest.source(static_cast<int>(i));
    struct stat status {};
    if (source.file() != files[i] || ::stat((root + "/" + files[i]).c_str(), &status) != 0 ||
        status.st_size != source.bytes()) {
      return false;
    }
  }
  std::atomic<std::size_t> next{0};
  std::atomic<bool> same{true};
  const auto work = [&] {
    for (std::size_t i = next++; i < files.size() && same; i = next++) {
      try {
        if (sha256_of_file(root + "/" + files[i]) !=
            manifest.source(static_cast<int>(i)).sha256()) {
          same = false;
        }
      } catch (const Error&) {
        same = false;  // building it will say what is wrong
      }
    }
  };
  std::vector<std::thread> workers;
  for (int t = 1; t < threads; ++t) workers.emplace_back(work);
  work();
  for (std::thread& worker : workers) worker.join();
  return same;
}

// The manifest of a component that is complete and of these sources.
std::optional<Manifest> finished_manifest(const std::string& folder, const Manifest& wanted,
                                          const std::string& root,
                                          const std::vector<std::string>& files, int threads) {
  std::error_code error;
  if (!fs::exists(folder + "/" + kManifestName, error)) return std::nullopt;
  try {
    Manifest manifest = read_manifest(folder);
    if (describes_the_same(manifest, wanted) && check_sizes(folder, manifest).empty() &&
        sources_are_the_same(manifest, root, files, threads)) {
      return manifest;
    }
  } catch (const Error&) {
    // A damaged manifest: build anew.
  }
  return std::nullopt;
}

BuiltComponent summary(const Manifest& manifest, bool kept) {
  return {manifest.component(),     kept,
          manifest.documents(),     manifest.empty_documents(),
          manifest.bad_documents(), manifest.tokens(),
          manifest.shard_size()};
}

std::string describe_line(const BuiltComponent& built, const std::string& out) {
  return built.name + (built.kept ? ": kept, " : ": ") + std::to_string(built.documents) +
         " documents (" + std::to_string(built.empty_documents) + " empty and " +
         std::to_string(built.bad_documents) + " bad ones left out" +
         (built.bad_documents > 0 ? ", see " + out + "/" + built.name + "/" + kBadDocumentsName
                                  : "") +
         "), " + std::to_string(built.tokens) + " tokens in " + std::to_string(built.shards) +
         " shards";
}

void write_shards(const Recipe& recipe, const Component& component, const Encoding& encoding,
                  const BuildOptions& options, const std::string& folder,
                  std::vector<SourceFacts>& sources, Manifest& manifest) {
  ShardWriter writer(folder, recipe.shard_tokens);
  std::optional<PublishedFile> bad_list;
  std::int64_t documents = 0;
  std::int64_t empty_documents = 0;
  std::int64_t bad_documents = 0;
  std::int64_t tokens = 0;
  {
    Pipeline pipeline(recipe, component, encoding, options.sources, sources, options.threads);
    auto last_report = std::chrono::steady_clock::now();
    while (const std::optional<Encoded> encoded = pipeline.take()) {
      for (const std::string& bad : encoded->bad) {
        if (recipe.fail_on_bad_documents) {
          fail(bad + " (the recipe says bad_documents: FAIL)");
        }
        if (!bad_list) bad_list.emplace(folder + "/" + kBadDocumentsName);
        bad_list->write((bad + "\n").data(), bad.size() + 1);
        if (bad_documents++ < kReportedBadRecords && options.report) {
          options.report(component.name + ": left out " + bad);
        }
      }
      writer.append(encoded->ids);
      tokens += static_cast<std::int64_t>(encoded->ids.size());
      sources[encoded->source].documents += encoded->documents;
      documents += encoded->documents;
      empty_documents += encoded->empty_documents;
      if (options.report && std::chrono::steady_clock::now() - last_report >= kProgressEvery) {
        last_report = std::chrono::steady_clock::now();
        options.report(component.name + ": at file " + std::to_string(encoded->source + 1) +
                       " of " + std::to_string(sources.size()) + ", " + std::to_string(tokens) +
                       " tokens");
      }
    }
  }
  for (ManifestShard& shard : writer.finish()) *manifest.add_shard() = std::move(shard);
  if (bad_list) bad_list->publish();
  manifest.set_documents(documents);
  manifest.set_empty_documents(empty_documents);
  manifest.set_bad_documents(bad_documents);
  manifest.set_tokens(tokens);
}

BuiltComponent build_component(const Recipe& recipe, const Component& component,
                               const Encoding& encoding, const BuildOptions& options) {
  const std::vector<std::string> files = list_sources(options.sources, component);
  const std::string folder = options.out + "/" + component.name;
  make_folders(folder, "--out");
  // Two builds must not write the same files.
  const FolderLock lock(folder, "another build is at work here");
  Manifest manifest = describe(recipe, component, encoding);
  if (const std::optional<Manifest> finished =
          finished_manifest(folder, manifest, options.sources, files, options.threads)) {
    return summary(*finished, true);
  }
  remove_leftovers(folder);

  std::vector<SourceFacts> sources(files.size());
  for (std::size_t i = 0; i < files.size(); ++i) sources[i].file = files[i];
  write_shards(recipe, component, encoding, options, folder, sources, manifest);
  for (const SourceFacts& facts : sources) {
    ManifestSource* source = manifest.add_source();
    source->set_file(facts.file);
    source->set_bytes(facts.bytes);
    source->set_sha256(facts.sha256);
    source->set_documents(facts.documents);
  }
  std::string text;
  TESSERA_CHECK(google::protobuf::TextFormat::PrintToString(manifest, &text));
  publish_file(folder + "/" + kManifestName, text);
  return summary(manifest, false);
}

[[noreturn]] void refuse_foreign(const std::string& folder, const std::string& name) {
  throw Error(ExitCode::kCheckpoint, folder + " holds files that data build didn't make (" +
                                         printable(name) + "); choose another --out or move them");
}

// The build replaces files by their names: in a folder with none of them nothing is its own.
void check_component_folder(const std::string& folder) {
  check_no_file(folder, "--out");
  std::string foreign;
  bool manifest = false, shards = false, other = false;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    const std::string name = it->path().filename().string();
    if (name == kManifestName) {
      manifest = true;
    } else if (is_ours(name)) {
      other = true;
      shards = shards || is_shard_name(name);
    } else if (name[0] != '.' && (foreign.empty() || name < foreign)) {
      foreign = name;
    }
  }
  if (!manifest) {
    if (!foreign.empty() && !other) refuse_foreign(folder, foreign);
    return;
  }
  const std::string path = folder + "/" + kManifestName;
  Manifest found;
  try {
    parse_text_format(read_manifest_text(path), path, ExitCode::kData, &found);
    // One that another program wrote has none.
    if (found.build_digest().empty()) refuse_foreign(folder, kManifestName);
  } catch (const Error& fault) {
    if (fault.code() != ExitCode::kData) throw;
    // Beside shards of ours it's our own that was damaged.
    if (!shards) refuse_foreign(folder, kManifestName);
  }
}

// A recipe that was changed takes the place of its older copy; one that no build left here is kept.
void check_recipe_copy(const Recipe& recipe, const std::string& out) {
  const std::string path = out + "/" + kRecipeName;
  std::error_code error;
  if (fs::symlink_status(path, error).type() == fs::file_type::not_found) return;
  bool built = !components_below(out).empty();
  for (const Component& component : recipe.components) {
    built = built || fs::is_directory(out + "/" + component.name, error);
  }
  try {
    const Recipe copy = read_recipe(path);
    if (built || copy.text == recipe.text) return;
  } catch (const Error&) {
    // Not a recipe.
  }
  refuse_foreign(out, kRecipeName);
}

// The folders that a build writes to, without links, and what they are called.
using Folders = std::map<fs::path, std::string>;

fs::path without_links(const fs::path& path) {
  std::error_code error;
  fs::path found = fs::weakly_canonical(path, error);
  if (error) found = path.lexically_normal();  // reading or writing it will say what is wrong
  return found.has_filename() || found == found.root_path() ? found : found.parent_path();
}

std::string folder_around(const fs::path& folder, const Folders& folders) {
  for (fs::path at = folder;; at = at.parent_path()) {
    const auto found = folders.find(at);
    if (found != folders.end()) return found->second;
    if (at == at.parent_path()) return "";
  }
}

// Sources that are there may lie in no folder that is written to.
void check_sources_apart(const Component& component, const std::string& root,
                         const Folders& folders) {
  std::vector<std::string> files;
  try {
    files = list_sources(root, component);
  } catch (const Error&) {
    return;  // whoever builds it will say it
  }
  std::map<std::string, std::string> around;  // a source's folder, as listed
  for (const std::string& file : files) {
    const fs::path path = fs::path(root) / file;
    const auto [seen, first] = around.emplace(path.parent_path().string(), "");
    if (first) seen->second = folder_around(without_links(path.parent_path()), folders);
    std::string folder = seen->second;
    std::error_code error;
    if (folder.empty() && fs::is_symlink(path, error)) {
      folder = folder_around(without_links(path).parent_path(), folders);
    }
    if (!folder.empty()) {
      throw Error(ExitCode::kUsage, folder + ": holds sources of component " + component.name +
                                        " (" + printable(path.string()) +
                                        "), and data build writes there; choose another --out");
    }
  }
}

// A glob, and where it begins to look.
struct Pattern {
  const std::string& component;
  const std::string& glob;
  std::string prefix;  // below the sources' folder
  std::string start;   // without links
};

// Nor may a pattern match what is going to be written: the next build would take it for sources.
void check_patterns_apart(const std::vector<Pattern>& patterns, const fs::path& folder,
                          const std::string& called, const std::vector<std::string>& names) {
  const std::string written = folder.string() + "/";
  for (const Pattern& pattern : patterns) {
    const std::string start = pattern.start == "/" ? "/" : pattern.start + "/";
    if (!written.starts_with(start)) continue;
    for (const std::string& name : names) {
      const std::string path = (pattern.prefix.empty() ? "" : pattern.prefix + "/") +
                               written.substr(start.size()) + name;
      if (!glob_matches(pattern.glob, path)) continue;
      throw Error(ExitCode::kUsage, called + ": what data build writes here (" + name +
                                        ") would be a source of component " + pattern.component +
                                        " by glob \"" + printable(pattern.glob) +
                                        "\"; choose another --out");
    }
  }
}

}  // namespace

void check_output(const Recipe& recipe, const BuildOptions& options) {
  check_no_file(options.out, "--out");
  Folders folders;
  std::vector<Pattern> patterns;
  for (const Component& component : recipe.components) {
    if (component.stream) continue;
    const std::string folder = options.out + "/" + component.name;
    folders.emplace(without_links(folder), folder);
    for (const std::string& glob : component.globs) {
      const std::string prefix = fixed_prefix(glob);
      const std::string start = options.sources + "/" + prefix;
      patterns.push_back({component.name, glob, prefix, without_links(start).string()});
    }
  }
  check_patterns_apart(patterns, without_links(options.out), options.out, {kRecipeName});
  for (const auto& [folder, called] : folders) {
    check_patterns_apart(patterns, folder, called,
                         {"shard-000000.tokens", kManifestName, kBadDocumentsName});
  }
  for (const Component& component : recipe.components) {
    if (!component.stream) check_sources_apart(component, options.sources, folders);
  }
  for (const auto& [folder, called] : folders) check_component_folder(called);
  check_recipe_copy(recipe, options.out);
}

std::unique_ptr<Tokenizer> open_recipe_tokenizer(const Recipe& recipe) {
  std::string path = recipe.tokenizer;
  std::error_code error;
  if (path != "byte" && !fs::exists(path, error)) {
    const char* elsewhere = std::getenv("TESSERA_TOKENIZER");
    const bool usable = elsewhere != nullptr && *elsewhere != '\0';
    if (recipe.tokenizer_digest.empty() || !usable) {
      fail(path +
           ": there is no such tokenizer; correct the recipe's `tokenizer`, or give it a "
           "tokenizer_digest and name the file by the environment's TESSERA_TOKENIZER");
    }
    path = elsewhere;
  }
  std::unique_ptr<Tokenizer> whole = open_tokenizer(path);
  if (!recipe.tokenizer_digest.empty() && whole->digest() != recipe.tokenizer_digest) {
    fail(path + ": expected a tokenizer of digest " + recipe.tokenizer_digest + ", found " +
         whole->digest());
  }
  if (recipe.vocabulary_limit == 0) return whole;
  TokenizerOptions options;
  options.vocabulary_limit = recipe.vocabulary_limit;
  return open_tokenizer(path, options);
}

std::vector<BuiltComponent> build(const Recipe& recipe, const Tokenizer& tokenizer,
                                  const BuildOptions& options) {
  TESSERA_CHECK(options.threads >= 1 && options.rank >= 0 && options.rank < options.ranks);
  const Encoding encoding = make_encoding(recipe, tokenizer);
  if (options.report && options.rank == 0) {
    options.report("tokenizer " + tokenizer.digest() + ", " + std::to_string(encoding.vocabulary) +
                   " ids, end of sequence " + std::to_string(encoding.end_of_sequence));
  }
  std::vector<BuiltComponent> built;
  int number = 0;
  for (const Component& component : recipe.components) {
    if (component.stream) continue;
    if (component.globs.empty()) {
      throw Error(ExitCode::kUsage, "component " + component.name + ": the recipe names no source");
    }
    if (number++ % options.ranks != options.rank) continue;
    built.push_back(build_component(recipe, component, encoding, options));
    if (options.report) options.report(describe_line(built.back(), options.out));
  }
  if (options.rank == 0) {
    make_folders(options.out, "--out");
    const std::string path = options.out + "/" + kRecipeName;
    publish_file(path, recipe.text);
  }
  return built;
}

}  // namespace tessera
