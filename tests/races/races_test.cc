// All threads of a rank at once, as a run has them: the loader's, the queue's, the watchdog's, and
// the step's own, which writes metrics and says what it is doing. The thread sanitizer watches
// (`cmake --preset thread`); without it these are short runs of the same parts.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "data/build.h"
#include "data/loader.h"
#include "data/stream.h"
#include "launch/metrics.h"
#include "launch/signals.h"
#include "launch/tensorboard.h"
#include "launch/watchdog.h"
#include "runtime/device.h"
#include "runtime/peak.h"
#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

constexpr std::int64_t kLength = 16, kBatch = 4, kSteps = 60;

class Races : public testing::Test {
 protected:
  Races() {
    write_component(root_.path(), "a", counting(1000, 0), {400, 600});
    stream_ = open_stream(
        "tokenizer: \"byte\" sequence_length: 16 total_tokens: 25600 seed: 3 "
        "component { name: \"a\" weight: \"1\" }",
        root_.path());
  }

  // The state file's line, once it isn't `before`.
  std::string state_after(const std::string& before) const {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    std::string line;
    do {
      std::ifstream file(root_ / "rank-0.state");
      std::getline(file, line);
    } while (line == before && std::chrono::steady_clock::now() < end);
    return line;
  }

  TempFolder root_;
  std::unique_ptr<TokenStream> stream_;
};

TEST_F(Races, ARanksThreads) {
  Device device(3);
  Activity activity;
  const Watchdog watchdog(activity, root_.path(), 0, 1, "here", std::chrono::hours(1));
  const std::string first = state_after("");
  Loader loader(
      *stream_, 1, [](std::int64_t n) { return n < kSteps * kBatch ? n : -1; }, 2, 0);
  MetricsFile metrics(root_ / "metrics.jsonl", 0);
  TensorBoardWriter tensorboard(root_.path(), 0);
  Progress progress(kSteps, kSteps * kBatch * kLength);
  std::vector<std::int64_t> sums(3);  // each its piece's, and not atomic
  std::int64_t expected = 0;
  for (std::int64_t step = 0; step < kSteps; ++step) {
    activity.set_step(step);
    for (std::int64_t quantum = 0; quantum < kBatch; ++quantum) {
      activity.set("data");
      const View window = loader.acquire();
      ASSERT_FALSE(window.empty());
      activity.set("compute", "layers." + std::to_string(quantum));
      const auto* tokens = window.as<std::uint32_t>();
      for (std::int64_t i = 0; i < kLength + 1; ++i) expected += tokens[i];
      device.queue().parallel_for(3, [&](std::int64_t piece, Worker&) {
        std::int64_t& sum = sums[static_cast<std::size_t>(piece)];
        for (std::int64_t i = piece; i < kLength + 1; i += 3) sum += tokens[i];
      });
      loader.release();
    }
    StepMetrics values;
    values.step = step;
    values.loss = 1.0;
    values.seconds = values.data_seconds = loader.seconds_waited();
    metrics.write(values);
    tensorboard.write(values);
    progress.step_done(kBatch * kLength, 0.01);
    EXPECT_FALSE(progress.line(values).empty());
  }
  EXPECT_TRUE(loader.acquire().empty());
  EXPECT_EQ(sums[0] + sums[1] + sums[2], expected);
  // The watchdog's thread has looked while all this went on, or looks now.
  EXPECT_NE(state_after(first), first);
}

// A loader, a queue and a watchdog that end while their threads are at work.
TEST_F(Races, EndsAtAnyMoment) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Activity activity;
    const Watchdog watchdog(activity, root_.path(), 0, 1, "here", std::chrono::hours(1));
    Queue queue(3);
    Loader loader(
        *stream_, 2, [](std::int64_t n) { return n; }, 3, repeat);
    for (int quantum = 0; quantum < repeat % 4; ++quantum) {
      activity.set("compute");
      ASSERT_FALSE(loader.acquire().empty());
      queue.parallel_for(5, [](std::int64_t, Worker&) {});
      loader.release();
    }
  }
}

// What a thread throws is read by another one.
TEST_F(Races, ErrorsCrossThreads) {
  for (int repeat = 0; repeat < 20; ++repeat) {
    Queue queue(3);
    EXPECT_THROW(queue.parallel_for(
                     9, [](std::int64_t, Worker&) { throw Error(ExitCode::kData, "a piece"); }),
                 Error);
    Loader loader(
        *stream_, 1,
        [](std::int64_t n) -> std::int64_t {
          if (n == 2) throw Error(ExitCode::kData, "a quantum");
          return n;
        },
        2, 0);
    EXPECT_FALSE(loader.acquire().empty());
    EXPECT_FALSE(loader.acquire().empty());
    loader.release();
    loader.release();
    EXPECT_THROW(loader.acquire(), Error);
  }
}

// Threads that read, tokenize and hash while the caller's writes.
TEST_F(Races, BuildingData) {
  const auto letters = [](int i) { return std::string(static_cast<std::size_t>(i), 'a'); };
  for (int i = 0; i < 30; ++i) {
    root_.write("sources-" + std::to_string(i) + ".jsonl",
                R"({"text":")" + letters(i) + "\"}\n{}\n{\"text\":\"b\"}\n");
  }
  const Recipe recipe = parse_recipe(
      "tokenizer: \"byte\" sequence_length: 4 total_tokens: 64 shard_tokens: 50 "
      "component { name: \"built\" weight: \"1\" source { glob: \"sources-*.jsonl\" } }",
      "recipe.textproto");
  const auto tokenizer = open_recipe_tokenizer(recipe);
  BuildOptions options;
  options.sources = options.out = root_.path();
  options.threads = 3;
  for (const bool kept : {false, true}) {
    const std::vector<BuiltComponent> built = build(recipe, *tokenizer, options);
    ASSERT_EQ(built.size(), 1U);
    EXPECT_EQ(built[0].kept, kept);
    EXPECT_EQ(built[0].documents, 29 + 30);  // one is empty
    EXPECT_EQ(built[0].bad_documents, 30);
  }
  EXPECT_TRUE(verify_corpus(root_.path(), 3).empty());
  const TokenStream stream(recipe, open_corpus(recipe, root_.path()));
  EXPECT_EQ(merkle_root(merkle_leaves(stream, 0, 10000, 3)),
            merkle_root(merkle_leaves(stream, 0, 10000, 1)));
}

// The system picks the thread that a signal's handler runs on.
TEST(SignalRaces, AnyThreadMayTakeTheSignal) {
  install_stop_signals();
  std::jthread other([] { pthread_kill(pthread_self(), SIGUSR1); });
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!stop_signal_seen() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
  EXPECT_TRUE(stop_signal_seen());
}

// Each core's loop on a thread of its own.
TEST(PeakRaces, ThreadsMeasureAtOnce) { EXPECT_GT(measure_peak_flops(Precision::kF32, 4), 0); }

}  // namespace
}  // namespace tessera
