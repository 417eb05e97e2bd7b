#include "launch/watchdog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
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
using testing::ContainsRegex;
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
  // The first line of rank 0's file.
  std::string state_line() const {
    std::ifstream file(state_path(0));
    std::string line;
    std::getline(file, line);
    return line;
  }
  std::string state_file() const {
    std::ifstream file(state_path(0));
    return {std::istreambuf_iterator<char>(file), {}};
  }
  bool comes(const std::string& line) const {
    for (const auto end = steady_clock::now() + seconds(30); steady_clock::now() < end;) {
      if (state_line() == line) return true;
      std::this_thread::sleep_for(milliseconds(20));
    }
    return false;
  }
  // As a rank that lives through the test would: its file doesn't grow old.
  void write_peer(int rank, const std::string& line, seconds age = -seconds(100)) const {
    std::ofstream(state_path(rank)) << line << '\n';
    std::filesystem::last_write_time(state_path(rank),
                                     std::filesystem::last_write_time(state_path(rank)) - age);
  }

  std::string folder_;
  const std::string head_ = "rank 0 host node7 pid " + std::to_string(getpid());
};

TEST_F(WatchdogTest, StateFileFollowsTheActivity) {
  Activity activity;
  {
    const Watchdog watchdog(activity, folder_, 0, 1, "node7", kNever);
    EXPECT_EQ(state_line(), head_ + " step 0 calls 0 doing start");
    activity.set_step(17);
    activity.begin_call("reduce", "layers.3");
    EXPECT_TRUE(comes(head_ + " step 17 calls 1 doing reduce of layers.3")) << state_line();
    activity.begin_call(std::string(400, 'x'), "");
    EXPECT_TRUE(comes(head_ + " step 17 calls 2 doing " + std::string(400, 'x')));
    EXPECT_EQ(state_file(),
              state_line() + "\n0 reduce of layers.3\n1 " + std::string(56, 'x') + "\n");
    activity.set("two\nlines");
    EXPECT_TRUE(comes(head_ + " step 17 calls 2 doing two lines")) << state_line();
    for (int i = 0; i < 100; ++i) activity.begin_call("gather", std::to_string(i));
    activity.set("end");
  }
  // Nothing is left of the longer lines before.
  std::string expected = head_ + " step 17 calls 102 doing end\n";
  for (int i = 84; i < 100; ++i) {
    expected += std::to_string(i + 2) + " gather of " + std::to_string(i) + "\n";
  }
  EXPECT_EQ(state_file(), expected);
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

// Rank 1's step is the latest, but its calls the fewest: that is the one that is waited for.
TEST_F(WatchdogDeathTest, StandingStillEndsTheProcessAndNamesTheRankBehind) {
  const auto stand_still = [this] {
    write_peer(1, "rank 1 host node8 pid 99 step 9 calls 2 doing gather of layers.0");
    write_peer(2, "rank 2 host node9 pid 98 step 5 calls 8 doing reduce of layers.1");
    Activity activity;
    activity.set_step(5);
    for (int i = 0; i < 8; ++i) activity.begin_call("reduce", "layers.1");
    const Watchdog watchdog(activity, folder_, 0, 3, "node7", seconds(1));
    std::this_thread::sleep_for(seconds(60));
    std::exit(0);
  };
  EXPECT_EXIT(stand_still(), ExitedWithCode(static_cast<int>(ExitCode::kCommunication)),
              AllOf(HasSubstr("tessera: rank 0 (node7) step 5, reduce of layers.1: nothing has "
                              "moved for 1 s (execution.watchdog_seconds); furthest behind: rank 1 "
                              "host node8 pid 99 step 9 calls 2 doing gather of layers.0; the job"),
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

// All are in the same call, but one's state is old: that process is stopped, or its host is gone.
TEST_F(WatchdogDeathTest, ARankThatNoLongerWritesItsStateIsFurthestBehind) {
  const auto stand_still = [this] {
    write_peer(1, "rank 1 host node8 pid 99 step 0 calls 1 doing x", seconds(600));
    write_peer(2, "rank 2 host node8 pid 99 step 0 calls 1 doing x");
    Activity activity;
    activity.begin_call("reduce", "layers.1");
    const Watchdog watchdog(activity, folder_, 0, 3, "node7", seconds(1));
    std::this_thread::sleep_for(seconds(60));
    std::exit(0);
  };
  EXPECT_EXIT(
      stand_still(), ExitedWithCode(static_cast<int>(ExitCode::kCommunication)),
      AllOf(ContainsRegex("furthest behind: rank 1 host node8 .* \\(silent for 6.. s: it is "
                          "stopped or its host is lost\\); the job ends"),
            Not(HasSubstr("rank 2"))));
}

TEST_F(WatchdogDeathTest, TheFirstCallThatDiffersIsNamed) {
  const auto stand_still = [this] {
    write_peer(1, "rank 1 host node8 pid 99 step 0 calls 2 doing x\n0 gather of a\n1 gather of c");
    Activity activity;
    for (const char* unit : {"a", "b", "d"}) activity.begin_call("gather", unit);
    const Watchdog watchdog(activity, folder_, 0, 2, "node7", seconds(1));
    std::this_thread::sleep_for(seconds(60));
    std::exit(0);
  };
  EXPECT_EXIT(
      stand_still(), ExitedWithCode(static_cast<int>(ExitCode::kCommunication)),
      HasSubstr("; call 1 is \"gather of b\" on rank 0, \"gather of c\" on rank 1; the job"));
}

TEST_F(WatchdogDeathTest, MovementKeepsTheProcessAlive) {
  const auto move = [this] {
    Activity activity;
    {
      const Watchdog watchdog(activity, folder_, 0, 1, "node7", seconds(2));
      for (const auto end = steady_clock::now() + seconds(5); steady_clock::now() < end;) {
        activity.set("compute");
        std::this_thread::sleep_for(milliseconds(50));
      }
    }
    std::exit(0);
  };
  EXPECT_EXIT(move(), ExitedWithCode(0), "");
}

TEST_F(WatchdogDeathTest, WaitingForARankThatMovesIsNoStandstill) {
  const auto wait = [this] {
    {
      const Activity activity;
      const Watchdog watchdog(activity, folder_, 0, 2, "node7", seconds(2));
      const auto end = steady_clock::now() + seconds(6);
      for (int piece = 0; steady_clock::now() < end; ++piece) {
        write_peer(
            1, "rank 1 host node8 pid 99 step 0 calls 1 doing sync checkpoint of the MiB from " +
                   std::to_string(piece));
        std::this_thread::sleep_for(milliseconds(200));
      }
    }
    std::exit(0);
  };
  EXPECT_EXIT(wait(), ExitedWithCode(0), "");
}

// A batch system may stop a job as a whole, and let it go on hours later.
TEST_F(WatchdogDeathTest, WhileTheProcessIsStoppedNoTimePasses) {
  const auto stop = [this] {
    {
      const Activity activity;
      const Watchdog watchdog(activity, folder_, 0, 1, "node7", seconds(3));
      const pid_t self = getpid();
      if (fork() == 0) {
        std::this_thread::sleep_for(seconds(6));
        kill(self, SIGCONT);
        _exit(0);
      }
      kill(self, SIGSTOP);
    }
    std::exit(0);
  };
  EXPECT_EXIT(stop(), ExitedWithCode(0), "");
}

}  // namespace
}  // namespace tessera
