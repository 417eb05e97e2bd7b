#include <algorithm>
#include <cmath>
#include <utility>

#include "layers/configuration.h"
#include "layers/experts/experts.h"
#include "layers/kernels/elementwise.h"
#include "layers/mixers/mixers.h"
#include "layers/rms_norm/rms_norm.h"
#include "layers/stack.h"
#include "layers/swiglu/swiglu.h"

namespace tessera {
namespace {

// The block's own places in its lists; the mixer's and the feed-forward's follow, except that their
// parameters stand behind the norm that feeds them.
enum Saved : std::size_t { kInverseInput, kMiddle, kInversePost, kSavedCount };
enum Scratch : std::size_t { kNormed, kDNormed, kPartial, kRounded, kScratchCount };

void append(std::vector<ParameterSpec>& list, const std::string& prefix,
            std::vector<ParameterSpec> more) {
  for (ParameterSpec& parameter : more) {
    parameter.name = prefix + parameter.name;
    list.push_back(std::move(parameter));
  }
}

// What a mixer may know at this place of the schedule.
MixerContext context_of(const ModelConfig& config, std::int64_t layer, DType compute,
                        const std::vector<std::string>& types) {
  const auto layers = static_cast<std::int64_t>(types.size());
  TESSERA_CHECK(layer >= 0 && layer < layers);
  require_range("model.feed_forward.wider_layers", config.feed_forward().wider_layers(), 0, layers);
  for (int i = 0; i < config.feed_forward_range_size(); ++i) {
    require_range("model.feed_forward_range[" + std::to_string(i) + "].last",
                  config.feed_forward_range(i).last(), 0, layers - 1);
  }
  return {config, layer, layers, compute};
}

// What stands in this layer: the range's that it is in, else the model's own.
std::unique_ptr<Layer> make_feed_forward(const MixerContext& context) {
  const ModelConfig& model = context.model;
  const FeedForwardConfig* config = &model.feed_forward();
  std::string path = "model.feed_forward";
  std::int64_t inner = config->width() + (context.layer < config->wider_layers() ? 1 : 0);
  for (int i = 0; i < model.feed_forward_range_size(); ++i) {
    const FeedForwardRange& range = model.feed_forward_range(i);
    if (context.layer < range.first() || context.layer > range.last()) continue;
    config = &range.feed_forward();
    path = "model.feed_forward_range[" + std::to_string(i) + "].feed_forward";
    inner = config->width();
  }
  if (config->has_experts()) {
    return std::make_unique<MixtureOfExperts>(
        experts_shape(config->experts(), model.width(), path + ".experts"), model.init_deviation(),
        context.output_deviation(), context.compute);
  }
  return std::make_unique<SwiGlu>(model.width(), inner, model.init_deviation(),
                                  context.output_deviation(), context.compute);
}

std::unique_ptr<Layer> scheduled_mixer(const ModelConfig& config, std::int64_t layer,
                                       DType compute) {
  validate(config);
  const std::vector<std::string> types = schedule_types(config.schedule());
  const MixerContext context = context_of(config, layer, compute, types);
  return make_mixer(types[static_cast<std::size_t>(layer)], context);
}

}  // namespace

struct Block::Parts {
  std::int64_t width;
  double epsilon;
  DType dtype;
  std::string type;
  std::unique_ptr<Layer> mixer;
  std::unique_ptr<Layer> feed_forward;
  const MixtureOfExperts* experts;  // the feed-forward itself, or null
  std::size_t mixer_parameters, mixer_saved;

  // The parts of the block's lists that belong to each layer.
  LayerMemory of_mixer(const LayerMemory& all) const {
    return {all.parameters.subspan(1, mixer_parameters),
            all.saved.subspan(kSavedCount, mixer_saved), all.scratch.subspan(kScratchCount)};
  }
  LayerMemory of_feed_forward(const LayerMemory& all) const {
    return {all.parameters.subspan(mixer_parameters + 2),
            all.saved.subspan(kSavedCount + mixer_saved),
            all.scratch.subspan(kScratchCount),
            all.experts,
            all.selection_bias,
            all.exchange};
  }
};

Block::Block(const ModelConfig& config, std::int64_t layer, DType compute)
    : Block(config, layer, compute, scheduled_mixer(config, layer, compute)) {}

Block::Block(const ModelConfig& config, std::int64_t layer, DType compute,
             std::unique_ptr<Layer> mixer) {
  validate(config);
  const std::vector<std::string> types = schedule_types(config.schedule());
  const MixerContext context = context_of(config, layer, compute, types);
  parts_ = std::make_unique<Parts>(Parts{config.width(), config.norm_epsilon(), compute,
                                         types[static_cast<std::size_t>(layer)], std::move(mixer),
                                         make_feed_forward(context), nullptr, 0, 0});
  parts_->experts = dynamic_cast<const MixtureOfExperts*>(parts_->feed_forward.get());
  parts_->mixer_parameters = parts_->mixer->parameters().size();
  parts_->mixer_saved = parts_->mixer->saved({1, 1, 1}).size();
}

Block::~Block() = default;
Block::Block(Block&&) noexcept = default;

const std::string& Block::mixer_type() const { return parts_->type; }
const Layer& Block::mixer() const { return *parts_->mixer; }
const Layer& Block::feed_forward() const { return *parts_->feed_forward; }
const MixtureOfExperts* Block::experts() const { return parts_->experts; }
LayerMemory Block::of_feed_forward(const LayerMemory& memory) const {
  return parts_->of_feed_forward(memory);
}

std::vector<ParameterSpec> Block::parameters() const {
  const Init one = {Init::Kind::kConstant, 1.0};
  std::vector<ParameterSpec> list = {{"input_norm.weight", {parts_->width}, one, false}};
  append(list, "mixer.", parts_->mixer->parameters());
  list.push_back({"post_norm.weight", {parts_->width}, one, false});
  append(list, "feed_forward.", parts_->feed_forward->parameters());
  return list;
}

std::vector<ParameterSpec> Block::expert_parameters() const {
  std::vector<ParameterSpec> list;
  if (parts_->experts != nullptr) {
    append(list, "feed_forward.", parts_->experts->expert_parameters());
  }
  return list;
}

std::vector<BufferSpec> Block::saved(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"input_inverse_rms", DType::kF32, {shape.rows()}},
                                  {"middle", DType::kF32, {shape.rows(), parts_->width}},
                                  {"post_inverse_rms", DType::kF32, {shape.rows()}}};
  for (BufferSpec& buffer : parts_->mixer->saved(shape)) list.push_back(std::move(buffer));
  for (BufferSpec& buffer : parts_->feed_forward->saved(shape)) list.push_back(std::move(buffer));
  return list;
}

std::vector<BufferSpec> Block::scratch(BatchShape shape) const {
  const std::int64_t width = parts_->width;
  const bool rounds = parts_->dtype != DType::kF32;
  std::vector<BufferSpec> list = {
      {"normed", parts_->dtype, {shape.rows(), width}},
      {"d_normed", DType::kF32, {shape.rows(), width}},
      {"partial_norm", DType::kF32, {rms_norm_blocks(shape.rows()), width}},
      {"rounded_gradient", parts_->dtype, {rounds ? shape.rows() : 0, width}}};
  // The two layers run one after the other: the i-th buffer of one is that of the other.
  const std::vector<BufferSpec> mixer = parts_->mixer->scratch(shape);
  const std::vector<BufferSpec> feed_forward = parts_->feed_forward->scratch(shape);
  for (std::size_t i = 0; i < std::max(mixer.size(), feed_forward.size()); ++i) {
    const std::int64_t first = i < mixer.size() ? mixer[i].bytes() : 0;
    const std::int64_t second = i < feed_forward.size() ? feed_forward[i].bytes() : 0;
    const std::int64_t words = (std::max(first, second) + 3) / 4;
    list.push_back({"layer." + std::to_string(i), DType::kF32, {words}});
  }
  return list;
}

double Block::flops_per_token(std::int64_t length) const {
  return parts_->mixer->flops_per_token(length) + parts_->feed_forward->flops_per_token(length);
}

void Block::forward(Queue& queue, const Batch& batch, const View& x, const View& out,
                    const LayerMemory& memory) const {
  forward_mixer(queue, batch, x, memory);
  forward_feed_forward(queue, batch, out, memory);
}

void Block::forward_mixer(Queue& queue, const Batch& batch, const View& x,
                          const LayerMemory& memory) const {
  if (batch.shape.rows() == 0) return;
  const Parts& p = *parts_;
  const View& normed = memory.scratch[kNormed];
  const View& middle = memory.saved[kMiddle];
  rms_norm(queue, x, memory.parameters[0], p.epsilon, normed, memory.saved[kInverseInput]);
  p.mixer->forward(queue, batch, normed, middle, p.of_mixer(memory));
  add(queue, middle, x);
}

// A rank without tokens computes its experts for the others.
void Block::forward_feed_forward(Queue& queue, const Batch& batch, const View& out,
                                 const LayerMemory& memory) const {
  const Parts& p = *parts_;
  const View& normed = memory.scratch[kNormed];
  const View& middle = memory.saved[kMiddle];
  const bool has_tokens = batch.shape.rows() > 0;
  if (has_tokens) {
    rms_norm(queue, middle, memory.parameters[p.mixer_parameters + 1], p.epsilon, normed,
             memory.saved[kInversePost]);
  }
  p.feed_forward->forward(queue, batch, normed, out, p.of_feed_forward(memory));
  if (has_tokens) add(queue, out, middle);
}

void Block::backward_feed_forward(Queue& queue, const Batch& batch, const View& d_x,
                                  std::span<const View> d_parameters,
                                  const LayerMemory& memory) const {
  const Parts& p = *parts_;
  const View& normed = memory.scratch[kNormed];
  const View& d_normed = memory.scratch[kDNormed];
  const View& partial = memory.scratch[kPartial];
  const View& middle = memory.saved[kMiddle];
  const std::size_t post = p.mixer_parameters + 1;
  const std::span<const View> d_feed_forward = d_parameters.subspan(post + 1);
  if (batch.shape.rows() == 0) {
    p.feed_forward->backward(queue, batch, normed, d_x, d_normed, d_feed_forward,
                             p.of_feed_forward(memory));
    return;
  }
  const View& post_weight = memory.parameters[post];
  const View& post_inverse = memory.saved[kInversePost];
  rms_norm_again(queue, middle, post_weight, post_inverse, normed);
  p.feed_forward->backward(queue, batch, normed,
                           converted(queue, d_x, p.dtype, memory.scratch[kRounded]), d_normed,
                           d_feed_forward, p.of_feed_forward(memory));
  rms_norm_backward(queue, middle, post_weight, post_inverse, d_normed, d_x, true, partial);
  rms_norm_weight_gradient(queue, partial, d_parameters[post]);
}

void Block::backward_mixer(Queue& queue, const Batch& batch, const View& x, const View& d_x,
                           std::span<const View> d_parameters, const LayerMemory& memory) const {
  if (batch.shape.rows() == 0) return;
  const Parts& p = *parts_;
  const View& normed = memory.scratch[kNormed];
  const View& d_normed = memory.scratch[kDNormed];
  const View& partial = memory.scratch[kPartial];
  const View& input_weight = memory.parameters[0];
  const View& input_inverse = memory.saved[kInverseInput];
  rms_norm_again(queue, x, input_weight, input_inverse, normed);
  p.mixer->backward(queue, batch, normed, converted(queue, d_x, p.dtype, memory.scratch[kRounded]),
                    d_normed, d_parameters.subspan(1, p.mixer_parameters), p.of_mixer(memory));
  rms_norm_backward(queue, x, input_weight, input_inverse, d_normed, d_x, true, partial);
  rms_norm_weight_gradient(queue, partial, d_parameters[0]);
}

}  // namespace tessera
