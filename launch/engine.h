// One training step on this rank's share of the model and of the batch: gather, forward, backward,
// canonical sum, update. Knows nothing of files, time or the terminal.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "layers/stack.h"
#include "optim/adamw.h"
#include "optim/optim.pb.h"
#include "parallel/canonical_sum.h"
#include "parallel/checkpoint.h"
#include "parallel/communicator.h"
#include "parallel/sharding.h"
#include "runtime/activity.h"
#include "runtime/device.h"
#include "runtime/memory.h"

namespace tessera {

struct EngineOptions {
  int rank = 0;
  int ranks = 1;
  BatchShape quantum;       // of every quantum, with the queue's threads
  std::int64_t quanta = 1;  // of a step, over all ranks
  Accumulate accumulate = Accumulate::kSharded;
  SumOrder order = SumOrder::kTree;
  bool gather_per_step = false;  // keep gathered parameters for the whole step
  // Parameters come and gradients go while other units compute, for which a second buffer is held.
  bool prefetch = true;
  bool recompute = false;  // compute a block's forward again in its backward
};

// What a rank will hold, as a pure function of the model and the layout: the same table is granted
// by a run and printed by `plan`.
class EnginePlan {
 public:
  EnginePlan(const Stack& stack, const EngineOptions& options);

  const EngineOptions& options() const { return options_; }
  const MemoryPlan& memory() const { return memory_; }
  const std::vector<UnitSpec>& units() const { return units_; }
  const std::vector<UnitLayout>& layouts() const { return layouts_; }
  const QuantumShare& share() const { return share_; }
  DType compute() const { return compute_; }
  // Whether parameters compute in a copy of their own, rounded from the f32 masters.
  bool rounds() const { return compute_ != DType::kF32; }
  // Bytes that this rank sends for parameters and for gradients in one step.
  struct Communication {
    std::int64_t gather_bytes = 0;
    std::int64_t reduce_bytes = 0;
  };
  Communication communication() const;

 private:
  friend class Engine;
  std::size_t book(const char* category, const std::string& name, std::int64_t bytes);
  std::vector<std::size_t> book_turns(const char* category, std::size_t buffers,
                                      const std::vector<std::int64_t>& bytes_of_units);
  std::int64_t gathered_slice_bytes(std::size_t unit) const;
  bool overlaps() const { return options_.prefetch && options_.ranks > 1; }
  // Which of so many buffers unit `unit` uses. With two, neighbours take turns: a unit is always
  // followed by the next one or by the one before.
  static std::size_t turn(std::size_t unit, std::size_t buffers) { return unit % buffers; }

  EngineOptions options_;
  DType compute_;
  std::vector<UnitSpec> units_;
  std::vector<UnitLayout> layouts_;
  QuantumShare share_;
  MemoryPlan memory_;

  struct UnitBookings {
    std::size_t weights, first, second, sum;
    std::size_t rounded;  // this rank's slice as it computes; the weights themselves in f32
  };
  std::vector<UnitBookings> unit_bookings_;
  // Where whole parameters come to lie (several ranks), gradients are made, and what sums receive:
  // buffers that units take turns in; under gather_per_step each unit has its own of the first.
  std::vector<std::size_t> gathered_, gradients_, workspaces_;
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
};

class Engine {
 public:
  // Grants the plan's memory on the device. All arguments outlive the engine.
  // Meanwhile the device's queue moves the communicator's transfers on.
  Engine(const Stack& stack, const EnginePlan& plan, Device& device, Communicator& communicator,
         Activity& activity);
  ~Engine() { device_.queue().set_background(nullptr); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  // Parameters as the model's inits say; moments zero.
  void initialise(std::uint64_t seed);

  // Memory for this rank's round-th quantum of a step; the caller fills it before the step.
  const Batch& batch(std::int64_t round) const { return batches_[static_cast<std::size_t>(round)]; }

  // Collective. `count` batches of this rank (as the plan's share gives it) are trained on; `rate`
  // is the schedule's learning rate. After the first step nothing is allocated.
  StepResult step(const OptimConfig& config, double rate, std::int64_t count, OptimState& state);

  // Collective. The cross-entropy, summed over the valid labels, of batch(0) when `has_batch`.
  double evaluate(bool has_batch);

  // This rank's parts of all parameters, and with `moments` of AdamW's; pointing into the engine.
  // Who writes to them calls weights_changed() before the next step or evaluation.
  std::vector<CheckpointArray> arrays(bool moments);
  void weights_changed();

 private:
  struct Gradient {
    View whole;                    // of a unit, f32
    std::vector<View> parameters;  // views of `whole`
  };
  struct Unit {
    View weights, first, second;  // this rank's slice, f32
    View rounded;  // this rank's slice as it is gathered, in words of the compute type
    View whole;    // gathered
    std::vector<View> parameters;  // views of `whole`
    // Where the gradient can be made: the buffer that units take turns at, then the sum's own.
    std::vector<Gradient> gradients;
    std::size_t made = 0;  // which of them holds the present one
    std::vector<View> saved, scratch;
    std::unique_ptr<CanonicalSum> sum;
    std::vector<Piece> pieces;         // of this rank's slice
    std::vector<View> rounded_pieces;  // the same pieces of `rounded`, each of its own type
    std::vector<std::int64_t> bounds;  // of all ranks' slices, in elements of `whole`
  };
  static constexpr std::size_t kNone = SIZE_MAX;
  // A buffer of whole parameters: whose they are, or will be when the transfer is finished.
  struct Gathered {
    std::size_t unit = kNone;
    Communicator::Transfer transfer;
  };

  Gathered& gathered(std::size_t unit) {
    return gathered_[EnginePlan::turn(unit, gathered_.size())];
  }
  void prefetch(std::size_t unit);
  void gather(std::size_t unit, std::size_t next);
  void release();
  void forward(const Batch* batch);
  double head(const Batch* batch, double scale);
  void backward(const Batch* batch, bool last_round);
  const Gradient& gradient_for(std::size_t unit);
  void take_turn(std::size_t unit);
  void push(std::size_t unit, bool has_gradient);
  LayerMemory memory(std::size_t unit) const;

  const Stack& stack_;
  const EnginePlan& plan_;
  Device& device_;
  Communicator& communicator_;
  Activity& activity_;
  Arena arena_;
  std::vector<Unit> units_;
  std::vector<Gathered> gathered_;
  std::vector<View> x_;
  View d_x_;
  std::vector<Batch> batches_;
  std::vector<View> slices_;             // gradient sums of the step
  std::vector<std::int64_t> loss_bits_;  // of each quantum
  std::vector<double> losses_;
};

}  // namespace tessera
