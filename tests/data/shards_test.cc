#include "data/shards.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <numeric>

#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr char kQwen3Digest[] = "7af1edf7618c1e3b4fe1a70d4cf606a5bc2c5798c8dcc74eaaa94410510da1a7";
constexpr std::int64_t kPaperShard = std::int64_t{1} << 28;

// Shards of the given lengths that take no space, with their manifest.
void write_sparse_component(const std::string& root, const std::string& name,
                            const std::vector<std::int64_t>& shards) {
  std::filesystem::create_directories(root + "/" + name);
  std::ostringstream manifest;
  manifest << "component: \"" << name << "\" vocabulary: 151669 end_of_sequence: 151645 "
           << "tokenizer_digest: \"" << kQwen3Digest
           << "\" tokens: " << std::accumulate(shards.begin(), shards.end(), std::int64_t{0})
           << "\n";
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string file = "shard-" + std::to_string(s);
    const int descriptor =
        ::open((root + "/" + name + "/" + file).c_str(), O_WRONLY | O_CREAT, 0666);
    ASSERT_GE(descriptor, 0);
    ASSERT_EQ(::ftruncate(descriptor, shards[s] * 4), 0) << std::strerror(errno);
    ::close(descriptor);
    manifest << "shard { file: \"" << file << "\" tokens: " << shards[s]
             << " bytes: " << shards[s] * 4 << " sha256: \"" << std::string(64, '0') << "\" }\n";
  }
  write_file(root + "/" + name + "/" + kManifestName, manifest.str());
}

std::vector<std::int64_t> cut(std::int64_t tokens, std::int64_t shard) {
  std::vector<std::int64_t> shards(static_cast<std::size_t>(tokens / shard), shard);
  if (tokens % shard != 0) shards.push_back(tokens % shard);
  return shards;
}

void plant(const std::string& file, std::int64_t byte_offset,
           const std::vector<std::uint32_t>& ids) {
  const int descriptor = ::open(file.c_str(), O_WRONLY);
  ASSERT_GE(descriptor, 0);
  const auto bytes = static_cast<ssize_t>(ids.size() * 4);
  ASSERT_EQ(::pwrite(descriptor, ids.data(), static_cast<std::size_t>(bytes), byte_offset), bytes);
  ::close(descriptor);
}

std::int64_t resident_bytes() {
  std::ifstream file("/proc/self/statm");
  std::int64_t size = 0;
  std::int64_t resident = 0;
  file >> size >> resident;
  return resident * ::sysconf(_SC_PAGESIZE);
}

std::uint32_t token_at(const TokenSource& source, std::int64_t token) {
  std::uint32_t id = 0;
  source.read(token, 1, &id);
  return id;
}

TEST(Shards, B03_OneShardBeyondFourGigabytes) {
  TempFolder root;
  constexpr std::int64_t kTokens = (std::int64_t{1} << 31) + 4096;
  write_sparse_component(root.path(), "big", {kTokens});
  const ShardedTokens tokens(root / "big", make_shard_files());
  EXPECT_EQ(tokens.tokens(), kTokens);
  std::uint32_t marker = 70000;
  for (const std::int64_t at : {std::int64_t{1} << 30, (std::int64_t{1} << 31) - 1,
                                std::int64_t{1} << 31, (std::int64_t{1} << 32) / 4, kTokens - 1}) {
    plant(root / "big/shard-0", at * 4, {++marker});
    EXPECT_EQ(token_at(tokens, at), marker) << at;
    EXPECT_EQ(tokens.place(at).byte_offset, at * 4);
  }
}

TEST(Shards, B03_SixHundredShardsBeyondFourBillionTokens) {
  TempFolder root;
  constexpr std::int64_t kShard = 8000000;
  write_sparse_component(root.path(), "many", std::vector<std::int64_t>(600, kShard));
  const ShardedTokens tokens(root / "many", make_shard_files());
  ASSERT_EQ(tokens.tokens(), 600 * kShard);
  EXPECT_GT(tokens.tokens(), std::int64_t{1} << 32);
  // A marker on both sides of every edge: all 600 files are read, with fewer descriptors.
  for (std::int64_t s = 0; s < 600; ++s) {
    const std::string file = root / ("many/shard-" + std::to_string(s));
    plant(file, 0, {static_cast<std::uint32_t>(s + 1)});
    plant(file, (kShard - 1) * 4, {static_cast<std::uint32_t>(1000 + s)});
  }
  for (std::int64_t s = 0; s + 1 < 600; ++s) {
    std::uint32_t pair[2];
    tokens.read((s + 1) * kShard - 1, 2, pair);
    ASSERT_EQ(pair[0], 1000 + s);
    ASSERT_EQ(pair[1], s + 2);
  }
  EXPECT_EQ(token_at(tokens, 600 * kShard - 1), 1599U);
}

TEST(Shards, B03_ThePapersRecipeAtItsTrueSizes) {
  TempFolder root;
  const Recipe recipe = parse_recipe(paper_recipe_text(), "aether_recipe.textproto");
  for (const Component& component : recipe.components) {
    write_sparse_component(root.path(), component.name,
                           cut(component.expected_tokens, kPaperShard));
  }
  const std::int64_t resident_before = resident_bytes();
  const auto start = std::chrono::steady_clock::now();
  const TokenStream stream(recipe, open_corpus(recipe, root.path()));
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  EXPECT_LT(seconds.count(), 1.0);
  EXPECT_LT(resident_bytes() - resident_before, 200000000);

  EXPECT_EQ(stream.samples(), 35205078);
  const std::int64_t length = stream.sequence_length();
  struct Expected {
    std::int64_t sample;
    Location place;
  };
  const std::vector<Expected> vectors = {{0, {2, 0, 1001703}},    {1, {0, 0, 2579427}},
                                         {2, {7, 0, 15885142}},   {1023, {7, 0, 5853575}},
                                         {1024, {7, 0, 6400661}}, {1000000, {0, 0, 2874243}}};
  std::vector<std::uint32_t> window(static_cast<std::size_t>(length + 1));
  for (const Expected& expected : vectors) {
    ASSERT_EQ(stream.locate(expected.sample), expected.place);
    const auto& component =
        *stream.corpus().components[static_cast<std::size_t>(expected.place.component)];
    // The window's first and last token, which may lie in two shards.
    const auto marker = static_cast<std::uint32_t>(100000 + expected.sample % 50000);
    const std::int64_t first = expected.place.window * length;
    EXPECT_EQ(component.place(first).file,
              root / (stream.component_name(expected.place.component) + "/shard-" +
                      std::to_string(first / kPaperShard)));
    EXPECT_EQ(component.place(first).byte_offset, first % kPaperShard * 4);
    plant(component.place(first).file, component.place(first).byte_offset, {marker});
    plant(component.place(first + length).file, component.place(first + length).byte_offset,
          {marker + 1});
    stream.read(expected.sample, window.data());
    EXPECT_EQ(window.front(), marker);
    EXPECT_EQ(window.back(), marker + 1);
    EXPECT_EQ(std::accumulate(window.begin(), window.end(), std::uint64_t{0}),
              std::uint64_t{marker} * 2 + 1);
  }
  // The last token of the ninety billion.
  const auto& blend = *stream.corpus().components[7];
  plant(blend.place(blend.tokens() - 1).file, blend.place(blend.tokens() - 1).byte_offset, {77777});
  EXPECT_EQ(token_at(blend, blend.tokens() - 1), 77777U);
}

// A component of three shards; each test damages it.
class DamagedShards : public ::testing::Test {
 protected:
  void SetUp() override {
    write_component(root_.path(), "a", counting(300, 5), {100, 100, 100});
    shard_ = root_ / "a/part-1";
  }

  // Opening must fail with one line that names the shard and both sizes.
  void expect_refused(const std::string& found) {
    const Recipe recipe = parse_recipe(
        "tokenizer: \"byte\" sequence_length: 8 total_tokens: 80 component { name: \"a\" weight: "
        "\"1\" }",
        "r");
    const Thrown thrown = thrown_by([&] { open_corpus(recipe, root_.path()); });
    EXPECT_EQ(thrown.code, ExitCode::kData);
    EXPECT_THAT(thrown.message, HasSubstr(shard_ + ": expected 400 bytes, found " + found));
    const std::vector<std::string> faults = verify_corpus(root_.path(), 2);
    ASSERT_THAT(faults, SizeIs(1));
    EXPECT_THAT(faults[0], HasSubstr(shard_));
  }

  TempFolder root_;
  std::string shard_;
};

TEST_F(DamagedShards, WholeOnesAreFine) { EXPECT_THAT(verify_corpus(root_.path(), 2), IsEmpty()); }

TEST_F(DamagedShards, B05_CutByOneByte) {
  std::filesystem::resize_file(shard_, 399);
  expect_refused("399 (short, and not whole tokens of 4 bytes)");
}
TEST_F(DamagedShards, B05_CutByOneToken) {
  std::filesystem::resize_file(shard_, 396);
  expect_refused("396 (short)");
}
TEST_F(DamagedShards, B05_CutByHalf) {
  std::filesystem::resize_file(shard_, 200);
  expect_refused("200 (short)");
}
TEST_F(DamagedShards, B05_Empty) {
  std::filesystem::resize_file(shard_, 0);
  expect_refused("0 (short)");
}
TEST_F(DamagedShards, B05_TooLong) {
  std::filesystem::resize_file(shard_, 404);
  expect_refused("404 (long)");
}
TEST_F(DamagedShards, B05_TooLongByAByte) {
  std::filesystem::resize_file(shard_, 401);
  expect_refused("401 (long, and not whole tokens of 4 bytes)");
}
TEST_F(DamagedShards, B05_Missing) {
  std::filesystem::remove(shard_);
  expect_refused("none: No such file");
}
TEST_F(DamagedShards, B05_AFolderInItsPlace) {
  std::filesystem::remove(shard_);
  std::filesystem::create_directory(shard_);
  expect_refused("none: it is not a regular file");
}

TEST_F(DamagedShards, B05_OneFlippedByteIsFoundByVerify) {
  std::string bytes = read_file(shard_);
  const std::string before = sha256_hex(bytes);
  bytes[200] = static_cast<char>(bytes[200] ^ 1);
  write_file(shard_, bytes);
  const std::vector<std::string> faults = verify_corpus(root_.path(), 2);
  ASSERT_THAT(faults, SizeIs(1));
  EXPECT_EQ(faults[0], shard_ + ": expected SHA-256 " + before + ", found " + sha256_hex(bytes));
}

TEST_F(DamagedShards, B05_TwoSwappedShardsAreFoundByVerify) {
  std::filesystem::rename(root_ / "a/part-0", root_ / "a/t");
  std::filesystem::rename(root_ / "a/part-2", root_ / "a/part-0");
  std::filesystem::rename(root_ / "a/t", root_ / "a/part-2");
  const std::vector<std::string> faults = verify_corpus(root_.path(), 3);
  ASSERT_THAT(faults, SizeIs(2));
  EXPECT_THAT(faults[0], HasSubstr("part-0"));
  EXPECT_THAT(faults[1], HasSubstr("part-2"));
}

TEST_F(DamagedShards, B05_AShardCutWhileOpenIsAnErrorAndNeverZeros) {
  const ShardedTokens tokens(root_ / "a", make_shard_files());
  EXPECT_EQ(token_at(tokens, 150), 155U);
  std::filesystem::resize_file(shard_, 100);
  const Thrown thrown = thrown_by([&] { token_at(tokens, 150); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr(shard_));
}

TEST_F(DamagedShards, B05_AnIdOutsideOfTheVocabularyIsDamage) {
  std::string manifest = read_file(root_ / "a/manifest.textproto");
  manifest.replace(manifest.find("vocabulary: 4294967296"), 22, "vocabulary: 300");
  write_file(root_ / "a/manifest.textproto", manifest);
  const ShardedTokens tokens(root_ / "a", make_shard_files());
  std::vector<std::uint32_t> ids(300);
  tokens.read(0, 295, ids.data());
  const Thrown thrown = thrown_by([&] { tokens.read(250, 50, ids.data()); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr("part-2: token id 300 at byte 380 isn't below"));
  EXPECT_THAT(thrown.message, HasSubstr("data verify"));
}

TEST_F(DamagedShards, ManifestsThatLieAreRefused) {
  const std::string path = root_ / "a/manifest.textproto";
  const std::string text = read_file(path);
  const auto refused = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    const std::size_t at = changed.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    changed.replace(at, from.size(), to);
    write_file(path, changed);
    const Thrown thrown = thrown_by([&] { read_manifest(root_ / "a"); });
    EXPECT_EQ(thrown.code, ExitCode::kData) << to;
    EXPECT_THAT(thrown.message, HasSubstr(path));
  };
  refused("tokens: 300", "tokens: 299");
  refused("tokens: 100", "tokens: -100");
  refused("tokens: 100", "tokens: 4611686018427387904");
  refused("bytes: 400", "bytes: 404");
  refused("part-1", "../part-1");
  refused("part-1", "");
  refused("vocabulary: 4294967296", "vocabulary: 256");
  refused("end_of_sequence: 256", "end_of_sequence: -1");
  refused("tokenizer_digest", "tokeniser_digest");
  refused("component: \"a\"", "");
  refused("shard {", "shard <");
  refused("vocabulary", "documents: -1 vocabulary");
  refused("vocabulary", "empty_documents: -1 vocabulary");
  refused("vocabulary", "bad_documents: -9223372036854775808 vocabulary");
}

TEST(Corpus, ComponentsOfDifferentTokenizersAreRefused) {
  TempFolder root;
  write_component(root.path(), "a", counting(100, 0), {100});
  write_component(root.path(), "b", counting(100, 0), {100});
  const Recipe recipe = parse_recipe(
      "tokenizer: \"byte\" sequence_length: 8 total_tokens: 80 component { name: \"a\" weight: "
      "\"1\" } component { name: \"b\" weight: \"1\" }",
      "r");
  const std::string digest = open_corpus(recipe, root.path()).digest;
  std::string manifest = read_file(root / "b/manifest.textproto");
  manifest.replace(manifest.find(open_tokenizer("byte")->digest()), 64, std::string(64, '1'));
  write_file(root / "b/manifest.textproto", manifest);
  const Thrown thrown = thrown_by([&] { open_corpus(recipe, root.path()); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr("another tokenizer"));

  std::filesystem::remove_all(root / "b");
  const Thrown missing = thrown_by([&] { open_corpus(recipe, root.path()); });
  EXPECT_EQ(missing.code, ExitCode::kData);
  EXPECT_THAT(missing.message, HasSubstr(root / "b/manifest.textproto"));

  // The data's digest is the manifests': another shard, another digest.
  write_component(root.path(), "b", counting(100, 1), {100});
  EXPECT_NE(open_corpus(recipe, root.path()).digest, digest);
}

TEST(Corpus, ShardsOfAnotherRecipeAreRefused) {
  TempFolder root;
  write_component(root.path(), "a", counting(100, 0), {100});
  const std::string path = root / "a/manifest.textproto";
  const std::string manifest = read_file(path);
  const auto recipe = [](const std::string& options, const std::string& source) {
    return parse_recipe("sequence_length: 8 total_tokens: 80 " + options +
                            " component { name: \"a\" weight: \"1\" " + source + " }",
                        "r");
  };
  const std::string source = "source { glob: \"x\" }";
  const Recipe whole = recipe("tokenizer: \"byte\"", source);
  write_file(path,
             manifest + "build_digest: \"" + build_digest(whole, whole.components[0]) + "\"\n");
  open_corpus(whole, root.path());
  // What the recipe doesn't say it can't be wrong about.
  open_corpus(recipe("tokenizer: \"byte\" seed: 3", ""), root.path());
  const auto refused = [&](const std::string& options, const std::string& with) {
    const Thrown thrown = thrown_by([&] { open_corpus(recipe(options, with), root.path()); });
    EXPECT_EQ(thrown.code, ExitCode::kData);
    EXPECT_THAT(thrown.message, HasSubstr("data build"));
    return thrown.message;
  };
  EXPECT_THAT(refused("tokenizer: \"byte\"", "source { glob: \"y\" }"),
              HasSubstr("another recipe"));
  EXPECT_THAT(refused("tokenizer: \"byte\" shard_tokens: 7", source), HasSubstr("another recipe"));
  EXPECT_THAT(refused("tokenizer: \"qwen.tiktoken\"", source), HasSubstr("another tokenizer"));
  EXPECT_THAT(refused("tokenizer: \"byte\" tokenizer_digest: \"" + std::string(64, '7') + "\"", ""),
              HasSubstr("another tokenizer"));
}

TEST(Corpus, VerifyMissesNoComponentOfTheRecipe) {
  TempFolder root;
  write_component(root.path(), "a", counting(100, 0), {100});
  write_file(root / kRecipeName,
             "tokenizer: \"byte\" sequence_length: 8 total_tokens: 80 component { name: \"a\" "
             "weight: \"1\" } component { name: \"b\" weight: \"1\" }");
  const std::vector<std::string> faults = verify_corpus(root.path(), 1);
  ASSERT_THAT(faults, SizeIs(1));
  EXPECT_THAT(faults[0], HasSubstr("/b/manifest.textproto"));
  EXPECT_EQ(thrown_by([&] { verify_corpus(root / "nowhere", 1); }).code, ExitCode::kData);
  // What can't be read is a fault too.
  write_file(root / "b/manifest.textproto", "garbage");
  write_file(root / kRecipeName, "{");
  std::filesystem::resize_file(root / "a/part-0", 1);
  EXPECT_THAT(verify_corpus(root.path(), 1), SizeIs(3));
}

}  // namespace
}  // namespace tessera
