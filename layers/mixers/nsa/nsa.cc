#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/mixers/nsa/nsa.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/mixers/nsa/nsa.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

void gate_logits(float* logits, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(sigmoid(load(logits + i, count)), logits + i, count); });
}

// out = the sum over three branches of gate * branch, one head of one position.
void combine_branches(const float* gates, Elements a, Elements b, Elements c, Elements out,
                      std::int64_t width) {
  const Floats d;
  const FloatVector first = hn::Set(d, gates[0]), second = hn::Set(d, gates[1]),
                    third = hn::Set(d, gates[2]);
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector sum = hn::Mul(first, load(a + i, count));
    sum = hn::MulAdd(second, load(b + i, count), sum);
    store(hn::MulAdd(third, load(c + i, count), sum), out + i, count);
  });
}

void scale_branch(float gate, Elements from, Elements to, std::int64_t width) {
  const FloatVector factor = hn::Set(Floats(), gate);
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Mul(factor, load(from + i, count)), to + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(gate_logits);
HWY_EXPORT(combine_branches);
HWY_EXPORT(dot);
HWY_EXPORT(scale_branch);

constexpr double kNormEpsilon = 1e-6;
constexpr std::int64_t kBranches = 3;
constexpr std::array kWeights = {1.0F};

// Places in the lists that are declared; those from kNormQ and kInverseQ on stand only with the
// norm. The compressed branch's own stand behind all.
enum Parameter : std::size_t {
  kWq,
  kWGate,
  kWSelected,  // of k, of v
  kWSliding = kWSelected + 2,
  kNormQ = kWSliding + 2,
  kNormSelected,
  kNormSliding,
  kAllParameters
};
enum Saved : std::size_t {
  kRowsQ,
  kGates,
  kOut,  // of each branch
  kSelectedKeys = kOut + kBranches,
  kSlidingKeys = kSelectedKeys + 2,
  kSelectedSum = kSlidingKeys + 2,
  kSlidingSum,
  kChoice,
  kProducts,
  kInverseQ,
  kSelectedRaw,
  kSlidingRaw = kSelectedRaw + 2,
  kAllSaved = kSlidingRaw + 2
};
enum Scratch : std::size_t {
  kPlainQ,
  kRotatedQ,
  kRows,  // q normed; d_out of a branch; d_q by row
  kRowsK,
  kRowsV,
  kOffsets,
  kPositions,
  kDGates,
  kDOutByHead,
  kDelta,
  kDQ,
  kMoreDQ,
  kDK,
  kDV,
  kTiles,
  kPartialQ,
  kPartialK,
  kAllScratch
};

template <class Spec>
void append(std::vector<Spec>& list, const std::string& prefix, std::vector<Spec> more) {
  for (Spec& spec : more) {
    spec.name = prefix + spec.name;
    list.push_back(std::move(spec));
  }
}

}  // namespace

const Nsa::Branch Nsa::kSelected = {kWSelected, kSelectedKeys, kNormSelected, kSelectedRaw};
const Nsa::Branch Nsa::kSliding = {kWSliding, kSlidingKeys, kNormSliding, kSlidingRaw};

Nsa::Nsa(const NsaConfig& config, const MixerContext& context, const std::string& path)
    : width_(context.model.width()),
      heads_(config.attention().heads()),
      key_value_heads_(config.attention().key_value_heads()),
      head_width_(config.attention().head_width()),
      selected_block_(require_range(path + ".selected_block_length", config.selected_block_length(),
                                    1, kMaxLength)),
      selected_blocks_(
          require_range(path + ".selected_blocks", config.selected_blocks(), 3, kMaxLength)),
      window_(require_range(path + ".window", config.window(), 1, kMaxLength)),
      norm_(config.attention().query_key_norm()),
      deviation_(context.model.init_deviation()),
      scale_(1.0 / std::sqrt(static_cast<double>(head_width_))),
      dtype_(context.compute),
      compressed_(config.compression(), heads_, key_value_heads_, head_width_, context,
                  path + ".attention", path + ".compression") {
  if (head_width_ % 2 != 0) {
    refuse(path + ".attention.head_width", "must be even for the rotation",
           std::to_string(head_width_));
  }
  require_positive(path + ".attention.rope_theta", config.attention().rope_theta());
  const std::int64_t stride = compressed_.compression().stride();
  if (selected_block_ % stride != 0) {
    refuse(path + ".selected_block_length",
           "must be a multiple of compression.block_stride, which is " + std::to_string(stride),
           std::to_string(selected_block_));
  }
  rope_ = shared_rope_table(context.model.length(), head_width_, config.attention().rope_theta());
}

AttentionShape Nsa::window_shape(BatchShape batch) const {
  return {batch, heads_, key_value_heads_, head_width_, head_width_, Visibility::tokens(window_)};
}

SelectionShape Nsa::selection(BatchShape batch) const {
  return {batch,
          heads_,
          key_value_heads_,
          head_width_,
          selected_block_,
          selected_blocks_,
          compressed_.compression().length(),
          compressed_.compression().stride()};
}

std::vector<ParameterSpec> Nsa::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  const Shape kv = {key_value_heads_ * head_width_, width_};
  std::vector<ParameterSpec> list = {
      {"q_proj.weight", {heads_ * head_width_, width_}, normal, true},
      {"gate_proj.weight", {kBranches * heads_, width_}, normal, true},
      {"selected_k_proj.weight", kv, normal, true},
      {"selected_v_proj.weight", kv, normal, true},
      {"sliding_k_proj.weight", kv, normal, true},
      {"sliding_v_proj.weight", kv, normal, true}};
  if (norm_) {
    for (const char* const name : {"q_norm", "selected_k_norm", "sliding_k_norm"}) {
      list.push_back(
          {std::string(name) + ".weight", {head_width_}, {Init::Kind::kConstant, 1.0}, false});
    }
  }
  append(list, "compressed_", compressed_.parameters());
  return list;
}

std::vector<BufferSpec> Nsa::saved(BatchShape batch) const {
  const SelectionShape selected = selection(batch);
  const AttentionShape sliding = window_shape(batch);
  const std::int64_t q_rows = batch.rows() * heads_, k_rows = batch.rows() * key_value_heads_;
  const Shape rows = {batch.rows(), heads_ * head_width_};
  std::vector<BufferSpec> list = {{"q", dtype_, rows},
                                  {"gates", DType::kF32, {batch.rows(), kBranches * heads_}},
                                  {"compressed", dtype_, rows},
                                  {"selected", dtype_, rows},
                                  {"sliding", dtype_, rows},
                                  {"selected_k", dtype_, selected.keys()},
                                  {"selected_v", dtype_, selected.keys()},
                                  {"sliding_k", dtype_, sliding.keys()},
                                  {"sliding_v", dtype_, sliding.values()},
                                  {"selected_log_sum_exp", DType::kF32, selected.rows()},
                                  {"sliding_log_sum_exp", DType::kF32, sliding.rows()},
                                  {"choice", DType::kI32, selected.choice()},
                                  {"products", DType::kI64, selected.products()}};
  if (norm_) {
    list.push_back({"q_inverse_rms", DType::kF32, {q_rows}});
    for (const std::string branch : {"selected", "sliding"}) {
      list.push_back({branch + "_k_raw", dtype_, {k_rows, head_width_}});
      list.push_back({branch + "_k_inverse_rms", DType::kF32, {k_rows}});
    }
  }
  append(list, "compressed_", compressed_.saved(batch));
  return list;
}

std::vector<BufferSpec> Nsa::scratch(BatchShape batch) const {
  const SelectionShape selected = selection(batch);
  const AttentionShape sliding = window_shape(batch);
  const Shape rows = {batch.rows(), heads_ * head_width_};
  const Shape kv_rows = {batch.rows(), key_value_heads_ * head_width_};
  const std::int64_t d_keys = std::max(selected.d_keys().count(), sliding.d_keys().count());
  const std::int64_t tiles = std::max(
      {selected.choice_room().count(), selected.tile_room().count(), sliding.tile_room().count()});
  std::vector<BufferSpec> list = {{"plain_q", dtype_, sliding.queries()},
                                  {"rotated_q", dtype_, sliding.queries()},
                                  {"rows", dtype_, rows},
                                  {"rows_k", dtype_, kv_rows},
                                  {"rows_v", dtype_, kv_rows},
                                  {"offsets", DType::kI64, selected.offsets()},
                                  {"positions", DType::kI32, selected.positions()},
                                  {"d_gates", dtype_, {batch.rows(), kBranches * heads_}},
                                  {"d_out_by_head", dtype_, sliding.d_out_by_head()},
                                  {"delta", DType::kF32, sliding.rows()},
                                  {"d_q", DType::kF32, sliding.queries()},
                                  {"more_d_q", DType::kF32, sliding.queries()},
                                  {"d_k", DType::kF32, {d_keys}},
                                  {"d_v", DType::kF32, {d_keys}},
                                  {"tiles", DType::kF32, {tiles}}};
  if (norm_) {
    list.push_back(
        {"partial_q_norm", DType::kF32, {rms_norm_blocks(batch.rows() * heads_), head_width_}});
    list.push_back({"partial_k_norm",
                    DType::kF32,
                    {rms_norm_blocks(batch.rows() * key_value_heads_), head_width_}});
  }
  append(list, "compressed_", compressed_.scratch(batch));
  return list;
}

LayerMemory Nsa::compressed_memory(const LayerMemory& memory) const {
  return {memory.parameters.subspan(norm_ ? kAllParameters : kNormQ),
          memory.saved.subspan(norm_ ? kAllSaved : kInverseQ),
          memory.scratch.subspan(norm_ ? kAllScratch : kPartialQ)};
}

double Nsa::flops_per_token(std::int64_t length) const {
  const auto d = static_cast<double>(width_);
  const auto q = static_cast<double>(heads_ * head_width_);
  const auto kv = static_cast<double>(key_value_heads_ * head_width_);
  const auto gates = static_cast<double>(kBranches * heads_);
  const BatchShape one = {1, length};
  return 2 * d * (q + 4 * kv + gates) + compressed_.flops_per_token(length) +
         4 * q *
             (selection(one).mean_keys(length) + window_shape(one).visibility.mean_keys(length));
}

std::vector<LayerSize> Nsa::sizes() const {
  std::vector<LayerSize> list = compressed_.sizes();
  list.push_back({"selected block", selected_block_});
  list.push_back({"selection", selected_block_ * selected_blocks_});
  list.push_back({"selected tile", kSelectedPositions});
  list.push_back({"window", window_});
  return list;
}

void Nsa::split_queries(Queue& queue, BatchShape batch, bool first, const View& plain,
                        const View& rotated, const LayerMemory& memory) const {
  const View& rows = memory.saved[kRowsQ];
  split_heads(queue, batch, nullptr, rows, plain);
  if (!norm_) {
    split_heads(queue, batch, rope_.get(), rows, rotated);
    return;
  }
  const View raw = rows.reshaped({batch.rows() * heads_, head_width_});
  const View normed = shaped(memory.scratch[kRows], dtype_, raw.shape());
  const View &weight = memory.parameters[kNormQ], &inverse = memory.saved[kInverseQ];
  if (first) {
    rms_norm(queue, raw, weight, kNormEpsilon, normed, inverse);
  } else {
    rms_norm_again(queue, raw, weight, inverse, normed);
  }
  split_heads(queue, batch, rope_.get(), normed, rotated);
}

void Nsa::forward_keys(Queue& queue, BatchShape batch, const Branch& branch, const View& in,
                       const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters, saved = memory.saved;
  const Shape rows = {batch.rows(), key_value_heads_ * head_width_};
  const View rows_k = shaped(memory.scratch[kRowsK], dtype_, rows);
  const View rows_v = shaped(memory.scratch[kRowsV], dtype_, rows);
  const Matrix x = matrix(in);
  if (norm_) {
    const View& raw = saved[branch.saved_norm];
    linear_forward(queue, x, matrix(p[branch.parameters]), matrix(raw.reshaped(rows)));
    rms_norm(queue, raw, p[branch.norm], kNormEpsilon, rows_k, saved[branch.saved_norm + 1]);
  } else {
    linear_forward(queue, x, matrix(p[branch.parameters]), matrix(rows_k));
  }
  linear_forward(queue, x, matrix(p[branch.parameters + 1]), matrix(rows_v));
  split_heads(queue, batch, rope_.get(), rows_k, saved[branch.saved]);
  split_heads(queue, batch, nullptr, rows_v, saved[branch.saved + 1]);
}

void Nsa::backward_keys(Queue& queue, BatchShape batch, const Branch& branch, const View& in,
                        const View& d_k, const View& d_v, const View& d_in, bool accumulate,
                        std::span<const View> d_parameters, const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters, saved = memory.saved;
  const Shape rows = {batch.rows(), key_value_heads_ * head_width_};
  const View rows_k = shaped(memory.scratch[kRowsK], dtype_, rows);
  const View rows_v = shaped(memory.scratch[kRowsV], dtype_, rows);
  const std::int64_t group = heads_ / key_value_heads_;
  merge_heads(queue, batch, rope_.get(), group, d_k, rows_k);
  merge_heads(queue, batch, nullptr, group, d_v, rows_v);
  if (norm_) {
    const View partial = shaped(memory.scratch[kPartialK], DType::kF32,
                                {rms_norm_blocks(batch.rows() * key_value_heads_), head_width_});
    rms_norm_backward(queue, saved[branch.saved_norm], p[branch.norm], saved[branch.saved_norm + 1],
                      rows_k, rows_k, false, partial);
    rms_norm_weight_gradient(queue, partial, d_parameters[branch.norm]);
  }
  const Matrix x = matrix(in), d_x = matrix(d_in);
  const std::size_t k = branch.parameters, v = k + 1;
  linear_backward_weight(queue, matrix(rows_k), x, matrix(d_parameters[k]), false);
  linear_backward_weight(queue, matrix(rows_v), x, matrix(d_parameters[v]), false);
  linear_backward_input(queue, matrix(rows_k), matrix(p[k]), d_x, accumulate);
  linear_backward_input(queue, matrix(rows_v), matrix(p[v]), d_x, true);
}

void Nsa::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                  const LayerMemory& memory) const {
  const AttentionShape sliding = window_shape(batch.shape);
  const SelectionShape selected = selection(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const View plain = shaped(scratch[kPlainQ], dtype_, sliding.queries());
  const View rotated = shaped(scratch[kRotatedQ], dtype_, sliding.queries());
  const auto tiles = [&](Shape shape) { return shaped(scratch[kTiles], DType::kF32, shape); };
  linear_forward(queue, matrix(in), matrix(p[kWq]), matrix(saved[kRowsQ]));
  split_queries(queue, batch.shape, true, plain, rotated, memory);

  const LayerMemory own = compressed_memory(memory);
  compressed_.forward(queue, batch, in, plain, saved[kOut], own);

  const View offsets = shaped(scratch[kOffsets], DType::kI64, selected.offsets());
  const View positions = shaped(scratch[kPositions], DType::kI32, selected.positions());
  choose_blocks(queue, selected, batch.segments, scale_, plain, compressed_.keys(own.saved),
                compressed_.log_sum_exp(own.saved), saved[kChoice], tiles(selected.choice_room()));
  invert_choice(queue, selected, saved[kChoice], offsets, positions);
  forward_keys(queue, batch.shape, kSelected, in, memory);
  selected_forward(queue, selected, batch.segments, scale_, rotated, saved[kSelectedKeys],
                   saved[kSelectedKeys + 1], offsets, positions, saved[kOut + 1],
                   saved[kSelectedSum], saved[kProducts], tiles(selected.tile_room()));

  forward_keys(queue, batch.shape, kSliding, in, memory);
  attention_forward(queue, sliding, batch.segments, scale_, rotated, saved[kSlidingKeys],
                    saved[kSlidingKeys + 1], saved[kOut + 2], saved[kSlidingSum],
                    tiles(sliding.tile_room()));

  const View& gates = saved[kGates];
  linear_forward(queue, matrix(in), matrix(p[kWGate]), matrix(gates));
  queue.parallel_for(
      pieces_of(batch.shape.rows(), kRowsPerPiece), [&](std::int64_t piece, Worker&) {
        const std::int64_t first = piece * kRowsPerPiece * heads_;
        const std::int64_t end = std::min((piece + 1) * kRowsPerPiece, batch.shape.rows()) * heads_;
        float* const g = gates.as<float>();
        HWY_DYNAMIC_DISPATCH(gate_logits)(g + first * kBranches, (end - first) * kBranches);
        for (std::int64_t head = first; head < end; ++head) {  // of a position
          const std::int64_t at = head * head_width_;
          HWY_DYNAMIC_DISPATCH(combine_branches)
          (g + head * kBranches, elements(saved[kOut]) + at, elements(saved[kOut + 1]) + at,
           elements(saved[kOut + 2]) + at, elements(out) + at, head_width_);
        }
      });
}

void Nsa::backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                   const View& d_out, const View& d_in, bool accumulate,
                   std::span<const View> d_parameters, const LayerMemory& memory) const {
  const AttentionShape sliding = window_shape(batch.shape);
  const SelectionShape selected = selection(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const Shape row_shape = {batch.shape.rows(), heads_ * head_width_};
  const View plain = shaped(scratch[kPlainQ], dtype_, sliding.queries());
  const View rotated = shaped(scratch[kRotatedQ], dtype_, sliding.queries());
  const View rows = shaped(scratch[kRows], dtype_, row_shape);
  const View delta = shaped(scratch[kDelta], DType::kF32, sliding.rows());
  const View d_q = shaped(scratch[kDQ], DType::kF32, sliding.queries());
  const View more_d_q = shaped(scratch[kMoreDQ], DType::kF32, sliding.queries());
  const auto tiles = [&](Shape shape) { return shaped(scratch[kTiles], DType::kF32, shape); };
  const float* const gates = saved[kGates].as<float>();
  const auto for_heads = [&](const auto& body) {
    queue.parallel_for(pieces_of(batch.shape.rows(), kRowsPerPiece), [&](std::int64_t piece,
                                                                         Worker&) {
      const std::int64_t end = std::min((piece + 1) * kRowsPerPiece, batch.shape.rows()) * heads_;
      for (std::int64_t head = piece * kRowsPerPiece * heads_; head < end; ++head) body(head);
    });
  };
  // The gradient of a branch's output, in `rows`.
  const auto d_branch = [&](std::int64_t branch) {
    for_heads([&](std::int64_t head) {
      HWY_DYNAMIC_DISPATCH(scale_branch)
      (gates[head * kBranches + branch], elements(d_out) + head * head_width_,
       elements(rows) + head * head_width_, head_width_);
    });
  };

  const View d_gates = shaped(scratch[kDGates], dtype_, {batch.shape.rows(), kBranches * heads_});
  for_heads([&](std::int64_t head) {
    std::array<float, kBranches> d_logits;
    for (std::size_t branch = 0; branch < d_logits.size(); ++branch) {
      const double g = gates[head * kBranches + static_cast<std::int64_t>(branch)];
      d_logits[branch] =
          static_cast<float>(HWY_DYNAMIC_DISPATCH(dot)(
                                 elements(d_out) + head * head_width_,
                                 elements(saved[kOut + branch]) + head * head_width_, head_width_) *
                             g * (1 - g));
    }
    HWY_DYNAMIC_DISPATCH(scale_branch)
    (1.0F, {reinterpret_cast<std::byte*>(d_logits.data()), DType::kF32},
     elements(d_gates) + head * kBranches, kBranches);
  });
  linear_backward_weight(queue, matrix(d_gates), matrix(in), matrix(d_parameters[kWGate]), false);
  linear_backward_input(queue, matrix(d_gates), matrix(p[kWGate]), matrix(d_in), accumulate);

  split_queries(queue, batch.shape, false, plain, rotated, memory);
  {
    d_branch(2);
    const View d_k = shaped(scratch[kDK], DType::kF32, sliding.d_keys());
    const View d_v = shaped(scratch[kDV], DType::kF32, sliding.d_values());
    attention_backward(queue, sliding, batch.segments, scale_, kWeights, rotated,
                       saved[kSlidingKeys], saved[kSlidingKeys + 1], saved[kOut + 2],
                       saved[kSlidingSum], rows,
                       shaped(scratch[kDOutByHead], dtype_, sliding.d_out_by_head()), delta, d_q,
                       d_k, d_v, tiles(sliding.tile_room()));
    backward_keys(queue, batch.shape, kSliding, in, d_k, d_v, d_in, true, d_parameters, memory);
  }
  {
    d_branch(1);
    const View d_k = shaped(scratch[kDK], DType::kF32, selected.d_keys());
    const View d_v = shaped(scratch[kDV], DType::kF32, selected.d_keys());
    const View offsets = shaped(scratch[kOffsets], DType::kI64, selected.offsets());
    const View positions = shaped(scratch[kPositions], DType::kI32, selected.positions());
    invert_choice(queue, selected, saved[kChoice], offsets, positions);
    selected_backward(queue, selected, batch.segments, scale_, rotated, saved[kSelectedKeys],
                      saved[kSelectedKeys + 1], offsets, positions, saved[kOut + 1],
                      saved[kSelectedSum], rows, shaped(delta, DType::kF32, selected.rows()),
                      more_d_q, d_k, d_v, tiles(selected.tile_room()));
    add(queue, d_q, more_d_q);
    backward_keys(queue, batch.shape, kSelected, in, d_k, d_v, d_in, true, d_parameters, memory);
  }
  // Back to the rows of q: the rotated branches' part, in f32, then the compressed branch's.
  const View d_rows = shaped(scratch[kDV], DType::kF32, row_shape);
  merge_heads(queue, batch.shape, rope_.get(), 1, d_q, d_rows);
  if (norm_) {
    const Shape by_head = {batch.shape.rows() * heads_, head_width_};
    const View partial = shaped(scratch[kPartialQ], DType::kF32,
                                {rms_norm_blocks(batch.shape.rows() * heads_), head_width_});
    const View d_normed = d_rows.reshaped(by_head);
    rms_norm_backward(queue, saved[kRowsQ].reshaped(by_head), p[kNormQ], saved[kInverseQ], d_normed,
                      d_normed, false, partial);
    rms_norm_weight_gradient(queue, partial, d_parameters[kNormQ]);
  }
  d_branch(0);
  const std::size_t own = norm_ ? kAllParameters : kNormQ;
  compressed_.backward(queue, batch, in, plain, saved[kOut], rows, d_q, d_in, true,
                       d_parameters.subspan(own), compressed_memory(memory));
  const View more_d_rows = shaped(scratch[kDK], DType::kF32, row_shape);
  merge_heads(queue, batch.shape, nullptr, 1, d_q, more_d_rows);
  add(queue, d_rows, more_d_rows);
  const View d_rows_q = converted(queue, d_rows, dtype_, rows);
  linear_backward_weight(queue, matrix(d_rows_q), matrix(in), matrix(d_parameters[kWq]), false);
  linear_backward_input(queue, matrix(d_rows_q), matrix(p[kWq]), matrix(d_in), true);
}

std::unique_ptr<Layer> make_nsa(const MixerConfig& config, const MixerContext& context,
                                const std::string& path) {
  return std::make_unique<ProjectedMixer>(std::make_unique<Nsa>(config.nsa(), context, path),
                                          context.model.width(), context.compute,
                                          context.output_deviation());
}

}  // namespace tessera
#endif
