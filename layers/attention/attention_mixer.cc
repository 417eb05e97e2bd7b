#include "layers/attention/attention_mixer.h"

#include <cmath>

#include "layers/configuration.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/products.h"

namespace tessera {
namespace {

constexpr double kNormEpsilon = 1e-6;

// Places in the lists that the mixer declares.
enum Parameter : std::size_t { kWq, kWk, kWv, kWo, kNormQ, kNormK };
enum Saved : std::size_t { kQ, kK, kV, kOut, kLogSumExp, kRawQ, kRawK, kInverseQ, kInverseK };
enum Scratch : std::size_t {
  kRowsQ,  // q before rotation; d_out of the attention; d_q by row
  kDOutByHead,
  kDQ,
  kDK,
  kDV,
  kRowsK,
  kRowsV,
  kDelta,
  kTiles,
  kPartialQ,
  kPartialK
};

}  // namespace

AttentionMixer::AttentionMixer(const AttentionConfig& config, std::int64_t window,
                               const MixerContext& context, const std::string& path)
    : width_(context.model.width()),
      heads_(require_range(path + ".heads", config.heads(), 1, kMaxHeads)),
      key_value_heads_(
          require_range(path + ".key_value_heads", config.key_value_heads(), 1, heads_)),
      head_width_(require_range(path + ".head_width", config.head_width(), 2, kMaxHeadWidth)),
      window_(window),
      norm_(config.query_key_norm()),
      dtype_(context.compute),
      scale_(1.0 / std::sqrt(static_cast<double>(head_width_))),
      deviation_(context.model.init_deviation()),
      output_deviation_(context.output_deviation()) {
  if (heads_ % key_value_heads_ != 0) {
    refuse(path + ".key_value_heads", "must divide heads, which is " + std::to_string(heads_),
           std::to_string(key_value_heads_));
  }
  if (head_width_ % 2 != 0) {
    refuse(path + ".head_width", "must be even for the rotation", std::to_string(head_width_));
  }
  require_positive(path + ".rope_theta", config.rope_theta());
  rope_ = shared_rope_table(context.model.length(), head_width_, config.rope_theta());
}

AttentionShape AttentionMixer::shape_of(BatchShape batch) const {
  return {batch, heads_, key_value_heads_, head_width_, window_};
}

std::vector<ParameterSpec> AttentionMixer::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  const std::int64_t q = heads_ * head_width_;
  const std::int64_t kv = key_value_heads_ * head_width_;
  std::vector<ParameterSpec> list = {
      {"q_proj.weight", {q, width_}, normal, true},
      {"k_proj.weight", {kv, width_}, normal, true},
      {"v_proj.weight", {kv, width_}, normal, true},
      {"o_proj.weight", {width_, q}, {Init::Kind::kNormal, output_deviation_}, true}};
  if (norm_) {
    const Init one = {Init::Kind::kConstant, 1.0};
    list.push_back({"q_norm.weight", {head_width_}, one, false});
    list.push_back({"k_norm.weight", {head_width_}, one, false});
  }
  return list;
}

std::vector<BufferSpec> AttentionMixer::saved(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t rows = batch.rows();
  std::vector<BufferSpec> list = {{"q", dtype_, shape.queries()},
                                  {"k", dtype_, shape.keys()},
                                  {"v", dtype_, shape.keys()},
                                  {"attention", dtype_, {rows, heads_ * head_width_}},
                                  {"log_sum_exp", DType::kF32, shape.rows()}};
  if (norm_) {
    list.push_back({"q_raw", dtype_, {rows * heads_, head_width_}});
    list.push_back({"k_raw", dtype_, {rows * key_value_heads_, head_width_}});
    list.push_back({"q_inverse_rms", DType::kF32, {rows * heads_}});
    list.push_back({"k_inverse_rms", DType::kF32, {rows * key_value_heads_}});
  }
  return list;
}

std::vector<BufferSpec> AttentionMixer::scratch(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t rows = batch.rows();
  std::vector<BufferSpec> list = {{"rows_q", dtype_, {rows, heads_ * head_width_}},
                                  {"d_out_by_head", dtype_, shape.queries()},
                                  {"d_q", DType::kF32, shape.queries()},
                                  {"d_k", DType::kF32, shape.queries()},
                                  {"d_v", DType::kF32, shape.queries()},
                                  {"rows_k", dtype_, {rows, key_value_heads_ * head_width_}},
                                  {"rows_v", dtype_, {rows, key_value_heads_ * head_width_}},
                                  {"delta", DType::kF32, shape.rows()},
                                  {"tiles", DType::kF32, shape.tile_room()}};
  if (norm_) {
    list.push_back({"partial_q_norm", DType::kF32, {rms_norm_blocks(rows * heads_), head_width_}});
    list.push_back(
        {"partial_k_norm", DType::kF32, {rms_norm_blocks(rows * key_value_heads_), head_width_}});
  }
  return list;
}

double AttentionMixer::flops_per_token(std::int64_t length) const {
  const auto d = static_cast<double>(width_);
  const auto q = static_cast<double>(heads_ * head_width_);
  const auto kv = static_cast<double>(key_value_heads_ * head_width_);
  // Four projections; scores and their product with the values over the keys that are visible.
  return 2 * d * (2 * q + 2 * kv) + 4 * q * mean_visible_keys(length, window_);
}

void AttentionMixer::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                             const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const Matrix x = matrix(in);
  const Shape q_rows = {batch.shape.rows(), heads_ * head_width_};
  const Shape kv_rows = {batch.shape.rows(), key_value_heads_ * head_width_};
  const View rows_q = shaped(scratch[kRowsQ], dtype_, q_rows);
  const View rows_k = shaped(scratch[kRowsK], dtype_, kv_rows);
  const View rows_v = shaped(scratch[kRowsV], dtype_, kv_rows);
  if (norm_) {
    linear_forward(queue, x, matrix(p[kWq]), matrix(saved[kRawQ].reshaped(rows_q.shape())));
    linear_forward(queue, x, matrix(p[kWk]), matrix(saved[kRawK].reshaped(rows_k.shape())));
    rms_norm(queue, saved[kRawQ], p[kNormQ], kNormEpsilon, rows_q, saved[kInverseQ]);
    rms_norm(queue, saved[kRawK], p[kNormK], kNormEpsilon, rows_k, saved[kInverseK]);
  } else {
    linear_forward(queue, x, matrix(p[kWq]), matrix(rows_q));
    linear_forward(queue, x, matrix(p[kWk]), matrix(rows_k));
  }
  linear_forward(queue, x, matrix(p[kWv]), matrix(rows_v));
  split_heads(queue, batch.shape, rope_.get(), rows_q, saved[kQ]);
  split_heads(queue, batch.shape, rope_.get(), rows_k, saved[kK]);
  split_heads(queue, batch.shape, nullptr, rows_v, saved[kV]);
  attention_forward(queue, shape, batch.segments, scale_, saved[kQ], saved[kK], saved[kV],
                    saved[kOut], saved[kLogSumExp],
                    shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
  linear_forward(queue, matrix(saved[kOut]), matrix(p[kWo]), matrix(out));
}

void AttentionMixer::backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                              const View& d_in, std::span<const View> d_parameters,
                              const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const Matrix x = matrix(in), d_y = matrix(d_out), d_x = matrix(d_in);
  const Shape q_rows = {batch.shape.rows(), heads_ * head_width_};
  const Shape kv_rows = {batch.shape.rows(), key_value_heads_ * head_width_};
  const View rows_q = shaped(scratch[kRowsQ], dtype_, q_rows);
  const View rows_k = shaped(scratch[kRowsK], dtype_, kv_rows);
  const View rows_v = shaped(scratch[kRowsV], dtype_, kv_rows);

  const View d_q = shaped(scratch[kDQ], DType::kF32, shape.queries());
  const View d_k = shaped(scratch[kDK], DType::kF32, shape.queries());
  const View d_v = shaped(scratch[kDV], DType::kF32, shape.queries());

  linear_backward_weight(queue, d_y, matrix(saved[kOut]), matrix(d_parameters[kWo]), false);
  linear_backward_input(queue, d_y, matrix(p[kWo]), matrix(rows_q), false);
  attention_backward(queue, shape, batch.segments, scale_, saved[kQ], saved[kK], saved[kV],
                     saved[kOut], saved[kLogSumExp], rows_q,
                     shaped(scratch[kDOutByHead], dtype_, shape.queries()),
                     shaped(scratch[kDelta], DType::kF32, shape.rows()), d_q, d_k, d_v,
                     shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
  merge_heads(queue, batch.shape, rope_.get(), 1, d_q, rows_q);
  merge_heads(queue, batch.shape, rope_.get(), shape.group(), d_k, rows_k);
  merge_heads(queue, batch.shape, nullptr, shape.group(), d_v, rows_v);
  if (norm_) {
    const View partial_q = shaped(scratch[kPartialQ], DType::kF32,
                                  {rms_norm_blocks(batch.shape.rows() * heads_), head_width_});
    const View partial_k =
        shaped(scratch[kPartialK], DType::kF32,
               {rms_norm_blocks(batch.shape.rows() * key_value_heads_), head_width_});
    rms_norm_backward(queue, saved[kRawQ], p[kNormQ], saved[kInverseQ], rows_q, rows_q, false,
                      partial_q);
    rms_norm_backward(queue, saved[kRawK], p[kNormK], saved[kInverseK], rows_k, rows_k, false,
                      partial_k);
    rms_norm_weight_gradient(queue, partial_q, d_parameters[kNormQ]);
    rms_norm_weight_gradient(queue, partial_k, d_parameters[kNormK]);
  }
  linear_backward_weight(queue, matrix(rows_q), x, matrix(d_parameters[kWq]), false);
  linear_backward_weight(queue, matrix(rows_k), x, matrix(d_parameters[kWk]), false);
  linear_backward_weight(queue, matrix(rows_v), x, matrix(d_parameters[kWv]), false);
  linear_backward_input(queue, matrix(rows_q), matrix(p[kWq]), d_x, false);
  linear_backward_input(queue, matrix(rows_k), matrix(p[kWk]), d_x, true);
  linear_backward_input(queue, matrix(rows_v), matrix(p[kWv]), d_x, true);
}

}  // namespace tessera
