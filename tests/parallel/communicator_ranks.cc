#include <gtest/gtest.h>
#include <unistd.h>

#include <cstring>
#include <numeric>
#include <thread>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/sharding.h"

namespace tessera {
namespace {

// Limits of a transfer: MPI's own, and ones so low that everything is cut (B30).
constexpr std::int64_t kLimits[] = {INT_MAX, 1000, 100};

std::vector<float> numbered(std::int64_t count) {
  std::vector<float> values(static_cast<std::size_t>(count));
  std::iota(values.begin(), values.end(), 1.0F);
  return values;
}

// Slices of every size, empty ones too.
std::vector<std::int64_t> uneven_bounds(int ranks) {
  std::vector<std::int64_t> bounds{0};
  for (int rank = 0; rank < ranks; ++rank) {
    bounds.push_back(bounds.back() + (rank % 3 == 1 ? 0 : 1237 * (rank + 1)));
  }
  return bounds;
}

TEST(Communicator, B30_GatheredSlicesAreTheArrayUnderEveryLimit) {
  for (const std::int64_t limit : kLimits) {
    Communicator communicator(MPI_COMM_WORLD, nullptr, limit);
    const auto self = static_cast<std::size_t>(communicator.rank());
    const std::vector<std::int64_t> bounds = uneven_bounds(communicator.size());
    std::vector<float> expected = numbered(bounds.back());
    for (const bool in_place : {false, true}) {
      std::vector<float> whole(expected.size(), -1.0F);
      std::vector<float> mine(expected.begin() + bounds[self], expected.begin() + bounds[self + 1]);
      const Shape shape{static_cast<std::int64_t>(mine.size())};
      View view(mine.data(), shape);
      if (in_place) {
        view = View(whole.data() + bounds[self], shape);
        std::copy(mine.begin(), mine.end(), whole.begin() + bounds[self]);
      }
      communicator.all_gather_slices(Traffic::kGather, "test", bounds, view,
                                     View(whole.data(), Shape{bounds.back()}));
      EXPECT_EQ(whole, expected) << "limit " << limit;
    }
    const TrafficCount& traffic = communicator.traffic(Traffic::kGather);
    EXPECT_EQ(traffic.calls, 2);
    EXPECT_EQ(traffic.bytes_sent,
              std::int64_t{2} * 4 * (bounds[self + 1] - bounds[self]) * (communicator.size() - 1));
    EXPECT_GE(traffic.seconds, 0.0);
  }
}

TEST(Communicator, GatherUnitFillsTheWholeBuffer) {
  Communicator communicator(MPI_COMM_WORLD);
  const UnitLayout layout("unit", {{"a", DType::kF32, Shape{97, 53}},
                                   {"b", DType::kF32, Shape{211}},
                                   {"c", DType::kF32, Shape{31, 17}}});
  const Slice slice = layout.slice(communicator.rank(), communicator.size());
  std::vector<float> expected = numbered(layout.count());
  std::vector<float> whole(expected.size());
  gather_unit(communicator, layout, layout.bounds(communicator.size()),
              View(expected.data() + slice.begin, Shape{slice.count()}),
              View(whole.data(), Shape{layout.count()}));
  EXPECT_EQ(whole, expected);
}

// What rank `from` sends to rank `to`: its size and bytes say whose it is.
std::vector<std::byte> letter(int from, int to, int number) {
  const auto size = static_cast<std::size_t>((from * 7 + to * 13 + number) % 5 * 1111);
  return std::vector<std::byte>(size, static_cast<std::byte>(from * 16 + to + number));
}

TEST(Communicator, B30_ExchangeBringsEveryMessageUnderEveryLimit) {
  for (const std::int64_t limit : kLimits) {
    Communicator communicator(MPI_COMM_WORLD, nullptr, limit);
    const int self = communicator.rank();
    // Rank 1 sends nothing at all; the others two messages to everybody, themselves included.
    const auto sends_of = [](int rank) { return rank == 1 ? 0 : 2; };
    std::vector<std::vector<std::byte>> outgoing, incoming, expected;
    std::vector<Communicator::Message> sends, receives;
    for (int peer = 0; peer < communicator.size(); ++peer) {
      for (int i = 0; i < sends_of(self); ++i) outgoing.push_back(letter(self, peer, i));
      for (int i = 0; i < sends_of(peer); ++i) {
        expected.push_back(letter(peer, self, i));
        incoming.emplace_back(expected.back().size());
      }
    }
    std::size_t out = 0, in = 0;
    for (int peer = 0; peer < communicator.size(); ++peer) {
      for (int i = 0; i < sends_of(self); ++i, ++out) {
        sends.push_back(
            {peer, outgoing[out].data(), static_cast<std::int64_t>(outgoing[out].size())});
      }
      for (int i = 0; i < sends_of(peer); ++i, ++in) {
        receives.push_back(
            {peer, incoming[in].data(), static_cast<std::int64_t>(incoming[in].size())});
      }
    }
    communicator.exchange(Traffic::kReduce, "test", sends, receives);
    EXPECT_EQ(incoming, expected) << "limit " << limit;
    std::int64_t bytes = 0;
    for (const auto& message : sends) bytes += message.peer == self ? 0 : message.bytes;
    EXPECT_EQ(communicator.traffic(Traffic::kReduce).bytes_sent, bytes);
    EXPECT_EQ(communicator.traffic(Traffic::kReduce).calls, 1);
  }
}

TEST(Communicator, B30_ReductionsBroadcastsAndGathersUnderEveryLimit) {
  for (const std::int64_t limit : kLimits) {
    Communicator communicator(MPI_COMM_WORLD, nullptr, limit);
    const int self = communicator.rank();
    const int ranks = communicator.size();
    std::vector<std::int64_t> values(2500);
    for (std::size_t i = 0; i < values.size(); ++i) {
      values[i] = (std::int64_t{1} << 40) * self + static_cast<std::int64_t>(i);
    }
    std::vector<std::int64_t> sum = values, low = values, high = values;
    communicator.all_reduce("test", Reduction::kSum, sum);
    communicator.all_reduce("test", Reduction::kMin, low);
    communicator.all_reduce("test", Reduction::kMax, high);
    for (std::size_t i = 0; i < values.size(); ++i) {
      const auto index = static_cast<std::int64_t>(i);
      ASSERT_EQ(sum[i], (std::int64_t{1} << 40) * (ranks * (ranks - 1) / 2) + ranks * index);
      ASSERT_EQ(low[i], index);
      ASSERT_EQ(high[i], (std::int64_t{1} << 40) * (ranks - 1) + index);
    }

    const int root = ranks - 1;
    const std::string expected(3001, 'x');
    std::string text = self == root ? expected : "another";
    communicator.broadcast("test", text, root);
    EXPECT_EQ(text, expected);
    text = self == root ? "" : "another";
    communicator.broadcast("test", text, root);
    EXPECT_EQ(text, "");

    const auto texts =
        communicator.all_gather_strings("test", std::string(static_cast<std::size_t>(self), 'a'));
    ASSERT_EQ(texts.size(), static_cast<std::size_t>(ranks));
    for (int rank = 0; rank < ranks; ++rank) {
      const auto r = static_cast<std::size_t>(rank);
      EXPECT_EQ(texts[r], std::string(r, 'a'));
    }
  }
}

TEST(Communicator, AgreeThrowsTheFirstRanksErrorEverywhere) {
  Communicator communicator(MPI_COMM_WORLD);
  EXPECT_NO_THROW(communicator.agree("test", ExitCode::kData, ""));
  const int guilty = communicator.size() / 2;
  const std::string mine =
      communicator.rank() >= guilty ? "rank " + std::to_string(communicator.rank()) : "";
  try {
    communicator.agree("test", ExitCode::kData, mine);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kData);
    EXPECT_EQ(error.what(), "rank " + std::to_string(guilty));
  }
}

TEST(Communicator, HostsAreNamed) {
  const Communicator communicator(MPI_COMM_WORLD);
  ASSERT_EQ(communicator.hosts().size(), static_cast<std::size_t>(communicator.size()));
  char name[256] = {};
  gethostname(name, sizeof(name) - 1);
  EXPECT_EQ(communicator.host().substr(0, 1), std::string(name).substr(0, 1));
  EXPECT_EQ(communicator.traffic(Traffic::kControl).calls, 0) << "setting up isn't counted";
}

// A message that is longer than its receiver expects is an error that names who and what.
TEST(Communicator, FailuresNameOperationUnitAndPeer) {
  Communicator communicator(MPI_COMM_WORLD);
  if (communicator.size() < 2) return;  // there is no peer to fail
  std::vector<std::byte> data(100);
  if (communicator.rank() == 0) {
    const Communicator::Message send{1, data.data(), 100};
    communicator.exchange(Traffic::kReduce, "layers.3", std::span(&send, 1), {});
  } else if (communicator.rank() == 1) {
    const Communicator::Message receive{0, data.data(), 10};
    try {
      communicator.exchange(Traffic::kReduce, "layers.3", {}, std::span(&receive, 1));
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCommunication);
      EXPECT_NE(std::string(error.what()).find("reduce of layers.3 with rank 0 on"),
                std::string::npos)
          << error.what();
    }
  }
}

// Transfers of several kinds and sizes in flight at once, finished in another order than started.
TEST(Communicator, B30_TransfersInFlightDontMixUnderAnyLimit) {
  for (const std::int64_t limit : kLimits) {
    Communicator communicator(MPI_COMM_WORLD, nullptr, limit);
    const int self = communicator.rank();
    const int ranks = communicator.size();
    const std::vector<std::int64_t> bounds = uneven_bounds(ranks);
    const Shape shape{bounds.back()};
    std::vector<float> first = numbered(bounds.back()), second = first, third(first.size());
    for (float& value : second) value = -value;
    const std::vector<float> expected_first = first, expected_second = second;
    const auto own = [&](std::vector<float>& whole) {
      std::vector<float> gathered(whole.size());
      const auto begin = bounds[static_cast<std::size_t>(self)];
      const auto end = bounds[static_cast<std::size_t>(self) + 1];
      std::copy(whole.begin() + begin, whole.begin() + end, gathered.begin() + begin);
      whole = gathered;
      return View(whole.data() + begin, Shape{end - begin});
    };
    const View my_first = own(first), my_second = own(second);
    std::vector<std::int64_t> numbers(static_cast<std::size_t>(ranks)), received(numbers.size());
    std::vector<Communicator::Message> sends, receives;
    for (int peer = 0; peer < ranks; ++peer) {
      const auto p = static_cast<std::size_t>(peer);
      numbers[p] = 100 * self + peer;
      sends.push_back({peer, reinterpret_cast<std::byte*>(&numbers[p]), 8});
      receives.push_back({peer, reinterpret_cast<std::byte*>(&received[p]), 8});
    }
    Communicator::Transfer a, b, c;
    for (int again = 0; again < 2; ++again) {
      communicator.start_all_gather_slices(a, Traffic::kGather, "a", bounds, my_first,
                                           View(first.data(), shape));
      communicator.start_exchange(b, Traffic::kReduce, "b", sends, receives);
      communicator.start_all_gather_slices(c, Traffic::kGather, "c", bounds, my_second,
                                           View(second.data(), shape));
      EXPECT_GE(communicator.most_in_flight(), ranks > 1 ? 3 : 0);
      // One in one part doesn't disturb those in two.
      communicator.all_gather_slices(Traffic::kGather, "d", bounds,
                                     View(my_first.as<float>(), my_first.shape()),
                                     View(third.data(), shape));
      communicator.finish(c);
      communicator.finish(a);
      communicator.finish(b);
      EXPECT_FALSE(a.started());
      EXPECT_EQ(first, expected_first);
      EXPECT_EQ(second, expected_second);
      EXPECT_EQ(third, expected_first);
      for (int peer = 0; peer < ranks; ++peer) {
        EXPECT_EQ(received[static_cast<std::size_t>(peer)], 100 * peer + self);
      }
    }
    EXPECT_EQ(communicator.traffic(Traffic::kGather).calls, 6);
    EXPECT_EQ(communicator.traffic(Traffic::kReduce).calls, 2);
  }
}

// What a queue computes moves transfers on, and their finish finds them complete.
TEST(Communicator, TransfersMoveOnWhileAQueueComputes) {
  Communicator communicator(MPI_COMM_WORLD);
  const int ranks = communicator.size();
  // Too large to be sent at once, whatever the transport: it takes both sides' attention.
  constexpr std::int64_t kSlice = std::int64_t{1} << 20;
  std::vector<std::int64_t> bounds{0};
  for (int rank = 0; rank < ranks; ++rank) bounds.push_back(bounds.back() + kSlice);
  std::vector<float> whole(static_cast<std::size_t>(bounds.back()));
  const View view(whole.data(), Shape{bounds.back()});
  const View mine = view.slice(communicator.rank() * kSlice, communicator.rank() * kSlice + kSlice);
  std::fill_n(mine.as<float>(), kSlice, static_cast<float>(communicator.rank() + 1));
  Communicator::Transfer transfer;
  for (const int threads : {1, 2}) {
    Queue queue(threads);
    queue.set_background(&communicator);
    communicator.reset_traffic();
    communicator.start_all_gather_slices(transfer, Traffic::kGather, "test", bounds, mine, view);
    const auto start = std::chrono::steady_clock::now();
    while (transfer.in_flight() &&
           std::chrono::steady_clock::now() - start < std::chrono::minutes(2)) {
      queue.parallel_for(4, [](std::int64_t, Worker&) {
        std::this_thread::sleep_for(std::chrono::microseconds(50));
      });
    }
    EXPECT_FALSE(transfer.in_flight());
    communicator.finish(transfer);
    const TrafficCount& count = communicator.traffic(Traffic::kGather);
    EXPECT_EQ(count.overlapped, 1);
    EXPECT_EQ(count.calls, 1);
    EXPECT_EQ(count.bytes_sent, 4 * kSlice * (ranks - 1));
    EXPECT_EQ(communicator.advance_seconds() > 0.0, ranks > 1);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(whole[static_cast<std::size_t>(rank * kSlice + 12345)],
                static_cast<float>(rank + 1));
    }
    communicator.barrier("test");
  }
}

// The same failure as above, found while the rank computes.
TEST(Communicator, FailuresInFlightNameOperationUnitAndPeer) {
  Communicator communicator(MPI_COMM_WORLD);
  if (communicator.size() < 2) return;
  std::vector<std::byte> data(100);
  Communicator::Transfer transfer;
  if (communicator.rank() == 0) {
    const Communicator::Message send{1, data.data(), 100};
    communicator.start_exchange(transfer, Traffic::kReduce, "layers.3", std::span(&send, 1), {});
    communicator.finish(transfer);
  } else if (communicator.rank() == 1) {
    const Communicator::Message receive{0, data.data(), 10};
    communicator.start_exchange(transfer, Traffic::kReduce, "layers.3", {}, std::span(&receive, 1));
    Queue queue(1);
    queue.set_background(&communicator);
    try {
      while (transfer.in_flight()) queue.parallel_for(4, [](std::int64_t, Worker&) {});
      ADD_FAILURE() << "no error";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCommunication);
      EXPECT_NE(std::string(error.what()).find("reduce of layers.3 with rank 0 on"),
                std::string::npos)
          << error.what();
    }
    EXPECT_FALSE(transfer.started());
  }
}

// The watchdog's view: while a rank waits, its state names the operation and the unit.
TEST(Communicator, ActivityTellsWhatIsWaitedFor) {
  Activity activity;
  Communicator communicator(MPI_COMM_WORLD, &activity);
  activity.set_step(17);
  activity.set("compute");
  const std::uint64_t before = activity.state().changes;
  if (communicator.size() > 1) {
    Activity::State seen;
    std::atomic<bool> done = false;
    std::thread watcher([&] {
      while (!done) {
        const Activity::State state = activity.state();
        if (state.operation == "barrier") seen = state;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      }
    });
    // The last rank is late; all others wait for it.
    if (communicator.rank() == communicator.size() - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    communicator.barrier("layers.3");
    done = true;
    watcher.join();
    if (communicator.rank() != communicator.size() - 1) {
      EXPECT_EQ(seen.operation, "barrier");
      EXPECT_EQ(seen.unit, "layers.3");
      EXPECT_EQ(seen.step, 17);
      EXPECT_GT(communicator.traffic(Traffic::kControl).seconds, 0.1);
    }
  } else {
    communicator.barrier("layers.3");
  }
  EXPECT_EQ(activity.state().operation, "compute");
  EXPECT_GT(activity.state().changes, before);
}

// Ranks that reduce one number each, in other orders: MPI takes it, and every result is wrong.
TEST(Communicator, B32_CallsInOtherOrdersAreFoundAndNamed) {
  Activity activity;
  Communicator communicator(MPI_COMM_WORLD, &activity);
  const bool last = communicator.rank() == communicator.size() - 1;
  const auto meet = [&] { return communicator.meet("edge", last ? 3 : 1); };
  for (int i = 0; i < 3; ++i) {
    communicator.all_reduce(i == 1 ? "losses" : "loads", Reduction::kSum, 1);
    const Communicator::Meeting same = meet();
    EXPECT_EQ(same.largest, 3);
    EXPECT_EQ(same.different_call, "");
  }
  const std::uint64_t calls = activity.state().calls;
  for (const bool first : {true, false}) {
    communicator.all_reduce(first == last ? "losses" : "loads", Reduction::kSum, 1);
  }
  const Communicator::Meeting different = meet();
  EXPECT_EQ(different.largest, 3);
  EXPECT_EQ(different.different_call,
            communicator.size() == 1
                ? ""
                : "call " + std::to_string(calls) +
                      " is \"all-reduce of loads\" on rank 0, \"all-reduce of losses\" on rank " +
                      std::to_string(communicator.size() - 1));
  // Found too when it lies further back than the calls that are kept.
  for (std::uint64_t i = 0; i <= Activity::kCallsKept; ++i) activity.begin_call("gather", "x");
  EXPECT_EQ(meet().different_call, communicator.size() == 1 ? "" : "before the last 1024");
}

}  // namespace
}  // namespace tessera
