#include "data/documents.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>
#include <zstd.h>

#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string gzip(const std::string& bytes) {
  z_stream stream{};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, bytes.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(bytes.data()));
  stream.avail_in = static_cast<uInt>(bytes.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string zstd(const std::string& bytes) {
  std::string packed(ZSTD_compressBound(bytes.size()), '\0');
  packed.resize(ZSTD_compress(packed.data(), packed.size(), bytes.data(), bytes.size(), 3));
  return packed;
}

std::string noise(std::size_t count) {
  std::string bytes;
  for (std::uint64_t i = 0; bytes.size() < count; ++i) bytes += std::to_string(mix64(i));
  return bytes;
}

std::string read_all(SourceFile& file) {
  std::string bytes;
  char chunk[1000];
  while (const std::size_t got = file.read(chunk, sizeof chunk)) bytes.append(chunk, got);
  return bytes;
}

TEST(Glob, MatchesAsAShellWould) {
  EXPECT_TRUE(glob_matches("a.txt", "a.txt"));
  EXPECT_FALSE(glob_matches("a.txt", "b.txt"));
  EXPECT_TRUE(glob_matches("*.txt", "a.txt"));
  EXPECT_FALSE(glob_matches("*.txt", "x/a.txt"));
  EXPECT_TRUE(glob_matches("?[0-9].txt", "a7.txt"));
  EXPECT_FALSE(glob_matches("*", ".hidden"));
  EXPECT_TRUE(glob_matches(".*", ".hidden"));
  EXPECT_TRUE(glob_matches("**/*.txt", "a.txt"));
  EXPECT_TRUE(glob_matches("**/*.txt", "x/y/z/a.txt"));
  EXPECT_FALSE(glob_matches("**/*.txt", "x/.git/a.txt"));
  EXPECT_TRUE(glob_matches("x/**", "x/y/z"));
  EXPECT_FALSE(glob_matches("x/**", "y/x/z"));
  EXPECT_TRUE(glob_matches("x/**/y/**/*.txt", "x/1/2/y/3/a.txt"));
  EXPECT_TRUE(glob_matches("x/**/y/**/*.txt", "x/y/a.txt"));
  EXPECT_FALSE(glob_matches("x/**/y/**/*.txt", "x/a.txt"));
}

TEST(Glob, AFolderStandsForAllBelowIt) {
  EXPECT_TRUE(glob_matches("x", "x/y/z.txt"));
  EXPECT_TRUE(glob_matches("*/y", "x/y/z.txt"));
  EXPECT_TRUE(glob_matches("**/y", "x/y/z.txt"));
  EXPECT_FALSE(glob_matches("x", "x/.git/config"));
  EXPECT_FALSE(glob_matches("*", "x/y"));  // a wildcard names files
  EXPECT_FALSE(glob_matches("x", "xy"));
}

class SourcesTest : public ::testing::Test {
 protected:
  std::vector<std::string> list(const std::vector<std::string>& globs) {
    Component component;
    component.name = "c";
    component.globs = globs;
    return list_sources(root_.path(), component);
  }
  void touch(const std::string& path) { write_file(root_ / path, path); }
  TempFolder root_;
};

TEST_F(SourcesTest, ComeByGlobThenByPathAsBytesAndOnce) {
  for (const char* path : {"b/2.txt", "b/10.txt", "b/Z.txt", "b/a.txt", "b/\xc3\xa4.txt", "b-c.txt",
                           "b/sub/x.txt", "z.jsonl", "b/.hidden"}) {
    touch(path);
  }
  // '-' (2d) sorts before '/' (2f); capitals before small letters; bytes above 7f last.
  EXPECT_THAT(list({"**/*.txt"}), ElementsAre("b-c.txt", "b/10.txt", "b/2.txt", "b/Z.txt",
                                              "b/a.txt", "b/sub/x.txt", "b/\xc3\xa4.txt"));
  EXPECT_THAT(list({"z.jsonl", "b/sub", "b/*.txt", "**"}),
              ElementsAre("z.jsonl", "b/sub/x.txt", "b/10.txt", "b/2.txt", "b/Z.txt", "b/a.txt",
                          "b/\xc3\xa4.txt", "b-c.txt"));
  EXPECT_THAT(list({"b"}), ElementsAre("b/10.txt", "b/2.txt", "b/Z.txt", "b/a.txt", "b/sub/x.txt",
                                       "b/\xc3\xa4.txt"));
}

TEST_F(SourcesTest, AGlobThatNamesNothingIsAnError) {
  touch("a.txt");
  const Thrown thrown = thrown_by([&] { list({"a.txt", "b/*.txt"}); });
  EXPECT_EQ(thrown.code, ExitCode::kData);
  EXPECT_THAT(thrown.message, HasSubstr("component c: glob \"b/*.txt\""));
}

TEST_F(SourcesTest, LinksToFilesCountLinksToFoldersOnlyByName) {
  touch("real/a.txt");
  std::filesystem::create_directory(root_ / "links");
  std::filesystem::create_symlink("../real/a.txt", root_ / "links/b.txt");
  std::filesystem::create_directory_symlink("..", root_ / "links/loop");
  EXPECT_THAT(list({"links/**"}), ElementsAre("links/b.txt"));
  std::filesystem::create_symlink("nowhere", root_ / "links/c.txt");
  EXPECT_THAT(thrown_by([&] { list({"links/*.txt"}); }).message, HasSubstr("links/c.txt"));

  // A glob may name one, as one names a mounted folder.
  std::filesystem::create_directory_symlink("real", root_ / "named");
  EXPECT_THAT(list({"named"}), ElementsAre("named/a.txt"));
  EXPECT_THAT(list({"named/*.txt"}), ElementsAre("named/a.txt"));
  EXPECT_THAT(list({"**/a.txt"}), ElementsAre("real/a.txt"));
  EXPECT_THAT(thrown_by([&] { list({"nam?d/*.txt"}); }).message, HasSubstr("names no file"));
}

class SourceFileTest : public ::testing::Test {
 protected:
  std::string path(const std::string& name, const std::string& bytes) {
    write_file(root_ / name, bytes);
    return root_ / name;
  }
  Thrown read_error(const std::string& name, const std::string& bytes) {
    const std::string file = path(name, bytes);
    Thrown thrown = thrown_by([&] {
      SourceFile source(file);
      read_all(source);
    });
    EXPECT_THAT(thrown.message, HasSubstr(file));
    return thrown;
  }
  TempFolder root_;
};

TEST_F(SourceFileTest, UnpacksAndHashesTheFileAsItLies) {
  const std::string bytes = noise(2000000);
  for (const auto& [name, packed] :
       {std::pair<std::string, std::string>{"a.txt", bytes},
        {"a.txt.gz", gzip(bytes)},
        {"two.gz", gzip(bytes.substr(0, 1000)) + gzip(bytes.substr(1000))},
        {"padded.gz", gzip(bytes) + std::string(512, '\0')},
        {"a.txt.zst", zstd(bytes)},
        {"two.zst", zstd(bytes.substr(0, 1000)) + zstd(bytes.substr(1000))}}) {
    SourceFile file(path(name, packed));
    EXPECT_TRUE(read_all(file) == bytes) << name;
    EXPECT_EQ(file.bytes(), static_cast<std::int64_t>(packed.size())) << name;
    EXPECT_EQ(file.sha256_hex(), sha256_hex(packed)) << name;
  }
}

TEST_F(SourceFileTest, EmptyArchivesHoldNothing) {
  for (const auto& [name, packed] : {std::pair<std::string, std::string>{"a.gz", gzip("")},
                                     {"a.zst", zstd("")},
                                     {"a.txt", ""}}) {
    SourceFile file(path(name, packed));
    EXPECT_EQ(read_all(file), "") << name;
  }
}

TEST_F(SourceFileTest, WhatCompressesWellIsReadInPieces) {
  std::string bytes;
  bytes.resize(20000000, 'x');
  for (const auto& [name, packed] :
       {std::pair<std::string, std::string>{"a.gz", gzip(bytes)}, {"a.zst", zstd(bytes)}}) {
    SourceFile file(path(name, packed));
    EXPECT_TRUE(read_all(file) == bytes) << name;
  }
}

TEST_F(SourceFileTest, CutArchivesAreErrors) {
  const std::string bytes = noise(300000);
  for (const auto& [name, packed] :
       {std::pair<std::string, std::string>{"a.gz", gzip(bytes)}, {"a.zst", zstd(bytes)}}) {
    for (const std::size_t keep :
         {std::size_t{0}, std::size_t{1}, std::size_t{9}, packed.size() / 2, packed.size() - 1}) {
      const Thrown thrown = read_error(name, packed.substr(0, keep));
      EXPECT_EQ(thrown.code, ExitCode::kData);
      EXPECT_THAT(thrown.message, HasSubstr("cut off")) << keep;
    }
  }
}

TEST_F(SourceFileTest, DamagedArchivesAreErrors) {
  const std::string bytes = noise(300000);
  for (const auto& [name, packed] :
       {std::pair<std::string, std::string>{"a.gz", gzip(bytes)}, {"a.zst", zstd(bytes)}}) {
    std::string flipped = packed;
    flipped[packed.size() / 2] = static_cast<char>(flipped[packed.size() / 2] ^ 0x55);
    EXPECT_EQ(read_error(name, flipped).code, ExitCode::kData);
    EXPECT_EQ(read_error(name, bytes).code, ExitCode::kData);
    EXPECT_EQ(read_error(name, packed + "rubbish").code, ExitCode::kData);
  }
  EXPECT_EQ(read_error("padded.gz", gzip(bytes) + std::string(10, '\0') + "x").code,
            ExitCode::kData);
}

TEST_F(SourceFileTest, B06_TheFaultOfAnArchiveIsFoundWithoutItsRecords) {
  const std::string bytes = noise(300000);
  const auto fault = [&](const std::string& name, const std::string& packed) {
    return archive_fault(path(name, packed)).value_or("");
  };
  for (const auto& [name, packed] :
       {std::pair<std::string, std::string>{"a.gz", gzip(bytes)}, {"a.zst", zstd(bytes)}}) {
    EXPECT_EQ(fault(name, packed), "");
    EXPECT_THAT(fault(name, packed.substr(0, packed.size() - 1)), HasSubstr("is cut off: "));
    EXPECT_THAT(fault(name, packed.substr(0, 100)), HasSubstr("is cut off: "));
    EXPECT_THAT(fault(name, ""), HasSubstr("is cut off: "));
    EXPECT_THAT(fault(name, bytes), HasSubstr("is damaged: "));
  }
  EXPECT_EQ(fault("a.txt", gzip(bytes).substr(0, 100)), "");
  EXPECT_EQ(thrown_by([&] { archive_fault(root_ / "none.gz"); }).code, ExitCode::kData);
}

TEST_F(SourceFileTest, MissingFilesAreErrors) {
  EXPECT_EQ(thrown_by([&] { SourceFile(root_ / "none.txt"); }).code, ExitCode::kData);
  EXPECT_EQ(thrown_by([&] {
              SourceFile folder(root_.path());
              read_all(folder);
            }).code,
            ExitCode::kData);
}

class RecordsTest : public SourceFileTest {
 protected:
  std::vector<std::pair<std::int64_t, std::string>> records(const std::string& name,
                                                            const std::string& bytes) {
    SourceFile file(path(name, bytes));
    std::vector<std::pair<std::int64_t, std::string>> found;
    read_records(file, is_jsonl(name),
                 [&](const Record& record) { found.emplace_back(record.line, record.bytes); });
    return found;
  }
};

TEST_F(RecordsTest, AFileIsOneRecordALineIsOneRecord) {
  using R = std::pair<std::int64_t, std::string>;
  EXPECT_THAT(records("a.txt", "x\ny\n"), ElementsAre(R{0, "x\ny\n"}));
  EXPECT_THAT(records("a.txt", ""), ElementsAre(R{0, ""}));
  EXPECT_THAT(records("a.jsonl", "1\n\n  \r\n22\r\n3"),
              ElementsAre(R{1, "1"}, R{4, "22\r"}, R{5, "3"}));
  EXPECT_THAT(records("a.jsonl", "1\n"), ElementsAre(R{1, "1"}));
  EXPECT_THAT(records("a.jsonl", ""), ElementsAre());
  EXPECT_THAT(records("a.jsonl.gz", gzip("1\n2")), ElementsAre(R{1, "1"}, R{2, "2"}));
  EXPECT_THAT(records("a.jsonl.zst", zstd("1\n2")), ElementsAre(R{1, "1"}, R{2, "2"}));
}

TEST_F(RecordsTest, LinesLongerThanAChunkAreWhole) {
  const std::string line = noise(1000000);
  const auto found = records("a.jsonl", line + "\n" + line + "x\n");
  ASSERT_EQ(found.size(), 2U);
  EXPECT_EQ(found[0].second, line);
  EXPECT_EQ(found[1].second, line + "x");
}

std::string text_or_why(const std::string& line, const std::string& field = "text") {
  std::string why;
  const std::optional<std::string> text = text_of_json(line, field, why);
  EXPECT_EQ(text.has_value(), why.empty());
  return text ? "text: " + *text : why;
}

TEST(TextOfJson, TakesTheStringOfTheField) {
  EXPECT_EQ(text_or_why(R"({"text": "a\nb\u00e9\ud83d\ude00", "x": 1})"),
            "text: a\nb\xc3\xa9\xf0\x9f\x98\x80");
  EXPECT_EQ(text_or_why(R"({"x": {"text": "inner"}, "y": ["text"], "text": ""})"), "text: ");
  EXPECT_EQ(text_or_why(R"({"text": "1", "text": "2"})"), "text: 2");
  EXPECT_EQ(text_or_why(R"({"body": "b"})", "body"), "text: b");
  EXPECT_EQ(text_or_why("{\"text\": \"\\u0000\"}\r"), std::string("text: \0", 7));
}

TEST(TextOfJson, SaysWhyThereIsNone) {
  EXPECT_EQ(text_or_why("{}"), "has no \"text\"");
  EXPECT_EQ(text_or_why(R"({"x": {"text": "inner"}})"), "has no \"text\"");
  EXPECT_EQ(text_or_why(R"({"text": null})"), "\"text\" is not a string");
  EXPECT_EQ(text_or_why(R"({"text": 3})"), "\"text\" is not a string");
  EXPECT_EQ(text_or_why(R"({"text": ["a"]})"), "\"text\" is not a string");
  EXPECT_EQ(text_or_why(R"({"text": {"text": "a"}})"), "\"text\" is not a string");
  EXPECT_EQ(text_or_why(R"({"text": "1", "text": null})"), "\"text\" is not a string");
  EXPECT_EQ(text_or_why(R"(["text"])"), "is not a JSON object");
  EXPECT_EQ(text_or_why(R"("text")"), "is not a JSON object");
  for (const char* bad :
       {"", "{", "nope", R"({"text": "a)", R"({"text": "a"} x)", "{'text': 'a'}",
        R"({"text": "\ud800"})", "{\"text\": \"\xff\"}", "{\"text\": \"\xc0\x80\"}",
        "{\"text\": \"\xed\xa0\x80\"}", "{\"text\": \"\xf4\x90\x80\x80\"}"}) {
    EXPECT_THAT(text_or_why(bad), HasSubstr("not valid JSON in UTF-8")) << bad;
  }
  EXPECT_THAT(text_or_why(std::string(1000000, '[')), HasSubstr("not valid JSON"));
  EXPECT_EQ(text_or_why(R"({"x": 1e999, "text": "a"})"),
            "holds a number beyond a double's range, at byte 11");
  // What is no text may lie as deep as it likes.
  const std::string deep(1000000, '[');
  EXPECT_EQ(text_or_why(R"({"text": "a", "x": )" + deep + std::string(deep.size(), ']') + "}"),
            "text: a");
  EXPECT_EQ(text_or_why("\xef\xbb\xbf{\"text\": \"a\"}"), "text: a");
}

}  // namespace
}  // namespace tessera
