#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <vector>

#include "parallel/canonical_sum.h"

namespace tessera {
namespace {

TEST(QuantumShare, EveryQuantumIsComputedOnce) {
  for (const Accumulate policy : {Accumulate::kSharded, Accumulate::kLocal}) {
    for (std::int64_t quanta = 1; quanta <= 40; ++quanta) {
      for (int ranks = 1; ranks <= 12; ++ranks) {
        const QuantumShare share(policy, quanta, ranks);
        // No layout takes more rounds than it must.
        EXPECT_EQ(share.rounds(), (quanta + ranks - 1) / ranks);
        std::set<std::int64_t> seen;
        for (int rank = 0; rank < ranks; ++rank) {
          std::int64_t count = 0, last = -1;
          for (std::int64_t round = 0; round < share.rounds(); ++round) {
            const std::int64_t q = share.quantum(round, rank);
            if (q == QuantumShare::kNone) continue;
            EXPECT_GT(q, last);
            last = q;
            EXPECT_EQ(count, round) << "a rank's quanta come in its first rounds";
            ++count;
            EXPECT_TRUE(seen.insert(q).second);
          }
          EXPECT_EQ(count, share.count(rank));
        }
        EXPECT_EQ(static_cast<std::int64_t>(seen.size()), quanta);
        EXPECT_EQ(*seen.rbegin(), quanta - 1);
      }
    }
  }
}

TEST(TreeNodes, AreAlignedAndMakeUpTheRun) {
  for (std::int64_t begin = 0; begin < 40; ++begin) {
    for (std::int64_t end = begin; end < 40; ++end) {
      std::int64_t at = begin;
      for (const TreeNode& node : tree_nodes(begin, end)) {
        EXPECT_EQ(node.begin, at);
        EXPECT_EQ(node.begin % (std::int64_t{1} << node.level), 0);
        at += std::int64_t{1} << node.level;
      }
      EXPECT_EQ(at, end);
    }
  }
  EXPECT_EQ(tree_nodes(0, 8), (std::vector<TreeNode>{{0, 3}}));
  EXPECT_EQ(tree_nodes(5, 10), (std::vector<TreeNode>{{5, 0}, {6, 1}, {8, 1}}));
}

TEST(TreeSum, HasTheShapeOfTheFormula) {
  const auto v = [](int i) { return 1.0 / (3.0 + i); };
  std::vector<double> values;
  EXPECT_EQ(tree_sum(values), 0.0);
  for (int i = 0; i < 7; ++i) values.push_back(v(i));
  EXPECT_EQ(tree_sum(std::span(values).first(1)), v(0));
  EXPECT_EQ(tree_sum(std::span(values).first(2)), v(0) + v(1));
  EXPECT_EQ(tree_sum(std::span(values).first(3)), (v(0) + v(1)) + v(2));
  EXPECT_EQ(tree_sum(std::span(values).first(5)), ((v(0) + v(1)) + (v(2) + v(3))) + v(4));
  EXPECT_EQ(tree_sum(values), ((v(0) + v(1)) + (v(2) + v(3))) + ((v(4) + v(5)) + v(6)));
}

// Nothing is added to a left child without a sibling: -0 stays -0.
TEST(TreeSum, MissingChildrenAddNothing) {
  const std::vector<double> values{-0.0, -0.0, -0.0};
  EXPECT_TRUE(std::signbit(tree_sum(values)));
}

TEST(TreeAccumulator, NeedsAsManyBuffersAsPartialSums) {
  const auto needed = [](std::int64_t quanta) {
    std::vector<TreeNode> nodes;
    for (std::int64_t q = 0; q < quanta; ++q) nodes.push_back({q, 0});
    return TreeAccumulator::buffers_needed(nodes);
  };
  EXPECT_EQ(needed(1), 1);
  EXPECT_EQ(needed(2), 1);
  EXPECT_EQ(needed(3), 2);
  EXPECT_EQ(needed(4), 2);
  EXPECT_EQ(needed(7), 3);
  EXPECT_EQ(needed(8), 3);
  EXPECT_EQ(needed(1024), 10);
}

}  // namespace
}  // namespace tessera
