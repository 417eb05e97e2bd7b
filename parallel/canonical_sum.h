// The sum over a step's quanta whose order is fixed by the data: a binary tree over the bits of the
// quantum's number, lowest bit first, in which a missing right child passes the left one through.
// The same bits on any number of ranks and under both policies.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "parallel/sharding.h"
#include "runtime/device.h"
#include "runtime/memory.h"
#include "runtime/view.h"

namespace tessera {

enum class Accumulate : std::uint8_t {
  kSharded,  // every quantum's gradient goes to the owners of its slices at once: least memory
  kLocal,    // a rank sums its own run of quanta first, then one exchange a step: least traffic
};

enum class SumOrder : std::uint8_t {
  kTree,   // the canonical sum
  kPlain,  // a rank's quanta one after another, then the ranks': other bits on other layouts
};

// Which quanta each rank computes, and how their gradients are added up. kSharded: round k gives
// quantum k*W + r to rank r. kLocal: rank r's are the run [r*Q div W, (r+1)*Q div W), one a round.
//
// Ranks may stand in groups of E, as they do where they share experts: ranks [g*E, (g+1)*E) are
// group g, whose member k makes the gradients of its part of the parameters from the quanta of all
// E ranks. The W/E ranks with the same k then sum that part: the members of its sum.
class QuantumShare {
 public:
  static constexpr std::int64_t kNone = -1;

  QuantumShare(Accumulate policy, std::int64_t quanta, int ranks, SumOrder order = SumOrder::kTree,
               int group = 1);
  // With one rank there is nothing to exchange and both policies are kSharded.
  Accumulate policy() const { return policy_; }
  SumOrder order() const { return order_; }
  std::int64_t quanta() const { return quanta_; }
  int ranks() const { return ranks_; }
  int group() const { return group_; }             // E
  int members() const { return ranks_ / group_; }  // of a sum
  // Every rank goes through all rounds, since gathers and exchanges need every rank.
  std::int64_t rounds() const;
  std::int64_t quantum(std::int64_t round, int rank) const;  // kNone: the rank has none
  std::int64_t count(int rank) const;                        // quanta of a rank
  // Partial sums that a member sends of each unit in a step.
  std::int64_t sums_sent(int member) const;
  // Those that come from other members in one exchange, at most; and those of the sum itself, at
  // one time, at most.
  std::int64_t sums_received(int member) const;
  std::int64_t sums_kept() const { return sums_kept_; }

 private:
  Accumulate policy_;
  SumOrder order_;
  std::int64_t quanta_;
  int ranks_, group_;
  std::int64_t sums_kept_ = 1;
  // What all members send in each exchange; not for groups of one under kSharded, where each sends
  // what it has.
  std::vector<std::int64_t> sums_of_exchange_;
};

// A whole aligned subtree: the sum of the quanta [begin, begin + 2^level) that exist.
struct TreeNode {
  std::int64_t begin = 0;
  int level = 0;
  bool operator==(const TreeNode&) const = default;
};
// The largest aligned subtrees that make up the run [begin, end) of quanta, in order.
std::vector<TreeNode> tree_nodes(std::int64_t begin, std::int64_t end);

// A binary counter of partial sums: nodes are pushed in order of their quanta, siblings are added.
// Under kPlain a single sum, to which each node is added.
class TreeAccumulator {
 public:
  // The buffers of `count` f32 each that pushing these nodes takes.
  static std::int64_t buffers_needed(std::span<const TreeNode> nodes,
                                     SumOrder order = SumOrder::kTree);

  TreeAccumulator(Queue& queue, std::vector<View> buffers, SumOrder order = SumOrder::kTree);
  // Where a node's values may be made, so that its push, which comes next, needn't copy them; empty
  // when they are added to others at once.
  View place(const TreeNode& node) const;
  // `values` is read only and may be reused after the call, unless it is the node's place.
  void push(const TreeNode& node, const View& values);
  // The partial sums in order of their quanta, valid until the next push.
  std::span<const View> nodes() const { return {buffers_.data(), nodes_.size()}; }
  // Adds up what is left; needs at least one push. Valid until the next push, which starts anew
  // after clear().
  View finish();
  void clear() { nodes_.clear(); }

 private:
  Queue& queue_;
  std::vector<View> buffers_;    // the first nodes_.size() hold the partial sums
  std::vector<TreeNode> nodes_;  // a stack
  SumOrder order_;
};

// The canonical sum of one unit's gradient, step after step; under SumOrder::kPlain the same
// exchanges with a sum that isn't canonical. In every round each member adds the gradients that its
// group's ranks give it, in their order, then pushes them.
class CanonicalSum {
 public:
  // What a member needs for one unit, to be granted to the constructor in this order. Held from a
  // step's first add until its result has been used.
  static std::vector<BufferSpec> buffers(const UnitLayout& layout, const QuantumShare& share,
                                         int member);
  // Used from a round's first add to the end of its push or complete only: one of the largest size
  // serves all units whose sums aren't under way at once; [0] when W is 1.
  static BufferSpec workspace(const UnitLayout& layout, const QuantumShare& share, int member);

  // Of the communicator's members; layout, communicator and queue outlive this.
  CanonicalSum(const UnitLayout& layout, const QuantumShare& share, Communicator& communicator,
               Queue& queue, const std::vector<View>& buffers, View workspace);

  // Where the gradient of the group's rank `source`, which is added next, may be made, to save a
  // copy of it: one of places(). Empty: in the caller's own memory.
  View place(int source = 0);
  // All that place() can be, each [layout.count()] f32.
  const std::vector<View>& places() const { return places_; }

  // The gradient [layout.count()] f32, padding zero, of the quantum that the group's rank `source`
  // has in this round; called for each that has one, in order. Read only. Free for reuse on return,
  // except in groups of one under kSharded: until the push, or complete(), returns.
  void add(int source, const View& gradient);
  // After a round's adds. Collective in every round under kSharded and in the last one under
  // kLocal.
  void push();
  // The same in two parts, between which the exchange goes on (Communicator::advance). complete()
  // is called after every start, and collective as push is.
  void start();
  void complete();
  // In groups of one: the gradient of this rank's quantum, or an empty View when it has none.
  void push(const View& gradient);
  void start(const View& gradient);
  // After all rounds: this rank's slice [slice.count()] of the sum, valid until the next push,
  // which starts another step.
  View finish();

 private:
  std::int64_t quantum_of(int source) const;
  TreeAccumulator& local_of(int source);
  void begin_round();
  void add_own(const View& gradient);
  bool prepare();
  void take_in();

  const UnitLayout& layout_;
  QuantumShare share_;
  Communicator& communicator_;
  Slice slice_;
  View workspace_;  // what comes in
  std::vector<View> places_;
  std::vector<TreeAccumulator> local_;  // of whole units: see local_buffers
  TreeAccumulator sharded_;             // this member's slice
  View direct_;                         // groups of one under kSharded: the round's gradient
  std::int64_t round_ = 0;
  int added_ = 0;                             // sources of this round so far
  std::vector<std::vector<TreeNode>> nodes_;  // of each member, in the exchange to come
  std::vector<View> sums_;                    // this member's nodes, whole
  std::vector<View> own_;                     // and its slices of them
  std::vector<Communicator::Message> sends_, receives_;
  Communicator::Transfer transfer_;
};

// The same tree over numbers, for losses; 0 for none.
double tree_sum(std::span<const double> values);

}  // namespace tessera
