// One training step on this rank's share of the model and of the batch: gather, forward, backward,
// canonical sum, update. Knows nothing of files, time or the terminal.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "launch/router_result.h"
#include "layers/stack.h"
#include "optim/adamw.h"
#include "optim/optim.pb.h"
#include "parallel/canonical_sum.h"
#include "parallel/checkpoint.h"
#include "parallel/communicator.h"
#include "parallel/mesh.h"
#include "parallel/sharding.h"
#include "runtime/activity.h"
#include "runtime/device.h"
#include "runtime/memory.h"

namespace tessera {

struct EngineOptions {
  int rank = 0;
  int ranks = 1;
  int expert_ranks = 1;     // that hold all experts between them; divides ranks
  BatchShape quantum;       // of every quantum, with the queue's threads
  std::int64_t quanta = 1;  // of a step, over all ranks
  Accumulate accumulate = Accumulate::kSharded;
  SumOrder order = SumOrder::kTree;
  bool gather_per_step = false;  // keep gathered parameters for the whole step
  // Parameters come and gradients go while other units compute, for which a second buffer is held.
  bool prefetch = true;
  bool recompute = false;  // compute a block's forward again in its backward
};

// What is gathered and summed as a whole: a unit of the stack without its experts, or those of a
// block's experts that this rank shares with the ranks of its place (parallel/mesh.h).
struct ShardedUnit {
  // What stands at one place of the layout: a parameter, or one expert's matrix of a stacked one.
  struct Part {
    std::size_t parameter = 0;
    std::int64_t begin = 0;  // its first element in the parameter
  };
  UnitSpec::Kind kind = UnitSpec::Kind::kBlock;
  std::int64_t layer = 0;
  bool experts = false;
  std::vector<ParameterSpec> parameters;  // with full names; experts' stacked, those of all ranks
  std::vector<Part> parts;
  UnitLayout layout;
};

// What a rank will hold, as a pure function of the model and the layout: the same table is granted
// by a run and printed by `plan`.
class EnginePlan {
 public:
  // Throws Error(kUsage) when expert_ranks doesn't divide ranks.
  EnginePlan(const Stack& stack, const EngineOptions& options);

  const EngineOptions& options() const { return options_; }
  const MemoryPlan& memory() const { return memory_; }
  // The stack's units in their order, then each block's experts.
  const std::vector<ShardedUnit>& units() const { return units_; }
  // The first of them, without experts.
  std::size_t dense_units() const { return dense_units_; }
  // Where a block's experts stand among them; kNoUnit where it has none.
  std::size_t experts_of(std::size_t layer) const { return experts_of_[layer]; }
  static constexpr std::size_t kNoUnit = SIZE_MAX;
  const QuantumShare& share() const { return share_; }
  // As the ranks of one unit see it: for experts, with the groups that share them.
  const QuantumShare& share(std::size_t unit) const {
    return units_[unit].experts ? expert_share_ : share_;
  }
  DType compute() const { return compute_; }
  // Whether parameters compute in a copy of their own, rounded from the f32 masters.
  bool rounds() const { return compute_ != DType::kF32; }
  // Bytes that this rank sends in one step: for parameters, for gradients, and for tokens of
  // experts when every expert is chosen equally often.
  struct Communication {
    std::int64_t gather_bytes = 0;
    std::int64_t reduce_bytes = 0;
    std::int64_t exchange_bytes = 0;
  };
  Communication communication() const;

 private:
  friend class Engine;
  std::size_t book(const char* category, const std::string& name, std::int64_t bytes);
  // Buffers that units take turns in: the stack's units in the first `dense` ones, of which
  // neighbours use different ones, for a unit is always followed by the next or by the one before;
  // experts in those behind them.
  struct Turns {
    std::size_t dense = 1, experts = 1;
    std::vector<std::size_t> bookings;
  };
  Turns book_turns(const char* category, std::size_t dense, std::size_t experts,
                   const std::vector<std::int64_t>& bytes_of_units);
  std::size_t turn(const Turns& turns, std::size_t unit) const {
    return unit < dense_units_ ? unit % turns.dense
                               : turns.dense + (unit - dense_units_) % turns.experts;
  }
  // Of the ranks that share a unit, which one this is and how many they are.
  int member(std::size_t unit) const {
    return units_[unit].experts ? options_.rank / options_.expert_ranks : options_.rank;
  }
  int members(std::size_t unit) const { return share(unit).members(); }
  Slice slice(std::size_t unit) const {
    return units_[unit].layout.slice(member(unit), members(unit));
  }
  std::int64_t gathered_slice_bytes(std::size_t unit) const;
  bool overlaps() const { return options_.prefetch && options_.ranks > 1; }

  EngineOptions options_;
  DType compute_;
  std::int64_t width_;
  std::vector<ShardedUnit> units_;
  std::size_t dense_units_ = 0;
  std::vector<std::size_t> experts_of_;
  std::int64_t dispatched_bytes_ = 0;  // a token's rows one way, of all layers
  std::int64_t most_experts_ = 0;      // of a layer
  QuantumShare share_, expert_share_;
  MemoryPlan memory_;

  struct UnitBookings {
    std::size_t weights, first, second, sum;
    std::size_t rounded;  // this rank's slice as it computes; the weights themselves in f32
  };
  std::vector<UnitBookings> unit_bookings_;
  // Where whole parameters come to lie (several ranks), gradients are made, and what sums receive:
  // buffers that units take turns in; under gather_per_step each unit has its own of the first.
  Turns gathered_, gradients_, workspaces_;
  std::size_t scratch_ = 0, d_x_ = 0;
  std::vector<std::size_t> x_;        // input of each block, and of the head
  std::vector<std::size_t> saved_;    // of each block; all the same booking with recompute
  std::vector<std::size_t> batches_;  // tokens, labels, segments of each round
};

struct StepResult {
  double loss = 0.0;           // cross-entropy in nats per valid label of the whole step
  double gradient_norm = 0.0;  // global, before clipping
  std::int64_t labels = 0;     // valid ones of the whole step
  bool applied = false;        // false: not finite, nothing was changed but the counts of `state`
  bool stop = false;           // too many such steps in a row
  const RouterResult* routers = nullptr;  // the engine's, until the next step; null without experts
};

class Engine {
 public:
  // Collective. Grants the plan's memory on the device. All arguments outlive the engine.
  // Meanwhile the device's queue moves the communicator's transfers on.
  Engine(const Stack& stack, const EnginePlan& plan, Device& device, Communicator& communicator,
         Activity& activity);
  ~Engine() { device_.queue().set_background(nullptr); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // What it sends over.
  Mesh& mesh() { return mesh_; }

  // Collective. Parameters as the model's inits say; moments and selection biases zero.
  void initialise(std::uint64_t seed);

  // Memory for this rank's round-th quantum of a step; the caller fills it before the step.
  const Batch& batch(std::int64_t round) const { return batches_[static_cast<std::size_t>(round)]; }

  // Collective. `count` batches of this rank (as the plan's share gives it) are trained on; `rate`
  // is the schedule's learning rate. After the first step nothing is allocated.
  StepResult step(const OptimConfig& config, double rate, std::int64_t count, OptimState& state);

  // Collective. The cross-entropy, summed over the valid labels, of batch(0) when `has_batch`.
  double evaluate(bool has_batch);

  // This rank's parts of all parameters and selection biases, and with `moments` of AdamW's;
  // pointing into the engine. Who writes to them calls weights_changed() before the next step or
  // evaluation, which is collective.
  std::vector<CheckpointArray> arrays(bool moments);
  void weights_changed();

 private:
  struct Gradient {
    View whole;                    // of a unit, f32
    std::vector<View> parameters;  // views of `whole`
  };
  struct Unit {
    Communicator* communicator = nullptr;  // of the ranks that share it
    View weights, first, second;           // this rank's slice, f32
    View rounded;  // this rank's slice as it is gathered, in words of the compute type
    View whole;    // gathered
    std::vector<View> parameters;  // views of `whole`
    // Where the gradient can be made: the buffer that units take turns at, then the sum's places.
    std::vector<Gradient> gradients;
    std::size_t made = 0;  // which of them holds the present one
    std::vector<View> saved, scratch;
    std::unique_ptr<CanonicalSum> sum;
    std::vector<Piece> pieces;         // of this rank's slice
    std::vector<View> rounded_pieces;  // the same pieces of `rounded`, each of its own type
    std::vector<std::int64_t> bounds;  // of all ranks' slices, in elements of `whole`
  };
  static constexpr std::size_t kNone = EnginePlan::kNoUnit;
  // A buffer of whole parameters: whose they are, or will be when the transfer is finished.
  struct Gathered {
    std::size_t unit = kNone;
    Communicator::Transfer transfer;
  };

  Gathered& gathered(std::size_t unit) { return gathered_[plan_.turn(plan_.gathered_, unit)]; }
  void prefetch(std::size_t unit);
  void gather(std::size_t unit, std::size_t next);
  void release();
  // The batch that a block computes with: an empty one where only its experts are at work, null
  // where nothing is.
  const Batch* at_work(std::size_t layer, const Batch* batch) const;
  void forward(const Batch* batch, std::int64_t quantum);
  void forward_block(std::size_t layer, const Batch* batch);
  double head(const Batch* batch, double scale);
  void backward(const Batch* batch, std::int64_t round);
  void expert_gradients(std::size_t layer, const Batch& batch, std::int64_t round);
  const Gradient& gradient_for(std::size_t unit, int source = 0);
  void take_turn(std::size_t unit);
  void push(std::size_t unit, bool has_gradient);
  LayerMemory memory(std::size_t unit);
  void record_router(std::size_t layer, std::int64_t quantum);
  void sum_router_results();
  void move_selection_biases();

  const Stack& stack_;
  const EnginePlan& plan_;
  Device& device_;
  Communicator& communicator_;
  Activity& activity_;
  Mesh mesh_;
  Arena arena_;
  std::unique_ptr<GroupExchange> exchange_;  // null where this rank holds all experts
  Batch idle_;                               // of no sequences
  std::vector<Unit> units_;
  std::vector<Gathered> gathered_;
  std::vector<View> x_;
  View d_x_;
  std::vector<Batch> batches_;
  std::vector<View> slices_;             // gradient sums of the step
  std::vector<std::int64_t> loss_bits_;  // of each quantum
  std::vector<double> losses_;

  // What is summed of each quantum's router.
  enum RouterValue : std::size_t { kAuxiliary, kZ, kEntropy, kRouterValues };
  // Of a block with experts.
  struct Router {
    std::size_t layer = 0;
    std::int64_t experts = 0, active = 0;
    std::vector<float> bias;  // [N], of the choice; empty without
    std::size_t counts = 0;   // of its loads in router_counts_; then what was dropped
  };
  std::vector<Router> routers_;
  std::vector<std::size_t> router_of_;       // by layer; kNone
  std::vector<std::int64_t> router_counts_;  // summed over the quanta
  std::vector<std::int64_t> router_bits_;    // of doubles [quanta, routers, kRouterValues]
  RouterResult router_result_;
};

}  // namespace tessera
