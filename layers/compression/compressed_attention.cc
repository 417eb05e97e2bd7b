#include "layers/compression/compressed_attention.h"

#include <array>
#include <cmath>
#include <utility>

#include "layers/configuration.h"
#include "layers/rope/rope.h"
#include "runtime/products.h"

namespace tessera {
namespace {

// Places in the lists; phi's own stand behind them, first those of the keys'.
enum Parameter : std::size_t { kWk, kWv, kPhi };
enum Scratch : std::size_t {
  kCompressed,
  kDRows,
  kDOutByHead,
  kDelta,
  kDKeys,
  kDValues,
  kTiles,
  kPhiScratch
};
constexpr std::size_t kPhiParameters = 3;
constexpr std::array kWeights = {1.0F};

template <class Spec>
void append(std::vector<Spec>& list, const std::string& prefix, std::vector<Spec> more) {
  for (Spec& spec : more) {
    spec.name = prefix + spec.name;
    list.push_back(std::move(spec));
  }
}

}  // namespace

CompressedAttention::CompressedAttention(const CompressionConfig& config, std::int64_t heads,
                                         std::int64_t key_value_heads, std::int64_t head_width,
                                         const MixerContext& context, const std::string& heads_path,
                                         const std::string& path)
    : width_(context.model.width()),
      heads_(require_range(heads_path + ".heads", heads, 1, kMaxHeads)),
      key_value_heads_(require_range(heads_path + ".key_value_heads", key_value_heads, 1, heads_)),
      head_width_(require_range(heads_path + ".head_width", head_width, 1, kMaxHeadWidth)),
      deviation_(context.model.init_deviation()),
      scale_(1.0 / std::sqrt(static_cast<double>(head_width))),
      dtype_(context.compute),
      k_compression_(config, key_value_heads, head_width, deviation_, dtype_, path),
      v_compression_(k_compression_) {
  if (heads_ % key_value_heads_ != 0) {
    refuse(heads_path + ".key_value_heads", "must divide heads, which is " + std::to_string(heads_),
           std::to_string(key_value_heads_));
  }
}

AttentionShape CompressedAttention::shape_of(BatchShape batch) const {
  return {batch, heads_, key_value_heads_, head_width_, head_width_, k_compression_.visibility()};
}

std::vector<ParameterSpec> CompressedAttention::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  const Shape projection = {key_value_heads_ * head_width_, width_};
  std::vector<ParameterSpec> list = {{"k_proj.weight", projection, normal, true},
                                     {"v_proj.weight", projection, normal, true}};
  append(list, "k_compression.", k_compression_.parameters());
  append(list, "v_compression.", v_compression_.parameters());
  return list;
}

std::vector<BufferSpec> CompressedAttention::saved(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  const Shape rows = {batch.rows(), key_value_heads_ * head_width_};
  std::vector<BufferSpec> list = {{"k_rows", dtype_, rows},
                                  {"v_rows", dtype_, rows},
                                  {"keys", dtype_, shape.keys()},
                                  {"values", dtype_, shape.values()},
                                  {"log_sum_exp", DType::kF32, shape.rows()}};
  append(list, "k_", k_compression_.saved(batch));
  append(list, "v_", v_compression_.saved(batch));
  return list;
}

std::vector<BufferSpec> CompressedAttention::scratch(BatchShape batch) const {
  const AttentionShape shape = shape_of(batch);
  const std::int64_t row = key_value_heads_ * head_width_;
  std::vector<BufferSpec> list = {
      {"compressed", dtype_, {k_compression_.blocks(batch).rows(), row}},
      {"d_rows", dtype_, {batch.rows(), row}},
      {"d_out_by_head", dtype_, shape.d_out_by_head()},
      {"delta", DType::kF32, shape.rows()},
      {"d_keys", DType::kF32, shape.d_keys()},
      {"d_values", DType::kF32, shape.d_values()},
      {"tiles", DType::kF32, shape.tile_room()}};
  append(list, "", k_compression_.scratch(batch));
  return list;
}

double CompressedAttention::flops_per_token(std::int64_t length) const {
  const auto projection = static_cast<double>(width_ * key_value_heads_ * head_width_);
  return 4 * projection + 2 * k_compression_.flops_per_token(length) +
         4 * static_cast<double>(heads_ * head_width_) *
             k_compression_.visibility().mean_keys(length);
}

std::vector<LayerSize> CompressedAttention::sizes() const {
  return {{"stride", k_compression_.stride()},
          {"compressed block", k_compression_.length()},
          {"tile", kAttentionTile}};
}

void CompressedAttention::forward(Queue& queue, const Batch& batch, const View& in, const View& q,
                                  const View& out, const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const BatchShape blocks = k_compression_.blocks(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const View compressed =
      shaped(scratch[kCompressed], dtype_, {blocks.rows(), key_value_heads_ * head_width_});
  const auto compress = [&](const Compression& phi, std::size_t which, Saved rows, Saved by_head) {
    linear_forward(queue, matrix(in), matrix(p[kWk + which]), matrix(saved[rows]));
    phi.forward(queue, batch.shape, saved[rows], compressed,
                {p.subspan(kPhi + which * kPhiParameters, kPhiParameters),
                 saved.subspan(kHidden + which, 1), scratch.subspan(kPhiScratch)});
    split_heads(queue, blocks, nullptr, compressed, saved[by_head]);
  };
  compress(k_compression_, 0, kKRows, kKeys);
  compress(v_compression_, 1, kVRows, kValues);
  attention_forward(queue, shape, batch.segments, scale_, q, saved[kKeys], saved[kValues], out,
                    saved[kLogSumExp], shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
}

void CompressedAttention::backward(Queue& queue, const Batch& batch, const View& in, const View& q,
                                   const View& out, const View& d_out, const View& d_q,
                                   const View& d_in, bool accumulate,
                                   std::span<const View> d_parameters,
                                   const LayerMemory& memory) const {
  const AttentionShape shape = shape_of(batch.shape);
  const BatchShape blocks = k_compression_.blocks(batch.shape);
  const std::span<const View> p = memory.parameters, saved = memory.saved, scratch = memory.scratch;
  const std::int64_t row = key_value_heads_ * head_width_;
  const View d_compressed = shaped(scratch[kCompressed], dtype_, {blocks.rows(), row});
  const View d_rows = shaped(scratch[kDRows], dtype_, {batch.shape.rows(), row});
  const View d_keys = shaped(scratch[kDKeys], DType::kF32, shape.d_keys());
  const View d_values = shaped(scratch[kDValues], DType::kF32, shape.d_values());
  attention_backward(queue, shape, batch.segments, scale_, kWeights, q, saved[kKeys],
                     saved[kValues], out, saved[kLogSumExp], d_out,
                     shaped(scratch[kDOutByHead], dtype_, shape.d_out_by_head()),
                     shaped(scratch[kDelta], DType::kF32, shape.rows()), d_q, d_keys, d_values,
                     shaped(scratch[kTiles], DType::kF32, shape.tile_room()));
  const auto expand = [&](const Compression& phi, std::size_t which, Saved rows,
                          const View& d_by_head, bool add) {
    merge_heads(queue, blocks, nullptr, shape.group(), d_by_head, d_compressed);
    phi.backward(queue, batch.shape, saved[rows], d_compressed, d_rows,
                 d_parameters.subspan(kPhi + which * kPhiParameters, kPhiParameters),
                 {p.subspan(kPhi + which * kPhiParameters, kPhiParameters),
                  saved.subspan(kHidden + which, 1), scratch.subspan(kPhiScratch)});
    linear_backward_weight(queue, matrix(d_rows), matrix(in), matrix(d_parameters[kWk + which]),
                           false);
    linear_backward_input(queue, matrix(d_rows), matrix(p[kWk + which]), matrix(d_in), add);
  };
  expand(k_compression_, 0, kKRows, d_keys, accumulate);
  expand(v_compression_, 1, kVRows, d_values, true);
}

}  // namespace tessera
