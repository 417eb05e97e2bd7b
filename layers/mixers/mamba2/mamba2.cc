#include "layers/mixers/mamba2/mamba2.h"

#include <utility>

#include "layers/configuration.h"
#include "layers/convolution/convolution.h"
#include "layers/gated_norm/gated_norm.h"
#include "layers/mixers/mechanism.h"
#include "layers/rms_norm/rms_norm.h"
#include "layers/scan/scan.h"
#include "layers/scan/steps.h"
#include "runtime/products.h"

namespace tessera {
namespace {

constexpr std::int64_t kChunk = 256;
constexpr std::int64_t kTaps = 4;
constexpr double kNormEpsilon = 1e-5;
constexpr std::int64_t kMaxExpand = 64;

std::int64_t heads_of(const Mamba2Config& config, std::int64_t width, const std::string& path) {
  const std::int64_t inner =
      require_range(path + ".expand", config.expand(), 1, kMaxExpand) * width;
  const std::int64_t head_width =
      require_range(path + ".head_width", config.head_width(), 1, kMaxHeadWidth);
  if (inner % head_width != 0) {
    refuse(path + ".head_width", "must divide the inner width, which is " + std::to_string(inner),
           std::to_string(head_width));
  }
  const std::int64_t heads = inner / head_width;
  require_range(path + ".state_width", config.state_width(), 1, kMaxHeadWidth);
  require_range(path + ".groups", config.groups(), 1, heads);
  if (heads % config.groups() != 0) {
    refuse(path + ".groups", "must divide the number of heads, which is " + std::to_string(heads),
           std::to_string(config.groups()));
  }
  return heads;
}

// Parameters: in_proj.weight [2 d_in + 2 g n + H, d], its rows [z | x | B | C | dt];
// conv1d.weight [d_in + 2 g n, 4], conv1d.bias; A_log, D, dt_bias [H]; norm.weight [d_in].
// Saved: z, (x, B, C) before the convolution, dt before softplus, y, the norm's inverse_rms, the
// chunks' states.
class Mamba2 : public Mechanism {
 public:
  Mamba2(const Mamba2Config& config, const MixerContext& context, const std::string& path)
      : width_(context.model.width()),
        heads_(heads_of(config, width_, path)),
        head_width_(config.head_width()),
        groups_(config.groups()),
        state_width_(config.state_width()),
        inner_(heads_ * head_width_),
        channels_(inner_ + 2 * groups_ * state_width_),
        dtype_(context.compute),
        deviation_(context.model.init_deviation()),
        convolution_{channels_, kTaps, true, true},
        norm_{inner_, inner_ / groups_, Gate::kSilu, kNormEpsilon},
        scan_(ScanConfig{heads_, groups_, groups_, heads_, state_width_, head_width_, kChunk,
                         dtype_}) {}

  std::int64_t out_width() const override { return inner_; }

  std::vector<ParameterSpec> parameters() const override {
    return {{"in_proj.weight",
             {inner_ + channels_ + heads_, width_},
             {Init::Kind::kNormal, deviation_}},
            {"conv1d.weight", convolution_.weight(), convolution_.init()},
            {"conv1d.bias", {channels_}, {Init::Kind::kConstant, 0.0}, false},
            decay_rate_parameter(heads_),
            {"D", {heads_}, {Init::Kind::kConstant, 1.0}, false, true},
            step_bias_parameter(heads_),
            {"norm.weight", {inner_}, {Init::Kind::kConstant, 1.0}, false}};
  }

  std::vector<BufferSpec> saved(BatchShape shape) const override {
    std::vector<BufferSpec> list = {{"z", dtype_, inner_shape(shape)},
                                    {"xbc", dtype_, channel_shape(shape)},
                                    {"dt", DType::kF32, step_shape(shape)},
                                    {"y", dtype_, inner_shape(shape)},
                                    {"inverse_rms", DType::kF32, {shape.rows(), groups_}}};
    for (BufferSpec& buffer : scan_.saved(shape)) list.push_back(std::move(buffer));
    return list;
  }

  std::vector<BufferSpec> scratch(BatchShape shape) const override {
    std::vector<BufferSpec> list = {
        {"active_xbc", dtype_, channel_shape(shape)},
        {"d_active_xbc", dtype_, channel_shape(shape)},
        {"d_z", dtype_, inner_shape(shape)},
        {"steps", DType::kF32, step_shape(shape)},
        {"log_decays", DType::kF32, step_shape(shape)},
        {"d_steps", DType::kF32, step_shape(shape)},
        {"d_log_decays", DType::kF32, step_shape(shape)},
        {"d_dt", dtype_, step_shape(shape)},
        {"partial_steps", DType::kF32, scan_steps_partial(shape.rows(), heads_)},
        {"partial_norm", DType::kF32, {rms_norm_blocks(shape.rows()), inner_}},
        {"convolution", DType::kF32, convolution_.scratch(shape)}};
    for (BufferSpec& buffer : scan_.scratch(shape)) list.push_back(std::move(buffer));
    return list;
  }

  double flops_per_token(std::int64_t length) const override {
    return 2 * static_cast<double>(width_) * static_cast<double>(inner_ + channels_ + heads_) +
           convolution_.flops_per_token() + scan_.flops_per_token(length);
  }

  std::vector<LayerSize> sizes() const override {
    std::vector<LayerSize> list = scan_.sizes();
    list.push_back({"taps", kTaps});
    return list;
  }

  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override {
    const std::span<const View> p = memory.parameters, saved = memory.saved;
    const Matrix x = matrix(in);
    linear_forward(queue, x, matrix(z_rows(p[kInProj])), matrix(saved[kZ]));
    linear_forward(queue, x, matrix(xbc_rows(p[kInProj])), matrix(saved[kXbc]));
    linear_forward(queue, x, matrix(dt_rows(p[kInProj])), matrix(saved[kDt]));
    const ScanInput input = activate(queue, batch, memory);
    scan_.forward(queue, batch, input, saved[kY], saved.subspan(kStates),
                  memory.scratch.subspan(kScan));
    gated_norm(queue, norm_, saved[kY], saved[kZ], p[kNorm], out, saved[kInverseRms]);
  }

  void backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override {
    const std::span<const View> p = memory.parameters, saved = memory.saved,
                                scratch = memory.scratch;
    const BatchShape shape = batch.shape;
    const Matrix x = matrix(in), d_x = matrix(d_in);
    const View d_active = shaped(scratch[kDActive], dtype_, channel_shape(shape));
    const View d_z = shaped(scratch[kDZ], dtype_, inner_shape(shape));
    const View d_steps = shaped(scratch[kDSteps], DType::kF32, step_shape(shape));
    const View d_log_decays = shaped(scratch[kDLogDecays], DType::kF32, step_shape(shape));
    const View d_dt = shaped(scratch[kDDt], dtype_, step_shape(shape));

    // In place: d_out becomes the gradient of y.
    gated_norm_backward(queue, norm_, saved[kY], saved[kZ], p[kNorm], saved[kInverseRms], d_out,
                        d_out, d_z, d_parameters[kNorm], scratch[kPartialNorm]);
    const ScanInput input = activate(queue, batch, memory);
    const ScanGradient gradient = {columns_c(d_active), columns_b(d_active), {d_active}, d_steps,
                                   d_log_decays,        d_parameters[kD]};
    scan_.backward(queue, batch, input, d_out, gradient, saved.subspan(kStates),
                   scratch.subspan(kScan));
    // The scan's inputs have been used: their memory takes the gradient before the convolution.
    const View d_xbc = shaped(scratch[kActive], dtype_, channel_shape(shape));
    convolution_backward(queue, convolution_, shape, batch.segments, saved[kXbc], p[kConvolution],
                         p[kConvolutionBias], d_active, d_xbc, d_parameters[kConvolution],
                         d_parameters[kConvolutionBias], scratch[kConvolutionRoom]);
    scan_steps_backward(queue, saved[kDt], p[kALog], p[kDtBias], d_steps, d_log_decays, d_dt,
                        d_parameters[kALog], d_parameters[kDtBias], scratch[kPartialSteps]);

    const View& w = p[kInProj];
    const View& d_w = d_parameters[kInProj];
    linear_backward_weight(queue, matrix(d_z), x, matrix(z_rows(d_w)), false);
    linear_backward_weight(queue, matrix(d_xbc), x, matrix(xbc_rows(d_w)), false);
    linear_backward_weight(queue, matrix(d_dt), x, matrix(dt_rows(d_w)), false);
    linear_backward_input(queue, matrix(d_z), matrix(z_rows(w)), d_x, accumulate);
    linear_backward_input(queue, matrix(d_xbc), matrix(xbc_rows(w)), d_x, true);
    linear_backward_input(queue, matrix(d_dt), matrix(dt_rows(w)), d_x, true);
  }

 private:
  // Places in the lists that are declared.
  enum Parameter : std::size_t {
    kInProj,
    kConvolution,
    kConvolutionBias,
    kALog,
    kD,
    kDtBias,
    kNorm
  };
  enum Saved : std::size_t { kZ, kXbc, kDt, kY, kInverseRms, kStates };
  enum Scratch : std::size_t {
    kActive,
    kDActive,
    kDZ,
    kSteps,
    kLogDecays,
    kDSteps,
    kDLogDecays,
    kDDt,
    kPartialSteps,
    kPartialNorm,
    kConvolutionRoom,
    kScan
  };

  Shape inner_shape(BatchShape shape) const { return {shape.rows(), inner_}; }
  Shape channel_shape(BatchShape shape) const { return {shape.rows(), channels_}; }
  Shape step_shape(BatchShape shape) const { return {shape.rows(), heads_}; }
  View z_rows(const View& w) const { return w.slice(0, inner_); }
  View xbc_rows(const View& w) const { return w.slice(inner_, inner_ + channels_); }
  View dt_rows(const View& w) const {
    return w.slice(inner_ + channels_, inner_ + channels_ + heads_);
  }
  Columns columns_b(const View& xbc) const { return {xbc, inner_}; }
  Columns columns_c(const View& xbc) const { return {xbc, inner_ + groups_ * state_width_}; }

  // What the scan runs over, made from what is saved: x is v, B is k, C is q.
  ScanInput activate(Queue& queue, const Batch& batch, const LayerMemory& memory) const {
    const std::span<const View> p = memory.parameters, saved = memory.saved,
                                scratch = memory.scratch;
    const View xbc = shaped(scratch[kActive], dtype_, channel_shape(batch.shape));
    const View steps = shaped(scratch[kSteps], DType::kF32, step_shape(batch.shape));
    const View log_decays = shaped(scratch[kLogDecays], DType::kF32, step_shape(batch.shape));
    convolution_forward(queue, convolution_, batch.shape, batch.segments, saved[kXbc],
                        p[kConvolution], p[kConvolutionBias], xbc, scratch[kConvolutionRoom]);
    scan_steps(queue, saved[kDt], p[kALog], p[kDtBias], steps, log_decays);
    return {columns_c(xbc), columns_b(xbc), {xbc}, steps, log_decays, p[kD]};
  }

  std::int64_t width_, heads_, head_width_, groups_, state_width_;
  std::int64_t inner_;     // d_in
  std::int64_t channels_;  // of the convolution
  DType dtype_;
  double deviation_;
  ConvolutionConfig convolution_;
  GatedNormConfig norm_;
  Scan scan_;
};

}  // namespace

std::unique_ptr<Layer> make_mamba2(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path) {
  return std::make_unique<ProjectedMixer>(std::make_unique<Mamba2>(config.mamba2(), context, path),
                                          context.model.width(), context.compute,
                                          context.output_deviation(), "out_proj.weight");
}

}  // namespace tessera
