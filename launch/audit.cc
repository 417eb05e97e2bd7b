#include "launch/audit.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "launch/together.h"
#include "layers/experts/experts.h"
#include "layers/mixers/mixers.h"
#include "runtime/memory.h"
#include "runtime/random.h"

namespace tessera {
namespace {

constexpr std::int64_t kSequencesAtOnce = 4;

std::vector<ParameterSpec> all_parameters(const Block& block) {
  std::vector<ParameterSpec> all = block.parameters();
  for (ParameterSpec& parameter : block.expert_parameters()) all.push_back(std::move(parameter));
  return all;
}

// Without capacities.
void drop_nothing(ModelConfig& model) {
  const auto change = [](FeedForwardConfig& config) {
    if (config.has_experts()) config.mutable_experts()->clear_capacity_factor();
  };
  if (model.has_feed_forward()) change(*model.mutable_feed_forward());
  for (FeedForwardRange& range : *model.mutable_feed_forward_range()) {
    change(*range.mutable_feed_forward());
  }
}

std::vector<AuditSize> sizes_of(const std::vector<Block>& blocks) {
  std::map<std::pair<std::string, std::int64_t>, std::set<std::string>> found;
  for (const Block& block : blocks) {
    for (const Layer* const layer : {&block.mixer(), &block.feed_forward()}) {
      for (const LayerSize& size : layer->sizes()) {
        found[{size.name, size.positions}].insert(block.mixer_type());
      }
    }
  }
  std::vector<AuditSize> sizes;
  sizes.reserve(found.size());
  for (const auto& [size, mixers] : found) {
    sizes.push_back({size.first, size.second, {mixers.begin(), mixers.end()}, true});
  }
  return sizes;
}

// Layer 1, the middle one, the last but one; the last three of a small stack.
std::set<std::int64_t> control_layers(std::int64_t layers) {
  if (layers >= 5) return {1, layers / 2, layers - 2};
  std::set<std::int64_t> last;
  for (std::int64_t l = std::max<std::int64_t>(layers - 3, 0); l < layers; ++l) last.insert(l);
  return last;
}

// A family of sequences, each the base with one token changed.
struct Family {
  bool documents = false;
  std::vector<std::int32_t> segments;  // [T]
  std::vector<std::int64_t> changed;   // p of each, over all ranks
  // Of this rank.
  std::vector<std::size_t> mine;  // which of `changed`
  std::vector<View> x;            // [T, d] of each
  View base;                      // [T, d]
};

// What was found for one family at one layer, sequence by sequence; bits that ranks can add up.
struct Findings {
  explicit Findings(std::size_t sequences) : largest(sequences, 0), position(sequences, 0) {}
  std::vector<std::int64_t> largest;   // bits of a double
  std::vector<std::int64_t> position;  // one past the first position that differs; 0: none does

  void set(std::size_t sequence, double delta, std::int64_t first) {
    largest[sequence] = std::bit_cast<std::int64_t>(delta);
    position[sequence] = first + 1;
  }
  void share(Communicator& communicator) {
    communicator.all_reduce("audit", Reduction::kSum, std::span(largest));
    communicator.all_reduce("audit", Reduction::kSum, std::span(position));
  }
  AuditDelta worst(const std::vector<std::int64_t>& changed) const {
    AuditDelta worst;
    for (std::size_t i = 0; i < largest.size(); ++i) {
      const auto delta = std::bit_cast<double>(largest[i]);
      if (delta > worst.largest) worst = {delta, changed[i], position[i] - 1};
    }
    return worst;
  }
};

void require_finite(const View& x, const std::string& after) {
  const auto* const values = x.as<float>();
  if (std::all_of(values, values + x.count(), [](float value) { return std::isfinite(value); })) {
    return;
  }
  throw Error(ExitCode::kNumerics,
              "the residual after " + after + " isn't finite: there is nothing to audit");
}

// Least squares of log y in log x over the points with y above 0.
double log_slope(const std::vector<double>& x, const std::vector<double>& y) {
  double n = 0.0, sum_x = 0.0, sum_y = 0.0, sum_xx = 0.0, sum_xy = 0.0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (y[i] <= 0.0) continue;
    const double log_x = std::log(x[i]), log_y = std::log(y[i]);
    n += 1.0;
    sum_x += log_x;
    sum_y += log_y;
    sum_xx += log_x * log_x;
    sum_xy += log_x * log_y;
  }
  return n < 2.0 ? 0.0 : (n * sum_xy - sum_x * sum_y) / (n * sum_xx - sum_x * sum_x);
}

class Walk {
 public:
  Walk(const AuditSubject& subject, const AuditOptions& options, Device& device,
       Communicator& communicator);
  AuditResult run(const std::function<void(std::int64_t)>& progress);

 private:
  struct Faulty {
    std::unique_ptr<AuditFault> fault;
    Block block;
  };
  Family family(bool documents) const;
  void grant();
  Batch batch(const Family& family, std::int64_t sequences);
  void load(const std::vector<ParameterSpec>& parameters);
  void load_embedding();
  void load_block(std::int64_t layer);
  void embed(Family& family);
  void embed_one(const Family& family, std::int64_t changed, const View& x);
  View forward(const Block& block, const Family& family, std::span<const View> x);
  Findings pass(const Block& block, Family& family, bool keep);
  void compare(const Family& family, std::size_t sequence, const View& out,
               Findings& findings) const;
  AuditSweep sweep(std::int64_t layer, Family& family, std::int64_t changed);
  void judge(AuditResult& result);

  const AuditSubject& subject_;
  ModelConfig model_;
  Device& device_;
  Communicator& communicator_;
  std::uint64_t seed_;
  std::optional<Embedding> embedding_;
  std::vector<Block> blocks_;
  std::map<std::int64_t, Faulty> faulty_;
  AuditPlan plan_;
  std::vector<std::uint32_t> tokens_;       // of the base
  std::vector<std::uint32_t> replacement_;  // what the token at each position is changed to

  std::unique_ptr<Arena> arena_;
  std::vector<View> parameters_;  // of the unit at work; a block's experts stacked, behind the rest
  std::vector<View> experts_;     // their matrices
  std::vector<float> selection_bias_;
  std::vector<Family> families_;
  std::byte *parameter_room_ = nullptr, *saved_room_ = nullptr, *scratch_room_ = nullptr;
  View in_, out_, base_out_;
  // Of the sequences at work.
  std::vector<std::uint32_t> batch_tokens_;
  std::vector<std::int32_t> batch_labels_, batch_segments_;
};

Walk::Walk(const AuditSubject& subject, const AuditOptions& options, Device& device,
           Communicator& communicator)
    : subject_(subject),
      model_(subject.model),
      device_(device),
      communicator_(communicator),
      seed_(options.seed) {
  drop_nothing(model_);
  const auto layers = static_cast<std::int64_t>(schedule_types(model_.schedule()).size());
  const auto make_blocks = [&] {
    std::vector<Block> blocks;
    for (std::int64_t l = 0; l < layers; ++l) {
      blocks.emplace_back(model_, l, DType::kF32, subject_.mixer(model_, l));
    }
    return blocks;
  };
  if (model_.vocabulary() < 2) {
    throw Error(ExitCode::kUsage,
                "model.vocabulary: an audit changes tokens: must be at least 2, is " +
                    std::to_string(model_.vocabulary()));
  }
  model_.set_length(std::max<std::int64_t>(model_.length(), 1));
  blocks_ = make_blocks();
  plan_ = plan_audit(sizes_of(blocks_), subject_.model.length(), options);
  if (plan_.length > model_.length()) {
    model_.set_length(plan_.length);
    blocks_ = make_blocks();
  }
  embedding_.emplace(model_);
  for (const std::int64_t layer : control_layers(layers)) {
    auto fault = std::make_unique<AuditFault>();
    auto mixer = std::make_unique<FaultyMixer>(subject_.mixer(model_, layer), *fault);
    faulty_.emplace(layer,
                    Faulty{std::move(fault), Block(model_, layer, DType::kF32, std::move(mixer))});
  }

  const RandomStream base(seed_, "audit tokens"), other(seed_, "audit changes");
  const auto vocabulary = static_cast<double>(model_.vocabulary());
  for (std::int64_t t = 0; t < plan_.length; ++t) {
    const auto index = static_cast<std::uint64_t>(t);
    const auto token = static_cast<std::int64_t>(base.uniform(index) * vocabulary);
    const auto step = 1 + static_cast<std::int64_t>(other.uniform(index) * (vocabulary - 1));
    tokens_.push_back(static_cast<std::uint32_t>(token));
    replacement_.push_back(static_cast<std::uint32_t>((token + step) % model_.vocabulary()));
  }
  families_ = {family(false), family(true)};
  grant();
}

Family Walk::family(bool documents) const {
  Family family;
  family.documents = documents;
  family.changed = documents ? plan_.in_document : plan_.positions;
  family.segments.resize(static_cast<std::size_t>(plan_.length), 0);
  if (documents) {
    for (const std::int64_t start : plan_.starts) {
      std::fill(family.segments.begin() + start, family.segments.end(),
                static_cast<std::int32_t>(start));
    }
  }
  for (std::size_t i = 0; i < family.changed.size(); ++i) {
    if (static_cast<int>(i % static_cast<std::size_t>(communicator_.size())) ==
        communicator_.rank()) {
      family.mine.push_back(i);
    }
  }
  return family;
}

void Walk::grant() {
  const std::int64_t length = plan_.length, width = model_.width();
  const BatchShape shape = {kSequencesAtOnce, length, device_.queue().threads()};
  std::int64_t parameters = Layout(f32_buffers(embedding_->parameters())).bytes();
  std::int64_t saved = 0, scratch = 0;
  for (const Block& block : blocks_) {
    parameters = std::max(parameters, Layout(f32_buffers(all_parameters(block))).bytes());
    saved = std::max(saved, Layout(block.saved(shape)).bytes());
    scratch = std::max(scratch, Layout(block.scratch(shape)).bytes());
  }
  MemoryPlan memory;
  const std::int64_t sequence = length * width * 4;
  const std::size_t parameter_booking = memory.book("parameters", "of a unit", parameters);
  const std::size_t saved_booking = memory.book("activations", "saved", saved);
  const std::size_t scratch_booking = memory.book("scratch", "of a block", scratch);
  const std::size_t in = memory.book("activations", "in", kSequencesAtOnce * sequence);
  const std::size_t out = memory.book("activations", "out", kSequencesAtOnce * sequence);
  const std::size_t base_out = memory.book("activations", "base out", sequence);
  std::vector<std::size_t> residuals;
  for (const Family& family : families_) {
    for (std::size_t i = 0; i <= family.mine.size(); ++i) {
      residuals.push_back(memory.book("activations", "residual", sequence));
    }
  }
  try {
    arena_ = std::make_unique<Arena>(device_, memory);
  } catch (const Error& error) {
    throw Error(error.code(), "an audit of " + std::to_string(length) +
                                  " positions (by the model's largest window, chunk or block, or "
                                  "--length): " +
                                  error.what());
  }
  parameter_room_ = arena_->at(parameter_booking);
  saved_room_ = arena_->at(saved_booking);
  scratch_room_ = arena_->at(scratch_booking);
  in_ = arena_->view(in, DType::kF32, {kSequencesAtOnce * length, width});
  out_ = arena_->view(out, DType::kF32, {kSequencesAtOnce * length, width});
  base_out_ = arena_->view(base_out, DType::kF32, {length, width});
  std::size_t next = 0;
  for (Family& family : families_) {
    family.base = arena_->view(residuals[next++], DType::kF32, {length, width});
    for (std::size_t i = 0; i < family.mine.size(); ++i) {
      family.x.push_back(arena_->view(residuals[next++], DType::kF32, {length, width}));
    }
  }
  const auto rows = static_cast<std::size_t>(kSequencesAtOnce * length);
  batch_tokens_.assign(rows, 0);
  batch_labels_.assign(rows, kNoLabel);
  batch_segments_.assign(rows, 0);
}

// The segments are the family's; the tokens those that were last put there, which blocks don't
// read.
Batch Walk::batch(const Family& family, std::int64_t sequences) {
  for (std::int64_t s = 0; s < sequences; ++s) {
    std::copy(family.segments.begin(), family.segments.end(),
              batch_segments_.begin() + s * plan_.length);
  }
  const Shape shape = {sequences, plan_.length};
  return {{sequences, plan_.length, device_.queue().threads()},
          View(batch_tokens_.data(), shape),
          View(batch_labels_.data(), shape),
          View(batch_segments_.data(), shape)};
}

void Walk::load(const std::vector<ParameterSpec>& parameters) {
  parameters_ = Layout(f32_buffers(parameters)).views(parameter_room_);
  subject_.parameters(parameters, parameters_);
}

void Walk::load_embedding() { load(with_prefix("model.embed_tokens.", embedding_->parameters())); }

void Walk::load_block(std::int64_t layer) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  load(with_prefix("model.layers." + std::to_string(layer) + ".", all_parameters(block)));
  experts_ = expert_matrices(std::span(parameters_).subspan(block.parameters().size()));
  parameters_.resize(block.parameters().size());
  selection_bias_.clear();
  if (block.experts() == nullptr || !block.experts()->shape().selection_bias) return;
  const std::int64_t experts = block.experts()->shape().experts;
  selection_bias_.resize(static_cast<std::size_t>(experts));
  if (subject_.selection_bias) subject_.selection_bias(layer, {selection_bias_.data(), {experts}});
}

// The base, with the token at `changed` replaced unless it is -1.
void Walk::embed_one(const Family& family, std::int64_t changed, const View& x) {
  std::copy(tokens_.begin(), tokens_.end(), batch_tokens_.begin());
  if (changed >= 0) {
    const auto place = static_cast<std::size_t>(changed);
    batch_tokens_[place] = replacement_[place];
  }
  const Batch one = batch(family, 1);
  embedding_->forward(device_.queue(), one, parameters_, x);
}

void Walk::embed(Family& family) {
  embed_one(family, -1, family.base);
  for (std::size_t i = 0; i < family.mine.size(); ++i) {
    embed_one(family, family.changed[family.mine[i]], family.x[i]);
  }
}

// The block's outputs for these sequences; valid until the next call for as many.
View Walk::forward(const Block& block, const Family& family, std::span<const View> x) {
  const auto sequences = static_cast<std::int64_t>(x.size());
  const Batch now = batch(family, sequences);
  for (std::int64_t s = 0; s < sequences; ++s) {
    device_.queue().copy(in_.slice(s * plan_.length, (s + 1) * plan_.length),
                         x[static_cast<std::size_t>(s)]);
  }
  const std::vector<View> saved = Layout(block.saved(now.shape)).views(saved_room_);
  const std::vector<View> scratch = Layout(block.scratch(now.shape)).views(scratch_room_);
  const View out = out_.slice(0, sequences * plan_.length);
  LayerMemory memory = {parameters_, saved, scratch, experts_};
  if (!selection_bias_.empty()) {
    const auto experts = static_cast<std::int64_t>(selection_bias_.size());
    memory.selection_bias = View(selection_bias_.data(), {experts});
  }
  block.forward(device_.queue(), now, in_.slice(0, sequences * plan_.length), out, memory);
  return out;
}

// Where the i-th of the family's sequences of this rank must not differ from the base, it is
// compared with it.
void Walk::compare(const Family& family, std::size_t sequence, const View& out,
                   Findings& findings) const {
  const std::int64_t changed = family.changed[sequence], width = model_.width();
  std::int64_t end = plan_.length;  // of what may change
  if (family.documents) {
    const std::int32_t start = family.segments[static_cast<std::size_t>(changed)];
    end = changed;
    while (end < plan_.length && family.segments[static_cast<std::size_t>(end)] == start) ++end;
  }
  const auto* const found = out.as<float>();
  const auto* const base = base_out_.as<float>();
  double largest = 0.0;
  std::int64_t first = -1;
  for (std::int64_t t = 0; t < plan_.length; ++t) {
    if (t == changed) t = end;
    if (t >= plan_.length) break;
    for (std::int64_t i = t * width; i < (t + 1) * width; ++i) {
      if (found[i] == base[i]) continue;
      if (first < 0) first = t;
      const double delta = std::abs(static_cast<double>(found[i]) - static_cast<double>(base[i]));
      largest = std::isfinite(delta) ? std::max(largest, delta)
                                     : static_cast<double>(std::numeric_limits<float>::max());
    }
  }
  findings.set(sequence, largest, first);
}

// Walks a family through a block or, unless it is kept, looks at what it would give.
Findings Walk::pass(const Block& block, Family& family, bool keep) {
  Findings findings(family.changed.size());
  device_.queue().copy(base_out_, forward(block, family, std::span(&family.base, 1)));
  for (std::size_t begin = 0; begin < family.mine.size(); begin += kSequencesAtOnce) {
    const std::size_t count = std::min(family.mine.size() - begin, std::size_t{kSequencesAtOnce});
    const View out = forward(block, family, std::span(family.x).subspan(begin, count));
    for (std::size_t i = 0; i < count; ++i) {
      const auto row = static_cast<std::int64_t>(i) * plan_.length;
      const View one = out.slice(row, row + plan_.length);
      compare(family, family.mine[begin + i], one, findings);
      if (keep) device_.queue().copy(family.x[begin + i], one);
    }
  }
  if (keep) device_.queue().copy(family.base, base_out_);
  return findings;
}

// All ranks do the same.
AuditSweep Walk::sweep(std::int64_t layer, Family& family, std::int64_t changed) {
  constexpr int kSteps = 9;  // 1e-4 .. 1, two a decade
  AuditSweep result;
  result.layer = layer;
  result.changed = changed;
  result.across_documents = family.documents;
  // The base, then one sequence a step.
  std::vector<std::vector<float>> storage(
      kSteps + 1, std::vector<float>(static_cast<std::size_t>(family.base.count())));
  std::vector<View> x;
  x.reserve(storage.size());
  for (std::vector<float>& values : storage) x.emplace_back(values.data(), family.base.shape());
  load_embedding();
  embed_one(family, -1, x[0]);
  embed_one(family, changed, base_out_);
  for (int step = 1; step <= kSteps; ++step) {
    const double epsilon = std::pow(10.0, (step - kSteps) / 2.0);
    result.epsilon.push_back(epsilon);
    device_.queue().copy(x[static_cast<std::size_t>(step)], x[0]);
    const std::int64_t begin = changed * model_.width();
    for (std::int64_t i = begin; i < begin + model_.width(); ++i) {
      const auto from = static_cast<double>(x[0].as<float>()[i]);
      const auto to = static_cast<double>(base_out_.as<float>()[i]);
      x[static_cast<std::size_t>(step)].as<float>()[i] =
          static_cast<float>(from + epsilon * (to - from));
    }
  }
  for (std::int64_t l = 0; l <= layer; ++l) {
    load_block(l);
    for (const View& one : x) {
      const Block& block = blocks_[static_cast<std::size_t>(l)];
      device_.queue().copy(one, forward(block, family, std::span(&one, 1)));
    }
  }
  device_.queue().copy(base_out_, x[0]);
  const auto sequence = static_cast<std::size_t>(
      std::find(family.changed.begin(), family.changed.end(), changed) - family.changed.begin());
  for (std::size_t step = 1; step < x.size(); ++step) {
    Findings findings(family.changed.size());
    compare(family, sequence, x[step], findings);
    result.delta.push_back(std::bit_cast<double>(findings.largest[sequence]));
  }
  result.slope = log_slope(result.epsilon, result.delta);
  return result;
}

AuditResult Walk::run(const std::function<void(std::int64_t)>& progress) {
  AuditResult result;
  result.plan = plan_;
  together(communicator_, "embedding of the audit", [&] {
    load_embedding();
    for (Family& family : families_) embed(family);
    require_finite(families_[0].base, "the embedding");
  });
  for (std::size_t l = 0; l < blocks_.size(); ++l) {
    const auto layer = static_cast<std::int64_t>(l);
    if (progress) progress(layer);
    std::vector<Findings> found;    // of the families
    std::vector<Findings> control;  // of the faults
    const auto faulty = faulty_.find(layer);
    together(communicator_, "layer " + std::to_string(l) + " of the audit", [&] {
      load_block(layer);
      if (faulty != faulty_.end()) {
        for (const AuditFault fault : kAuditFaults) {
          *faulty->second.fault = fault;
          control.push_back(pass(faulty->second.block, families_[0], false));
        }
      }
      for (Family& family : families_) {
        found.push_back(pass(blocks_[l], family, true));
        require_finite(family.base,
                       "layer " + std::to_string(l) + " (" + blocks_[l].mixer_type() + ")");
      }
    });
    AuditLayer line;
    line.mixer = blocks_[l].mixer_type();
    for (Findings& findings : found) findings.share(communicator_);
    line.time = found[0].worst(families_[0].changed);
    line.document = found[1].worst(families_[1].changed);
    result.layers.push_back(line);
    for (std::size_t i = 0; i < control.size(); ++i) {
      control[i].share(communicator_);
      AuditInjection injection;
      injection.fault = kAuditFaults[i];
      injection.layer = layer;
      injection.largest = control[i].worst(families_[0].changed).largest;
      // Below the fault nothing differs from the run without it.
      for (std::size_t before = 0; before < l && injection.onset < 0; ++before) {
        if (result.layers[before].time.largest > kAuditThreshold) {
          injection.onset = static_cast<std::int64_t>(before);
        }
      }
      if (injection.onset < 0 && injection.largest > kAuditThreshold) injection.onset = layer;
      result.localised += injection.localised() ? 1 : 0;
      result.control.push_back(injection);
    }
  }
  judge(result);
  return result;
}

void Walk::judge(AuditResult& result) {
  // The first layer with a difference above the threshold or, if none has one, above 0.
  const auto first_above = [&](double least) -> std::optional<AuditOnset> {
    for (std::size_t l = 0; l < result.layers.size(); ++l) {
      const AuditLayer& line = result.layers[l];
      const auto layer = static_cast<std::int64_t>(l);
      if (line.time.largest > least) return AuditOnset{layer, false, line.time};
      if (line.document.largest > least) return AuditOnset{layer, true, line.document};
    }
    return std::nullopt;
  };
  const std::optional<AuditOnset> large = first_above(kAuditThreshold);
  const std::optional<AuditOnset> any = large ? large : first_above(0.0);
  if (any) {
    together(communicator_, "sweep of the audit", [&] {
      result.sweep =
          sweep(any->layer, families_[any->across_documents ? 1 : 0], any->delta.changed);
    });
  }
  if (large || (any && result.sweep->grows())) {
    result.onset = any;
    result.verdict = AuditVerdict::kLeak;
  } else if (result.localised == static_cast<std::int64_t>(result.control.size())) {
    result.verdict = AuditVerdict::kClean;
  } else {
    result.verdict = AuditVerdict::kInconclusive;
  }
}

}  // namespace

bool AuditSweep::grows() const {
  const std::size_t half = delta.size() / 2;
  return slope >= kAuditSlope ||
         std::all_of(delta.begin(), delta.begin() + static_cast<std::ptrdiff_t>(half),
                     [](double value) { return value == 0.0; });
}

const char* name_of(AuditVerdict verdict) {
  switch (verdict) {
    case AuditVerdict::kClean:
      return "clean";
    case AuditVerdict::kLeak:
      return "leak";
    case AuditVerdict::kInconclusive:
      return "inconclusive";
  }
  return "?";
}

AuditSubject initialised_subject(const ModelConfig& model, std::uint64_t seed, Device& device) {
  AuditSubject subject;
  subject.model = model;
  subject.mixer = [](const ModelConfig& config, std::int64_t layer) {
    const std::vector<std::string> types = schedule_types(config.schedule());
    const MixerContext context = {config, layer, static_cast<std::int64_t>(types.size()),
                                  DType::kF32};
    return make_mixer(types[static_cast<std::size_t>(layer)], context);
  };
  subject.parameters = [seed, &device](std::span<const ParameterSpec> parameters,
                                       std::span<const View> values) {
    constexpr std::int64_t kPiece = std::int64_t{1} << 18;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      const std::int64_t count = values[i].count();
      const View flat = values[i].reshaped({count});
      device.queue().parallel_for((count + kPiece - 1) / kPiece,
                                  [&](std::int64_t piece, Worker& /*worker*/) {
                                    const std::int64_t begin = piece * kPiece;
                                    const std::int64_t end = std::min(begin + kPiece, count);
                                    initialise(parameters[i], seed, begin, flat.slice(begin, end));
                                  });
    }
  };
  return subject;
}

AuditResult audit(const AuditSubject& subject, const AuditOptions& options, Device& device,
                  Communicator& communicator, const std::function<void(std::int64_t)>& progress) {
  std::optional<Walk> walk;
  together(communicator, "plan of the audit",
           [&] { walk.emplace(subject, options, device, communicator); });
  return walk->run(progress);
}

}  // namespace tessera
