#include "launch/probe.h"

#include <Eigen/Core>
#include <algorithm>
#include <cmath>
#include <memory>
#include <numeric>
#include <utility>

#include "data/loader.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/random.h"

namespace tessera {
namespace {

constexpr std::int64_t kWindowsAtOnce = 4;

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::Map<const RowMajor> matrix(const View& view) {
  return {view.as<float>(), view.extent(0), view.extent(1)};
}

// `take` of [0, count), ascending, each set as likely as any other.
std::vector<std::int64_t> draw(std::int64_t count, std::int64_t take, const RandomStream& random) {
  std::vector<std::pair<double, std::int64_t>> keys;
  for (std::int64_t i = 0; i < count; ++i) {
    keys.emplace_back(random.uniform(static_cast<std::uint64_t>(i)), i);
  }
  std::sort(keys.begin(), keys.end());
  std::vector<std::int64_t> drawn;
  for (std::int64_t i = 0; i < take; ++i) drawn.push_back(keys[static_cast<std::size_t>(i)].second);
  std::sort(drawn.begin(), drawn.end());
  return drawn;
}

// The parameters of a block, then those of its experts.
std::vector<ParameterSpec> all_parameters(const Block& block, std::int64_t layer) {
  std::vector<ParameterSpec> list = block.parameters();
  for (ParameterSpec& parameter : block.expert_parameters()) list.push_back(std::move(parameter));
  return with_prefix("model.layers." + std::to_string(layer) + ".", std::move(list));
}

// One expert's matrix of a stacked parameter.
View of_expert(const View& stacked, std::int64_t i) {
  return stacked.slice(i, i + 1).reshaped({stacked.extent(1), stacked.extent(2)});
}

template <class Spec>
std::size_t place_of(const std::vector<Spec>& list, const std::string& name) {
  const auto at =
      std::find_if(list.begin(), list.end(), [&](const Spec& spec) { return spec.name == name; });
  TESSERA_CHECK(at != list.end());
  return static_cast<std::size_t>(at - list.begin());
}

class Walk {
 public:
  Walk(const ProbeSubject& subject, const ProbeText& text, Device& device);
  void run(const std::function<void(const ProbedExperts&)>& visit,
           const std::function<void(std::int64_t)>& progress);

 private:
  void grant();
  Batch batch(std::int64_t begin, std::int64_t end);
  void load(const std::vector<ParameterSpec>& parameters);
  void embed();
  void pass(std::int64_t layer);
  void gather(const Block& block, const LayerMemory& memory, std::int64_t begin, std::int64_t end);
  ProbedExperts probed(std::int64_t layer) const;

  const ProbeSubject& subject_;
  const ProbeText& text_;
  Device& device_;
  std::int64_t length_, width_, windows_;
  Embedding embedding_;
  std::vector<Block> blocks_;  // up to the last with experts

  std::unique_ptr<Arena> arena_;
  std::vector<View> parameters_;
  std::byte *parameter_room_ = nullptr, *saved_room_ = nullptr, *scratch_room_ = nullptr;
  View residual_, out_;               // [windows * L, d], [kWindowsAtOnce * L, d]
  View x_, inverse_;                  // [tokens, d], [tokens]
  View choices_, weights_;            // [tokens * K]
  std::vector<std::int64_t> starts_;  // the first row of each window
  std::vector<std::uint32_t> batch_windows_, tokens_;
  std::vector<std::int32_t> labels_, segments_;
};

Walk::Walk(const ProbeSubject& subject, const ProbeText& text, Device& device)
    : subject_(subject),
      text_(text),
      device_(device),
      length_(static_cast<std::int64_t>(text.windows[0].size()) - 1),
      width_(subject.model.width()),
      windows_(static_cast<std::int64_t>(text.windows.size())),
      embedding_(subject.model) {
  const auto layers = static_cast<std::int64_t>(schedule_types(subject.model.schedule()).size());
  for (std::int64_t l = 0; l < layers; ++l) blocks_.emplace_back(subject.model, l);
  while (!blocks_.empty() && blocks_.back().experts() == nullptr) blocks_.pop_back();
  if (blocks_.empty()) {
    throw Error(ExitCode::kUsage,
                "model.feed_forward: no layer has experts, which is what the probe looks at");
  }
  std::int64_t row = 0;
  for (const auto& positions : text_.positions) {
    starts_.push_back(row);
    row += static_cast<std::int64_t>(positions.size());
  }
  grant();
}

void Walk::grant() {
  const BatchShape shape = {kWindowsAtOnce, length_, device_.queue().threads()};
  std::int64_t parameters = Layout(f32_buffers(embedding_.parameters())).bytes();
  std::int64_t saved = 0, scratch = 0, active = 0;
  for (const Block& block : blocks_) {
    if (block.experts() != nullptr) active = std::max(active, block.experts()->shape().active);
    parameters = std::max(parameters, Layout(f32_buffers(all_parameters(block, 0))).bytes());
    saved = std::max(saved, Layout(block.saved(shape)).bytes());
    scratch = std::max(scratch, Layout(block.scratch(shape)).bytes());
  }
  const std::int64_t tokens = text_.tokens();
  MemoryPlan memory;
  const std::size_t parameter_booking = memory.book("parameters", "of a unit", parameters);
  const std::size_t saved_booking = memory.book("activations", "saved", saved);
  const std::size_t scratch_booking = memory.book("scratch", "of a block", scratch);
  const std::size_t residual =
      memory.book("activations", "residual", windows_ * length_ * width_ * 4);
  const std::size_t out = memory.book("activations", "out", kWindowsAtOnce * length_ * width_ * 4);
  const std::size_t x = memory.book("activations", "rows", tokens * width_ * 4);
  const std::size_t inverse = memory.book("activations", "inverse_rms", tokens * 4);
  const std::size_t choices = memory.book("activations", "choices", tokens * active * 4);
  const std::size_t weights = memory.book("activations", "weights", tokens * active * 4);
  arena_ = std::make_unique<Arena>(device_, memory);
  parameter_room_ = arena_->at(parameter_booking);
  saved_room_ = arena_->at(saved_booking);
  scratch_room_ = arena_->at(scratch_booking);
  residual_ = arena_->view(residual, DType::kF32, {windows_ * length_, width_});
  out_ = arena_->view(out, DType::kF32, {kWindowsAtOnce * length_, width_});
  x_ = arena_->view(x, DType::kF32, {tokens, width_});
  inverse_ = arena_->view(inverse, DType::kF32, {tokens});
  choices_ = arena_->view(choices, DType::kI32, {tokens * active});
  weights_ = arena_->view(weights, DType::kF32, {tokens * active});
  const auto rows = static_cast<std::size_t>(kWindowsAtOnce * length_);
  batch_windows_.resize(rows + static_cast<std::size_t>(kWindowsAtOnce));
  tokens_.resize(rows);
  labels_.resize(rows);
  segments_.resize(rows);
}

Batch Walk::batch(std::int64_t begin, std::int64_t end) {
  const Shape shape = {end - begin, length_};
  auto to = batch_windows_.begin();
  for (std::int64_t w = begin; w < end; ++w) {
    const auto& window = text_.windows[static_cast<std::size_t>(w)];
    to = std::copy(window.begin(), window.end(), to);
  }
  const View windows(batch_windows_.data(), {end - begin, length_ + 1});
  const Batch batch = {{end - begin, length_, device_.queue().threads()},
                       View(tokens_.data(), shape),
                       View(labels_.data(), shape),
                       View(segments_.data(), shape)};
  split_windows(windows, batch.tokens, batch.labels);
  fill_segments(windows, subject_.end_of_sequence, subject_.document_masking, batch.segments);
  return batch;
}

void Walk::load(const std::vector<ParameterSpec>& parameters) {
  parameters_ = Layout(f32_buffers(parameters)).views(parameter_room_);
  subject_.parameters(parameters, parameters_);
}

void Walk::embed() {
  load(with_prefix("model.embed_tokens.", embedding_.parameters()));
  for (std::int64_t w = 0; w < windows_; w += kWindowsAtOnce) {
    const std::int64_t end = std::min(w + kWindowsAtOnce, windows_);
    embedding_.forward(device_.queue(), batch(w, end), parameters_,
                       residual_.slice(w * length_, end * length_));
  }
}

// What enters the block's experts at the chosen positions of these windows, before the norm, and
// where it went.
void Walk::gather(const Block& block, const LayerMemory& memory, std::int64_t begin,
                  std::int64_t end) {
  const BatchShape shape = {end - begin, length_, device_.queue().threads()};
  const std::vector<BufferSpec> names = block.experts()->saved(shape);
  const std::span<const View> routed = block.of_feed_forward(memory).saved;
  const View middle = memory.saved[place_of(block.saved(shape), "middle")];
  const View places = routed[place_of(names, "places")];
  const std::int64_t active = block.experts()->shape().active;
  const auto* const choices = routed[place_of(names, "choices")].as<std::int32_t>();
  const auto* const weights = routed[place_of(names, "weights")].as<float>();
  for (std::int64_t w = begin; w < end; ++w) {
    std::int64_t row = starts_[static_cast<std::size_t>(w)];
    for (const std::int64_t position : text_.positions[static_cast<std::size_t>(w)]) {
      const std::int64_t from = (w - begin) * length_ + position;
      device_.queue().copy(x_.slice(row, row + 1), middle.slice(from, from + 1));
      for (std::int64_t k = 0; k < active; ++k) {
        const bool dropped = places.as<std::int64_t>()[from * active + k] < 0;
        choices_.as<std::int32_t>()[row * active + k] = dropped ? -1 : choices[from * active + k];
        weights_.as<float>()[row * active + k] = weights[from * active + k];
      }
      ++row;
    }
  }
}

// Walks all windows through the block; x_ holds what enters its feed-forward.
void Walk::pass(std::int64_t layer) {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  load(all_parameters(block, layer));
  const std::size_t own = block.parameters().size();
  std::vector<View> experts;
  std::vector<float> bias;
  if (block.experts() != nullptr) {
    experts = expert_matrices(std::span(parameters_).subspan(own));
    if (block.experts()->shape().selection_bias) {
      bias.resize(static_cast<std::size_t>(block.experts()->shape().experts));
    }
  }
  LayerMemory memory;
  memory.parameters = std::span(parameters_).first(own);
  memory.experts = experts;
  if (!bias.empty()) {
    memory.selection_bias = View(bias.data(), {static_cast<std::int64_t>(bias.size())});
    subject_.selection_bias(layer, memory.selection_bias);
  }
  for (std::int64_t w = 0; w < windows_; w += kWindowsAtOnce) {
    const std::int64_t end = std::min(w + kWindowsAtOnce, windows_);
    const Batch now = batch(w, end);
    const std::vector<View> saved = Layout(block.saved(now.shape)).views(saved_room_);
    const std::vector<View> scratch = Layout(block.scratch(now.shape)).views(scratch_room_);
    memory.saved = saved;
    memory.scratch = scratch;
    const View x = residual_.slice(w * length_, end * length_);
    const View out = out_.slice(0, (end - w) * length_);
    block.forward(device_.queue(), now, x, out, memory);
    if (block.experts() != nullptr) gather(block, memory, w, end);
    device_.queue().copy(x, out);
  }
  if (block.experts() == nullptr) return;
  const View& weight = parameters_[place_of(block.parameters(), "post_norm.weight")];
  rms_norm(device_.queue(), x_, weight, subject_.model.norm_epsilon(), x_, inverse_);
}

ProbedExperts Walk::probed(std::int64_t layer) const {
  const Block& block = blocks_[static_cast<std::size_t>(layer)];
  std::vector<ParameterSpec> names = block.parameters();
  for (ParameterSpec& parameter : block.expert_parameters()) names.push_back(std::move(parameter));
  const auto find = [&](const std::string& name) {
    return parameters_[place_of(names, "feed_forward." + name)];
  };
  const auto of_tokens = [&](const View& room, std::int64_t active) {
    return shaped(room, room.dtype(), {x_.extent(0), active});
  };
  ProbedExperts probed;
  probed.layer = layer;
  probed.shape = block.experts()->shape();
  probed.x = x_;
  probed.choices = of_tokens(choices_, probed.shape.active);
  probed.weights = of_tokens(weights_, probed.shape.active);
  if (probed.shape.latent > 0) probed.latent_down = find("latent_down.weight");
  probed.gate = find("experts.gate_proj.weight");
  probed.up = find("experts.up_proj.weight");
  probed.down = find("experts.down_proj.weight");
  return probed;
}

void Walk::run(const std::function<void(const ProbedExperts&)>& visit,
               const std::function<void(std::int64_t)>& progress) {
  embed();
  for (std::int64_t l = 0; l < static_cast<std::int64_t>(blocks_.size()); ++l) {
    if (progress) progress(l);
    pass(l);
    if (blocks_[static_cast<std::size_t>(l)].experts() != nullptr) visit(probed(l));
  }
}

RankSpread spread_of(const std::vector<double>& values) {
  const auto [least, most] = std::minmax_element(values.begin(), values.end());
  return {std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size()),
          *least, *most};
}

}  // namespace

std::int64_t ProbeText::tokens() const {
  std::int64_t sum = 0;
  for (const auto& of_window : positions) sum += static_cast<std::int64_t>(of_window.size());
  return sum;
}

ProbeText choose_text(const TokenStream& stream, std::int64_t tokens, std::uint64_t seed) {
  std::vector<std::pair<std::int64_t, std::int64_t>> held_out;  // component, its window
  for (std::int64_t c = 0; c < stream.components(); ++c) {
    for (std::int64_t k = 0; k < stream.held_out_windows(c); ++k) held_out.emplace_back(c, k);
  }
  const std::int64_t length = stream.sequence_length();
  const bool held = !held_out.empty();
  const std::int64_t there = held ? static_cast<std::int64_t>(held_out.size()) : stream.samples();
  const std::int64_t wanted = (tokens + kProbePositions - 1) / kProbePositions;
  const std::int64_t windows = std::min({there, std::max(wanted, (tokens + length - 1) / length)});
  tokens = std::min(tokens, windows * length);
  ProbeText text;
  text.source = held ? "held-out windows" : "the training stream";
  std::int64_t taken = 0;
  for (const std::int64_t w : draw(there, windows, RandomStream(seed, "probe windows"))) {
    std::vector<std::uint32_t>& window = text.windows.emplace_back();
    window.resize(static_cast<std::size_t>(length + 1));
    if (held) {
      const auto& [component, k] = held_out[static_cast<std::size_t>(w)];
      stream.read_held_out(component, k, window.data());
    } else {
      stream.read(w, window.data());
    }
    // As many of each window as of any other, give or take one.
    const auto before = static_cast<std::int64_t>(text.positions.size());
    const std::int64_t upto = (before + 1) * tokens / windows;
    text.positions.push_back(
        draw(length, upto - taken, RandomStream(seed, "probe positions " + std::to_string(w))));
    taken = upto;
  }
  return text;
}

ExpertWeights ProbedExperts::expert(std::int64_t i) const {
  return {of_expert(gate, i), of_expert(up, i), of_expert(down, i)};
}

void walk_experts(const ProbeSubject& subject, const ProbeText& text, Device& device,
                  const std::function<void(const ProbedExperts&)>& visit,
                  const std::function<void(std::int64_t layer)>& progress) {
  Walk(subject, text, device).run(visit, progress);
}

BlockDimension probe_dimension(Queue& queue, const ProbedExperts& block) {
  try {
    return {block.layer, intrinsic_dimension(queue, block.x)};
  } catch (const Error& error) {
    throw Error(error.code(), "layer " + std::to_string(block.layer) + ": " + error.what());
  }
}

BlockRanks probe_ranks(Queue& queue, const ProbedExperts& block) {
  const ExpertsShape& shape = block.shape;
  const std::int64_t tokens = block.x.extent(0), l = shape.row_width();
  BlockRanks ranks;
  ranks.layer = block.layer;
  ranks.experts = shape.experts;
  ranks.active = shape.active;
  ranks.latent = l;
  ranks.inner = shape.inner;
  ranks.capacity = std::min(l, shape.inner);
  // Of each token; a share below 0: capacity left the choice out.
  std::vector<double> local(static_cast<std::size_t>(tokens * shape.active), -1.0);
  std::vector<double> mixed(static_cast<std::size_t>(tokens), -1.0);
  queue.parallel_for(tokens, [&](std::int64_t token, Worker&) {
    Eigen::VectorXd z = matrix(block.x).row(token).cast<double>();
    if (shape.latent > 0) z = matrix(block.latent_down).cast<double>() * z;
    Eigen::MatrixXd mixture = Eigen::MatrixXd::Zero(l, l);
    bool any = false;
    for (std::int64_t k = token * shape.active; k < (token + 1) * shape.active; ++k) {
      const std::int64_t chosen = block.choices.as<std::int32_t>()[k];
      if (chosen < 0) continue;
      any = true;
      const Eigen::MatrixXd jacobian = expert_jacobian(block.expert(chosen), z);
      local[static_cast<std::size_t>(k)] =
          static_cast<double>(numerical_rank(jacobian)) / static_cast<double>(ranks.capacity);
      mixture += static_cast<double>(block.weights.as<float>()[k]) * jacobian;
    }
    if (!any) return;
    mixed[static_cast<std::size_t>(token)] =
        static_cast<double>(numerical_rank(mixture)) / static_cast<double>(l);
  });
  const auto left_out = [](double share) { return share < 0.0; };
  std::erase_if(local, left_out);
  std::erase_if(mixed, left_out);
  if (mixed.empty()) {
    throw Error(ExitCode::kUsage, "layer " + std::to_string(block.layer) +
                                      ": capacity left out all choices of the probed tokens");
  }
  ranks.tokens = static_cast<std::int64_t>(mixed.size());
  ranks.pairs = static_cast<std::int64_t>(local.size());
  ranks.local = spread_of(local);
  ranks.mixture = spread_of(mixed);
  return ranks;
}

}  // namespace tessera
