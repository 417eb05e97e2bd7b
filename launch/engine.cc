#include "launch/engine.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "layers/kernels/elementwise.h"
#include "parallel/exact_sum.h"

namespace tessera {
namespace {

std::vector<BufferSpec> buffers_of(const UnitSpec& unit, DType compute) {
  std::vector<BufferSpec> buffers;
  for (const ParameterSpec& parameter : unit.parameters) {
    const DType dtype = parameter.full_precision ? DType::kF32 : compute;
    buffers.push_back({parameter.name, dtype, parameter.shape});
  }
  return buffers;
}

std::vector<BufferSpec> scratch_of(const Stack& stack, const UnitSpec& unit, BatchShape shape) {
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

std::vector<BufferSpec> saved_of(const Stack& stack, const UnitSpec& unit, BatchShape shape) {
  if (unit.kind != UnitSpec::Kind::kBlock) return {};
  return stack.blocks()[static_cast<std::size_t>(unit.layer)].saved(shape);
}

std::vector<BufferSpec> batch_buffers(BatchShape shape) {
  return {{"tokens", DType::kU32, {shape.batch, shape.length}},
          {"labels", DType::kI32, {shape.batch, shape.length}},
          {"segments", DType::kI32, {shape.batch, shape.length}}};
}

std::int64_t width_of(const std::vector<UnitSpec>& units) {
  return units.front().parameters.front().shape[1];  // the embedding's [V, d]
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
    : options_(options),
      compute_(stack.compute()),
      units_(stack.units()),
      share_(options.accumulate, options.quanta, options.ranks, options.order) {
  const BatchShape shape = options.quantum;
  for (const UnitSpec& unit : units_) {
    layouts_.emplace_back(unit.name, buffers_of(unit, compute_));
  }

  std::int64_t scratch = 0, saved = 0;
  std::vector<std::int64_t> gathered, gradients, workspaces;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    gathered.push_back(layouts_[u].gathered_bytes(layouts_[u].count()));
    gradients.push_back(layouts_[u].count() * size_of(DType::kF32));
    workspaces.push_back(CanonicalSum::workspace(layouts_[u], share_, options.rank).bytes());
    scratch = std::max(scratch, Layout(scratch_of(stack, units_[u], shape)).bytes());
    saved = std::max(saved, Layout(saved_of(stack, units_[u], shape)).bytes());
  }

  const std::size_t turns = overlaps() ? 2 : 1;
  if (options.ranks > 1) {
    gathered_ = book_turns("gathered parameters", options.gather_per_step ? units_.size() : turns,
                           gathered);
  }
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const std::int64_t slice =
        layouts_[u].slice(options.rank, options.ranks).count() * size_of(DType::kF32);
    const std::string& name = units_[u].name;
    UnitBookings bookings{};
    bookings.weights = book("master parameters", name, slice);
    bookings.rounded =
        rounds() ? book("rounded parameters", name, gathered_slice_bytes(u)) : bookings.weights;
    bookings.first = book("optimiser moments", name + " first", slice);
    bookings.second = book("optimiser moments", name + " second", slice);
    bookings.sum = book("gradient sums", name,
                        Layout(CanonicalSum::buffers(layouts_[u], share_, options.rank)).bytes());
    unit_bookings_.push_back(bookings);
  }
  // Under kLocal a gradient is added up where it is made, and its buffer is free at once.
  gradients_ = book_turns("gradients at work", share_.policy() == Accumulate::kSharded ? turns : 1,
                          gradients);
  workspaces_ = book_turns("exchange buffers", turns, workspaces);

  const std::int64_t row_bytes = shape.rows() * width_of(units_) * 4;
  for (std::size_t l = 0; l <= stack.blocks().size(); ++l) {
    x_.push_back(book("activations", "residual " + std::to_string(l), row_bytes));
  }
  d_x_ = book("activations", "gradient of the residual", row_bytes);
  if (options.recompute) {
    saved_.assign(units_.size(), book("activations", "saved by one block", saved));
  } else {
    for (const UnitSpec& unit : units_) {
      saved_.push_back(book("activations", "saved by " + unit.name,
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
std::vector<std::size_t> EnginePlan::book_turns(const char* category, std::size_t buffers,
                                                const std::vector<std::int64_t>& bytes_of_units) {
  std::vector<std::int64_t> bytes(buffers);
  for (std::size_t u = 0; u < bytes_of_units.size(); ++u) {
    bytes[turn(u, buffers)] = std::max(bytes[turn(u, buffers)], bytes_of_units[u]);
  }
  std::vector<std::size_t> bookings;
  for (std::size_t i = 0; i < buffers; ++i) {
    bookings.push_back(book(category, std::to_string(i), bytes[i]));
  }
  return bookings;
}

// This rank's part of what is gathered of a unit.
std::int64_t EnginePlan::gathered_slice_bytes(std::size_t u) const {
  const Slice slice = layouts_[u].slice(options_.rank, options_.ranks);
  return layouts_[u].gathered_bytes(slice.end) - layouts_[u].gathered_bytes(slice.begin);
}

EnginePlan::Communication EnginePlan::communication() const {
  Communication result;
  const int ranks = options_.ranks;
  if (ranks == 1) return result;
  // Parameters are gathered unless the last use of their buffer was theirs. The head computes
  // forward and backward at once, and the embedding's backward reads no weight.
  std::vector<std::size_t> held(gathered_.size(), units_.size());
  const auto need = [&](std::size_t u) {
    std::size_t& holder = held[turn(u, held.size())];
    if (holder == u) return;
    holder = u;
    result.gather_bytes += gathered_slice_bytes(u) * (ranks - 1);
  };
  for (std::int64_t round = 0; round < share_.rounds(); ++round) {
    for (std::size_t u = 0; u < units_.size(); ++u) need(u);
    for (std::size_t u = units_.size() - 1; u-- > 1;) need(u);
  }
  for (const UnitLayout& layout : layouts_) {
    const std::int64_t others =
        (layout.count() - layout.slice(options_.rank, ranks).count()) * size_of(DType::kF32);
    result.reduce_bytes += share_.sums_sent(options_.rank) * others;
  }
  return result;
}

Engine::Engine(const Stack& stack, const EnginePlan& plan, Device& device,
               Communicator& communicator, Activity& activity)
    : stack_(stack),
      plan_(plan),
      device_(device),
      communicator_(communicator),
      activity_(activity),
      arena_(device, plan.memory()) {
  const EngineOptions& options = plan.options();
  TESSERA_CHECK(options.rank == communicator.rank() && options.ranks == communicator.size());
  const BatchShape shape = options.quantum;
  const std::int64_t width = width_of(plan.units());
  for (const std::size_t booking : plan.x_) {
    x_.push_back(arena_.view(booking, DType::kF32, {shape.rows(), width}));
  }
  d_x_ = arena_.view(plan.d_x_, DType::kF32, {shape.rows(), width});
  for (const std::size_t booking : plan.batches_) {
    const std::vector<View> views = Layout(batch_buffers(shape)).views(arena_.at(booking));
    batches_.push_back({shape, views[0], views[1], views[2]});
  }
  for (std::size_t u = 0; u < plan.units().size(); ++u) {
    const UnitLayout& layout = plan.layouts()[u];
    const EnginePlan::UnitBookings& bookings = plan.unit_bookings_[u];
    const Slice slice = layout.slice(options.rank, options.ranks);
    Unit unit;
    unit.weights = arena_.view(bookings.weights, DType::kF32, {slice.count()});
    unit.first = arena_.view(bookings.first, DType::kF32, {slice.count()});
    unit.second = arena_.view(bookings.second, DType::kF32, {slice.count()});
    const std::int64_t word = size_of(plan.compute());
    unit.rounded =
        arena_.view(bookings.rounded, plan.compute(), {plan.gathered_slice_bytes(u) / word});
    unit.whole = options.ranks == 1
                     ? unit.rounded
                     : arena_.view(plan.gathered_[EnginePlan::turn(u, plan.gathered_.size())],
                                   plan.compute(), {layout.gathered_bytes(layout.count()) / word});
    unit.parameters = layout.gathered_views(unit.whole);
    const auto add_gradient = [&](const View& whole) {
      unit.gradients.push_back({whole, layout.views(whole)});
    };
    add_gradient(arena_.view(plan.gradients_[EnginePlan::turn(u, plan.gradients_.size())],
                             DType::kF32, {layout.count()}));
    unit.saved = Layout(saved_of(stack, plan.units()[u], shape)).views(arena_.at(plan.saved_[u]));
    unit.scratch =
        Layout(scratch_of(stack, plan.units()[u], shape)).views(arena_.at(plan.scratch_));
    const BufferSpec workspace = CanonicalSum::workspace(layout, plan.share(), options.rank);
    const std::vector<View> sums = Layout(CanonicalSum::buffers(layout, plan.share(), options.rank))
                                       .views(arena_.at(bookings.sum));
    for (const View& buffer : sums) {
      if (buffer.count() == layout.count()) add_gradient(buffer);
    }
    unit.sum = std::make_unique<CanonicalSum>(
        layout, plan.share(), communicator, device.queue(), sums,
        arena_.view(plan.workspaces_[EnginePlan::turn(u, plan.workspaces_.size())], workspace.dtype,
                    workspace.shape));
    unit.pieces = layout.pieces(slice);
    unit.bounds = layout.gathered_bounds(options.ranks, plan.compute());
    for (const Piece& piece : unit.pieces) {
      const std::int64_t begin = slice.begin + piece.offset;
      std::byte* const at =
          unit.rounded.raw() + layout.gathered_bytes(begin) - layout.gathered_bytes(slice.begin);
      unit.rounded_pieces.emplace_back(layout.parameter(piece.parameter).dtype,
                                       Shape{piece.count()}, at);
    }
    units_.push_back(std::move(unit));
  }
  gathered_ = std::vector<Gathered>(plan.gathered_.size());
  slices_.resize(units_.size());
  loss_bits_.resize(static_cast<std::size_t>(options.quanta));
  losses_.resize(static_cast<std::size_t>(options.quanta));
  if (plan.overlaps()) device.queue().set_background(&communicator);
}

void Engine::initialise(std::uint64_t seed) {
  for (std::size_t u = 0; u < units_.size(); ++u) {
    Unit& unit = units_[u];
    for (const Piece& piece : unit.pieces) {
      tessera::initialise(plan_.units()[u].parameters[piece.parameter], seed, piece.begin,
                          unit.weights.slice(piece.offset, piece.offset + piece.count()));
    }
    device_.queue().fill_zero(unit.first);
    device_.queue().fill_zero(unit.second);
  }
  weights_changed();
}

LayerMemory Engine::memory(std::size_t unit) const {
  return {units_[unit].parameters, units_[unit].saved, units_[unit].scratch};
}

// Starts bringing the unit's parameters, unless they are here or on their way. Their buffer must be
// free: the unit at work is a neighbour, whose turn is another.
void Engine::prefetch(std::size_t u) {
  if (u == kNone || !plan_.overlaps() || gathered(u).unit == u) return;
  start_gather_unit(communicator_, gathered(u).transfer, plan_.layouts()[u], units_[u].bounds,
                    units_[u].rounded, units_[u].whole);
  gathered(u).unit = u;
}

// Returns when the unit's parameters are here; then those of `next`, the unit after it, are on
// their way.
void Engine::gather(std::size_t u, std::size_t next) {
  if (communicator_.size() == 1) return;
  if (gathered(u).unit != u) {
    gather_unit(communicator_, plan_.layouts()[u], units_[u].bounds, units_[u].rounded,
                units_[u].whole);
    gathered(u).unit = u;
  }
  if (gathered(u).transfer.started()) communicator_.finish(gathered(u).transfer);
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
  for (Unit& unit : units_) {
    if (!plan_.rounds()) continue;
    for (std::size_t i = 0; i < unit.pieces.size(); ++i) {
      const Piece& piece = unit.pieces[i];
      convert(device_.queue(), unit.rounded_pieces[i],
              unit.weights.slice(piece.offset, piece.offset + piece.count()));
    }
  }
}

void Engine::forward(const Batch* batch) {
  Queue& queue = device_.queue();
  gather(0, 1);
  activity_.set("forward", plan_.units()[0].name);
  if (batch != nullptr) {
    stack_.embedding().forward(queue, *batch, units_[0].parameters, x_[0]);
  }
  for (std::size_t l = 0; l < stack_.blocks().size(); ++l) {
    gather(l + 1, l + 2);
    activity_.set("forward", plan_.units()[l + 1].name);
    if (batch != nullptr) {
      stack_.blocks()[l].forward(queue, *batch, x_[l], x_[l + 1], memory(l + 1));
    }
  }
}

double Engine::head(const Batch* batch, double scale) {
  const std::size_t u = units_.size() - 1;
  gather(u, u - 1);
  take_turn(u);
  activity_.set("loss", plan_.units()[u].name);
  double loss = 0.0;
  if (batch != nullptr) {
    loss = stack_.head().loss_and_gradient(device_.queue(), *batch, x_.back(), scale, d_x_,
                                           units_[u].parameters, gradient_for(u).parameters,
                                           units_[u].scratch);
  }
  push(u, batch != nullptr);
  return loss;
}

void Engine::backward(const Batch* batch, bool last_round) {
  Queue& queue = device_.queue();
  for (std::size_t l = stack_.blocks().size(); l-- > 0;) {
    const Block& block = stack_.blocks()[l];
    const std::size_t u = l + 1;
    gather(u, u > 1 ? u - 1 : last_round ? kNone : 0);
    take_turn(u);
    activity_.set("backward", plan_.units()[u].name);
    if (batch != nullptr) {
      // The output isn't needed again: it goes where the next block's input was.
      if (plan_.options().recompute) block.forward(queue, *batch, x_[l], x_[l + 1], memory(u));
      block.backward(queue, *batch, x_[l], d_x_, gradient_for(u).parameters, memory(u));
    }
    push(u, batch != nullptr);
  }
  take_turn(0);
  activity_.set("backward", plan_.units()[0].name);
  if (batch != nullptr) {
    stack_.embedding().backward(queue, *batch, d_x_, gradient_for(0).parameters, units_[0].scratch);
  }
  push(0, batch != nullptr);
}

// Where the unit's gradient is to be made: where its sum would copy it, or else in the buffer that
// units take turns at. Padding is zero.
const Engine::Gradient& Engine::gradient_for(std::size_t u) {
  Unit& unit = units_[u];
  const View place = unit.sum->place();
  unit.made = 0;
  for (std::size_t i = 1; i < unit.gradients.size(); ++i) {
    if (unit.gradients[i].whole.raw() == place.raw()) unit.made = i;
  }
  TESSERA_CHECK(place.empty() || unit.made > 0);
  const UnitLayout& layout = plan_.layouts()[u];
  auto* gradient = unit.gradients[unit.made].whole.as<float>();
  for (std::size_t i = 0; i < layout.size(); ++i) {
    const std::int64_t begin = layout.offset(i) + layout.parameter(i).shape.count();
    const std::int64_t end = i + 1 < layout.size() ? layout.offset(i + 1) : layout.count();
    std::fill(gradient + begin, gradient + end, 0.0F);
  }
  return unit.gradients[unit.made];
}

// Before the unit's gradient is made: its buffers were used last by the unit two further up, or, at
// the beginning of the pass, by one of the first two in the round before.
void Engine::take_turn(std::size_t u) {
  units_[u + 2 < units_.size() ? u + 2 : u % 2].sum->complete();
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
  for (std::int64_t round = 0; round < plan_.share().rounds(); ++round) {
    const Batch* batch = round < count ? &batches_[static_cast<std::size_t>(round)] : nullptr;
    forward(batch);
    const double loss = head(batch, scale);
    if (batch != nullptr) {
      const std::int64_t quantum = plan_.share().quantum(round, plan_.options().rank);
      loss_bits_[static_cast<std::size_t>(quantum)] = std::bit_cast<std::int64_t>(loss);
    }
    backward(batch, round + 1 == plan_.share().rounds());
  }

  // Every quantum's loss to every rank: the others' bits are 0, so the integer sum is exact.
  communicator_.all_reduce("losses", Reduction::kSum, std::span(loss_bits_));
  for (std::size_t q = 0; q < losses_.size(); ++q)
    losses_[q] = std::bit_cast<double>(loss_bits_[q]);
  result.loss = tree_sum(losses_) * scale;
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
      const UnitSpec& spec = plan_.units()[u];
      for (std::size_t i = 0; i < units_[u].pieces.size(); ++i) {
        const Piece& piece = units_[u].pieces[i];
        const ParameterGroup group = parameter_group(config, part_of(spec.kind), spec.layer, layers,
                                                     spec.parameters[piece.parameter].decay);
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
    release();
  }
  return result;
}

double Engine::evaluate(bool has_batch) {
  const Batch* batch = has_batch ? batches_.data() : nullptr;
  forward(batch);
  const std::size_t u = units_.size() - 1;
  gather(u, kNone);
  if (batch == nullptr) return 0.0;
  return stack_.head().loss(device_.queue(), *batch, x_.back(), units_[u].parameters,
                            units_[u].scratch);
}

std::vector<CheckpointArray> Engine::arrays(bool moments) {
  std::vector<CheckpointArray> arrays;
  for (std::size_t u = 0; u < units_.size(); ++u) {
    const Unit& unit = units_[u];
    const std::vector<ParameterSpec>& parameters = plan_.units()[u].parameters;
    const auto add = [&](const std::string& prefix, const View& slice) {
      const std::size_t first = arrays.size();
      for (const ParameterSpec& parameter : parameters) {
        arrays.push_back({prefix + parameter.name, parameter.shape, {}});
      }
      for (const Piece& piece : unit.pieces) {
        arrays[first + piece.parameter].parts.push_back(
            {piece.begin, piece.end, slice.as<float>() + piece.offset});
      }
    };
    add("params/", unit.weights);
    if (moments) {
      add("adamw/m/", unit.first);
      add("adamw/v/", unit.second);
    }
  }
  return arrays;
}

}  // namespace tessera
