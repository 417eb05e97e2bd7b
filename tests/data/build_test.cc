#include "data/build.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <zlib.h>

#include <chrono>
#include <map>
#include <thread>

#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

std::vector<std::uint32_t> tokens_of(const std::string& root, const std::string& component) {
  const ShardedTokens tokens(root + "/" + component, make_shard_files());
  std::vector<std::uint32_t> ids(static_cast<std::size_t>(tokens.tokens()));
  tokens.read(0, tokens.tokens(), ids.data());
  return ids;
}

// Documents as the byte tokenizer writes them.
std::vector<std::uint32_t> bytes_and_ends(const std::vector<std::string>& documents) {
  std::vector<std::uint32_t> ids;
  for (const std::string& document : documents) {
    for (const char c : document) ids.push_back(static_cast<unsigned char>(c));
    ids.push_back(kByteEnd);
  }
  return ids;
}

// Every file below a folder, by relative path.
std::map<std::string, std::string> files_below(const std::string& root) {
  std::map<std::string, std::string> files;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(root)) {
    if (entry.is_regular_file()) {
      files[entry.path().lexically_relative(root).string()] = read_file(entry.path().string());
    }
  }
  return files;
}

Recipe one_component(const std::string& glob, const std::string& options = "") {
  return parse_recipe("name: \"r\" tokenizer: \"byte\" sequence_length: 4 total_tokens: 40 " +
                          options + " component { name: \"c\" weight: \"1\" source { glob: \"" +
                          glob + "\" } }",
                      "r.textproto");
}

class BuildTest : public ::testing::Test {
 protected:
  std::vector<BuiltComponent> run(const Recipe& recipe, int threads = 2, int rank = 0,
                                  int ranks = 1, const std::string& out = "out") {
    BuildOptions options;
    options.sources = root_ / "src";
    options.out = root_ / out;
    options.threads = threads;
    options.rank = rank;
    options.ranks = ranks;
    options.report = [&](const std::string& line) { reported_.push_back(line); };
    check_output(recipe, options);
    return build(recipe, *open_recipe_tokenizer(recipe), options);
  }
  // Refused with that code, and no file anywhere changed.
  std::string refusal(ExitCode code, const Recipe& recipe, const std::string& out) {
    const auto before = files_below(root_.path());
    const Thrown thrown = thrown_by([&] { run(recipe, 1, 0, 1, out); });
    EXPECT_EQ(thrown.code, code) << thrown.message;
    EXPECT_TRUE(files_below(root_.path()) == before) << out;
    return thrown.message;
  }
  void source(const std::string& name, const std::string& bytes) {
    write_file(root_ / ("src/" + name), bytes);
  }

  TempFolder root_;
  std::vector<std::string> reported_;
};

TEST_F(BuildTest, B06_OneEndForEachKeptDocument) {
  // Empty first, in the middle and last; white space; a missing, a null and a numeric text; the
  // end-of-sequence string in the text; one token; no newline at the end.
  source("d.jsonl",
         "{\"text\": \"\"}\n"
         "{\"text\": \"first\"}\n"
         "{\"text\": \"  \\n\"}\n"
         "{\"text\": \"\"}\n"
         "{\"title\": \"no text\"}\n"
         "{\"text\": null}\n"
         "{\"text\": 5}\n"
         "{\"text\": \"ends<|im_end|>\"}\n"
         "{\"text\": \"x\"}\n"
         "not json\n"
         "{\"text\": \"\xff\"}\n"
         "{\"text\": \"\"}\n"
         "{\"text\": \"last\"}");
  const std::vector<BuiltComponent> built = run(one_component("d.jsonl"));
  const std::vector<std::uint32_t> expected =
      bytes_and_ends({"first", "  \n", "ends<|im_end|>", "x", "last"});
  EXPECT_EQ(tokens_of(root_ / "out", "c"), expected);
  EXPECT_EQ(std::count(expected.begin(), expected.end(), std::uint32_t{kByteEnd}), 5);

  ASSERT_THAT(built, SizeIs(1));
  EXPECT_EQ(built[0].documents, 5);
  EXPECT_EQ(built[0].empty_documents, 3);
  EXPECT_EQ(built[0].bad_documents, 5);
  EXPECT_EQ(built[0].tokens, static_cast<std::int64_t>(expected.size()));
  const Manifest manifest = read_manifest(root_ / "out/c");
  EXPECT_EQ(manifest.end_of_sequence(), kByteEnd);
  EXPECT_EQ(manifest.documents(), 5);
  EXPECT_EQ(manifest.empty_documents(), 3);
  EXPECT_EQ(manifest.bad_documents(), 5);
  EXPECT_EQ(manifest.source(0).documents(), 5);

  // Every bad record is reported by file and line, in order.
  const std::string bad = read_file(root_ / "out/c" + "/" + kBadDocumentsName);
  EXPECT_EQ(bad,
            "d.jsonl:5: has no \"text\"\n"
            "d.jsonl:6: \"text\" is not a string\n"
            "d.jsonl:7: \"text\" is not a string\n"
            "d.jsonl:10: is not valid JSON in UTF-8, at byte 2\n"
            "d.jsonl:11: is not valid JSON in UTF-8, at byte 11\n");
  ASSERT_THAT(reported_, SizeIs(7));
  EXPECT_THAT(reported_[0], HasSubstr("end of sequence 256"));
  EXPECT_EQ(reported_[1], "c: left out d.jsonl:5: has no \"text\"");
}

// What an archive gave before its damage shows could be wrong as well: it is one bad record.
TEST_F(BuildTest, B06_AnArchiveThatIsNotWholeIsLeftOutWhole) {
  const std::string path = root_ / "src/b.jsonl.gz";
  source("a.txt", "a");
  source("c.txt", "c");
  write_file(path, "");
  gzFile file = gzopen(path.c_str(), "wb");
  std::string lines;
  for (int i = 0; i < 100000; ++i) lines += "{\"text\": \"" + std::to_string(i) + "\"}\n";
  gzwrite(file, lines.data(), static_cast<unsigned>(lines.size()));
  gzclose(file);
  const std::string whole = read_file(path);
  EXPECT_EQ(run(one_component("**"))[0].documents, 100002);
  for (const std::size_t keep : {whole.size() - 1, whole.size() / 2, std::size_t{0}}) {
    write_file(path, whole.substr(0, keep));
    reported_.clear();
    const BuiltComponent built = run(one_component("**"))[0];
    EXPECT_FALSE(built.kept);
    EXPECT_EQ(built.documents, 2);
    EXPECT_EQ(built.bad_documents, 1);
    EXPECT_EQ(tokens_of(root_ / "out", "c"), bytes_and_ends({"a", "c"}));
    EXPECT_THAT(read_file(root_ / "out/c" + "/" + kBadDocumentsName),
                StartsWith("b.jsonl.gz: is cut off"));
    EXPECT_THAT(reported_[1], StartsWith("c: left out b.jsonl.gz: is cut off"));
    EXPECT_THAT(reported_.back(), HasSubstr("out/c/bad_documents.txt"));
    const Manifest manifest = read_manifest(root_ / "out/c");
    EXPECT_EQ(manifest.bad_documents(), 1);
    EXPECT_EQ(manifest.source(1).bytes(), static_cast<std::int64_t>(keep));
    EXPECT_EQ(manifest.source(1).sha256(), sha256_hex(whole.substr(0, keep)));
    EXPECT_EQ(manifest.source(1).documents(), 0);
    EXPECT_TRUE(run(one_component("**"))[0].kept);
    const Thrown thrown = thrown_by([&] { run(one_component("**", "bad_documents: FAIL")); });
    EXPECT_EQ(thrown.code, ExitCode::kData);
    EXPECT_THAT(thrown.message, HasSubstr("b.jsonl.gz: is cut off"));
  }
}

TEST_F(BuildTest, B06_FailStopsAtTheFirstBadRecord) {
  source("a.jsonl", "{\"text\": \"a\"}\n{\"x\": 1}\nnope\n");
  const Thrown thrown = thrown_by([&] { run(one_component("a.jsonl", "bad_documents: FAIL")); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr("a.jsonl:2: has no \"text\""));
  EXPECT_FALSE(std::filesystem::exists(root_ / "out/c" + "/" + kManifestName));
}

TEST_F(BuildTest, B06_TextFilesKeepTheirBytes) {
  source("1.txt", "");
  source("2.txt", " ");
  source("3.txt",
         "\xef\xbb\xbf"
         "a\r\nb");  // a byte order mark is text
  source("4.txt", "bad \xff");
  source("5.txt", std::string("nul \0.", 6));
  const std::vector<BuiltComponent> built = run(one_component("*.txt"));
  EXPECT_EQ(tokens_of(root_ / "out", "c"), bytes_and_ends({" ",
                                                           "\xef\xbb\xbf"
                                                           "a\r\nb",
                                                           std::string("nul \0.", 6)}));
  EXPECT_EQ(built[0].documents, 3);
  EXPECT_EQ(built[0].empty_documents, 1);
  EXPECT_EQ(built[0].bad_documents, 1);
  EXPECT_EQ(reported_[1], "c: left out 4.txt: is not valid UTF-8, at byte 4");
}

TEST_F(BuildTest, TheEndComesFromTheTokenizerOrTheRecipe) {
  source("a.txt", "a");
  run(one_component("a.txt", "end_of_sequence: 700"));
  EXPECT_THAT(tokens_of(root_ / "out", "c"), ElementsAre('a', 700));
  const Manifest manifest = read_manifest(root_ / "out/c");
  EXPECT_EQ(manifest.end_of_sequence(), 700);
  EXPECT_EQ(manifest.vocabulary(), 701);
}

TEST_F(BuildTest, ShardsAreCutAtAFixedCount) {
  source("a.txt", std::string(24, 'a'));
  for (const auto& [cut, expected] : std::map<int, std::vector<std::int64_t>>{
           {7, {7, 7, 7, 4}}, {25, {25}}, {24, {24, 1}}, {5, {5, 5, 5, 5, 5}}, {1000, {25}}}) {
    run(one_component("a.txt", "shard_tokens: " + std::to_string(cut)));
    const Manifest manifest = read_manifest(root_ / "out/c");
    std::vector<std::int64_t> found;
    for (const ManifestShard& shard : manifest.shard()) found.push_back(shard.tokens());
    EXPECT_EQ(found, expected);
    EXPECT_EQ(tokens_of(root_ / "out", "c"), bytes_and_ends({std::string(24, 'a')}));
    EXPECT_THAT(verify_corpus(root_ / "out", 1), IsEmpty());
    // Shards of the build before are gone.
    EXPECT_EQ(files_below(root_ / "out/c").size(), expected.size() + 1);
  }
}

TEST_F(BuildTest, AComponentWithoutDocumentsHasNoShards) {
  source("a.txt", "");
  EXPECT_EQ(run(one_component("a.txt"))[0].tokens, 0);
  EXPECT_EQ(read_manifest(root_ / "out/c").shard_size(), 0);
  const Thrown thrown = thrown_by([&] {
    const Recipe recipe = one_component("a.txt");
    TokenStream(recipe, open_corpus(recipe, root_ / "out"));
  });
  EXPECT_EQ(thrown.code, ExitCode::kUsage);
  EXPECT_THAT(thrown.message, HasSubstr("component c"));
}

TEST_F(BuildTest, AFinishedComponentOfTheSameSourcesIsKept) {
  source("a.txt", "one");
  source("b.txt", "two");
  EXPECT_FALSE(run(one_component("*.txt"))[0].kept);
  const auto before = files_below(root_ / "out");
  EXPECT_TRUE(run(one_component("*.txt"))[0].kept);
  EXPECT_EQ(files_below(root_ / "out"), before);

  // The same size, other bytes; another file; another option; a shard cut; a manifest gone.
  source("b.txt", "TWO");
  EXPECT_FALSE(run(one_component("*.txt"))[0].kept);
  EXPECT_EQ(tokens_of(root_ / "out", "c"), bytes_and_ends({"one", "TWO"}));
  source("c.txt", "three");
  EXPECT_FALSE(run(one_component("*.txt"))[0].kept);
  std::filesystem::remove(root_ / "src/a.txt");
  EXPECT_FALSE(run(one_component("*.txt"))[0].kept);
  EXPECT_FALSE(run(one_component("*.txt", "shard_tokens: 3"))[0].kept);
  EXPECT_TRUE(run(one_component("*.txt", "shard_tokens: 3 seed: 9"))[0].kept);
  std::filesystem::resize_file(root_ / "out/c/shard-000001.tokens", 4);
  EXPECT_FALSE(run(one_component("*.txt", "shard_tokens: 3"))[0].kept);
  write_file(root_ / "out/c" + "/" + kManifestName, "garbage");
  EXPECT_FALSE(run(one_component("*.txt", "shard_tokens: 3"))[0].kept);
  EXPECT_THAT(verify_corpus(root_ / "out", 1), IsEmpty());
}

TEST_F(BuildTest, ATokenizersDigestIsHeldAgainstTheRecipes) {
  const Recipe other = one_component("a.txt", "tokenizer_digest: \"" + std::string(64, 'a') + "\"");
  const Thrown thrown = thrown_by([&] { open_recipe_tokenizer(other); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr(std::string(64, 'a')));
  EXPECT_EQ(thrown_by([&] {
              open_recipe_tokenizer(parse_recipe(
                  "tokenizer: \"none.json\" sequence_length: 4 total_tokens: 40 component { name: "
                  "\"c\" weight: \"1\" }",
                  "/nowhere/r"));
            }).code,
            ExitCode::kData);
}

TEST_F(BuildTest, SourcesInAFolderThatIsWrittenToAreKept) {
  source("c/shard-00001.jsonl", "{\"text\": \"a\"}");
  source("c/shard-000001.tokens", "text of that name");
  source("c/old.partial", "b");
  source("d/a.txt", "d");
  std::filesystem::create_directory_symlink(root_ / "src", root_ / "link");
  const Recipe recipe = one_component("c/*.jsonl");
  for (const std::string out : {"src", "link", "src/d/..", "src/"}) {
    EXPECT_THAT(refusal(ExitCode::kUsage, recipe, out),
                AllOf(HasSubstr("src/c/shard-00001.jsonl"), HasSubstr("choose another --out")));
  }
  // The folder of another component; a link to a file there; a folder that is a link.
  const Recipe two = parse_recipe(
      "tokenizer: \"byte\" sequence_length: 4 total_tokens: 40 "
      "component { name: \"c\" weight: \"1\" source { glob: \"d/*.txt\" } }"
      "component { name: \"e\" weight: \"1\" source { glob: \"c/*.jsonl\" } }",
      "r.textproto");
  EXPECT_THAT(refusal(ExitCode::kUsage, two, "src"), HasSubstr("sources of component e"));
  std::filesystem::create_symlink(root_ / "src/c/old.partial", root_ / "src/d/link.txt");
  EXPECT_THAT(refusal(ExitCode::kUsage, one_component("d/*.txt"), "src"), HasSubstr("d/link.txt"));
  std::filesystem::create_directory(root_ / "out");
  std::filesystem::create_directory_symlink(root_ / "src/d", root_ / "out/c");
  EXPECT_THAT(refusal(ExitCode::kUsage, one_component("d/a.txt"), "out"), HasSubstr("d/a.txt"));
}

TEST_F(BuildTest, WhatIsWrittenMayBeNoSourceOfTheNextBuild) {
  source("a.txt", "a");
  source("texts/b.txt", "b");
  std::filesystem::create_directory_symlink(root_ / "src/texts", root_ / "src/link");
  for (const auto& [glob, out] :
       std::vector<std::pair<std::string, std::string>>{{"**", "src/out"},
                                                        {"**", "src"},
                                                        {"texts", "src/texts/out"},
                                                        {"link", "src/texts/out"},
                                                        {"*/*/b*", "src/texts/../b"},
                                                        {"texts/**", "src/link/out"},
                                                        {"**/*.txt", "src/texts"}}) {
    EXPECT_THAT(refusal(ExitCode::kUsage, one_component(glob), out),
                AllOf(HasSubstr("data build writes here"), HasSubstr("glob \"" + glob + "\"")));
  }
  for (const auto& [glob, out] : std::vector<std::pair<std::string, std::string>>{
           {"*.txt", "src"}, {"**", "src/.out"}, {"texts", "src"}}) {
    EXPECT_FALSE(run(one_component(glob), 1, 0, 1, out)[0].kept) << glob;
    EXPECT_TRUE(run(one_component(glob), 1, 0, 1, out)[0].kept) << glob;
    std::filesystem::remove_all(root_ / (out + "/c"));
    std::filesystem::remove(root_ / (out + "/" + kRecipeName));
  }
}

TEST_F(BuildTest, OnlyFilesOfOurNamesAreReplaced) {
  source("a.txt", std::string(20, 'a'));
  run(one_component("a.txt", "shard_tokens: 3"));
  const std::vector<std::string> others = {
      "shard-00001.jsonl",    "shard-00000.tokens",     "shard-0000001.tokens",
      "shard-00000x.tokens",  "shard-000001.tokens.gz", "notes.partial",
      "bad_documents.txt.gz", "shard-.tokens",          "recipe.textproto"};
  for (const std::string& name : others) write_file(root_ / ("out/c/" + name), name);
  write_file(root_ / "out/c/shard-000009.tokens.partial", "ours");
  EXPECT_FALSE(run(one_component("a.txt"))[0].kept);
  for (const std::string& name : others) EXPECT_EQ(read_file(root_ / ("out/c/" + name)), name);
  EXPECT_EQ(files_below(root_ / "out/c").size(), others.size() + 2);
}

TEST_F(BuildTest, AFolderThatABuildDidntMakeIsKept) {
  source("a.txt", "a");
  const Recipe recipe = one_component("a.txt");
  write_file(root_ / "out/c/notes.txt", "mine");
  EXPECT_EQ(refusal(ExitCode::kCheckpoint, recipe, "out"),
            root_ / "out/c" +
                " holds files that data build didn't make (notes.txt); choose another --out or "
                "move them");
  std::filesystem::remove(root_ / "out/c/notes.txt");
  // Neither a text of that name nor another program's manifest is ours.
  write_file(root_ / "out/c/manifest.textproto", "mine");
  EXPECT_THAT(refusal(ExitCode::kCheckpoint, recipe, "out"), HasSubstr("(manifest.textproto)"));
  write_component(root_ / "out", "c", {1, 2, 3}, {3});
  EXPECT_THAT(refusal(ExitCode::kCheckpoint, recipe, "out"), HasSubstr("(manifest.textproto)"));
  std::filesystem::remove_all(root_ / "out/c");
  write_file(root_ / "out/c/.hidden", "");
  write_file(root_ / "out/c/shard-000000.tokens.partial", "");
  EXPECT_FALSE(run(recipe)[0].kept);
}

TEST_F(BuildTest, ARecipeThatABuildDidntLeaveIsKept) {
  source("a.txt", "a");
  const Recipe recipe = one_component("a.txt");
  const Recipe other = one_component("a.txt", "seed: 9");
  for (const std::string& text : {std::string("mine"), other.text}) {
    write_file(root_ / "out/recipe.textproto", text);
    EXPECT_EQ(refusal(ExitCode::kCheckpoint, recipe, "out"),
              root_ / "out" +
                  " holds files that data build didn't make (recipe.textproto); choose another "
                  "--out or move them");
  }
  run(other);
  run(recipe);
  EXPECT_EQ(read_file(root_ / "out/recipe.textproto"), recipe.text);
  write_file(root_ / "out/recipe.textproto", "mine");
  refusal(ExitCode::kCheckpoint, recipe, "out");
}

// 37 sources of very uneven size, in three components of text, JSONL and archives.
class ManySources : public BuildTest {
 protected:
  void SetUp() override {
    std::uint64_t state = 1;
    const auto words = [&](std::size_t count) {
      std::string text;
      for (std::size_t i = 0; i < count; ++i) {
        state = mix64(state + 1);
        text += std::to_string(state % 100000) + (state % 11 == 0 ? "\n" : " ");
      }
      return text;
    };
    for (int f = 0; f < 37; ++f) {
      const std::size_t size = f % 9 == 4 ? 200000 : static_cast<std::size_t>(f * f);
      const std::string number = std::to_string(f);
      if (f % 3 == 0) {
        source("texts/" + number + ".txt", words(size));
      } else if (f % 3 == 1) {
        std::string lines;
        for (std::size_t left = size; left > 0;) {
          const std::size_t piece = std::min(left, 1 + static_cast<std::size_t>(state % 400));
          std::string text = words(piece);
          std::replace(text.begin(), text.end(), '\n', ' ');
          lines += state % 17 == 0 ? "{\"bad\": 1}\n" : "{\"text\": \"" + text + "\"}\n";
          left -= piece;
        }
        source("lines/" + number + ".jsonl", lines);
      } else {
        const std::string text = words(size);
        write_file(root_ / ("src/packed/" + number + ".txt.gz"), "");
        gzFile file = gzopen((root_ / ("src/packed/" + number + ".txt.gz")).c_str(), "wb");
        gzwrite(file, text.data(), static_cast<unsigned>(text.size()));
        gzclose(file);
      }
    }
    recipe_ = parse_recipe(
        "name: \"many\" tokenizer: \"byte\" sequence_length: 8 total_tokens: 800 "
        "shard_tokens: 500000 "
        "component { name: \"texts\" weight: \"1\" source { glob: \"texts/*.txt\" } } "
        "component { name: \"lines\" weight: \"1\" source { glob: \"lines/*\" } } "
        "component { name: \"blend\" weight: \"1\" stream { sequence_length: 8 total_tokens: 80 "
        "component { name: \"texts\" weight: \"1\" } } } "
        "component { name: \"packed\" weight: \"1\" source { glob: \"packed\" } }",
        "many.textproto");
    run(recipe_, 1, 0, 1, "reference");
    expected_ = files_below(root_ / "reference");
    ASSERT_GT(expected_.size(), 10U);
  }

  // In a process of its own; returns its id.
  pid_t start(int threads, int rank, int ranks, const std::string& out) {
    const pid_t child = ::fork();
    if (child != 0) return child;
    try {
      run(recipe_, threads, rank, ranks, out);
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  static int wait_for(pid_t child) {
    int status = -1;
    ::waitpid(child, &status, 0);
    return status;
  }

  Recipe recipe_;
  std::map<std::string, std::string> expected_;
};

TEST_F(ManySources, B43_SameBytesForAnyThreads) {
  for (const int threads : {1, 2, 3, 16}) {
    for (int twice = 0; twice < 2; ++twice) {
      const std::string out = "t" + std::to_string(threads) + "-" + std::to_string(twice);
      run(recipe_, threads, 0, 1, out);
      EXPECT_TRUE(files_below(root_ / out) == expected_) << out;
      std::filesystem::remove_all(root_ / out);
    }
  }
}

TEST_F(ManySources, B43_SameBytesForAnyRanks) {
  for (const int ranks : {2, 4}) {
    std::vector<pid_t> children;
    children.reserve(static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) children.push_back(start(1, rank, ranks, "ranks"));
    for (const pid_t child : children) EXPECT_EQ(wait_for(child), 0);
    EXPECT_TRUE(files_below(root_ / "ranks") == expected_) << ranks;
    std::filesystem::remove_all(root_ / "ranks");
  }
}

TEST_F(ManySources, B43_TheManifestTellsTheSourcesAndTheirDocuments) {
  const Manifest manifest = read_manifest(root_ / "reference/lines");
  EXPECT_EQ(manifest.recipe(), "many");
  EXPECT_EQ(manifest.component(), "lines");
  EXPECT_EQ(manifest.tokenizer_digest(), open_tokenizer("byte")->digest());
  EXPECT_EQ(manifest.text_field(), "text");
  EXPECT_EQ(manifest.shard_tokens(), 500000);
  EXPECT_GT(manifest.bad_documents(), 0);
  std::int64_t documents = 0;
  std::string last;
  for (const ManifestSource& entry : manifest.source()) {
    const std::string bytes = read_file(root_ / ("src/" + entry.file()));
    EXPECT_EQ(entry.bytes(), static_cast<std::int64_t>(bytes.size()));
    EXPECT_EQ(entry.sha256(), sha256_hex(bytes));
    EXPECT_LT(last, entry.file());
    last = entry.file();
    documents += entry.documents();
  }
  EXPECT_EQ(documents, manifest.documents());
  const std::vector<std::uint32_t> ids = tokens_of(root_ / "reference", "lines");
  EXPECT_EQ(std::count(ids.begin(), ids.end(), std::uint32_t{kByteEnd}), documents);
  std::string joined;
  for (const ManifestShard& shard : manifest.shard()) {
    const std::string bytes = read_file(root_ / ("reference/lines/" + shard.file()));
    EXPECT_EQ(shard.sha256(), sha256_hex(bytes));
    joined += bytes;
  }
  EXPECT_EQ(joined, std::string(reinterpret_cast<const char*>(ids.data()), ids.size() * 4));
}

TEST_F(ManySources, B43_AKilledBuildGoesOnToTheSameBytes) {
  int killed = 0;
  for (int round = 0; round < 5; ++round) {
    const std::string out = root_ / "killed";
    for (int attempt = 0;; ++attempt) {
      const pid_t child = start(1 + round % 3, 0, 1, "killed");
      // From the first instants to well past the end.
      std::this_thread::sleep_for(std::chrono::milliseconds(5 + 17 * round + 40 * attempt));
      ::kill(child, SIGKILL);
      const int status = wait_for(child);
      if (WIFEXITED(status)) {
        EXPECT_EQ(WEXITSTATUS(status), 0);
        break;
      }
      ++killed;
      // What bears its final name is whole.
      if (!std::filesystem::exists(out)) continue;
      for (const auto& [name, bytes] : files_below(out)) {
        if (name.size() > 8 && name.substr(name.size() - 8) == ".partial") continue;
        const auto found = expected_.find(name);
        ASSERT_NE(found, expected_.end()) << name;
        EXPECT_TRUE(found->second == bytes) << name;
      }
    }
    EXPECT_TRUE(files_below(out) == expected_);
    std::filesystem::remove_all(out);
  }
  EXPECT_GT(killed, 5);
}

TEST_F(ManySources, PartialFilesAndForeignShardsAreNotTrusted) {
  write_file(root_ / "out/texts/shard-000000.tokens", "rubbish!");
  write_file(root_ / "out/texts/shard-000099.tokens", "rubbish!");
  write_file(root_ / "out/texts/shard-000001.tokens.partial", "rubbish!");
  write_file(root_ / "out/texts/manifest.textproto.partial", "rubbish!");
  run(recipe_);
  EXPECT_TRUE(files_below(root_ / "out") == expected_);
}

TEST_F(BuildTest, AFullDiskIsAnErrorOfTheDisk) {
  source("a.txt", std::string(100000, 'a'));
  const pid_t child = ::fork();
  if (child == 0) {
    // Files can't grow past 100 kB here.
    ::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{100000, 100000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    const Thrown thrown = thrown_by([&] { run(one_component("a.txt")); });
    const bool right = thrown.code == ExitCode::kCheckpoint &&
                       thrown.message.find("shard-000000.tokens") != std::string::npos;
    ::_exit(right ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(std::filesystem::exists(root_ / "out/c" + "/" + kManifestName));
  EXPECT_THAT(files_below(root_ / "out"), IsEmpty());
}

TEST_F(BuildTest, AnUnusableFolderIsAnErrorOfTheDisk) {
  source("a.txt", "a");
  write_file(root_ / "out", "a file");
  const Thrown thrown = thrown_by([&] { run(one_component("a.txt")); });
  EXPECT_EQ(thrown.code, ExitCode::kCheckpoint);
  EXPECT_EQ(thrown.message, root_ / "out" + " is a file; choose another --out");
}

TEST_F(BuildTest, TwoBuildsOfOneComponentDontMix) {
  source("a.txt", "a");
  std::filesystem::create_directories(root_ / "out/c");
  const int folder = ::open((root_ / "out/c").c_str(), O_RDONLY);
  ASSERT_EQ(::flock(folder, LOCK_EX), 0);
  const Thrown thrown = thrown_by([&] { run(one_component("a.txt")); });
  EXPECT_EQ(thrown.code, ExitCode::kCheckpoint);
  EXPECT_THAT(thrown.message, HasSubstr("another build"));
  ::close(folder);
  EXPECT_EQ(run(one_component("a.txt"))[0].tokens, 2);
}

TEST_F(BuildTest, MemoryIsBoundedByTheLongestDocument) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "a sanitizer adds memory of its own";
#endif
  // 96 MB of short documents; the queue may hold 16 MiB of bytes, 64 MiB of their ids.
  std::string lines;
  const std::string line = "{\"text\": \"" + std::string(1000, 'x') + "\"}\n";
  while (lines.size() < 96000000) lines += line;
  source("a.jsonl", lines);
  lines = std::string();
  const pid_t child = ::fork();
  if (child == 0) {
    rusage before{};
    ::getrusage(RUSAGE_SELF, &before);
    run(one_component("a.jsonl"), 1);
    rusage after{};
    ::getrusage(RUSAGE_SELF, &after);
    const std::int64_t grown = (after.ru_maxrss - before.ru_maxrss) * 1024;
    ::_exit(grown < 200000000 ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
}

TEST_F(BuildTest, ALineOf500Megabytes) {
  if (std::getenv("TESSERA_LONG") == nullptr) GTEST_SKIP() << "set TESSERA_LONG=1";
  const std::size_t length = 500000000;
  source("a.jsonl", "{\"text\": \"" + std::string(length, 'y') + "\"}\n{\"text\": \"z\"}\n");
  EXPECT_EQ(run(one_component("a.jsonl"))[0].tokens, static_cast<std::int64_t>(length) + 3);
}

}  // namespace
}  // namespace tessera
