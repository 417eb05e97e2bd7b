#include "data/loader.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <chrono>
#include <thread>

#include "tests/data/data_fixture.h"
#include "tests/layers/count_allocations.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Tokens = std::vector<std::uint32_t>;

constexpr std::int64_t kLength = 16;

Tokens copy(const View& view) {
  return Tokens(view.as<std::uint32_t>(), view.as<std::uint32_t>() + view.count());
}

class LoaderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Shards of exactly 3, 4 and 1 windows, and a rest; and another component with odd edges.
    constexpr std::int64_t kTokens = 3 * kLength + 4 * kLength + kLength + 5 * kLength + 7;
    write_component(root_.path(), "a", counting(kTokens, 0),
                    {3 * kLength, 4 * kLength, kLength, 5 * kLength + 7});
    write_component(root_.path(), "b", counting(1000, 10000), {1, 499, 17, 483});
    stream_ = open_stream(
        "tokenizer: \"byte\" sequence_length: 16 total_tokens: 25600 seed: 3 "
        "component { name: \"a\" weight: \"2\" } component { name: \"b\" weight: \"1\" }",
        root_.path());
  }

  // Samples [from, to) read one by one.
  std::vector<Tokens> straight(std::int64_t from, std::int64_t to) const {
    std::vector<Tokens> windows;
    for (std::int64_t i = from; i < to; ++i) {
      Tokens window(kLength + 1);
      stream_->read(i, window.data());
      windows.push_back(window);
    }
    return windows;
  }

  TempFolder root_;
  std::unique_ptr<TokenStream> stream_;
};

TEST_F(LoaderTest, B01_OrderIsTheSameForEveryLayout) {
  // 200 steps of 8 samples in quanta of m; rank r of W takes quanta r, r + W, ... of each step.
  constexpr std::int64_t kBatch = 8;
  constexpr std::int64_t kSteps = 200;
  const std::vector<Tokens> expected = straight(0, kSteps * kBatch);
  for (const std::int64_t m : {1, 2, 4}) {
    const std::int64_t quanta = kBatch / m;
    for (const std::int64_t ranks : {1, 2, 3, 4, 5, 8}) {
      std::vector<Tokens> found(expected.size());
      for (std::int64_t rank = 0; rank < ranks; ++rank) {
        const std::int64_t mine = (quanta - rank + ranks - 1) / ranks;
        if (mine <= 0) continue;
        const auto quantum_of = [=](std::int64_t n) {
          const std::int64_t step = n / mine;
          return step < kSteps ? step * quanta + rank + (n % mine) * ranks : -1;
        };
        Loader loader(*stream_, m, quantum_of, 1 + rank % 3, 0);
        for (std::int64_t n = 0;; ++n) {
          const View view = loader.acquire();
          if (view.empty()) {
            EXPECT_EQ(n, mine * kSteps);
            break;
          }
          ASSERT_EQ(view.shape(), Shape({m, kLength + 1}));
          for (std::int64_t s = 0; s < m; ++s) {
            Tokens& place = found[static_cast<std::size_t>(quantum_of(n) * m + s)];
            ASSERT_TRUE(place.empty()) << "a sample came twice";
            place = copy(view.slice(s, s + 1));
          }
          loader.release();
        }
      }
      ASSERT_EQ(found, expected) << "m " << m << ", ranks " << ranks;
    }
  }
}

TEST_F(LoaderTest, B02_StartsAtEveryQuantumAsAStraightRunGoesOn) {
  const auto quantum_of = [](std::int64_t n) { return n < 60 ? n : -1; };
  std::vector<Tokens> all;
  Loader straight(*stream_, 2, quantum_of, 3, 0);
  for (View view = straight.acquire(); !view.empty(); view = straight.acquire()) {
    all.push_back(copy(view));
    straight.release();
  }
  ASSERT_EQ(all.size(), 60U);
  for (std::int64_t first = 0; first <= 60; ++first) {
    Loader resumed(*stream_, 2, quantum_of, 2, first);
    for (auto n = static_cast<std::size_t>(first); n < std::min<std::size_t>(60, first + 5); ++n) {
      const View view = resumed.acquire();
      ASSERT_FALSE(view.empty());
      ASSERT_EQ(copy(view), all[n]) << "resumed at " << first;
      resumed.release();
    }
    if (first == 60) {
      EXPECT_TRUE(resumed.acquire().empty());
    }
  }
}

TEST_F(LoaderTest, B02_WindowsAreRightOnBothSidesOfEveryShardEdge) {
  // a holds 0, 1, 2, ...: window w must hold w*L .. w*L + L, whatever the shards.
  std::vector<bool> seen(13, false);
  Tokens window(kLength + 1);
  for (std::int64_t i = 0; i < 500; ++i) {
    const Location place = stream_->locate(i);
    stream_->read(i, window.data());
    const std::uint32_t base = place.component == 0 ? 0 : 10000;
    ASSERT_EQ(window,
              counting(kLength + 1, base + static_cast<std::uint32_t>(place.window * kLength)));
    if (place.component == 0) seen[static_cast<std::size_t>(place.window)] = true;
  }
  EXPECT_EQ(std::count(seen.begin(), seen.end(), true), 13);
}

TEST_F(LoaderTest, B02_EveryLabelIsTheNextInput) {
  Tokens windows(3 * (kLength + 1));
  for (std::int64_t s = 0; s < 3; ++s) stream_->read(s, windows.data() + s * (kLength + 1));
  Tokens tokens(3 * kLength);
  std::vector<std::int32_t> labels(3 * kLength);
  split_windows(View(windows.data(), Shape({3, kLength + 1})),
                View(tokens.data(), Shape({3, kLength})), View(labels.data(), Shape({3, kLength})));
  for (std::int64_t s = 0; s < 3; ++s) {
    for (std::int64_t i = 0; i < kLength; ++i) {
      const auto at = static_cast<std::size_t>(s * kLength + i);
      ASSERT_EQ(tokens[at], windows[static_cast<std::size_t>(s * (kLength + 1) + i)]);
      ASSERT_EQ(static_cast<std::uint32_t>(labels[at]),
                windows[static_cast<std::size_t>(s * (kLength + 1) + i + 1)]);
      if (i + 1 == kLength) continue;
      ASSERT_EQ(static_cast<std::uint32_t>(labels[at]), tokens[at + 1]);
    }
  }
}

TEST_F(LoaderTest, SeveralQuantaMayBeHeld) {
  const std::vector<Tokens> expected = straight(0, 6);
  Loader loader(
      *stream_, 1, [](std::int64_t n) { return n; }, 3, 0);
  const View first = loader.acquire();
  const View second = loader.acquire();
  const View third = loader.acquire();
  EXPECT_EQ(copy(first), expected[0]);
  EXPECT_EQ(copy(second), expected[1]);
  EXPECT_EQ(copy(third), expected[2]);
  EXPECT_EQ(thrown_by([&] { loader.acquire(); }).code, ExitCode::kInternal);
  loader.release();
  const View fourth = loader.acquire();
  EXPECT_EQ(fourth.raw(), first.raw());
  EXPECT_EQ(copy(fourth), expected[3]);
  EXPECT_EQ(copy(third), expected[2]);
}

TEST_F(LoaderTest, AllocatesNothingPerQuantum) {
  Loader loader(
      *stream_, 4, [](std::int64_t n) { return n; }, 3, 0);
  for (int n = 0; n < 20; ++n) {  // all files are open after these
    loader.acquire();
    loader.release();
  }
  EXPECT_EQ(testing::count_allocations([&] {
              for (int n = 0; n < 300; ++n) {
                ASSERT_FALSE(loader.acquire().empty());
                loader.release();
              }
            }),
            0);
}

TEST_F(LoaderTest, AReadingErrorComesInItsPlace) {
  // Only b's second shard is damaged; find a sample that needs it, after one that doesn't.
  const auto touches = [&](std::int64_t i) {
    const Location place = stream_->locate(i);
    return place.component == 1 && place.window * kLength < 500 &&
           place.window * kLength + kLength >= 250;
  };
  std::int64_t good = 0;
  while (touches(good)) ++good;
  std::int64_t bad = good;
  while (!touches(bad)) ++bad;
  std::filesystem::resize_file(root_ / "b/part-1", std::uintmax_t{249} * 4);
  Loader loader(
      *stream_, 1, [](std::int64_t n) { return n; }, 4, good);
  for (std::int64_t n = good; n < bad; ++n) {
    ASSERT_FALSE(loader.acquire().empty());
    loader.release();
  }
  for (int again = 0; again < 2; ++again) {
    const Thrown thrown = thrown_by([&] { loader.acquire(); });
    EXPECT_EQ(thrown.code, ExitCode::kData);
    EXPECT_THAT(thrown.message, HasSubstr("b/part-1"));
  }
}

TEST_F(LoaderTest, AnErrorOfQuantumOfComesThrough) {
  Loader loader(
      *stream_, 1,
      [](std::int64_t n) -> std::int64_t {
        if (n == 1) throw Error(ExitCode::kUsage, "no such quantum");
        return n;
      },
      2, 0);
  EXPECT_FALSE(loader.acquire().empty());
  EXPECT_EQ(thrown_by([&] { loader.acquire(); }).message, "no such quantum");
}

TEST_F(LoaderTest, EndsPromptlyWhateverItsThreadIsAt) {
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < 100; ++round) {
    Loader loader(
        *stream_, 8, [](std::int64_t n) { return n; }, 1 + round % 4, 0);
    for (int n = 0; n < round % 3; ++n) {
      loader.acquire();
      if (round % 2 == 0) loader.release();
      if (round % 4 == 1) break;
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST_F(LoaderTest, CountsTheSecondsThatItWasWaitedFor) {
  Loader loader(
      *stream_, 1,
      [](std::int64_t n) {
        if (n == 3) std::this_thread::sleep_for(std::chrono::milliseconds(50));
        return n;
      },
      1, 0);
  for (int n = 0; n < 4; ++n) {
    loader.acquire();
    loader.release();
  }
  EXPECT_GT(loader.seconds_waited(), 0.04);
}

TEST_F(LoaderTest, AStreamIsReadByManyThreadsAtOnce) {
  const std::vector<Tokens> expected = straight(0, 400);
  std::array<std::thread, 4> threads;
  std::atomic<int> wrong{0};
  for (std::size_t t = 0; t < threads.size(); ++t) {
    threads[t] = std::thread([&, t] {
      Tokens window(kLength + 1);
      for (std::size_t i = t; i < 400; i += 2) {
        stream_->read(static_cast<std::int64_t>(i), window.data());
        if (window != expected[i]) ++wrong;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST(Segments, StartAfterEachEndOfSequence) {
  Tokens windows = {1,   256, 2, 3, 256, 256, 4, 5,   9,  //
                    256, 1,   1, 1, 1,   1,   1, 256, 256};
  std::vector<std::int32_t> segments(16, -1);
  const View window_view(windows.data(), Shape({2, 9}));
  const View segment_view(segments.data(), Shape({2, 8}));
  fill_segments(window_view, 256, true, segment_view);
  EXPECT_THAT(segments, ElementsAre(0, 0, 2, 2, 2, 5, 6, 6, 0, 1, 1, 1, 1, 1, 1, 1));
  fill_segments(window_view, 256, false, segment_view);
  EXPECT_EQ(segments, std::vector<std::int32_t>(16, 0));
}

TEST(SplitWindows, RefusesIdsThatALabelCantHold) {
  Tokens window = {1, 0x80000000U};
  Tokens tokens(1);
  std::vector<std::int32_t> labels(1);
  const Thrown thrown = thrown_by([&] {
    split_windows(View(window.data(), Shape({1, 2})), View(tokens.data(), Shape({1, 1})),
                  View(labels.data(), Shape({1, 1})));
  });
  EXPECT_EQ(thrown.code, ExitCode::kData);
}

}  // namespace
}  // namespace tessera
