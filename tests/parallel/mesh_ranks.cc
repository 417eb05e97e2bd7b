#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "parallel/mesh.h"
#include "tests/layers/count_allocations.h"

namespace tessera {
namespace {

std::vector<int> group_sizes(int ranks) {
  std::vector<int> sizes;
  for (int size = 1; size <= ranks; ++size) {
    if (ranks % size == 0) sizes.push_back(size);
  }
  return sizes;
}

TEST(ExpertPlacement, EveryExpertHasOneRankWhateverTheNumbers) {
  for (const std::int64_t experts : {1, 2, 7, 25, 64}) {
    for (int ranks = 1; ranks <= 32; ++ranks) {
      std::int64_t next = 0, most = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const ExpertPlacement placement = {ranks, rank};
        EXPECT_EQ(placement.begin(experts), next);
        EXPECT_EQ(placement.begin(experts), rank * experts / ranks);
        next = placement.end(experts);
        most = std::max(most, placement.count(experts));
      }
      EXPECT_EQ(next, experts);
      EXPECT_LE(most, (experts + ranks - 1) / ranks);
    }
  }
}

TEST(Mesh, GroupsHoldAllExpertsAndShardsTheSameOnes) {
  Communicator world(MPI_COMM_WORLD);
  for (const int size : group_sizes(world.size())) {
    Mesh mesh(world, size);
    EXPECT_EQ(mesh.placement().ranks, size);
    EXPECT_EQ(mesh.placement().rank, world.rank() % size);
    EXPECT_EQ(mesh.shard_group().size(), world.size() / size);
    EXPECT_EQ(mesh.shard_group().rank(), world.rank() / size);
    // Who is in them: the sum of their ranks in the world.
    const std::int64_t of_shard =
        mesh.shard_group().all_reduce("ranks", Reduction::kSum, world.rank());
    std::int64_t expected = 0;
    for (int rank = world.rank() % size; rank < world.size(); rank += size) expected += rank;
    EXPECT_EQ(of_shard, expected);
    if (size == 1) continue;
    EXPECT_EQ(mesh.expert_group().size(), size);
    EXPECT_EQ(mesh.expert_group().rank(), world.rank() % size);
    const int first = world.rank() / size * size;
    EXPECT_EQ(mesh.expert_group().all_reduce("ranks", Reduction::kSum, world.rank()),
              first * size + size * (size - 1) / 2);
  }
}

TEST(Mesh, RefusesGroupsThatDontDivideTheRanks) {
  Communicator world(MPI_COMM_WORLD);
  try {
    const Mesh mesh(world, world.size() + 1);
    FAIL() << "accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_NE(std::string(error.what()).find("parallel.expert_ranks"), std::string::npos);
  }
}

// What rank `from` sends `to` in a round: any size, often nothing.
std::int64_t bytes_between(int round, int from, int to) {
  const std::int64_t draw = (round * 7919 + from * 104729 + to * 1299709) % 11;
  return draw < 4 ? 0 : draw * 3001;
}
std::byte value_of(int round, int from, int to, std::int64_t i) {
  return static_cast<std::byte>(round * 31 + from * 17 + to * 7 + i);
}

TEST(GroupExchange, UnevenAndEmptyMessagesArriveAndNothingIsAllocated) {
  Communicator world(MPI_COMM_WORLD);
  for (const int size : group_sizes(world.size())) {
    if (size == 1) continue;
    Mesh mesh(world, size);
    // Each pair sends two messages, which match in order.
    GroupExchange exchange(mesh.expert_group(), static_cast<std::size_t>(2 * size));
    const int self = exchange.rank();
    std::vector<std::vector<std::byte>> out(static_cast<std::size_t>(2 * size)), in(out.size());
    for (auto* const buffers : {&out, &in}) {
      for (auto& buffer : *buffers) buffer.resize(40000);
    }
    world.reset_traffic();
    mesh.reset_traffic();
    std::int64_t sent = 0, allocations = 0;
    for (int round = 0; round < 12; ++round) {
      for (int peer = 0; peer < size; ++peer) {
        for (std::size_t which = 0; which < 2; ++which) {
          const auto place = 2 * static_cast<std::size_t>(peer) + which;
          const std::int64_t bytes = bytes_between(2 * round + static_cast<int>(which), self, peer);
          for (std::int64_t i = 0; i < bytes; ++i) {
            out[place][static_cast<std::size_t>(i)] =
                value_of(2 * round + static_cast<int>(which), self, peer, i);
          }
          if (peer != self) sent += bytes;
        }
      }
      const std::int64_t allocated = testing::count_allocations([&] {
        for (int peer = 0; peer < size; ++peer) {
          for (std::size_t which = 0; which < 2; ++which) {
            const auto place = 2 * static_cast<std::size_t>(peer) + which;
            exchange.send(peer, out[place].data(),
                          bytes_between(2 * round + static_cast<int>(which), self, peer));
            exchange.receive(peer, in[place].data(),
                             bytes_between(2 * round + static_cast<int>(which), peer, self));
          }
        }
        exchange.start("rows");
        mesh.advance();
        exchange.finish();
      });
      if (round > 0) allocations += allocated;
      for (int peer = 0; peer < size; ++peer) {
        for (std::size_t which = 0; which < 2; ++which) {
          const auto place = 2 * static_cast<std::size_t>(peer) + which;
          for (std::int64_t i = 0;
               i < bytes_between(2 * round + static_cast<int>(which), peer, self); ++i) {
            ASSERT_EQ(in[place][static_cast<std::size_t>(i)],
                      value_of(2 * round + static_cast<int>(which), peer, self, i))
                << "round " << round << " from " << peer;
          }
        }
      }
    }
    EXPECT_EQ(mesh.traffic(Traffic::kExchange).bytes_sent, sent);
    EXPECT_GT(sent, 0);
    EXPECT_EQ(mesh.traffic(Traffic::kExchange).calls, 12);
    EXPECT_EQ(allocations, 0);
  }
}

// Transfers of all the communicators go on while the caller does something else.
TEST(Mesh, AdvancesTransfersOfItsGroupsAtOnce) {
  Communicator world(MPI_COMM_WORLD);
  if (world.size() < 4 || world.size() % 2 != 0) return;  // there are no two groups of two
  Mesh mesh(world, 2);
  mesh.reset_traffic();
  GroupExchange exchange(mesh.expert_group(), 2);
  std::vector<float> mine(1 << 16, static_cast<float>(world.rank())), theirs(mine.size());
  exchange.send(1 - exchange.rank(), reinterpret_cast<std::byte*>(mine.data()),
                static_cast<std::int64_t>(mine.size() * sizeof(float)));
  exchange.receive(1 - exchange.rank(), reinterpret_cast<std::byte*>(theirs.data()),
                   static_cast<std::int64_t>(mine.size() * sizeof(float)));
  exchange.start("rows");
  Communicator& shards = mesh.shard_group();
  std::vector<std::int64_t> bounds(static_cast<std::size_t>(shards.size()) + 1);
  for (std::size_t i = 0; i < bounds.size(); ++i) bounds[i] = static_cast<std::int64_t>(i) << 14;
  std::vector<float> whole(static_cast<std::size_t>(bounds.back()));
  Communicator::Transfer gather;
  shards.start_all_gather_slices(gather, Traffic::kGather, "unit", bounds,
                                 View(mine.data(), {1 << 14}), View(whole.data(), {bounds.back()}));
  // Neither is waited for; both come.
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (gather.in_flight() && std::chrono::steady_clock::now() < end) mesh.advance();
  EXPECT_FALSE(gather.in_flight());
  shards.finish(gather);
  exchange.finish();
  EXPECT_EQ(theirs.back(), static_cast<float>(world.rank() ^ 1));
  for (int peer = 0; peer < shards.size(); ++peer) {
    EXPECT_EQ(whole[static_cast<std::size_t>(bounds[static_cast<std::size_t>(peer)])],
              static_cast<float>(2 * peer + world.rank() % 2));
  }
  EXPECT_GE(mesh.most_in_flight(), 1);
  EXPECT_GT(mesh.advance_seconds(), 0.0);
}

}  // namespace
}  // namespace tessera
