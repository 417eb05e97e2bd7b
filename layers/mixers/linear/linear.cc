#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/mixers/linear/linear.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/mixers/linear/linear.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// y = SiLU(x) * factor
void silu(Elements x, float factor, Elements y, std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), factor);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector value = load(x + i, count);
    store(hn::Mul(hn::Mul(value, sigmoid(value)), by), y + i, count);
  });
}

// d_x = d_y * factor * s (1 + x (1 - s)), s = sigmoid(x), in place of d_y.
void silu_backward(Elements x, float factor, Elements d_y, std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), factor), one = hn::Set(Floats(), 1.0F);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector value = load(x + i, count);
    const FloatVector s = sigmoid(value);
    const FloatVector slope = hn::Mul(s, hn::MulAdd(value, hn::Sub(one, s), one));
    store(hn::Mul(hn::Mul(load(d_y + i, count), by), slope), d_y + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <utility>

#include "layers/attention/softmax_attention.h"
#include "layers/configuration.h"
#include "layers/gated_norm/gated_norm.h"
#include "layers/mixers/mechanism.h"
#include "layers/rms_norm/rms_norm.h"
#include "layers/scan/scan.h"
#include "layers/scan/steps.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(silu);
HWY_EXPORT(silu_backward);

constexpr std::int64_t kChunk = 128;
constexpr std::int64_t kPiece = 16384;

void silu_of(Queue& queue, const View& x, float factor, const View& y) {
  const Elements from = elements(x), to = elements(y);
  const std::int64_t count = x.count();
  queue.parallel_for(pieces_of(count, kPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(silu)
    (from + begin, factor, to + begin, std::min(kPiece, count - begin));
  });
}

void silu_of_backward(Queue& queue, const View& x, float factor, const View& d_y) {
  const Elements from = elements(x), to = elements(d_y);
  const std::int64_t count = x.count();
  queue.parallel_for(pieces_of(count, kPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(silu_backward)
    (from + begin, factor, to + begin, std::min(kPiece, count - begin));
  });
}

// q, k, v and steps from the input, then the scan. Parameters: q_proj.weight [H*dh, d],
// k_proj.weight, v_proj.weight [Hk*dh, d], dt_proj.weight [H, d], A_log, dt_bias [H].
// Saved: q and k before SiLU, v, the steps before softplus, the chunks' states.
class GatedRecurrence : public Mechanism {
 public:
  GatedRecurrence(const AttentionConfig& config, const MixerContext& context,
                  const std::string& path)
      : width_(context.model.width()),
        heads_(require_range(path + ".heads", config.heads(), 1, kMaxHeads)),
        key_heads_(require_range(path + ".key_value_heads", config.key_value_heads(), 1, heads_)),
        head_width_(require_range(path + ".head_width", config.head_width(), 1, kMaxHeadWidth)),
        dtype_(context.compute),
        deviation_(context.model.init_deviation()),
        scale_(static_cast<float>(1.0 / std::sqrt(static_cast<double>(head_width_)))),
        scan_((check(config, path), ScanConfig{heads_, heads_, key_heads_, key_heads_, head_width_,
                                               head_width_, kChunk, dtype_})) {}

  std::int64_t out_width() const override { return heads_ * head_width_; }

  std::vector<ParameterSpec> parameters() const override {
    const Init normal = {Init::Kind::kNormal, deviation_};
    return {{"q_proj.weight", {heads_ * head_width_, width_}, normal},
            {"k_proj.weight", {key_heads_ * head_width_, width_}, normal},
            {"v_proj.weight", {key_heads_ * head_width_, width_}, normal},
            {"dt_proj.weight", {heads_, width_}, normal},
            decay_rate_parameter(heads_),
            step_bias_parameter(heads_)};
  }

  std::vector<BufferSpec> saved(BatchShape shape) const override {
    std::vector<BufferSpec> list = {{"q", dtype_, query_shape(shape)},
                                    {"k", dtype_, key_shape(shape)},
                                    {"v", dtype_, key_shape(shape)},
                                    {"dt", DType::kF32, step_shape(shape)}};
    for (BufferSpec& buffer : scan_.saved(shape)) list.push_back(std::move(buffer));
    return list;
  }

  std::vector<BufferSpec> scratch(BatchShape shape) const override {
    std::vector<BufferSpec> list = {
        {"active_q", dtype_, query_shape(shape)},
        {"active_k", dtype_, key_shape(shape)},
        {"d_q", dtype_, query_shape(shape)},
        {"d_k", dtype_, key_shape(shape)},
        {"d_v", dtype_, key_shape(shape)},
        {"steps", DType::kF32, step_shape(shape)},
        {"log_decays", DType::kF32, step_shape(shape)},
        {"d_steps", DType::kF32, step_shape(shape)},
        {"d_log_decays", DType::kF32, step_shape(shape)},
        {"d_dt", dtype_, step_shape(shape)},
        {"partial_steps", DType::kF32, scan_steps_partial(shape.rows(), heads_)}};
    for (BufferSpec& buffer : scan_.scratch(shape)) list.push_back(std::move(buffer));
    return list;
  }

  double flops_per_token(std::int64_t length) const override {
    const auto columns = static_cast<double>((heads_ + 2 * key_heads_) * head_width_ + heads_);
    return 2 * static_cast<double>(width_) * columns + scan_.flops_per_token(length);
  }

  std::vector<LayerSize> sizes() const override { return scan_.sizes(); }

  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override {
    const std::span<const View> p = memory.parameters, saved = memory.saved;
    const Matrix x = matrix(in);
    linear_forward(queue, x, matrix(p[kWq]), matrix(saved[kQ]));
    linear_forward(queue, x, matrix(p[kWk]), matrix(saved[kK]));
    linear_forward(queue, x, matrix(p[kWv]), matrix(saved[kV]));
    linear_forward(queue, x, matrix(p[kWdt]), matrix(saved[kDt]));
    const ScanInput input = activate(queue, batch.shape, memory);
    scan_.forward(queue, batch, input, out, saved.subspan(kStates), memory.scratch.subspan(kScan));
  }

  void backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override {
    const std::span<const View> p = memory.parameters, saved = memory.saved,
                                scratch = memory.scratch;
    const BatchShape shape = batch.shape;
    const Matrix x = matrix(in), d_x = matrix(d_in);
    const View d_q = shaped(scratch[kDQ], dtype_, query_shape(shape));
    const View d_k = shaped(scratch[kDK], dtype_, key_shape(shape));
    const View d_v = shaped(scratch[kDV], dtype_, key_shape(shape));
    const View d_steps = shaped(scratch[kDSteps], DType::kF32, step_shape(shape));
    const View d_log_decays = shaped(scratch[kDLogDecays], DType::kF32, step_shape(shape));
    const View d_dt = shaped(scratch[kDDt], dtype_, step_shape(shape));
    const ScanInput input = activate(queue, shape, memory);
    scan_.backward(queue, batch, input, d_out, {{d_q}, {d_k}, {d_v}, d_steps, d_log_decays, {}},
                   saved.subspan(kStates), scratch.subspan(kScan));
    silu_of_backward(queue, saved[kQ], scale_, d_q);
    silu_of_backward(queue, saved[kK], 1.0F, d_k);
    scan_steps_backward(queue, saved[kDt], p[kALog], p[kDtBias], d_steps, d_log_decays, d_dt,
                        d_parameters[kALog], d_parameters[kDtBias], scratch[kPartialSteps]);
    const std::pair<Parameter, View> projections[] = {
        {kWq, d_q}, {kWk, d_k}, {kWv, d_v}, {kWdt, d_dt}};
    for (const auto& [parameter, gradient] : projections) {
      linear_backward_weight(queue, matrix(gradient), x, matrix(d_parameters[parameter]), false);
      linear_backward_input(queue, matrix(gradient), matrix(p[parameter]), d_x,
                            accumulate || parameter != kWq);
    }
  }

 private:
  // Places in the lists that are declared.
  enum Parameter : std::size_t { kWq, kWk, kWv, kWdt, kALog, kDtBias };
  enum Saved : std::size_t { kQ, kK, kV, kDt, kStates };
  enum Scratch : std::size_t {
    kActiveQ,
    kActiveK,
    kDQ,
    kDK,
    kDV,
    kSteps,
    kLogDecays,
    kDSteps,
    kDLogDecays,
    kDDt,
    kPartialSteps,
    kScan
  };

  void check(const AttentionConfig& config, const std::string& path) const {
    if (heads_ % key_heads_ != 0) {
      refuse(path + ".key_value_heads", "must divide heads, which is " + std::to_string(heads_),
             std::to_string(key_heads_));
    }
    // A resolved config states the defaults.
    const AttentionConfig& defaults = AttentionConfig::default_instance();
    const bool rotates = config.rope_theta() != defaults.rope_theta();
    if (rotates || config.query_key_norm()) {
      refuse(path + (rotates ? ".rope_theta" : ".query_key_norm"),
             "must not be set: the recurrence has neither rotation nor norm", "set");
    }
  }
  Shape query_shape(BatchShape shape) const { return {shape.rows(), heads_ * head_width_}; }
  Shape key_shape(BatchShape shape) const { return {shape.rows(), key_heads_ * head_width_}; }
  Shape step_shape(BatchShape shape) const { return {shape.rows(), heads_}; }

  // What the scan runs over, made from what is saved.
  ScanInput activate(Queue& queue, BatchShape shape, const LayerMemory& memory) const {
    const std::span<const View> p = memory.parameters, saved = memory.saved,
                                scratch = memory.scratch;
    const View q = shaped(scratch[kActiveQ], dtype_, query_shape(shape));
    const View k = shaped(scratch[kActiveK], dtype_, key_shape(shape));
    const View steps = shaped(scratch[kSteps], DType::kF32, step_shape(shape));
    const View log_decays = shaped(scratch[kLogDecays], DType::kF32, step_shape(shape));
    silu_of(queue, saved[kQ], scale_, q);
    silu_of(queue, saved[kK], 1.0F, k);
    scan_steps(queue, saved[kDt], p[kALog], p[kDtBias], steps, log_decays);
    return {{q}, {k}, {saved[kV]}, steps, log_decays, {}};
  }

  std::int64_t width_, heads_, key_heads_, head_width_;
  DType dtype_;
  double deviation_;
  float scale_;  // of the outputs; q carries it
  Scan scan_;
};

// RMSNorm_head(o * sigmoid(x W_g)) of another mechanism's o. Parameters: the other's, then
// g_proj.weight [H*dh, d], norm.weight [dh]. Saved: o, x W_g, the norm's inverse_rms, then what the
// other saves.
class HeadGate : public Mechanism {
 public:
  HeadGate(std::unique_ptr<Mechanism> inner, std::int64_t head_width, const MixerContext& context)
      : inner_(std::move(inner)),
        width_(context.model.width()),
        norm_{inner_->out_width(), head_width, Gate::kSigmoid, kNormEpsilon},
        dtype_(context.compute),
        deviation_(context.model.init_deviation()) {}

  std::int64_t out_width() const override { return norm_.width; }

  std::vector<ParameterSpec> parameters() const override {
    std::vector<ParameterSpec> list = inner_->parameters();
    list.push_back({"g_proj.weight", {norm_.width, width_}, {Init::Kind::kNormal, deviation_}});
    list.push_back({"norm.weight", {norm_.group}, {Init::Kind::kConstant, 1.0}, false});
    return list;
  }

  std::vector<BufferSpec> saved(BatchShape shape) const override {
    std::vector<BufferSpec> list = {{"o", dtype_, rows(shape)},
                                    {"gate", dtype_, rows(shape)},
                                    {"inverse_rms", DType::kF32, {shape.rows(), norm_.groups()}}};
    for (BufferSpec& buffer : inner_->saved(shape)) list.push_back(std::move(buffer));
    return list;
  }

  std::vector<BufferSpec> scratch(BatchShape shape) const override {
    std::vector<BufferSpec> list = {
        {"d_gate", dtype_, rows(shape)},
        {"partial_norm", DType::kF32, {rms_norm_blocks(shape.rows()), norm_.group}}};
    for (BufferSpec& buffer : inner_->scratch(shape)) list.push_back(std::move(buffer));
    return list;
  }

  double flops_per_token(std::int64_t length) const override {
    return inner_->flops_per_token(length) +
           2 * static_cast<double>(width_) * static_cast<double>(norm_.width);
  }

  std::vector<LayerSize> sizes() const override { return inner_->sizes(); }

  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override {
    const View& w_gate = memory.parameters[memory.parameters.size() - 2];
    const std::span<const View> saved = memory.saved;
    inner_->forward(queue, batch, in, saved[kO], inner(memory));
    linear_forward(queue, matrix(in), matrix(w_gate), matrix(saved[kGate]));
    gated_norm(queue, norm_, saved[kO], saved[kGate], memory.parameters.back(), out,
               saved[kInverseRms]);
  }

  void backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override {
    const std::size_t at_gate = d_parameters.size() - 2;
    const std::span<const View> saved = memory.saved;
    const View d_gate = shaped(memory.scratch[kDGate], dtype_, rows(batch.shape));
    // In place: d_out becomes the gradient of o.
    gated_norm_backward(queue, norm_, saved[kO], saved[kGate], memory.parameters.back(),
                        saved[kInverseRms], d_out, d_out, d_gate, d_parameters.back(),
                        memory.scratch[kPartial]);
    linear_backward_weight(queue, matrix(d_gate), matrix(in), matrix(d_parameters[at_gate]), false);
    linear_backward_input(queue, matrix(d_gate), matrix(memory.parameters[at_gate]), matrix(d_in),
                          accumulate);
    inner_->backward(queue, batch, in, saved[kO], d_out, d_in, true, d_parameters.first(at_gate),
                     inner(memory));
  }

 private:
  static constexpr double kNormEpsilon = 1e-6;
  enum Saved : std::size_t { kO, kGate, kInverseRms, kInnerSaved };
  enum Scratch : std::size_t { kDGate, kPartial, kInnerScratch };

  Shape rows(BatchShape shape) const { return {shape.rows(), norm_.width}; }
  static LayerMemory inner(const LayerMemory& memory) {
    return {memory.parameters.first(memory.parameters.size() - 2),
            memory.saved.subspan(kInnerSaved), memory.scratch.subspan(kInnerScratch)};
  }

  std::unique_ptr<Mechanism> inner_;
  std::int64_t width_;
  GatedNormConfig norm_;
  DType dtype_;
  double deviation_;
};

}  // namespace

std::unique_ptr<Layer> make_linear(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path) {
  const LinearConfig& linear = config.linear();
  const std::string attention = path + ".attention";
  std::unique_ptr<Mechanism> inner;
  if (linear.kind() == LinearConfig::GATED_SOFTMAX) {
    inner = std::make_unique<SoftmaxAttention>(linear.attention(), Visibility::kNoWindow, context,
                                               attention);
  } else {
    inner = std::make_unique<GatedRecurrence>(linear.attention(), context, attention);
  }
  return std::make_unique<ProjectedMixer>(
      std::make_unique<HeadGate>(std::move(inner), linear.attention().head_width(), context),
      context.model.width(), context.compute, context.output_deviation());
}

}  // namespace tessera
#endif
