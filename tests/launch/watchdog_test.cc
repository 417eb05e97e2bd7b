#include "launch/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "runtime/error.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using std::chrono::steady_clock;
using testing::AllOf;
using testing::ExitedWithCode;
using testing::HasSubstr;
using testing::Not;

constexpr seconds kNever = std::chrono::hours(1);
constexpr const char* kFolderVariable = "TESSERA_WATCHDOG_TEST_FOLDER";

class WatchdogTest : public testing::Test {
 protected:
  // A death test's child starts from main, since threads run here; it uses its parent's folder, who
  // removes it.
  WatchdogTest() {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    if (const char* parents = getenv(kFolderVariable)) {
      folder_ = parents;
      return;
    }
    std::string pattern =
        (std::filesystem::temp_directory_path() / "tessera-watchdog-XXXXXX").string();
    folder_ = mkdtemp(pattern.data());
    setenv(kFolderVariable, folder_.c_str(), 1);
  }
  ~WatchdogTest() override {
    unsetenv(kFolderVariable);
    std::filesystem::remove_all(folder_);
  }

  std::string state_path(int rank) const {
    return folder_ + "/rank-" + std::to_string(rank) + ".state";
  }
  // The first line of rank 0's file, without the blanks that fill it up.
  std::string state_line() const {
    std::ifstream file(state_path(0));
    std::string line;
    std::getline(file, line);
    return line.substr(0, line.find_last_not_of(' ') + 1);
  }
  bool comes(const std::string& line) const {
    for (const auto end = steady_clock::now() + seconds(30); steady_clock::now() < end;) {
      if (state_line() == line) return true;
      std::this_thread::sleep_for(milliseconds(20));
    }
    return false;
  }
  void write_peer(int rank, const std::string& line) const {
    std::ofstream(state_path(rank)) << line << '\n';
  }

  std::string folder_;
  const std::string head_ = "rank 0 host node7 pid " + std::to_string(getpid());
};

TEST_F(WatchdogTest, StateFileFollowsTheActivity) {
  Activity activity;
  {
    const Watchdog watchdog(activity, folder_, 0, 1, "node7", kNever);
    EXPECT_EQ(state_line(), head_ + " step 0 sequence 0 doing start");
    activity.set_step(17);
    activity.set("reduce", "layers.3");
    EXPECT_TRUE(comes(head_ + " step 17 sequence 2 doing reduce of layers.3")) << state_line();
    activity.set(std::string(400, 'x'));
    EXPECT_TRUE(comes(head_ + " step 17 sequence 3 doing " + std::string(400, 'x')));
    activity.set("two\nlines");
    EXPECT_TRUE(comes(head_ + " step 17 sequence 4 doing two lines")) << state_line();
    activity.set("end");
  }
  EXPECT_EQ(state_line(), head_ + " step 17 sequence 5 doing end");
}

TEST_F(WatchdogTest, AFolderThatIsMissingIsNamed) {
  const Activity activity;
  const std::string folder = folder_ + "/missing";
  try {
    const Watchdog watchdog(activity, folder, 3, 4, "node7", kNever);
    FAIL() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
    EXPECT_THAT(error.what(), HasSubstr(folder + "/rank-3.state"));
  }
}

// A thread that only saw the end when it next looks would take a second.
TEST_F(WatchdogTest, EndsPromptly) {
  const Activity activity;
  auto best = steady_clock::duration::max();
  for (int i = 0; i < 5; ++i) {
    auto watchdog = std::make_unique<Watchdog>(activity, folder_, 0, 1, "node7", kNever);
    const auto start = steady_clock::now();
    watchdog.reset();
    best = std::min(best, steady_clock::now() - start);
  }
  EXPECT_LT(best, milliseconds(500));
}

using WatchdogDeathTest = WatchdogTest;

// Rank 1's step is the latest, but its sequence the smallest: that is the one that is waited for.
TEST_F(WatchdogDeathTest, StandingStillEndsTheProcessAndNamesTheRankBehind) {
  const auto stand_still = [this] {
    write_peer(1, "rank 1 host node8 pid 99 step 9 sequence 2 doing gather of layers.0    ");
    write_peer(2, "rank 2 host node9 pid 98 step 5 sequence 8 doing reduce of layers.1    ");
    Activity activity;
    activity.set_step(5);
    activity.set("compute");
    activity.set("reduce", "layers.1");
    const Watchdog watchdog(activity, folder_, 0, 3, "node7", seconds(1));
    std::this_thread::sleep_for(seconds(60));
    std::exit(0);
  };
  EXPECT_EXIT(stand_still(), ExitedWithCode(static_cast<int>(ExitCode::kCommunication)),
              AllOf(HasSubstr("tessera: rank 0 (node7) step 5, reduce of layers.1: nothing has "
                              "moved for 1 s (execution.watchdog_seconds); furthest behind: rank 1 "
                              "host node8 pid 99 step 9 sequence 2 doing gather of layers.0; "),
                    Not(HasSubstr("node9"))));
}

TEST_F(WatchdogDeathTest, ARankWithoutAStateIsFurthestBehind) {
  const auto stand_still = [this] {
    const Activity activity;
    const Watchdog watchdog(activity, folder_, 0, 2, "node7", seconds(1));
    std::this_thread::sleep_for(seconds(60));
    std::exit(0);
  };
  EXPECT_EXIT(stand_still(), ExitedWithCode(static_cast<int>(ExitCode::kCommunication)),
              HasSubstr("furthest behind: rank 1 (no state); "));
}

TEST_F(WatchdogDeathTest, MovementKeepsTheProcessAlive) {
  const auto move = [this] {
    Activity activity;
    {
      const Watchdog watchdog(activity, folder_, 0, 1, "node7", seconds(2));
      for (const auto end = steady_clock::now() + seconds(4); steady_clock::now() < end;) {
        activity.set("compute");
        std::this_thread::sleep_for(milliseconds(50));
      }
    }
    std::exit(0);
  };
  EXPECT_EXIT(move(), ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera
