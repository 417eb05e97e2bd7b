#include "runtime/peak.h"

#include <gtest/gtest.h>
#include <stdlib.h>
#include <sys/stat.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace tessera {
namespace {

class PeakCache : public testing::Test {
 protected:
  PeakCache() {
    std::string pattern = (std::filesystem::temp_directory_path() / "tessera-peak-XXXXXX").string();
    root_ = mkdtemp(pattern.data());
    folder_ = root_ + "/cache/tessera";
  }
  ~PeakCache() override { std::filesystem::remove_all(root_); }
  double peak(const std::string& version = "1.2.3") const {
    return peak_flops(Precision::kF32, 1, version, folder_);
  }
  std::vector<std::string> files() const {
    std::vector<std::string> paths;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      paths.push_back(entry.path().string());
    }
    return paths;
  }
  static std::string read(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  static void write(const std::string& path, const std::string& text) {
    std::ofstream(path) << text;
  }
  // The file's text with another rate, which no measurement would give.
  static std::string with_rate(const std::string& text, const std::string& rate) {
    const std::size_t line = text.rfind('\n', text.size() - 2) + 1;
    return text.substr(0, line) + rate + "\n";
  }

  std::string root_, folder_;
};

// That the loops have run is checked inside by their sums. A core that runs at 1 GHz makes 2e9
// operations a second with the narrowest multiply-add there is; 1e14 is above any core's.
TEST(Peak, IsARate) {
  for (const Precision precision : {Precision::kF32, Precision::kBF16}) {
    const double rate = measure_peak_flops(precision, 1);
    EXPECT_TRUE(std::isfinite(rate));
    EXPECT_GT(rate, 1e7) << peak_instructions(precision);
    EXPECT_LT(rate, 1e14) << peak_instructions(precision);
  }
  EXPECT_TRUE(peak_instructions(Precision::kF32).starts_with("f32 "));
}

// Threads past the cores add nothing; each of those before adds something.
TEST(Peak, ThreadsAddUpToTheCores) {
  const double one = measure_peak_flops(Precision::kF32, 1);
  const double many = measure_peak_flops(Precision::kF32, 4096);
  EXPECT_TRUE(std::isfinite(many));
  EXPECT_GT(many, 0.3 * one);  // others may be using the cores
}

TEST_F(PeakCache, TheSecondCallReadsWhatTheFirstLeft) {
  const double first = peak();
  ASSERT_EQ(files().size(), 1U);
  EXPECT_EQ(peak(), first);  // bit for bit, as no second measurement would be
  write(files()[0], with_rate(read(files()[0]), "1234567890.5"));
  EXPECT_EQ(peak(), 1234567890.5);
}

TEST_F(PeakCache, AnotherVersionOrPrecisionIsMeasured) {
  peak();
  const std::string path = files()[0];
  write(path, with_rate(read(path), "1234567890.5"));
  EXPECT_GT(peak("1.2.4"), 1e7);
  if (peak_instructions(Precision::kBF16) != peak_instructions(Precision::kF32)) {
    EXPECT_GT(peak_flops(Precision::kBF16, 1, "1.2.3", folder_), 1e7);
  }
  EXPECT_EQ(peak(), 1234567890.5);
}

TEST_F(PeakCache, AGarbledFileIsMeasuredAnewAndReplaced) {
  peak();
  const std::string path = files()[0];
  const std::string whole = read(path);
  const std::vector<std::string> garbled = {"",
                                            "garbage",
                                            std::string(10000, 'x'),
                                            whole.substr(0, whole.size() / 2),
                                            whole.substr(0, whole.size() - 1),
                                            with_rate(whole, "-5"),
                                            with_rate(whole, "0"),
                                            with_rate(whole, "nan"),
                                            with_rate(whole, "inf"),
                                            with_rate(whole, "1"),
                                            with_rate(whole, "1e-300"),
                                            with_rate(whole, "1e300"),
                                            with_rate(whole, "12 apples"),
                                            with_rate(whole, ""),
                                            "x" + with_rate(whole, "1234567890.5")};
  for (const std::string& text : garbled) {
    write(path, text);
    const double rate = peak();
    EXPECT_GT(rate, 1e7) << text;
    EXPECT_TRUE(std::isfinite(rate)) << text;
    EXPECT_EQ(peak(), rate) << text;
    EXPECT_EQ(files().size(), 1U);
  }
}

TEST_F(PeakCache, NoFolderIsNoObstacle) {
  EXPECT_GT(peak_flops(Precision::kF32, 1, "1", ""), 1e7);
  // A file stands where the folder should be.
  std::filesystem::create_directories(root_ + "/cache");
  write(folder_, "");
  EXPECT_GT(peak(), 1e7);
  // A folder stands where the file should be.
  std::filesystem::remove(folder_);
  peak();
  const std::string path = files()[0];
  std::filesystem::remove(path);
  std::filesystem::create_directories(path + "/inner");
  EXPECT_GT(peak(), 1e7);
  EXPECT_EQ(files().size(), 1U);  // nothing half-written is left beside it
  // A pipe stands there, which nobody writes to.
  std::filesystem::remove_all(path);
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  EXPECT_GT(peak(), 1e7);
}

TEST(PeakCacheFolder, FollowsTheEnvironment) {
  const char* const cache = getenv("XDG_CACHE_HOME");
  const std::string kept = cache == nullptr ? "" : cache;
  setenv("XDG_CACHE_HOME", "/some/where", 1);
  EXPECT_EQ(default_cache_folder(), "/some/where/tessera");
  unsetenv("XDG_CACHE_HOME");
  if (const char* home = getenv("HOME")) {
    EXPECT_EQ(default_cache_folder(), std::string(home) + "/.cache/tessera");
  }
  if (cache != nullptr) setenv("XDG_CACHE_HOME", kept.c_str(), 1);
}

}  // namespace
}  // namespace tessera
