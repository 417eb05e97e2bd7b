#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "parallel/canonical_sum.h"
#include "parallel/mesh.h"

namespace tessera {
namespace {

// Parameters of odd sizes, so that slices straddle them.
UnitLayout unit() {
  return {"layers.0",
          {{"norm", DType::kF32, Shape{2100}},
           {"q", DType::kF32, Shape{97, 53}},
           {"up", DType::kF32, Shape{211, 31}},
           {"down", DType::kF32, Shape{29, 223}}}};
}

// A quantum's gradient: values of very different sizes, so that almost every other order of
// additions gives other bits. Padding is zero.
std::vector<float> gradient_of(const UnitLayout& layout, std::int64_t quantum) {
  std::mt19937 random(static_cast<unsigned>(quantum) + 1);
  std::normal_distribution<float> normal;
  std::vector<float> whole(static_cast<std::size_t>(layout.count()));
  for (std::size_t p = 0; p < layout.size(); ++p) {
    for (std::int64_t i = 0; i < layout.parameter(p).shape.count(); ++i) {
      const float value = normal(random);
      whole[static_cast<std::size_t>(layout.offset(p) + i)] = value * value * value;
    }
  }
  return whole;
}

// The formula, as plainly as it reads: level by level.
std::vector<float> tree(std::vector<std::vector<float>> level) {
  while (level.size() > 1) {
    std::vector<std::vector<float>> next;
    for (std::size_t q = 0; q < level.size(); q += 2) {
      next.push_back(level[q]);
      if (q + 1 == level.size()) continue;
      for (std::size_t i = 0; i < level[q].size(); ++i) next.back()[i] += level[q + 1][i];
    }
    level = std::move(next);
  }
  return level[0];
}

std::vector<float> in_sequence(const std::vector<std::vector<float>>& gradients) {
  std::vector<float> sum = gradients[0];
  for (std::size_t q = 1; q < gradients.size(); ++q) {
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += gradients[q][i];
  }
  return sum;
}

// Each rank's run in sequence, then the ranks' sums in sequence.
std::vector<float> by_ranks(const std::vector<std::vector<float>>& gradients, int ranks) {
  const auto quanta = static_cast<std::int64_t>(gradients.size());
  std::vector<std::vector<float>> sums;
  for (std::int64_t rank = 0; rank < ranks; ++rank) {
    const auto begin = gradients.begin() + rank * quanta / ranks;
    const auto end = gradients.begin() + (rank + 1) * quanta / ranks;
    if (begin != end) sums.push_back(in_sequence({begin, end}));
  }
  return in_sequence(sums);
}

// Memory for a CanonicalSum, with a guard that nothing writes beyond what was asked for.
class Grant {
 public:
  explicit Grant(const std::vector<BufferSpec>& specs) {
    for (const BufferSpec& spec : specs) add(spec);
  }
  explicit Grant(const BufferSpec& spec) { add(spec); }
  const std::vector<View>& views() const { return views_; }
  bool intact() const {
    for (const auto& block : blocks_) {
      if (block.back() != kGuard || block.front() != kGuard) return false;
    }
    return true;
  }

 private:
  static constexpr float kGuard = 12345.0F;
  void add(const BufferSpec& spec) {
    blocks_.emplace_back(static_cast<std::size_t>(spec.shape.count()) + 2, kGuard);
    views_.emplace_back(blocks_.back().data() + 1, spec.shape);
  }
  std::vector<std::vector<float>> blocks_;
  std::vector<View> views_;
};

class Policies : public testing::TestWithParam<std::pair<Accumulate, SumOrder>> {};

TEST_P(Policies, SumIsTheFormulaBitForBit) {
  const auto [policy, order] = GetParam();
  Communicator communicator(MPI_COMM_WORLD);
  const int self = communicator.rank();
  const UnitLayout layout = unit();
  const Slice slice = layout.slice(self, communicator.size());
  std::vector<std::vector<float>> gradients;
  bool order_matters = false;
  for (std::int64_t quanta = 1; quanta <= 17; ++quanta) {
    gradients.push_back(gradient_of(layout, quanta - 1));
    const std::vector<float> expected =
        order == SumOrder::kTree ? tree(gradients) : by_ranks(gradients, communicator.size());
    order_matters = order_matters || expected != (order == SumOrder::kTree ? in_sequence(gradients)
                                                                           : tree(gradients));
    const QuantumShare share(policy, quanta, communicator.size(), order);
    // Threads share pieces; their number must not show.
    Queue queue(1 + static_cast<int>(quanta % 2));
    const Grant grant(CanonicalSum::buffers(layout, share, self));
    const Grant workspace(CanonicalSum::workspace(layout, share, self));
    CanonicalSum sum(layout, share, communicator, queue, grant.views(), workspace.views()[0]);
    // The later ones on what the one before has left; the third in two parts, the fourth with
    // gradients made where the sum would copy them.
    std::int64_t in_place = 0;
    for (int step = 0; step < 4; ++step) {
      communicator.reset_traffic();
      for (std::int64_t round = 0; round < share.rounds(); ++round) {
        const std::int64_t q = share.quantum(round, self);
        std::vector<float> gradient;
        if (q != QuantumShare::kNone) gradient = gradients[static_cast<std::size_t>(q)];
        const View view = gradient.empty() ? View() : View(gradient.data(), Shape{layout.count()});
        const View place = step == 3 && !view.empty() ? sum.place() : View();
        if (!place.empty()) {
          ++in_place;
          std::memcpy(place.raw(), view.raw(), static_cast<std::size_t>(view.bytes()));
          sum.push(place);
        } else if (step != 2) {
          sum.push(view);
        } else {
          sum.start(view);
          // Under kLocal the gradient is free at once.
          if (share.policy() == Accumulate::kLocal) std::fill(gradient.begin(), gradient.end(), 7);
          sum.complete();
        }
      }
      const View mine = sum.finish();
      ASSERT_EQ(mine.count(), slice.count());
      EXPECT_EQ(std::memcmp(mine.raw(), expected.data() + slice.begin,
                            static_cast<std::size_t>(mine.bytes())),
                0)
          << quanta << " quanta, step " << step;
    }
    EXPECT_TRUE(grant.intact());
    EXPECT_TRUE(workspace.intact());
    const bool keeps_whole_units = communicator.size() == 1 || share.policy() == Accumulate::kLocal;
    EXPECT_EQ(in_place > 0, keeps_whole_units && share.count(self) > 0);
    // Ranks really exchanged: all of a gradient but the own slice, for each node that was sent.
    const std::int64_t away = (layout.count() - slice.count()) * 4;
    std::int64_t sent = share.count(self);
    if (order == SumOrder::kPlain && share.policy() == Accumulate::kLocal) {
      sent = std::min<std::int64_t>(sent, 1);
    } else if (share.policy() == Accumulate::kLocal) {
      const std::int64_t begin = share.quantum(0, self);
      sent = sent == 0 ? 0 : static_cast<std::int64_t>(tree_nodes(begin, begin + sent).size());
    }
    EXPECT_EQ(sent, share.sums_sent(self));
    EXPECT_EQ(communicator.traffic(Traffic::kReduce).bytes_sent, away * sent);
    EXPECT_EQ(communicator.traffic(Traffic::kReduce).calls,
              share.policy() == Accumulate::kLocal ? 1 : share.rounds());
  }
  EXPECT_TRUE(order_matters) << "the gradients can't tell the tree from another order";
}
INSTANTIATE_TEST_SUITE_P(All, Policies,
                         testing::Values(std::pair(Accumulate::kSharded, SumOrder::kTree),
                                         std::pair(Accumulate::kLocal, SumOrder::kTree),
                                         std::pair(Accumulate::kLocal, SumOrder::kPlain)),
                         [](const auto& info) {
                           if (info.param.second == SumOrder::kPlain) return "Plain";
                           return info.param.first == Accumulate::kSharded ? "Sharded" : "Local";
                         });

// Ranks in groups, each member adding the gradients of its whole group: the same formula.
TEST_P(Policies, GroupsGiveTheFormulaBitForBit) {
  const auto [policy, order] = GetParam();
  Communicator world(MPI_COMM_WORLD);
  const UnitLayout layout = unit();
  std::int64_t in_place = 0, sent = 0;
  for (int group = 1; group <= world.size(); ++group) {
    if (world.size() % group != 0) continue;
    Mesh mesh(world, group);
    Communicator& members = mesh.shard_group();
    const Slice slice = layout.slice(members.rank(), members.size());
    std::vector<std::vector<float>> gradients;
    for (std::int64_t quanta = 1; quanta <= 19; ++quanta) {
      gradients.push_back(gradient_of(layout, quanta - 1));
      const std::vector<float> expected =
          order == SumOrder::kTree ? tree(gradients) : by_ranks(gradients, world.size());
      const QuantumShare share(policy, quanta, world.size(), order, group);
      Queue queue(1);
      const Grant grant(CanonicalSum::buffers(layout, share, members.rank()));
      const Grant workspace(CanonicalSum::workspace(layout, share, members.rank()));
      CanonicalSum sum(layout, share, members, queue, grant.views(), workspace.views()[0]);
      members.reset_traffic();
      for (int step = 0; step < 3; ++step) {
        for (std::int64_t round = 0; round < share.rounds(); ++round) {
          std::vector<std::vector<float>> kept;  // in groups of one until the sum is complete
          for (int source = 0; source < group; ++source) {
            const std::int64_t q = share.quantum(round, members.rank() * group + source);
            if (q == QuantumShare::kNone) continue;
            kept.push_back(gradients[static_cast<std::size_t>(q)]);
            View view(kept.back().data(), Shape{layout.count()});
            const View place = step == 1 ? sum.place(source) : View();
            if (!place.empty()) {
              ++in_place;
              std::memcpy(place.raw(), view.raw(), static_cast<std::size_t>(view.bytes()));
              view = place;
            }
            sum.add(source, view);
            if (group > 1) std::fill(kept.back().begin(), kept.back().end(), 7.0F);
          }
          if (step == 2) {
            sum.start();
            sum.complete();
          } else {
            sum.push();
          }
        }
        const View mine = sum.finish();
        ASSERT_EQ(mine.count(), slice.count());
        EXPECT_EQ(std::memcmp(mine.raw(), expected.data() + slice.begin,
                              static_cast<std::size_t>(mine.bytes())),
                  0)
            << "groups of " << group << ", " << quanta << " quanta, step " << step;
      }
      EXPECT_TRUE(grant.intact());
      EXPECT_TRUE(workspace.intact());
      const std::int64_t away = (layout.count() - slice.count()) * 4;
      EXPECT_EQ(members.traffic(Traffic::kReduce).bytes_sent,
                3 * away * share.sums_sent(members.rank()));
      sent += members.traffic(Traffic::kReduce).bytes_sent;
    }
  }
  EXPECT_GT(in_place, 0);
  EXPECT_EQ(sent > 0, world.size() > 1) << "nothing was exchanged";
}

// Within a round a group adds whole subtrees up before it sends them.
TEST(CanonicalSum, GroupsSendLess) {
  const QuantumShare apart(Accumulate::kSharded, 32, 8),
      fours(Accumulate::kSharded, 32, 8, SumOrder::kTree, 4);
  EXPECT_EQ(apart.sums_sent(0), 4);
  EXPECT_EQ(fours.sums_sent(0), 4);  // of one part in four
  EXPECT_EQ(fours.members(), 2);
  const QuantumShare odd(Accumulate::kSharded, 11, 6, SumOrder::kTree, 3);
  EXPECT_EQ(odd.sums_sent(0), 2 + 2);  // (0 1) 2, (6 7) 8
  EXPECT_EQ(odd.sums_sent(1), 2 + 2);  // 3 (4 5), 9 10
}

TEST(CanonicalSum, RefusesAGroupsGradientThatIsMissingOrTwice) {
  Communicator world(MPI_COMM_WORLD);
  Communicator alone(world, world.rank());
  const UnitLayout layout = unit();
  const QuantumShare share(Accumulate::kSharded, 4, 2, SumOrder::kTree, 2);
  Queue queue(1);
  const Grant grant(CanonicalSum::buffers(layout, share, 0));
  const Grant workspace(CanonicalSum::workspace(layout, share, 0));
  CanonicalSum sum(layout, share, alone, queue, grant.views(), workspace.views()[0]);
  std::vector<float> gradient = gradient_of(layout, 0);
  const View view(gradient.data(), Shape{layout.count()});
  sum.add(0, view);
  EXPECT_THROW(sum.add(0, view), Error);
  EXPECT_THROW(sum.push(), Error);
}

// The case that the parts above have to meet: a rank's slice holds pieces of several parameters.
TEST(CanonicalSum, SlicesOfTheTestStraddleParameters) {
  const Communicator communicator(MPI_COMM_WORLD);
  const UnitLayout layout = unit();
  std::int64_t straddling = 0, split = 0;
  for (int rank = 0; rank < communicator.size(); ++rank) {
    const std::vector<Piece> pieces = layout.pieces(layout.slice(rank, communicator.size()));
    if (pieces.size() > 1) ++straddling;
    if (!pieces.empty() && pieces[0].begin > 0) ++split;
  }
  EXPECT_GT(straddling, 0);
  if (communicator.size() > 1) {
    EXPECT_GT(split, 0);
  }
}

TEST(CanonicalSum, RefusesAGradientThatIsMissingOrTooMuch) {
  Communicator communicator(MPI_COMM_WORLD);
  const UnitLayout layout = unit();
  const QuantumShare share(Accumulate::kSharded, communicator.size() + 1, communicator.size());
  Queue queue(1);
  const Grant grant(CanonicalSum::buffers(layout, share, communicator.rank()));
  const Grant workspace(CanonicalSum::workspace(layout, share, communicator.rank()));
  CanonicalSum sum(layout, share, communicator, queue, grant.views(), workspace.views()[0]);
  EXPECT_THROW(sum.push({}), Error);
  EXPECT_THROW(sum.finish(), Error);
}

}  // namespace
}  // namespace tessera
