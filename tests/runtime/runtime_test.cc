#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <set>
#include <string>
#include <thread>

#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/random.h"

namespace tessera {
namespace {

TEST(View, SlicesAndReshapesWithoutCopying) {
  std::array<float, 24> data{};
  const View view(data.data(), {4, 3, 2});
  EXPECT_EQ(view.count(), 24);
  EXPECT_EQ(view.bytes(), 96);
  EXPECT_EQ(view.slice(1, 3).as<float>(), data.data() + 6);
  EXPECT_EQ(view.slice(1, 3).shape(), (Shape{2, 3, 2}));
  EXPECT_EQ(view.reshaped({6, 4}).shape().to_string(), "[6, 4]");
  EXPECT_THROW(view.as<double>(), Error);
  EXPECT_THROW(view.reshaped({5, 5}), Error);
  EXPECT_THROW(view.slice(3, 5), Error);
}

TEST(View, CountsBeyond32Bits) {
  const View view(DType::kF32, {1 << 20, 1 << 14}, nullptr);
  EXPECT_EQ(view.count(), std::int64_t{1} << 34);
  EXPECT_EQ(view.bytes(), std::int64_t{1} << 36);
}

// The known answers that the authors of Philox publish with Random123.
// Messages quote what files hold, which may be a line of 65,000 characters or a terminal's
// commands.
TEST(Error, IsOneLineWhateverItQuotes) {
  const Error junk(ExitCode::kData, "a.txt: found \"a\nb\x1b[2J\x7f\" caf\xC3\xA9");
  EXPECT_STREQ(junk.what(), "a.txt: found \"a?b?[2J?\" caf\xC3\xA9");
  for (const std::size_t size : {999U, 1000U, 1001U, 65000U}) {
    const std::string message = "begin" + std::string(size - 8, 'x') + "end";
    const std::string what = Error(ExitCode::kData, message).what();
    EXPECT_EQ(what.size(), std::min(size, Error::kLongestMessage));
    EXPECT_TRUE(what.starts_with("begin") && what.ends_with("end")) << what;
    EXPECT_EQ(what.find(" ... ") == std::string::npos, size <= Error::kLongestMessage);
  }
}

TEST(Random, PhiloxKnownAnswers) {
  using Words = std::array<std::uint32_t, 4>;
  EXPECT_EQ(philox4x32_10({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  EXPECT_EQ(
      philox4x32_10({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, {0xffffffff, 0xffffffff}),
      (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(
      philox4x32_10({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, NormalHasItsMomentsAndNamesAreIndependent) {
  constexpr int kCount = 200000;
  const RandomStream stream(1, "model.layers.0.mixer.q_proj.weight");
  const RandomStream other(1, "model.layers.1.mixer.q_proj.weight");
  double sum = 0, squares = 0, fourth = 0, cross = 0;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    const double x = stream.normal(i);
    sum += x;
    squares += x * x;
    fourth += x * x * x * x;
    cross += x * other.normal(i);
  }
  // Five standard errors of each moment.
  const double error = 5.0 / std::sqrt(kCount);
  EXPECT_NEAR(sum / kCount, 0.0, error);
  EXPECT_NEAR(squares / kCount, 1.0, error * std::sqrt(2.0));
  EXPECT_NEAR(fourth / kCount, 3.0, error * std::sqrt(96.0));
  EXPECT_NEAR(cross / kCount, 0.0, error);
}

TEST(Queue, EveryPieceRunsOnceOnAnyNumberOfThreads) {
  for (const int threads : {1, 2, 3, 8}) {
    Queue queue(threads);
    for (int repeat = 0; repeat < 200; ++repeat) {
      std::array<std::atomic<int>, 37> seen{};
      queue.parallel_for(37, [&](std::int64_t piece, Worker& worker) {
        EXPECT_LT(worker.index(), threads);
        ++seen[static_cast<std::size_t>(piece)];
      });
      for (const auto& count : seen) ASSERT_EQ(count, 1);
    }
  }
}

TEST(Queue, APiecesExceptionReachesTheCaller) {
  for (const int threads : {1, 3}) {
    Queue queue(threads);
    EXPECT_THROW(queue.parallel_for(100,
                                    [](std::int64_t piece, Worker&) {
                                      if (piece == 42) throw Error(ExitCode::kData, "piece 42");
                                    }),
                 Error);
    std::atomic<int> count{0};
    queue.parallel_for(100, [&](std::int64_t, Worker&) { ++count; });
    EXPECT_EQ(count, 100);
  }
}

// Threads look for work for a while, then sleep. The pauses lie on both sides of that while, in
// turn between two calls, in the caller's piece and in each worker's, so that each waits for the
// other. What the pieces write isn't atomic: the queue is what makes it visible.
TEST(Queue, WhoeverFellAsleepIsWoken) {
  constexpr int kThreads = 3;
  Queue queue(kThreads);
  for (int repeat = 0; repeat < 400; ++repeat) {
    const std::chrono::microseconds pause{repeat * 37 % 1000};
    const int late = repeat % (kThreads + 1);
    std::array<int, kThreads> seen{};
    if (late == kThreads) std::this_thread::sleep_for(pause);
    queue.parallel_for(kThreads, [&](std::int64_t piece, Worker&) {
      if (piece == late) std::this_thread::sleep_for(pause);
      ++seen[static_cast<std::size_t>(piece)];
    });
    for (const int count : seen) ASSERT_EQ(count, 1);
  }
}

class CountedWork : public BackgroundWork {
 public:
  void advance() override {
    EXPECT_EQ(std::this_thread::get_id(), submitter_);
    ++calls;
    if (fails) throw Error(ExitCode::kData, "background");
  }
  int calls = 0;
  bool fails = false;

 private:
  std::thread::id submitter_ = std::this_thread::get_id();
};

TEST(Queue, BackgroundWorkIsAdvancedBetweenTheSubmittersPieces) {
  const auto lasts_an_interval = [](std::int64_t, Worker&) {
    std::this_thread::sleep_for(Queue::kAdvanceInterval);
  };
  for (const int threads : {1, 3}) {
    Queue queue(threads);
    CountedWork work;
    queue.set_background(&work);
    queue.parallel_for(std::int64_t{20} * threads, lasts_an_interval);
    EXPECT_EQ(work.calls, 20);  // every piece of the submitter's is an interval long

    work.calls = 0;
    const auto begin = std::chrono::steady_clock::now();
    queue.parallel_for(100000, [](std::int64_t, Worker&) {});
    const auto intervals = (std::chrono::steady_clock::now() - begin) / Queue::kAdvanceInterval;
    EXPECT_LE(work.calls, intervals + 1);

    work.fails = true;
    EXPECT_THROW(queue.parallel_for(std::int64_t{2} * threads, lasts_an_interval), Error);
    work.calls = 0;
    queue.set_background(nullptr);
    queue.parallel_for(std::int64_t{2} * threads, lasts_an_interval);
    EXPECT_EQ(work.calls, 0);
  }
}

TEST(Memory, BookingsAreAlignedDisjointZeroedAndReported) {
  MemoryPlan plan;
  const std::size_t a = plan.book("parameters", "embedding", 1000);
  const std::size_t b = plan.book("activations", "x", 12);
  const std::size_t c = plan.book("parameters", "head", 256);
  EXPECT_EQ(plan.bytes(), 1024 + 256 + 256);
  const auto sums = plan.categories();
  ASSERT_EQ(sums.size(), 2U);
  EXPECT_EQ(sums[0], (std::pair<std::string, std::int64_t>{"parameters", 1024 + 256}));
  Device device(2);
  const Arena arena(device, plan);
  std::set<std::byte*> starts = {arena.at(a), arena.at(b), arena.at(c)};
  EXPECT_EQ(starts.size(), 3U);
  for (std::byte* start : starts) EXPECT_EQ(reinterpret_cast<std::uintptr_t>(start) % 256, 0U);
  const View x = arena.view(b, DType::kF32, {3});
  for (int i = 0; i < 3; ++i) EXPECT_EQ(x.as<float>()[i], 0.0F);
  EXPECT_THROW(arena.view(b, DType::kF32, {4}), Error);
}

TEST(Device, RefusesMoreThanThereIsWithTheAmount) {
  Device device(1);
  try {
    device.allocate(std::int64_t{1} << 60);
    FAIL() << "an exbibyte was granted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("1152921504606846976"), std::string::npos);
  }
}

TEST(Queue, PiecesTakeDenormalsForZeros) {
#if !defined(__x86_64__)
  GTEST_SKIP() << "x86-64 only";
#endif
  Queue queue(2);
  volatile float smallest = std::numeric_limits<float>::min();
  std::vector<float> halves(64, 1.0F);
  queue.parallel_for(64, [&](std::int64_t piece, Worker&) {
    volatile float half = 0.5F * smallest;
    halves[static_cast<std::size_t>(piece)] = half;
  });
  for (const float half : halves) EXPECT_EQ(half, 0.0F);
  volatile float outside = 0.5F * smallest;
  EXPECT_GT(outside, 0.0F);
}

}  // namespace
}  // namespace tessera
