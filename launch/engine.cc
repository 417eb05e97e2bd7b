#include "launch/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "layers/experts/experts.h"
#include "layers/kernels/elementwise.h"
#include "parallel/exact_sum.h"

namespace tessera {
namespace {

DType type_of(const ParameterSpec& parameter, DType compute) {
  return parameter.full_precision ? DType::kF32 : compute;
}

ShardedUnit dense_unit(const UnitSpec& unit, DType compute) {
  std::vector<ShardedUnit::Part> parts;
  std::vector<BufferSpec> buffers;
  for (const ParameterSpec& parameter : unit.parameters) {
    parts.push_back({parts.size(), 0});
    buffers.push_back({parameter.name, type_of(parameter, compute), parameter.shape});
  }
  return {unit.kind,       unit.layer,       false,
          unit.parameters, std::move(parts), {unit.name, std::move(buffers)}};
}

// The experts of a block that a rank holds: each stacked parameter's matrices, in order.
ShardedUnit expert_unit(const UnitSpec& unit, DType compute, const ExpertPlacement& placement) {
  std::vector<ShardedUnit::Part> parts;
  std::vector<BufferSpec> buffers;
  for (std::size_t p = 0; p < unit.experts.size(); ++p) {
    const ParameterSpec& parameter = unit.experts[p];
    const std::int64_t experts = parameter.shape[0];
    const Shape shape = {parameter.shape[1], parameter.shape[2]};
    for (std::int64_t e = placement.begin(experts); e < placement.end(experts); ++e) {
      parts.push_back({p, e * shape.count()});
      buffers.push_back({parameter.name, type_of(parameter, compute), shape});
    }
  }
  return {unit.kind,    unit.layer,       true,
          unit.experts, std::move(parts), {unit.name + ".experts", std::move(buffers)}};
}

EngineOptions checked(const EngineOptions& options) {
  check_expert_ranks(options.expert_ranks, options.ranks);
  return options;
}

std::vector<BufferSpec> scratch_of(const Stack& stack, const ShardedUnit& unit, BatchShape shape) {
  if (unit.experts) return {};  // the block's
  switch (unit.kind) {
    case UnitSpec::Kind::kEmbedding:
      return stack.embedding().scratch(shape);
    case UnitSpec::Kind::kBlock:
      return stack.blocks()[static_cast<std::size_t>(unit.layer)].scratch(shape);
    case UnitSpec::Kind::kHead:
      return stack.head().scratch(shape);
  }
  return {};
}

std::vector<BufferSpec> saved_of(const Stack& stack, const ShardedUnit& unit, BatchShape shape) {
  if (unit.experts || unit.kind != UnitSpec::Kind::kBlock) return {};
  return stack.blocks()[static_cast<std::size_t>(unit.layer)].saved(shape);
}

std::vector<BufferSpec> batch_buffers(BatchShape shape) {
  return {{"tokens", DType::kU32, {shape.batch, shape.length}},
          {"labels", DType::kI32, {shape.batch, shape.length}},
          {"segments", DType::kI32, {shape.batch, shape.length}}};
}

ModelPart part_of(UnitSpec::Kind kind) {
  switch (kind) {
    case UnitSpec::Kind::kEmbedding:
      return ModelPart::kEmbedding;
    case UnitSpec::Kind::kBlock:
      return ModelPart::kBlock;
    case UnitSpec::Kind::kHead:
      return ModelPart::kHead;
  }
  return ModelPart::kBlock;
}

}  // namespace

EnginePlan::EnginePlan(const Stack& stack, const EngineOptions& options)
    : options_(checked(options)),
      compute_(stack.compute()),
      width_(stack.embedding().parameters().front().shape[1]),
      share_(options.accumulate, options.quanta, options.ranks, options.order),
      expert_share_(options.accumulate, options.quanta, options.ranks, options.order,
                    options.expert_ranks) {
  const ExpertPlacement placement = {options.expert_ranks, options.rank % options.expert_ranks};
  options_.quantum.experts = placement;
  const BatchShape shape = options_.quantum;
  const std::vector<UnitSpec> specs = stack.units();
  for (const UnitSpec& unit : specs) units_.push_back(dense_unit(unit, compute_));
  dense_units_ = units_.size();
  for (const UnitSpec& unit : specs) {
    if (unit.kind != UnitSpec::Kind::kBlock) continue;
    experts_of_.push_back(unit.experts.empty() ? kNoUnit : units_.size());
    if (unit.experts.empty()) continue;
    units_.push_back(expert_unit(unit, compute_, placement));
    const MixtureOfExperts& experts = *stack.blocks()[experts_of_.size() - 1].experts();
    dispatched_bytes_ += experts.dispatched_bytes_per_token();
    most_experts_ = std::max(most_experts_, experts.shape().experts);
  }

  std::int64_t scratch = 0, saved = 0;
  std::vector<std::int64_t> gathered, gradients, workspaces;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const UnitLayout& layout = units_[u].layout;
    gathered.push_back(members(u) > 1 ? layout.gathered_bytes(layout.count()) : 0);
    gradients.push_back(layout.count() * size_of(DType::kF32));
    workspaces.push_back(CanonicalSum::workspace(layout, share(u), member(u)).bytes());
    scratch = std::max(scratch, Layout(scratch_of(stack, units_[u], shape)).bytes());
    saved = std::max(saved, Layout(saved_of(stack, units_[u], shape)).bytes());
  }

  const std::size_t turns = overlaps() ? 2 : 1;
  const std::size_t expert_units = units_.size() - dense_units_;
  const auto at_most_one = std::min<std::size_t>(expert_units, 1);
  if (options.ranks > 1) {
    gathered_ = options.gather_per_step
                    ? book_turns("gathered parameters", dense_units_, expert_units, gathered)
                    : book_turns("gathered parameters", turns, at_most_one, gathered);
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const UnitLayout& layout = units_[u].layout;
    const std::int64_t bytes = slice(u).count() * size_of(DType::kF32);
    const std::string& name = layout.name();
    UnitBookings bookings{};
    bookings.weights = book("master parameters", name, bytes);
    bookings.rounded =
        rounds() ? book("rounded parameters", name, gathered_slice_bytes(u)) : bookings.weights;
    bookings.first = book("optimiser moments", name + " first", bytes);
    bookings.second = book("optimiser moments", name + " second", bytes);
    bookings.sum = book("gradient sums", name,
                        Layout(CanonicalSum::buffers(layout, share(u), member(u))).bytes());
    unit_bookings_.push_back(bookings);
  }
  // Under kLocal a gradient is added up where it is made, and its buffer is free at once.
  gradients_ = book_turns("gradients at work", share_.policy() == Accumulate::kSharded ? turns : 1,
                          at_most_one, gradients);
  workspaces_ = book_turns("exchange buffers", turns, at_most_one, workspaces);

  const std::int64_t row_bytes = shape.rows() * width_ * 4;
  for (std::size_t l = 0; l <= stack.blocks().size(); ++l) {
    x_.push_back(book("activations", "residual " + std::to_string(l), row_bytes));
  }
  d_x_ = book("activations", "gradient of the residual", row_bytes);
  if (options.recompute) {
    saved_.assign(units_.size(), book("activations", "saved by one block", saved));
  } else {
    for (const ShardedUnit& unit : units_) {
      saved_.push_back(book("activations", "saved by " + unit.layout.name(),
                            Layout(saved_of(stack, unit, shape)).bytes()));
    }
  }
  scratch_ = book("scratch", "of the unit at work", scratch);
  const std::int64_t rounds = std::max<std::int64_t>(share_.count(options.rank), 1);
  for (std::int64_t round = 0; round < rounds; ++round) {
    batches_.push_back(
        book("batch", "quantum " + std::to_string(round), Layout(batch_buffers(shape)).bytes()));
  }
}

std::size_t EnginePlan::book(const char* category, const std::string& name, std::int64_t bytes) {
  return memory_.book(category, name, bytes);
}

// Each as large as the largest unit whose turn it is.
EnginePlan::Turns EnginePlan::book_turns(const char* category, std::size_t dense,
                                         std::size_t experts,
                                         const std::vector<std::int64_t>& bytes_of_units) {
  Turns turns = {dense, experts, {}};
  std::vector<std::int64_t> bytes(dense + experts);
  for (std::size_t u = 0; u < bytes_of_units.size(); ++u) {
    std::int64_t& most = bytes[turn(turns, u)];
    most = std::max(most, bytes_of_units[u]);
  }
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    turns.bookings.push_back(book(category, std::to_string(i), bytes[i]));
  }
  return turns;
}

// This rank's part of what is gathered of a unit.
std::int64_t EnginePlan::gathered_slice_bytes(std::size_t u) const {
  const Slice own = slice(u);
  const UnitLayout& layout = units_[u].layout;
  return layout.gathered_bytes(own.end) - layout.gathered_bytes(own.begin);
}

EnginePlan::Communication EnginePlan::communication() const {
  Communication result;
  if (options_.ranks == 1) return result;
  // Parameters are gathered unless the last use of their buffer was theirs. The head computes
  // forward and backward at once, and the embedding's backward reads no weight.
  std::vector<std::size_t> held(gathered_.bookings.size(), kNoUnit);
  const auto need = [&](std::size_t u) {
    if (u == kNoUnit) return;
    std::size_t& holder = held[turn(gathered_, u)];
    if (holder == u) return;
    holder = u;
    result.gather_bytes += gathered_slice_bytes(u) * (members(u) - 1);
  };
  const std::size_t layers = experts_of_.size();
  for (std::int64_t round = 0; round < share_.rounds(); ++round) {
    need(0);
    for (std::size_t l = 0; l < layers; ++l) {
      need(l + 1);
      need(experts_of_[l]);
    }
    need(layers + 1);
    for (std::size_t l = layers; l-- > 0;) {
      need(l + 1);
      need(experts_of_[l]);
    }
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const std::int64_t others =
        (units_[u].layout.count() - slice(u).count()) * size_of(DType::kF32);
    result.reduce_bytes += share(u).sums_sent(member(u)) * others;
  }
  // Rows go there and back in each forward pass and in the backward pass.
  const std::int64_t ways = options_.recompute ? 6 : 4;
  const std::int64_t tokens = share_.count(options_.rank) * options_.quantum.rows();
  result.exchange_bytes =
      ways * tokens * dispatched_bytes_ * (options_.expert_ranks - 1) / options_.expert_ranks;
  return result;
}

Engine::Engine(const Stack& stack, const EnginePlan& plan, Device& device,
               Communicator& communicator, Activity& activity)
    : stack_(stack),
      plan_(plan),
      device_(device),
      communicator_(communicator),
      activity_(activity),
      mesh_(communicator, plan.options().expert_ranks),
      arena_(device, plan.memory()) {
  const EngineOptions& options = plan.options();
  TESSERA_CHECK(options.rank == communicator.rank() && options.ranks == communicator.size());
  const BatchShape shape = options.quantum;
  for (const std::size_t booking : plan.x_) {
    x_.push_back(arena_.view(booking, DType::kF32, {shape.rows(), plan.width_}));
  }
  d_x_ = arena_.view(plan.d_x_, DType::kF32, {shape.rows(), plan.width_});
  for (const std::size_t booking : plan.batches_) {
    const std::vector<View> views = Layout(batch_buffers(shape)).views(arena_.at(booking));
    batches_.push_back({shape, views[0], views[1], views[2], options.quanta * shape.batch});
  }
  idle_ = batches_[0];
  idle_.shape.batch = 0;
  for (std::size_t u = 0; u < plan.units().size(); ++u) {
    const ShardedUnit& sharded = plan.units()[u];
    const UnitLayout& layout = sharded.layout;
    const EnginePlan::UnitBookings& bookings = plan.unit_bookings_[u];
    const Slice slice = plan.slice(u);
    Unit unit;
    unit.communicator = sharded.experts ? &mesh_.shard_group() : &communicator;
    unit.weights = arena_.view(bookings.weights, DType::kF32, {slice.count()});
    unit.first = arena_.view(bookings.first, DType::kF32, {slice.count()});
    unit.second = arena_.view(bookings.second, DType::kF32, {slice.count()});
    const std::int64_t word = size_of(plan.compute());
    unit.rounded =
        arena_.view(bookings.rounded, plan.compute(), {plan.gathered_slice_bytes(u) / word});
    const auto of_turn = [&](const EnginePlan::Turns& turns) {
      return turns.bookings[plan.turn(turns, u)];
    };
    unit.whole = plan.members(u) == 1 ? unit.rounded
                                      : arena_.view(of_turn(plan.gathered_), plan.compute(),
                                                    {layout.gathered_bytes(layout.count()) / word});
    unit.parameters = layout.gathered_views(unit.whole);
    const auto add_gradient = [&](const View& whole) {
      unit.gradients.push_back({whole, layout.views(whole)});
    };
    add_gradient(arena_.view(of_turn(plan.gradients_), DType::kF32, {layout.count()}));
    unit.saved = Layout(saved_of(stack, sharded, shape)).views(arena_.at(plan.saved_[u]));
    unit.scratch = Layout(scratch_of(stack, sharded, shape)).views(arena_.at(plan.scratch_));
    const QuantumShare& share = plan.share(u);
    const BufferSpec workspace = CanonicalSum::workspace(layout, share, plan.member(u));
    unit.sum = std::make_unique<CanonicalSum>(
        layout, share, *unit.communicator, device.queue(),
        Layout(CanonicalSum::buffers(layout, share, plan.member(u))).views(arena_.at(bookings.sum)),
        arena_.view(of_turn(plan.workspaces_), workspace.dtype, workspace.shape));
    for (const View& place : unit.sum->places()) add_gradient(place);
    unit.pieces = layout.pieces(slice);
    unit.bounds = layout.gathered_bounds(plan.members(u), plan.compute());
    for (const Piece& piece : unit.pieces) {
      const std::int64_t begin = slice.begin + piece.offset;
      std::byte* const at =
          unit.rounded.raw() + layout.gathered_bytes(begin) - layout.gathered_bytes(slice.begin);
      unit.rounded_pieces.emplace_back(layout.parameter(piece.parameter).dtype,
                                       Shape{piece.count()}, at);
    }
    units_.push_back(std::move(unit));
  }
  gathered_ = std::vector<Gathered>(plan.gathered_.bookings.size());
  slices_.resize(units_.size());
  loss_bits_.resize(static_cast<std::size_t>(options.quanta));
  losses_.resize(static_cast<std::size_t>(options.quanta));

  router_of_.assign(stack.blocks().size(), kNone);
  for (std::size_t l = 0; l < stack.blocks().size(); ++l) {
    const MixtureOfExperts* const experts = stack.blocks()[l].experts();
    if (experts == nullptr) continue;
    const ExpertsShape& expert_shape = experts->shape();
    router_of_[l] = routers_.size();
    Router router;
    router.layer = l;
    router.experts = expert_shape.experts;
    router.active = expert_shape.active;
    if (expert_shape.selection_bias) {
      router.bias.resize(static_cast<std::size_t>(expert_shape.experts));
    }
    router.counts = router_counts_.size();
    router_counts_.resize(router.counts + static_cast<std::size_t>(expert_shape.experts) + 1);
    routers_.push_back(std::move(router));
    router_result_.layers.push_back(static_cast<std::int64_t>(l));
    router_result_.loads.emplace_back(static_cast<std::size_t>(expert_shape.experts));
  }
  router_bits_.resize(static_cast<std::size_t>(options.quanta) * routers_.size() * kRouterValues);
  router_result_.dropped.resize(routers_.size());
  router_result_.entropy.resize(routers_.size());
  if (options.expert_ranks > 1 && !routers_.empty()) {
    // A message for each of a peer's experts, or for each of its own.
    const auto messages = static_cast<std::size_t>(options.expert_ranks) *
                          static_cast<std::size_t>(plan.most_experts_ + 1);
    exchange_ = std::make_unique<GroupExchange>(mesh_.expert_group(), messages);
  }
  if (plan.overlaps()) device.queue().set_background(&mesh_);
}

void Engine::initialise(std::uint64_t seed) {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    for (const Piece& piece : unit.pieces) {
      const ShardedUnit::Part& part = plan_.units()[u].parts[piece.parameter];
      tessera::initialise(plan_.units()[u].parameters[part.parameter], seed,
                          part.begin + piece.begin,
                          unit.weights.slice(piece.offset, piece.offset + piece.count()));
    }
    device_.queue().fill_zero(unit.first);
    device_.queue().fill_zero(unit.second);
  }
  for (Router& router : routers_) std::fill(router.bias.begin(), router.bias.end(), 0.0F);
  weights_changed();
}

// Of one of the stack's units.
LayerMemory Engine::memory(std::size_t u) {
  LayerMemory memory = {units_[u].parameters, units_[u].saved, units_[u].scratch};
  const ShardedUnit& unit = plan_.units()[u];
  if (unit.kind != UnitSpec::Kind::kBlock) return memory;
  const auto layer = static_cast<std::size_t>(unit.layer);
  if (plan_.experts_of(layer) == kNone) return memory;
  memory.experts = units_[plan_.experts_of(layer)].parameters;
  std::vector<float>& bias = routers_[router_of_[layer]].bias;
  if (!bias.empty()) {
    memory.selection_bias = View(bias.data(), Shape{static_cast<std::int64_t>(bias.size())});
  }
  memory.exchange = exchange_.get();
  return memory;
}

// Starts bringing the unit's parameters, unless they are here or on their way. Their buffer must be
// free: the unit at work is another one's turn.
void Engine::prefetch(std::size_t u) {
  if (u == kNone || !plan_.overlaps() || plan_.members(u) == 1 || gathered(u).unit == u) return;
  start_gather_unit(*units_[u].communicator, gathered(u).transfer, plan_.units()[u].layout,
                    units_[u].bounds, units_[u].rounded, units_[u].whole);
  gathered(u).unit = u;
}

// Returns when the unit's parameters are here; then those of `next`, the unit after it, are on
// their way.
void Engine::gather(std::size_t u, std::size_t next) {
  if (plan_.members(u) > 1) {
    if (gathered(u).unit != u) {
      gather_unit(*units_[u].communicator, plan_.units()[u].layout, units_[u].bounds,
                  units_[u].rounded, units_[u].whole);
      gathered(u).unit = u;
    }
    if (gathered(u).transfer.started()) units_[u].communicator->finish(gathered(u).transfer);
  }
  prefetch(next);
}

// The weights have changed: what was gathered is stale.
void Engine::release() {
  for (Gathered& gathered : gathered_) {
    TESSERA_CHECK(!gathered.transfer.started());
    gathered.unit = kNone;
  }
}

void Engine::weights_changed() {
  release();
  for (Router& router : routers_) {  // rank 0 has them from the checkpoint
    communicator_.broadcast("selection bias", std::as_writable_bytes(std::span(router.bias)), 0);
  }
  for (Unit& unit : units_) {
    if (!plan_.rounds()) continue;
    for (std::size_t i = 0; i < unit.pieces.size(); ++i) {
      const Piece& piece = unit.pieces[i];
      convert(device_.queue(), unit.rounded_pieces[i],
              unit.weights.slice(piece.offset, piece.offset + piece.count()));
    }
  }
}

const Batch* Engine::at_work(std::size_t layer, const Batch* batch) const {
  if (batch != nullptr) return batch;
  return exchange_ && plan_.experts_of(layer) != kNone ? &idle_ : nullptr;
}

void Engine::forward(const Batch* batch, std::int64_t quantum) {
  gather(0, 1);
  activity_.set("forward", plan_.units()[0].layout.name());
  if (batch != nullptr) {
    stack_.embedding().forward(device_.queue(), *batch, units_[0].parameters, x_[0]);
  }
  for (std::size_t l = 0; l < stack_.blocks().size(); ++l) {
    gather(l + 1, l + 2);
    forward_block(l, batch);
    if (quantum != QuantumShare::kNone) record_router(l, quantum);
  }
}

// The block's own parameters are here. Its experts' come while the mixer computes.
void Engine::forward_block(std::size_t l, const Batch* batch) {
  const Block& block = stack_.blocks()[l];
  const Batch* const work = at_work(l, batch);
  const std::size_t u = l + 1, experts = plan_.experts_of(l);
  prefetch(experts);
  if (exchange_) exchange_->set_unit(plan_.units()[u].layout.name());
  activity_.set("forward", plan_.units()[u].layout.name());
  if (work != nullptr) block.forward_mixer(device_.queue(), *work, x_[l], memory(u));
  if (experts != kNone) gather(experts, kNone);
  if (work != nullptr) block.forward_feed_forward(device_.queue(), *work, x_[l + 1], memory(u));
}

double Engine::head(const Batch* batch, double scale) {
  const std::size_t u = plan_.dense_units() - 1;
  gather(u, u - 1);
  take_turn(u);
  activity_.set("loss", plan_.units()[u].layout.name());
  double loss = 0.0;
  if (batch != nullptr) {
    loss = stack_.head().loss_and_gradient(device_.queue(), *batch, x_.back(), scale, d_x_,
                                           units_[u].parameters, gradient_for(u).parameters,
                                           units_[u].scratch);
  }
  push(u, batch != nullptr);
  return loss;
}

void Engine::backward(const Batch* batch, std::int64_t round) {
  Queue& queue = device_.queue();
  const bool last_round = round + 1 == plan_.share().rounds();
  for (std::size_t l = stack_.blocks().size(); l-- > 0;) {
    const Block& block = stack_.blocks()[l];
    const Batch* const work = at_work(l, batch);
    const std::size_t u = l + 1, experts = plan_.experts_of(l);
    gather(u, u > 1 ? u - 1 : last_round ? kNone : 0);
    take_turn(u);
    // The output isn't needed again: it goes where the next block's input was.
    if (plan_.options().recompute) forward_block(l, batch);
    if (exchange_) exchange_->set_unit(plan_.units()[u].layout.name());
    activity_.set("backward", plan_.units()[u].layout.name());
    if (experts != kNone) gather(experts, kNone);
    const std::span<const View> d_parameters =
        batch != nullptr ? gradient_for(u).parameters : units_[u].gradients[0].parameters;
    if (work != nullptr) {
      block.backward_feed_forward(queue, *work, d_x_, d_parameters, memory(u));
    }
    if (experts != kNone) {
      expert_gradients(l, work != nullptr ? *work : idle_, round);
    }
    if (l > 0) prefetch(plan_.experts_of(l - 1));
    if (work != nullptr) block.backward_mixer(queue, *work, x_[l], d_x_, d_parameters, memory(u));
    push(u, batch != nullptr);
  }
  take_turn(0);
  activity_.set("backward", plan_.units()[0].layout.name());
  if (batch != nullptr) {
    stack_.embedding().backward(queue, *batch, d_x_, gradient_for(0).parameters, units_[0].scratch);
  }
  push(0, batch != nullptr);
}

// Of this rank's experts, from each quantum of its group; the sum's exchange goes on while the
// mixer computes.
void Engine::expert_gradients(std::size_t l, const Batch& batch, std::int64_t round) {
  const Block& block = stack_.blocks()[l];
  const std::size_t u = plan_.experts_of(l);
  take_turn(u);
  const LayerMemory of_experts = block.of_feed_forward(memory(l + 1));
  const QuantumShare& share = plan_.share(u);
  for (int source = 0; source < share.group(); ++source) {
    const int rank = plan_.member(u) * share.group() + source;
    if (share.quantum(round, rank) == QuantumShare::kNone) continue;
    const Gradient& gradient = gradient_for(u, source);
    block.experts()->expert_gradient(device_.queue(), batch, source, gradient.parameters,
                                     of_experts);
    units_[u].sum->add(source, gradient.whole);
  }
  if (plan_.overlaps()) {
    units_[u].sum->start();
  } else {
    units_[u].sum->push();
  }
}

// Where the unit's gradient is to be made: where its sum would copy it, or else in the buffer that
// units take turns at. Padding is zero.
const Engine::Gradient& Engine::gradient_for(std::size_t u, int source) {
  Unit& unit = units_[u];
  const View place = unit.sum->place(source);
  unit.made = 0;
  for (std::size_t i = 1; i < unit.gradients.size(); ++i) {
    if (unit.gradients[i].whole.raw() == place.raw()) unit.made = i;
  }
  TESSERA_CHECK(place.empty() || unit.made > 0);
  const UnitLayout& layout = plan_.units()[u].layout;
  auto* gradient = unit.gradients[unit.made].whole.as<float>();
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::int64_t begin = layout.offset(i) + layout.parameter(i).shape.count();
    const std::int64_t end = i + 1 < layout.size() ? layout.offset(i + 1) : layout.count();
    std::fill(gradient + begin, gradient + end, 0.0F);
  }
  return unit.gradients[unit.made];
}

// Before the unit's gradient is made: its buffers were used last by the unit two further up, or, at
// the beginning of the pass, by one of the first two in the round before. Experts have one buffer:
// the last block's were there before, or, at the beginning, the first block's.
void Engine::take_turn(std::size_t u) {
  const std::size_t dense = plan_.dense_units();
  if (u >= dense) {
    units_[u + 1 < units_.size() ? u + 1 : dense].sum->complete();
  } else {
    units_[u + 2 < dense ? u + 2 : u % 2].sum->complete();
  }
}

void Engine::push(std::size_t u, bool has_gradient) {
  const View gradient = has_gradient ? units_[u].gradients[units_[u].made].whole : View();
  if (plan_.overlaps()) {
    units_[u].sum->start(gradient);
  } else {
    units_[u].sum->push(gradient);
  }
}

StepResult Engine::step(const OptimConfig& config, double rate, std::int64_t count,
                        OptimState& state) {
  TESSERA_CHECK(count == plan_.share().count(plan_.options().rank));
  StepResult result;
  prefetch(0);
  for (std::int64_t round = 0; round < count; ++round) {
    const View& labels = batch(round).labels;
    const auto* label = labels.as<std::int32_t>();
    result.labels += labels.count() - std::count(label, label + labels.count(), kNoLabel);
  }
  result.labels = communicator_.all_reduce("valid labels", Reduction::kSum, result.labels);
  const double scale = result.labels > 0 ? 1.0 / static_cast<double>(result.labels) : 0.0;

  std::fill(loss_bits_.begin(), loss_bits_.end(), 0);
  std::fill(router_counts_.begin(), router_counts_.end(), 0);
  std::fill(router_bits_.begin(), router_bits_.end(), 0);
  for (std::int64_t round = 0; round < plan_.share().rounds(); ++round) {
    const Batch* batch = round < count ? &batches_[static_cast<std::size_t>(round)] : nullptr;
    const std::int64_t quantum = plan_.share().quantum(round, plan_.options().rank);
    forward(batch, quantum);
    const double loss = head(batch, scale);
    if (batch != nullptr) {
      loss_bits_[static_cast<std::size_t>(quantum)] = std::bit_cast<std::int64_t>(loss);
    }
    backward(batch, round);
  }

  // Every quantum's loss to every rank: the others' bits are 0, so the integer sum is exact.
  communicator_.all_reduce("losses", Reduction::kSum, std::span(loss_bits_));
  for (std::size_t q = 0; q < losses_.size(); ++q)
    losses_[q] = std::bit_cast<double>(loss_bits_[q]);
  result.loss = tree_sum(losses_) * scale;
  if (!routers_.empty()) {
    sum_router_results();
    result.routers = &router_result_;
  }
  for (std::size_t u = units_.size(); u-- > 0;) {
    units_[u].sum->complete();
    slices_[u] = units_[u].sum->finish();
  }
  activity_.set("gradient norm");
  result.gradient_norm = global_norm(communicator_, device_.queue(), slices_);

  const StepDecision decision = decide_step(config, result.loss, result.gradient_norm, state);
  result.applied = decision.apply;
  result.stop = decision.stop;
  if (decision.apply) {
    activity_.set("update");
    const auto layers = static_cast<std::int64_t>(stack_.blocks().size());
    for (std::size_t u = 0; u < units_.size(); ++u) {
      const ShardedUnit& spec = plan_.units()[u];
      for (std::size_t i = 0; i < units_[u].pieces.size(); ++i) {
        const Piece& piece = units_[u].pieces[i];
        const ParameterGroup group =
            parameter_group(config, part_of(spec.kind), spec.layer, layers,
                            spec.parameters[spec.parts[piece.parameter].parameter].decay);
        const AdamWStep step =
            adamw_step(config, rate, group, state.adam_steps, decision.gradient_scale);
        const std::int64_t begin = piece.offset, end = piece.offset + piece.count();
        const View weights = units_[u].weights.slice(begin, end);
        const View& rounded = units_[u].rounded_pieces[i];
        const bool rounds = rounded.dtype() != DType::kF32;
        adamw_update(device_.queue(), step, weights, units_[u].first.slice(begin, end),
                     units_[u].second.slice(begin, end), slices_[u].slice(begin, end),
                     rounds ? rounded : View());
        if (plan_.rounds() && !rounds) convert(device_.queue(), rounded, weights);
      }
    }
    move_selection_biases();
    release();
  }
  return result;
}

// After the block's forward: what its router did with this quantum.
void Engine::record_router(std::size_t l, std::int64_t quantum) {
  if (router_of_[l] == kNone) return;
  const Router& router = routers_[router_of_[l]];
  const Block& block = stack_.blocks()[l];
  const RouterStatistics statistics =
      block.experts()->statistics(block.of_feed_forward(memory(l + 1)));
  std::int64_t* const counts = router_counts_.data() + router.counts;
  for (std::size_t e = 0; e < statistics.loads.size(); ++e) counts[e] += statistics.loads[e];
  counts[router.experts] += statistics.dropped;
  std::int64_t* const bits =
      router_bits_.data() +
      (static_cast<std::size_t>(quantum) * routers_.size() + router_of_[l]) * kRouterValues;
  bits[kAuxiliary] = std::bit_cast<std::int64_t>(statistics.auxiliary);
  bits[kZ] = std::bit_cast<std::int64_t>(statistics.z);
  bits[kEntropy] = std::bit_cast<std::int64_t>(statistics.entropy);
}

// Over all ranks: integers, and numbers by the tree over the quanta.
void Engine::sum_router_results() {
  communicator_.all_reduce("router loads", Reduction::kSum, std::span(router_counts_));
  communicator_.all_reduce("router losses", Reduction::kSum, std::span(router_bits_));
  const auto sequences = static_cast<double>(batches_[0].step_sequences);
  const double tokens = sequences * static_cast<double>(plan_.options().quantum.length);
  router_result_.auxiliary = router_result_.z = 0.0;
  for (std::size_t r = 0; r < routers_.size(); ++r) {
    const std::int64_t* const counts = router_counts_.data() + routers_[r].counts;
    std::copy(counts, counts + routers_[r].experts, router_result_.loads[r].begin());
    router_result_.dropped[r] = counts[routers_[r].experts];
    const auto sum = [&](std::size_t value) {
      for (std::size_t q = 0; q < losses_.size(); ++q) {
        losses_[q] =
            std::bit_cast<double>(router_bits_[(q * routers_.size() + r) * kRouterValues + value]);
      }
      return tree_sum(losses_);
    };
    router_result_.auxiliary += sum(kAuxiliary) / sequences;
    router_result_.z += sum(kZ) / tokens;
    router_result_.entropy[r] = sum(kEntropy) / tokens;
  }
}

// An expert below the mean load becomes likelier, one above it less so; one at the mean stays.
void Engine::move_selection_biases() {
  constexpr float kRate = 1e-3F;
  for (std::size_t r = 0; r < routers_.size(); ++r) {
    Router& router = routers_[r];
    const std::vector<std::int64_t>& loads = router_result_.loads[r];
    std::int64_t total = 0;
    for (const std::int64_t load : loads) total += load;
    for (std::size_t e = 0; e < router.bias.size(); ++e) {
      const std::int64_t below = total - loads[e] * router.experts;  // N times the distance
      if (below != 0) router.bias[e] += below > 0 ? kRate : -kRate;
    }
  }
}

double Engine::evaluate(bool has_batch) {
  const Batch* batch = has_batch ? batches_.data() : nullptr;
  forward(batch, QuantumShare::kNone);
  const std::size_t u = plan_.dense_units() - 1;
  gather(u, kNone);
  if (batch == nullptr) return 0.0;
  return stack_.head().loss(device_.queue(), *batch, x_.back(), units_[u].parameters,
                            units_[u].scratch);
}

std::vector<CheckpointArray> Engine::arrays(bool moments) {
  std::vector<CheckpointArray> arrays;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const ShardedUnit& spec = plan_.units()[u];
    const auto add = [&](const std::string& prefix, const View& slice) {
      const std::size_t first = arrays.size();
      for (const ParameterSpec& parameter : spec.parameters) {
        arrays.push_back({prefix + parameter.name, parameter.shape, {}});
      }
      for (const Piece& piece : units_[u].pieces) {
        const ShardedUnit::Part& part = spec.parts[piece.parameter];
        std::vector<CheckpointArray::Part>& parts = arrays[first + part.parameter].parts;
        const std::int64_t begin = part.begin + piece.begin, end = part.begin + piece.end;
        float* const data = slice.as<float>() + piece.offset;
        // Experts without padding between them are one part.
        if (!parts.empty() && parts.back().end == begin &&
            parts.back().data + (begin - parts.back().begin) == data) {
          parts.back().end = end;
        } else {
          parts.push_back({begin, end, data});
        }
      }
    };
    add("params/", units_[u].weights);
    if (moments) {
      add("adamw/m/", units_[u].first);
      add("adamw/v/", units_[u].second);
    }
  }
  for (Router& router : routers_) {
    if (router.bias.empty()) continue;
    arrays.push_back(
        {selection_bias_name(static_cast<std::int64_t>(router.layer)), Shape{router.experts}, {}});
    if (communicator_.rank() == 0) {
      arrays.back().parts.push_back({0, router.experts, router.bias.data()});
    }
  }
  return arrays;
}

}  // namespace tessera
