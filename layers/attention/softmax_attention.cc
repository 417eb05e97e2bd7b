#include "layers/attention/softmax_attention.h"

#include <array>
#include <cmath>

#include "layers/configuration.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/products.h"

namespace tessera {
namespace {

constexpr double kNormEpsilon = 1e-6;

// Places in the lists that are declared.
enum Parameter : std::size_t { kWq, kWk, kWv, kNormQ, kNormK };
enum Saved : std::size_t { kQ, kK, kV, kLogSumExp, kRawQ, kRawK, kInverseQ, kInverseK };
enum Scratch : std::size_t {
  kRowsK,
  kRowsV,
  kDOutByHead,
  kDQ,
  kDK,
  kDV,
  kDelta,
  kTiles,
  kPartialQ,
  kPartialK
};

}  // namespace

AttentionMaps::AttentionMaps(const AttentionConfig& config, Visibility visibility,
                             std::int64_t maps, const MixerContext& context,
                             const std::string& path)
    : width_(context.model.width()),
      heads_(require_range(path + ".heads", config.heads(), 1, kMaxHeads)),
      key_value_heads_(
          require_range(path + ".key_value_heads", config.key_value_heads(), 1, heads_)),
      head_width_(require_range(path + ".head_width", config.head_width(), 2, kMaxHeadWidth)),
      maps_(maps),
      visibility_(visibility),
      norm_(config.query_key_norm()),
      dtype_(context.compute),
      deviation_(context.model.init_deviation()) {
  if (heads_ % key_value_heads_ != 0) {
    refuse(path + ".key_value_heads", "must divide heads, which is " + std::to_string(heads_),
           std::to_string(key_value_heads_));
  }
  if (head_width_ % (2 * maps_) != 0) {
    refuse(path + ".head_width",
           maps_ == 1 ? "must be even for the rotation"
                      : "must be a multiple of 4 for the rotation of its halves",
           std::to_string(head_width_));
  }
  require_positive(path + ".rope_theta", config.rope_theta());
  rope_ = shared_rope_table(context.model.length(), head_width_ / maps_, config.rope_theta());
}

AttentionShape AttentionMaps::shape_of(BatchShape batch) const {
  return {batch, heads_, key_value_heads_, head_width_ / maps_, head_width_, visibility_, maps_};
}

std::vector<ParameterSpec> AttentionMaps::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  const std::int64_t q = heads_ * head_width_;
  const std::int64_t kv = key_value_heads_ * head_width_;
  std::vector<ParameterSpec> list = {{"q_proj.weight", {q, width_}, normal, true},
                                     {"k_proj.weight", {kv, width_}, normal, true},
                                     {"v_proj.weight", {kv, width_}, normal, true}};
  if (norm_) {
    const Init one = {Init::Kind::kConstant, 1.0};
    list.push_back({"q_norm.weight", {head_width_ / maps_}, one, false});
    list.push_back({"k_norm.weight", {head_width_ / maps_}, one, false});
  }
  return list;
}

std::vector<BufferSpec> AttentionMaps::saved(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  std::vector<BufferSpec> list = {{"q", dtype_, shape.queries()},
                                  {"k", dtype_, shape.keys()},
                                  {"v", dtype_, shape.values()},
                                  {"log_sum_exp", DType::kF32, shape.rows()}};
  if (norm_) {
    const std::int64_t q_rows = batch.rows() * heads_ * maps_;
    const std::int64_t k_rows = batch.rows() * key_value_heads_ * maps_;
    list.push_back({"q_raw", dtype_, {q_rows, shape.key_width}});
    list.push_back({"k_raw", dtype_, {k_rows, shape.key_width}});
    list.push_back({"q_inverse_rms", DType::kF32, {q_rows}});
    list.push_back({"k_inverse_rms", DType::kF32, {k_rows}});
  }
  return list;
}

std::vector<BufferSpec> AttentionMaps::scratch(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t rows = batch.rows();
  const Shape kv_rows = {rows, key_value_heads_ * head_width_};
  std::vector<BufferSpec> list = {{"rows_k", dtype_, kv_rows},
                                  {"rows_v", dtype_, kv_rows},
                                  {"d_out_by_head", dtype_, shape.d_out_by_head()},
                                  {"d_q", DType::kF32, shape.queries()},
                                  {"d_k", DType::kF32, shape.d_keys()},
                                  {"d_v", DType::kF32, shape.d_values()},
                                  {"delta", DType::kF32, shape.rows()},
                                  {"tiles", DType::kF32, shape.tile_room()}};
  if (norm_) {
    list.push_back(
        {"partial_q_norm", DType::kF32, {rms_norm_blocks(rows * heads_ * maps_), shape.key_width}});
    list.push_back({"partial_k_norm",
                    DType::kF32,
                    {rms_norm_blocks(rows * key_value_heads_ * maps_), shape.key_width}});
  }
  return list;
}

double AttentionMaps::flops_per_token(std::int64_t length) const {
  const auto d = static_cast<double>(width_);
  const auto q = static_cast<double>(heads_ * head_width_);
  const auto kv = static_cast<double>(key_value_heads_ * head_width_);
  // Projections; over the keys that are visible, the scores, whose widths add up to the head's, and
  // each map's product with the values.
  return 2 * d * (q + 2 * kv) +
         2 * q * static_cast<double>(1 + maps_) * visibility_.mean_keys(length);
}

void AttentionMaps::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                            const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const Matrix x = matrix(in);
  const Shape kv_rows = {batch.shape.rows(), key_value_heads_ * head_width_};
  // The rows of q need their room only until they are split.
  const View rows_q = shaped(out, dtype_, shape.d_out());
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
  attention_forward(queue, shape, batch.segments,
                    1.0 / std::sqrt(static_cast<double>(shape.key_width)), saved[kQ], saved[kK],
                    saved[kV], out, saved[kLogSumExp],
                    shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
}

void AttentionMaps::backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                             std::span<const float> weights, const View& d_out, const View& d_in,
                             bool accumulate, std::span<const View> d_parameters,
                             const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const Matrix x = matrix(in), d_x = matrix(d_in);
  const std::int64_t rows = batch.shape.rows();
  const Shape kv_rows = {rows, key_value_heads_ * head_width_};
  const View rows_k = shaped(scratch[kRowsK], dtype_, kv_rows);
  const View rows_v = shaped(scratch[kRowsV], dtype_, kv_rows);
  const View d_q = shaped(scratch[kDQ], DType::kF32, shape.queries());
  const View d_k = shaped(scratch[kDK], DType::kF32, shape.d_keys());
  const View d_v = shaped(scratch[kDV], DType::kF32, shape.d_values());

  attention_backward(queue, shape, batch.segments,
                     1.0 / std::sqrt(static_cast<double>(shape.key_width)), weights, saved[kQ],
                     saved[kK], saved[kV], out, saved[kLogSumExp], d_out,
                     shaped(scratch[kDOutByHead], dtype_, shape.d_out_by_head()),
                     shaped(scratch[kDelta], DType::kF32, shape.rows()), d_q, d_k, d_v,
                     shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
  const View& rows_q = d_out;
  merge_heads(queue, batch.shape, rope_.get(), 1, d_q, rows_q);
  merge_heads(queue, batch.shape, rope_.get(), shape.group(), d_k, rows_k);
  merge_heads(queue, batch.shape, nullptr, shape.group(), d_v, rows_v);
  if (norm_) {
    const View partial_q = shaped(scratch[kPartialQ], DType::kF32,
                                  {rms_norm_blocks(rows * heads_ * maps_), shape.key_width});
    const View partial_k =
        shaped(scratch[kPartialK], DType::kF32,
               {rms_norm_blocks(rows * key_value_heads_ * maps_), shape.key_width});
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
  linear_backward_input(queue, matrix(rows_q), matrix(p[kWq]), d_x, accumulate);
  linear_backward_input(queue, matrix(rows_k), matrix(p[kWk]), d_x, true);
  linear_backward_input(queue, matrix(rows_v), matrix(p[kWv]), d_x, true);
}

SoftmaxAttention::SoftmaxAttention(const AttentionConfig& config, std::int64_t window,
                                   const MixerContext& context, const std::string& path)
    : window_(window), maps_(config, Visibility::tokens(window), 1, context, path) {}

std::vector<LayerSize> SoftmaxAttention::sizes() const {
  std::vector<LayerSize> list = {{"tile", kAttentionTile}};
  if (window_ != Visibility::kNoWindow) list.push_back({"window", window_});
  return list;
}

void SoftmaxAttention::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                               const LayerMemory& memory) const {
  maps_.forward(queue, batch, in, out, memory);
}

void SoftmaxAttention::backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                                const View& d_out, const View& d_in, bool accumulate,
                                std::span<const View> d_parameters,
                                const LayerMemory& memory) const {
  maps_.backward(queue, batch, in, out, std::array{1.0F}, d_out, d_in, accumulate, d_parameters,
                 memory);
}

}  // namespace tessera
