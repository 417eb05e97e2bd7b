// Messages and checkpoint parts beyond 2^31 bytes (B30); run with TESSERA_LONG=1, on 2 ranks, with
// 12 GB of memory and 5 GB of disk.
#include <gtest/gtest.h>

#include <cstdlib>

#include "tests/parallel/checkpoint_fixture.h"

namespace tessera {
namespace {

constexpr std::int64_t kElements = 600'000'000;  // 2.4e9 bytes

bool is_long() {
  const char* value = std::getenv("TESSERA_LONG");
  return value != nullptr && std::string(value) == "1";
}

float value_at(std::int64_t i) { return static_cast<float>(i % 16777213); }

TEST(Large, B30_MessagesBeyondTheLargestCount) {
  if (!is_long()) GTEST_SKIP() << "TESSERA_LONG=1 runs it";
  Communicator communicator(MPI_COMM_WORLD);
  ASSERT_EQ(communicator.size(), 2);
  // Rank 0's slice alone is larger than any count, rank 1's is small.
  const std::vector<std::int64_t> bounds{0, kElements, kElements + 1024};
  const auto self = static_cast<std::size_t>(communicator.rank());
  std::vector<float> whole(static_cast<std::size_t>(bounds.back()));
  for (std::int64_t i = bounds[self]; i < bounds[self + 1]; ++i) {
    whole[static_cast<std::size_t>(i)] = value_at(i);
  }
  const View view(whole.data(), Shape{bounds.back()});
  communicator.all_gather_slices(Traffic::kGather, "large", bounds,
                                 view.slice(bounds[self], bounds[self + 1]), view);
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < bounds.back(); ++i) {
    if (whole[static_cast<std::size_t>(i)] != value_at(i)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(communicator.traffic(Traffic::kGather).bytes_sent,
            4 * (bounds[self + 1] - bounds[self]));
}

TEST(Large, B30_CheckpointPartsBeyondTheLargestCount) {
  if (!is_long()) GTEST_SKIP() << "TESSERA_LONG=1 runs it";
  Communicator communicator(MPI_COMM_WORLD);
  ASSERT_EQ(communicator.size(), 2);
  SharedFolder folder;
  const Shape shape{3, kElements / 3};
  const auto part_of = [&](std::vector<float>& data, bool first) {
    // Cut inside a row.
    const std::int64_t cut = first ? kElements - 1000 : 1000;
    const std::int64_t begin = communicator.rank() == 0 ? 0 : cut;
    const std::int64_t end = communicator.rank() == 0 ? cut : kElements;
    data.assign(static_cast<std::size_t>(end - begin), 0.0F);
    return CheckpointArray{"params/large", shape, {{begin, end, data.data()}}};
  };
  std::vector<float> data;
  const CheckpointArray written = part_of(data, true);
  for (std::int64_t i = written.parts[0].begin; i < written.parts[0].end; ++i) {
    data[static_cast<std::size_t>(i - written.parts[0].begin)] = value_at(i);
  }
  const std::string path =
      write_checkpoint(communicator, folder.path(), checkpoint_meta(1), std::span(&written, 1));
  const CheckpointArray read = part_of(data, false);
  read_checkpoint(communicator, path, std::span(&read, 1));
  std::int64_t wrong = 0;
  for (std::int64_t i = read.parts[0].begin; i < read.parts[0].end; ++i) {
    if (data[static_cast<std::size_t>(i - read.parts[0].begin)] != value_at(i)) ++wrong;
  }
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace tessera
