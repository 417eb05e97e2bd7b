#include "parallel/canonical_sum.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <utility>

namespace tessera {

namespace {

// Elements of one piece of work; fixed, and small enough that a cascade of additions stays in
// cache.
constexpr std::int64_t kPiece = 16384;

std::int64_t run_begin(std::int64_t quanta, int ranks, int rank) { return rank * quanta / ranks; }

bool siblings(const TreeNode& left, const TreeNode& right) {
  return left.level == right.level && (left.begin ^ right.begin) == std::int64_t{1} << left.level;
}

TreeNode parent(const TreeNode& left) { return {left.begin, left.level + 1}; }

// Elements are a multiple of kGranule. Blocks of constant length, so that it vectorises at -O2.
void add_to(float* __restrict left, const float* __restrict right, std::int64_t elements) {
  constexpr std::int64_t kBlock = 64;
  for (std::int64_t block = 0; block < elements; block += kBlock) {
    for (std::int64_t i = block; i < block + kBlock; ++i) left[i] += right[i];
  }
}

// Merges that pushing a node onto the stack brings about.
std::size_t merges(std::span<const TreeNode> stack, TreeNode node, SumOrder order) {
  if (order == SumOrder::kPlain) return stack.size();
  std::size_t count = 0;
  while (count < stack.size() && siblings(stack[stack.size() - 1 - count], node)) {
    node = parent(stack[stack.size() - 1 - count]);
    ++count;
  }
  return count;
}

void push_node(std::vector<TreeNode>& stack, const TreeNode& node,
               SumOrder order = SumOrder::kTree) {
  const std::size_t count = merges(stack, node, order);
  if (count == 0) {
    stack.push_back(node);
    return;
  }
  stack.resize(stack.size() - (count - 1));
  stack.back().level = node.level + static_cast<int>(count);
}

// What rank `rank` makes of its own run under kLocal, in order of quanta.
void append_local_nodes(const QuantumShare& share, int rank, std::vector<TreeNode>& nodes) {
  const std::int64_t begin = run_begin(share.quanta(), share.ranks(), rank);
  const std::int64_t end = run_begin(share.quanta(), share.ranks(), rank + 1);
  if (begin == end) return;
  if (share.order() == SumOrder::kPlain) {
    nodes.push_back({begin, 0});
    return;
  }
  std::vector<TreeNode> own;
  for (std::int64_t q = begin; q < end; ++q) push_node(own, {q, 0});
  nodes.insert(nodes.end(), own.begin(), own.end());
}

// The quanta of a member's group in a round under kSharded.
struct Run {
  std::int64_t begin, end;
};
Run run_of(const QuantumShare& share, std::int64_t round, int member) {
  const std::int64_t begin = round * share.ranks() + std::int64_t{member} * share.group();
  return {std::min(begin, share.quanta()), std::min(begin + share.group(), share.quanta())};
}

// What a member sends in this round, in order of quanta; allocates nothing once `nodes` has had the
// most.
void nodes_of_round(const QuantumShare& share, std::int64_t round, int member,
                    std::vector<TreeNode>& nodes) {
  nodes.clear();
  const Run run = run_of(share, round, member);
  for (std::int64_t q = run.begin; q < run.end; ++q) push_node(nodes, {q, 0});
}

std::vector<TreeNode> nodes_of_step(const QuantumShare& share, int member) {
  std::vector<TreeNode> nodes;
  for (int k = 0; k < share.group(); ++k) {
    append_local_nodes(share, member * share.group() + k, nodes);
  }
  return nodes;
}

std::vector<TreeNode> single_quanta(std::int64_t begin, std::int64_t end) {
  std::vector<TreeNode> nodes;
  for (std::int64_t q = begin; q < end; ++q) nodes.push_back({q, 0});
  return nodes;
}

// Whole units that a member sums before it sends. Under kLocal the run of each of its group's ranks
// has sums of its own, kept through the step; under kSharded, in groups of more than one, the
// quanta of a round have some that are free after it.
std::int64_t local_buffers(const QuantumShare& share, int rank) {
  return TreeAccumulator::buffers_needed(
      single_quanta(run_begin(share.quanta(), share.ranks(), rank),
                    run_begin(share.quanta(), share.ranks(), rank + 1)),
      share.order());
}
std::int64_t buffers_of_step(const QuantumShare& share, int member) {
  if (share.policy() == Accumulate::kSharded) return 0;
  std::int64_t buffers = 0;
  for (int k = 0; k < share.group(); ++k) {
    buffers += local_buffers(share, member * share.group() + k);
  }
  return buffers;
}
std::int64_t buffers_of_round(const QuantumShare& share, int member) {
  if (share.policy() == Accumulate::kLocal || share.group() == 1) return 0;
  std::int64_t most = 0;
  for (std::int64_t round = 0; round < share.rounds(); ++round) {
    const Run run = run_of(share, round, member);
    most = std::max(most, TreeAccumulator::buffers_needed(single_quanta(run.begin, run.end)));
  }
  return most;
}

std::vector<View> part(const std::vector<View>& buffers, std::int64_t begin, std::int64_t end) {
  TESSERA_CHECK(end <= static_cast<std::int64_t>(buffers.size()));
  return {buffers.begin() + begin, buffers.begin() + end};
}

}  // namespace

QuantumShare::QuantumShare(Accumulate policy, std::int64_t quanta, int ranks, SumOrder order,
                           int group)
    : policy_(ranks == 1 ? Accumulate::kSharded : policy),
      order_(order),
      quanta_(quanta),
      ranks_(ranks),
      group_(group) {
  TESSERA_CHECK(quanta >= 1 && ranks >= 1 && group >= 1 && ranks % group == 0);
  const bool sharded = policy_ == Accumulate::kSharded;
  if (sharded && group == 1) {
    // After n quanta as many as n has ones.
    if (order == SumOrder::kTree) {
      sums_kept_ = std::bit_width(static_cast<std::uint64_t>(quanta) + 1) - 1;
    }
    return;
  }
  std::vector<TreeNode> stack, nodes;
  for (std::int64_t exchange = 0; exchange < (sharded ? rounds() : 1); ++exchange) {
    sums_of_exchange_.push_back(0);
    for (int member = 0; member < members(); ++member) {
      if (sharded) {
        nodes_of_round(*this, exchange, member, nodes);
      } else {
        nodes = nodes_of_step(*this, member);
      }
      sums_of_exchange_.back() += static_cast<std::int64_t>(nodes.size());
      for (const TreeNode& node : nodes) {
        push_node(stack, node, order);
        sums_kept_ = std::max(sums_kept_, static_cast<std::int64_t>(stack.size()));
      }
    }
  }
}

std::int64_t QuantumShare::rounds() const { return (quanta_ + ranks_ - 1) / ranks_; }

std::int64_t QuantumShare::quantum(std::int64_t round, int rank) const {
  if (policy_ == Accumulate::kSharded) {
    const std::int64_t q = round * ranks_ + rank;
    return q < quanta_ ? q : kNone;
  }
  const std::int64_t q = run_begin(quanta_, ranks_, rank) + round;
  return q < run_begin(quanta_, ranks_, rank + 1) ? q : kNone;
}

std::int64_t QuantumShare::count(int rank) const {
  if (policy_ == Accumulate::kSharded) {
    return quanta_ / ranks_ + (rank < quanta_ % ranks_ ? 1 : 0);
  }
  return run_begin(quanta_, ranks_, rank + 1) - run_begin(quanta_, ranks_, rank);
}

std::int64_t QuantumShare::sums_sent(int member) const {
  if (policy_ == Accumulate::kLocal) {
    return static_cast<std::int64_t>(nodes_of_step(*this, member).size());
  }
  if (group_ == 1) return count(member);
  std::size_t sums = 0;
  std::vector<TreeNode> nodes;
  for (std::int64_t round = 0; round < rounds(); ++round) {
    nodes_of_round(*this, round, member, nodes);
    sums += nodes.size();
  }
  return static_cast<std::int64_t>(sums);
}

std::int64_t QuantumShare::sums_received(int member) const {
  if (policy_ == Accumulate::kLocal) return sums_of_exchange_[0] - sums_sent(member);
  if (group_ == 1) return std::min<std::int64_t>(ranks_, quanta_) - (member < quanta_ ? 1 : 0);
  std::int64_t most = 0;
  std::vector<TreeNode> nodes;
  for (std::int64_t round = 0; round < rounds(); ++round) {
    nodes_of_round(*this, round, member, nodes);
    most = std::max(most, sums_of_exchange_[static_cast<std::size_t>(round)] -
                              static_cast<std::int64_t>(nodes.size()));
  }
  return most;
}

std::vector<TreeNode> tree_nodes(std::int64_t begin, std::int64_t end) {
  std::vector<TreeNode> nodes;
  for (const TreeNode& node : single_quanta(begin, end)) push_node(nodes, node);
  return nodes;
}

std::int64_t TreeAccumulator::buffers_needed(std::span<const TreeNode> nodes, SumOrder order) {
  std::vector<TreeNode> stack;
  std::size_t most = 0;
  for (const TreeNode& node : nodes) {
    push_node(stack, node, order);
    most = std::max(most, stack.size());
  }
  return static_cast<std::int64_t>(most);
}

TreeAccumulator::TreeAccumulator(Queue& queue, std::vector<View> buffers, SumOrder order)
    : queue_(queue), buffers_(std::move(buffers)), order_(order) {
  nodes_.reserve(buffers_.size() + 1);
  for (const View& buffer : buffers_) TESSERA_CHECK(buffer.count() % kGranule == 0);
}

View TreeAccumulator::place(const TreeNode& node) const {
  if (merges(nodes_, node, order_) > 0) return {};
  TESSERA_CHECK(nodes_.size() < buffers_.size());
  return buffers_[nodes_.size()];
}

void TreeAccumulator::push(const TreeNode& node, const View& values) {
  const std::size_t count = merges(nodes_, node, order_);
  const std::size_t target = count == 0 ? nodes_.size() : nodes_.size() - count;
  TESSERA_CHECK(target < buffers_.size() && values.count() == buffers_[target].count());
  const std::int64_t elements = values.count();
  const float* source = values.as<float>();
  if (source == buffers_[target].as<float>()) {
    push_node(nodes_, node, order_);
    return;
  }
  queue_.parallel_for((elements + kPiece - 1) / kPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    const std::int64_t length = std::min(kPiece, elements - begin);
    const float* right = source + begin;
    if (count == 0) {
      std::memcpy(buffers_[target].as<float>() + begin, right,
                  static_cast<std::size_t>(length) * sizeof(float));
      return;
    }
    for (std::size_t level = 0; level < count; ++level) {
      float* left = buffers_[nodes_.size() - 1 - level].as<float>() + begin;
      add_to(left, right, length);
      right = left;
    }
  });
  push_node(nodes_, node, order_);
}

View TreeAccumulator::finish() {
  TESSERA_CHECK(!nodes_.empty());
  const std::int64_t elements = buffers_[0].count();
  queue_.parallel_for((elements + kPiece - 1) / kPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    const std::int64_t length = std::min(kPiece, elements - begin);
    for (std::size_t at = nodes_.size() - 1; at > 0; --at) {
      const float* right = buffers_[at].as<float>() + begin;
      float* left = buffers_[at - 1].as<float>() + begin;
      add_to(left, right, length);
    }
  });
  nodes_.resize(1);
  return buffers_[0];
}

std::vector<BufferSpec> CanonicalSum::buffers(const UnitLayout& layout, const QuantumShare& share,
                                              int member) {
  std::vector<BufferSpec> specs;
  for (std::int64_t i = 0; i < buffers_of_step(share, member); ++i) {
    specs.push_back({layout.name() + " own partial sum " + std::to_string(i), DType::kF32,
                     Shape{layout.count()}});
  }
  const std::int64_t slice = layout.slice(member, share.members()).count();
  for (std::int64_t i = 0; i < share.sums_kept(); ++i) {
    specs.push_back(
        {layout.name() + " partial sum " + std::to_string(i), DType::kF32, Shape{slice}});
  }
  return specs;
}

BufferSpec CanonicalSum::workspace(const UnitLayout& layout, const QuantumShare& share,
                                   int member) {
  const std::int64_t slice = layout.slice(member, share.members()).count();
  return {"received gradients", DType::kF32,
          Shape{layout.count() * buffers_of_round(share, member) +
                slice * share.sums_received(member)}};
}

CanonicalSum::CanonicalSum(const UnitLayout& layout, const QuantumShare& share,
                           Communicator& communicator, Queue& queue,
                           const std::vector<View>& buffers, View workspace)
    : layout_(layout),
      share_(share),
      communicator_(communicator),
      slice_(layout.slice(communicator.rank(), communicator.size())),
      sharded_(queue,
               part(buffers, buffers_of_step(share, communicator.rank()),
                    static_cast<std::int64_t>(buffers.size())),
               share.order()) {
  const int self = communicator.rank();
  TESSERA_CHECK(share.members() == communicator.size());
  TESSERA_CHECK(workspace.count() >= CanonicalSum::workspace(layout, share, self).shape.count());
  const std::int64_t of_round = buffers_of_round(share, self);
  places_ = part(buffers, 0, buffers_of_step(share, self));
  for (std::int64_t i = 0; i < of_round; ++i) {
    places_.push_back(workspace.slice(i * layout.count(), (i + 1) * layout.count()));
  }
  workspace_ = workspace.slice(of_round * layout.count(), workspace.count());
  nodes_.resize(static_cast<std::size_t>(share.members()));
  if (share.policy() == Accumulate::kLocal) {
    std::int64_t next = 0;
    for (int k = 0; k < share.group(); ++k) {
      const std::int64_t count = local_buffers(share, self * share.group() + k);
      local_.emplace_back(queue, part(places_, next, next + count), share.order());
      next += count;
    }
    for (int member = 0; member < share.members(); ++member) {
      nodes_[static_cast<std::size_t>(member)] = nodes_of_step(share, member);
    }
  } else if (share.group() > 1) {
    local_.emplace_back(queue, places_);
  } else if (share.ranks() == 1) {
    places_ = part(buffers, 0, static_cast<std::int64_t>(buffers.size()));
  }
}

std::int64_t CanonicalSum::quantum_of(int source) const {
  return share_.quantum(round_, communicator_.rank() * share_.group() + source);
}

// Where a whole gradient is summed before it is sent; there is none in groups of one under
// kSharded.
TreeAccumulator& CanonicalSum::local_of(int source) {
  return local_[share_.policy() == Accumulate::kLocal ? static_cast<std::size_t>(source) : 0];
}

void CanonicalSum::begin_round() {
  if (added_ > 0) return;
  if (round_ == 0) sharded_.clear();
  if (round_ == 0 || share_.policy() == Accumulate::kSharded) {
    for (TreeAccumulator& local : local_) local.clear();
  }
}

View CanonicalSum::place(int source) {
  const std::int64_t quantum = quantum_of(source);
  if (quantum == QuantumShare::kNone) return {};
  begin_round();
  if (!local_.empty()) return local_of(source).place({quantum, 0});
  return share_.ranks() == 1 ? sharded_.place({quantum, 0}) : View();
}

void CanonicalSum::add(int source, const View& gradient) {
  TESSERA_CHECK(round_ < share_.rounds() && !transfer_.started());
  TESSERA_CHECK(source >= added_ && source < share_.group());
  TESSERA_CHECK(gradient.count() == layout_.count());
  const std::int64_t quantum = quantum_of(source);
  TESSERA_CHECK(quantum != QuantumShare::kNone);
  begin_round();
  added_ = source + 1;
  if (local_.empty()) {
    direct_ = gradient;
  } else {
    local_of(source).push({quantum, 0}, gradient);
  }
}

// Makes this round's messages: every member's partial sums to the owners of their slices. Whether
// there is an exchange.
bool CanonicalSum::prepare() {
  const int self = communicator_.rank();
  TESSERA_CHECK(round_ < share_.rounds() && !transfer_.started());
  for (int source = 0; source < share_.group(); ++source) {  // none is missing
    TESSERA_CHECK(source < added_ || quantum_of(source) == QuantumShare::kNone);
  }
  begin_round();
  sums_.clear();
  if (share_.policy() == Accumulate::kLocal) {
    if (round_ + 1 == share_.rounds()) {
      for (const TreeAccumulator& local : local_) {
        sums_.insert(sums_.end(), local.nodes().begin(), local.nodes().end());
      }
    }
  } else {
    for (int member = 0; member < share_.members(); ++member) {
      nodes_of_round(share_, round_, member, nodes_[static_cast<std::size_t>(member)]);
    }
    if (local_.empty()) {
      if (added_ > 0) sums_.push_back(direct_);
    } else {
      sums_.insert(sums_.end(), local_[0].nodes().begin(), local_[0].nodes().end());
    }
  }
  added_ = 0;
  ++round_;
  if (share_.policy() == Accumulate::kLocal && round_ < share_.rounds()) return false;
  own_.clear();
  for (const View& sum : sums_) own_.push_back(sum.slice(slice_.begin, slice_.end));
  sends_.clear();
  receives_.clear();
  std::byte* place = workspace_.raw();
  const std::int64_t slice_bytes = slice_.count() * size_of(DType::kF32);
  for (int peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == self) continue;
    const Slice slice = layout_.slice(peer, communicator_.size());
    for (const View& sum : sums_) {
      const View part = sum.slice(slice.begin, slice.end);
      sends_.push_back({peer, part.raw(), part.bytes()});
    }
    for (std::size_t i = 0; i < nodes_[static_cast<std::size_t>(peer)].size(); ++i) {
      receives_.push_back({peer, place, slice_bytes});
      place += slice_bytes;
    }
  }
  return true;
}

// Pushes what has come, and this rank's own, in order of the quanta, which is that of the ranks.
void CanonicalSum::take_in() {
  std::size_t received = 0;
  for (int peer = 0; peer < communicator_.size(); ++peer) {
    const std::vector<TreeNode>& nodes = nodes_[static_cast<std::size_t>(peer)];
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      sharded_.push(nodes[i], peer == communicator_.rank()
                                  ? own_[i]
                                  : View(reinterpret_cast<float*>(receives_[received++].data),
                                         Shape{slice_.count()}));
    }
  }
}

void CanonicalSum::push() {
  if (!prepare()) return;
  communicator_.exchange(Traffic::kReduce, layout_.name(), sends_, receives_);
  take_in();
}

void CanonicalSum::start() {
  if (!prepare()) return;
  communicator_.start_exchange(transfer_, Traffic::kReduce, layout_.name(), sends_, receives_);
}

void CanonicalSum::add_own(const View& gradient) {
  TESSERA_CHECK(share_.group() == 1 && added_ == 0);
  if (!gradient.empty()) add(0, gradient);
}

void CanonicalSum::push(const View& gradient) {
  add_own(gradient);
  push();
}

void CanonicalSum::start(const View& gradient) {
  add_own(gradient);
  start();
}

void CanonicalSum::complete() {
  if (!transfer_.started()) return;
  communicator_.finish(transfer_);
  take_in();
}

View CanonicalSum::finish() {
  TESSERA_CHECK(round_ == share_.rounds() && !transfer_.started());
  round_ = 0;
  return sharded_.finish();
}

double tree_sum(std::span<const double> values) {
  // A binary counter, as TreeAccumulator's: partial[l] sums an aligned run of 2^l values where bit
  // l of the count is set.
  std::array<double, 64> partial{};
  std::uint64_t count = 0;
  for (double sum : values) {
    std::size_t level = 0;
    for (; (count >> level & 1) != 0; ++level) sum = partial[level] + sum;
    partial[level] = sum;
    ++count;
  }
  if (count == 0) return 0.0;
  auto level = static_cast<std::size_t>(std::countr_zero(count));
  double total = partial[level];
  for (++level; level < partial.size(); ++level) {
    if ((count >> level & 1) != 0) total = partial[level] + total;
  }
  return total;
}

}  // namespace tessera
