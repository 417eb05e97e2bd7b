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

// What rank `rank` sends under kLocal, in order of quanta.
std::vector<TreeNode> local_nodes(const QuantumShare& share, int rank) {
  const std::int64_t begin = run_begin(share.quanta(), share.ranks(), rank);
  const std::int64_t end = run_begin(share.quanta(), share.ranks(), rank + 1);
  if (share.order() == SumOrder::kPlain && begin < end) return {{begin, 0}};
  return tree_nodes(begin, end);
}

std::vector<TreeNode> single_quanta(std::int64_t begin, std::int64_t end) {
  std::vector<TreeNode> nodes;
  for (std::int64_t q = begin; q < end; ++q) nodes.push_back({q, 0});
  return nodes;
}

std::int64_t local_buffers(const QuantumShare& share, int rank) {
  if (share.policy() == Accumulate::kSharded) return 0;
  return TreeAccumulator::buffers_needed(
      single_quanta(run_begin(share.quanta(), share.ranks(), rank),
                    run_begin(share.quanta(), share.ranks(), rank + 1)),
      share.order());
}

std::vector<TreeNode> received_nodes(const QuantumShare& share) {
  if (share.policy() == Accumulate::kSharded) return single_quanta(0, share.quanta());
  std::vector<TreeNode> nodes;
  for (int rank = 0; rank < share.ranks(); ++rank) {
    const std::vector<TreeNode> of_rank = local_nodes(share, rank);
    nodes.insert(nodes.end(), of_rank.begin(), of_rank.end());
  }
  return nodes;
}

// Slices of this rank that come from the others in one exchange.
std::int64_t received_slices(const QuantumShare& share, int rank) {
  if (share.policy() == Accumulate::kSharded) {
    return std::min<std::int64_t>(share.ranks(), share.quanta()) - (rank < share.quanta() ? 1 : 0);
  }
  return static_cast<std::int64_t>(received_nodes(share).size() - local_nodes(share, rank).size());
}

std::vector<View> part(const std::vector<View>& buffers, std::int64_t begin, std::int64_t end) {
  TESSERA_CHECK(end <= static_cast<std::int64_t>(buffers.size()));
  return {buffers.begin() + begin, buffers.begin() + end};
}

}  // namespace

QuantumShare::QuantumShare(Accumulate policy, std::int64_t quanta, int ranks, SumOrder order)
    : policy_(ranks == 1 ? Accumulate::kSharded : policy),
      order_(order),
      quanta_(quanta),
      ranks_(ranks) {
  TESSERA_CHECK(quanta >= 1 && ranks >= 1);
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

std::int64_t QuantumShare::sums_sent(int rank) const {
  return policy_ == Accumulate::kSharded
             ? count(rank)
             : static_cast<std::int64_t>(local_nodes(*this, rank).size());
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
                                              int rank) {
  std::vector<BufferSpec> specs;
  for (std::int64_t i = 0; i < local_buffers(share, rank); ++i) {
    specs.push_back({layout.name() + " own partial sum " + std::to_string(i), DType::kF32,
                     Shape{layout.count()}});
  }
  const std::int64_t slice = layout.slice(rank, share.ranks()).count();
  for (std::int64_t i = 0;
       i < TreeAccumulator::buffers_needed(received_nodes(share), share.order()); ++i) {
    specs.push_back(
        {layout.name() + " partial sum " + std::to_string(i), DType::kF32, Shape{slice}});
  }
  return specs;
}

BufferSpec CanonicalSum::workspace(const UnitLayout& layout, const QuantumShare& share, int rank) {
  const std::int64_t slice = layout.slice(rank, share.ranks()).count();
  return {"received gradients", DType::kF32, Shape{slice * received_slices(share, rank)}};
}

CanonicalSum::CanonicalSum(const UnitLayout& layout, const QuantumShare& share,
                           Communicator& communicator, Queue& queue,
                           const std::vector<View>& buffers, View workspace)
    : layout_(layout),
      share_(share),
      communicator_(communicator),
      slice_(layout.slice(communicator.rank(), communicator.size())),
      workspace_(workspace),
      local_(queue, part(buffers, 0, local_buffers(share, communicator.rank())), share.order()),
      sharded_(queue,
               part(buffers, local_buffers(share, communicator.rank()),
                    static_cast<std::int64_t>(buffers.size())),
               share.order()) {
  TESSERA_CHECK(share.ranks() == communicator.size());
  TESSERA_CHECK(workspace.count() >=
                CanonicalSum::workspace(layout, share, communicator.rank()).shape.count());
  nodes_.resize(static_cast<std::size_t>(share.ranks()));
  if (share.policy() == Accumulate::kLocal) {
    for (int rank = 0; rank < share.ranks(); ++rank) {
      nodes_[static_cast<std::size_t>(rank)] = local_nodes(share, rank);
    }
  }
}

View CanonicalSum::place() {
  const std::int64_t quantum = share_.quantum(round_, communicator_.rank());
  if (quantum == QuantumShare::kNone) return {};
  if (round_ == 0) {
    local_.clear();
    sharded_.clear();
  }
  if (share_.policy() == Accumulate::kLocal) return local_.place({quantum, 0});
  return communicator_.size() == 1 ? sharded_.place({quantum, 0}) : View();
}

// Makes this round's messages: every rank's partial sums (kSharded: its quantum's gradient; kLocal:
// after the last round its subtrees) to the owners of their slices. Whether there is an exchange.
bool CanonicalSum::prepare(const View& gradient) {
  const int self = communicator_.rank();
  const std::int64_t quantum = share_.quantum(round_, self);
  TESSERA_CHECK(round_ < share_.rounds() && !transfer_.started());
  TESSERA_CHECK(gradient.empty() == (quantum == QuantumShare::kNone));
  TESSERA_CHECK(gradient.empty() || gradient.count() == layout_.count());
  if (round_ == 0) {
    local_.clear();
    sharded_.clear();
  }
  std::span<const View> sums{&gradient, gradient.empty() ? std::size_t{0} : std::size_t{1}};
  if (share_.policy() == Accumulate::kLocal) {
    if (!gradient.empty()) local_.push({quantum, 0}, gradient);
    if (++round_ < share_.rounds()) return false;
    sums = local_.nodes();
  } else {
    for (int rank = 0; rank < share_.ranks(); ++rank) {
      std::vector<TreeNode>& nodes = nodes_[static_cast<std::size_t>(rank)];
      nodes.clear();
      const std::int64_t q = share_.quantum(round_, rank);
      if (q != QuantumShare::kNone) nodes.push_back({q, 0});
    }
    ++round_;
  }
  own_.clear();
  for (const View& sum : sums) own_.push_back(sum.slice(slice_.begin, slice_.end));
  sends_.clear();
  receives_.clear();
  std::byte* place = workspace_.raw();
  const std::int64_t slice_bytes = slice_.count() * size_of(DType::kF32);
  for (int peer = 0; peer < communicator_.size(); ++peer) {
    if (peer == self) continue;
    const Slice slice = layout_.slice(peer, communicator_.size());
    for (const View& sum : sums) {
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

void CanonicalSum::push(const View& gradient) {
  if (!prepare(gradient)) return;
  communicator_.exchange(Traffic::kReduce, layout_.name(), sends_, receives_);
  take_in();
}

void CanonicalSum::start(const View& gradient) {
  if (!prepare(gradient)) return;
  communicator_.start_exchange(transfer_, Traffic::kReduce, layout_.name(), sends_, receives_);
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
