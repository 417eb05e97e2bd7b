#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/embedding/embedding.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/stack.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

void copy_row(Elements from, float* to, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(load(from + i, count), to + i, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <string>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"

namespace tessera {
namespace {
HWY_EXPORT(copy_row);
HWY_EXPORT(add_row);

// The gradient is cut into ranges of tokens and of columns; each piece walks over all positions.
constexpr std::int64_t kTokensPerPiece = 2048;
constexpr std::int64_t kColumnsPerPiece = 256;

[[noreturn]] void refuse_token(const Batch& batch, std::int64_t row, std::int64_t token,
                               std::int64_t vocabulary) {
  throw Error(ExitCode::kData, "token " + std::to_string(token) + " at sequence " +
                                   std::to_string(row / batch.shape.length) + ", position " +
                                   std::to_string(row % batch.shape.length) +
                                   " lies outside the model's vocabulary of " +
                                   std::to_string(vocabulary) + " (model.vocabulary)");
}

}  // namespace

Embedding::Embedding(const ModelConfig& config)
    : vocabulary_(require_range("model.vocabulary", config.vocabulary(), 1, kMaxVocabulary)),
      width_(require_range("model.width", config.width(), 1, kMaxWidth)),
      deviation_(require_positive("model.init_deviation", config.init_deviation())) {}

std::vector<ParameterSpec> Embedding::parameters() const {
  return {{"weight", {vocabulary_, width_}, {Init::Kind::kNormal, deviation_}, false}};
}

std::vector<BufferSpec> Embedding::scratch(BatchShape /*shape*/) const { return {}; }

void Embedding::forward(Queue& queue, const Batch& batch, std::span<const View> parameters,
                        const View& x) const {
  const std::int64_t rows = batch.shape.rows();
  const std::uint32_t* const tokens = batch.tokens.as<std::uint32_t>();
  const Elements weight = elements(parameters[0]);
  float* const out = x.as<float>();
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece);
    for (std::int64_t row = piece * kRowsPerPiece; row < end; ++row) {
      const std::int64_t token = tokens[row];
      if (token >= vocabulary_) refuse_token(batch, row, token, vocabulary_);
      HWY_DYNAMIC_DISPATCH(copy_row)(weight + token * width_, out + row * width_, width_);
    }
  });
}

void Embedding::backward(Queue& queue, const Batch& batch, const View& d_x,
                         std::span<const View> d_parameters,
                         std::span<const View> /*scratch*/) const {
  const std::int64_t rows = batch.shape.rows();
  const std::uint32_t* const tokens = batch.tokens.as<std::uint32_t>();
  const float* const d_out = d_x.as<float>();
  float* const d_weight = d_parameters[0].as<float>();
  const std::int64_t ranges = pieces_of(vocabulary_, kTokensPerPiece);
  const std::int64_t cuts = pieces_of(width_, kColumnsPerPiece);
  queue.parallel_for(ranges * cuts, [&](std::int64_t piece, Worker&) {
    const std::int64_t first = piece / cuts * kTokensPerPiece;
    const std::int64_t end = std::min(vocabulary_, first + kTokensPerPiece);
    const std::int64_t column = piece % cuts * kColumnsPerPiece;
    const std::int64_t columns = std::min(kColumnsPerPiece, width_ - column);
    for (std::int64_t token = first; token < end; ++token) {
      std::fill_n(d_weight + token * width_ + column, columns, 0.0F);
    }
    for (std::int64_t row = 0; row < rows; ++row) {
      const std::int64_t token = tokens[row];
      if (token < first || token >= end) continue;
      HWY_DYNAMIC_DISPATCH(add_row)
      (d_out + row * width_ + column, d_weight + token * width_ + column, columns);
    }
  });
}

}  // namespace tessera
#endif
