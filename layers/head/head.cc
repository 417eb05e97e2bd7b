#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/head/head.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/stack.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

float largest_of(const float* x, std::int64_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  FloatVector largest = hn::Set(Floats(), kLowest);
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { largest = hn::Max(largest, load(x + i, count, kLowest)); });
  return max_of(largest);
}

// The sum of e^(x - shift), which replaces x.
double exponentials(float* x, float shift, std::int64_t n) {
  constexpr float kLowest = -std::numeric_limits<float>::infinity();
  const FloatVector by = hn::Set(Floats(), shift);
  DoubleSum sum;
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector e = exponential(hn::Sub(load(x + i, count, kLowest), by));
    sum.add(e);
    store(e, x + i, count);
  });
  return sum.total();
}

void scale_flat(float* x, float factor, std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), factor);
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(hn::Mul(load(x + i, count), by), x + i, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <string>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"
#include "layers/rms_norm/rms_norm.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(largest_of);
HWY_EXPORT(exponentials);
HWY_EXPORT(scale_flat);

// Positions whose logits exist at once. Whole blocks of the norm's backward.
constexpr std::int64_t kChunk = 256;
static_assert(kChunk % kRmsNormBlock == 0);
constexpr std::int64_t kLossRowsPerPiece = 8;

// Places in the lists that the head declares.
enum Parameter : std::size_t { kNorm, kWeight };
enum Scratch : std::size_t { kLogits, kNormed, kDNormed, kInverse, kPartial, kLosses };

void check_label(const Batch& batch, std::int64_t row, std::int32_t label,
                 std::int64_t vocabulary) {
  if (label == kNoLabel || (label >= 0 && label < vocabulary)) return;
  throw Error(ExitCode::kData, "label " + std::to_string(label) + " at sequence " +
                                   std::to_string(row / batch.shape.length) + ", position " +
                                   std::to_string(row % batch.shape.length) +
                                   " lies outside the model's vocabulary of " +
                                   std::to_string(vocabulary) + " (model.vocabulary)");
}

// The cross-entropy of each of a chunk's rows [begin, begin + rows) into losses, 0 where there is
// no label; the logits become their gradient times scale where `gradient`, else undefined.
void cross_entropy(Queue& queue, const Batch& batch, std::int64_t begin, std::int64_t rows,
                   std::int64_t vocabulary, bool gradient, double scale, float* logits,
                   double* losses) {
  const std::int32_t* const labels = batch.labels.as<std::int32_t>() + begin;
  queue.parallel_for(pieces_of(rows, kLossRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kLossRowsPerPiece);
    for (std::int64_t row = piece * kLossRowsPerPiece; row < end; ++row) {
      const std::int32_t label = labels[row];
      check_label(batch, begin + row, label, vocabulary);
      float* const x = logits + row * vocabulary;
      if (label == kNoLabel) {
        losses[begin + row] = 0.0;
        if (gradient) std::fill_n(x, vocabulary, 0.0F);
        continue;
      }
      const float chosen = x[label];
      const float largest = HWY_DYNAMIC_DISPATCH(largest_of)(x, vocabulary);
      const double sum = HWY_DYNAMIC_DISPATCH(exponentials)(x, largest, vocabulary);
      losses[begin + row] =
          std::log(sum) + (static_cast<double>(largest) - static_cast<double>(chosen));
      if (!gradient) continue;
      HWY_DYNAMIC_DISPATCH(scale_flat)(x, static_cast<float>(scale / sum), vocabulary);
      x[label] -= static_cast<float>(scale);
    }
  });
}

}  // namespace

Head::Head(const ModelConfig& config)
    : vocabulary_(require_range("model.vocabulary", config.vocabulary(), 1, kMaxVocabulary)),
      width_(require_range("model.width", config.width(), 1, kMaxWidth)),
      epsilon_(require_positive("model.norm_epsilon", config.norm_epsilon())),
      deviation_(require_positive("model.init_deviation", config.init_deviation())) {}

std::vector<ParameterSpec> Head::parameters() const {
  return {{"norm.weight", {width_}, {Init::Kind::kConstant, 1.0}, false},
          {"lm_head.weight", {vocabulary_, width_}, {Init::Kind::kNormal, deviation_}, true}};
}

std::vector<BufferSpec> Head::scratch(BatchShape shape) const {
  const std::int64_t chunk = std::min(kChunk, shape.rows());
  return {{"logits", DType::kF32, {chunk, vocabulary_}},
          {"normed", DType::kF32, {chunk, width_}},
          {"d_normed", DType::kF32, {chunk, width_}},
          {"inverse_rms", DType::kF32, {chunk}},
          {"partial_norm", DType::kF32, {rms_norm_blocks(shape.rows()), width_}},
          {"losses", DType::kF64, {shape.rows()}}};
}

double Head::flops_per_token() const {
  return 2.0 * static_cast<double>(width_) * static_cast<double>(vocabulary_);
}

double Head::loss(Queue& queue, const Batch& batch, const View& x, std::span<const View> parameters,
                  std::span<const View> scratch) const {
  return run(queue, batch, x, nullptr, parameters, scratch);
}

double Head::loss_and_gradient(Queue& queue, const Batch& batch, const View& x, double scale,
                               const View& d_x, std::span<const View> parameters,
                               std::span<const View> d_parameters,
                               std::span<const View> scratch) const {
  const Gradient gradient = {scale, d_x, d_parameters};
  return run(queue, batch, x, &gradient, parameters, scratch);
}

double Head::run(Queue& queue, const Batch& batch, const View& x, const Gradient* gradient,
                 std::span<const View> parameters, std::span<const View> scratch) const {
  const std::int64_t rows = batch.shape.rows();
  double* const losses = scratch[kLosses].as<double>();
  for (std::int64_t begin = 0; begin < rows; begin += kChunk) {
    const std::int64_t count = std::min(kChunk, rows - begin);
    const View in = x.slice(begin, begin + count);
    const View normed = shaped(scratch[kNormed], {count, width_});
    const View d_normed = shaped(scratch[kDNormed], {count, width_});
    const View logits = shaped(scratch[kLogits], {count, vocabulary_});
    const View inverse = shaped(scratch[kInverse], {count});
    rms_norm(queue, in, parameters[kNorm], epsilon_, normed, inverse);
    linear_forward(queue, matrix(normed), matrix(parameters[kWeight]), matrix(logits));
    cross_entropy(queue, batch, begin, count, vocabulary_, gradient != nullptr,
                  gradient ? gradient->scale : 0.0, logits.as<float>(), losses);
    if (!gradient) continue;
    linear_backward_weight(queue, matrix(logits), matrix(normed),
                           matrix(gradient->d_parameters[kWeight]), begin > 0);
    linear_backward_input(queue, matrix(logits), matrix(parameters[kWeight]), matrix(d_normed),
                          false);
    rms_norm_backward(queue, in, parameters[kNorm], inverse, d_normed,
                      gradient->d_x.slice(begin, begin + count), false,
                      scratch[kPartial].slice(begin / kRmsNormBlock,
                                              begin / kRmsNormBlock + rms_norm_blocks(count)));
  }
  if (gradient) {
    rms_norm_weight_gradient(queue, shaped(scratch[kPartial], {rms_norm_blocks(rows), width_}),
                             gradient->d_parameters[kNorm]);
  }
  double total = 0.0;
  for (std::int64_t row = 0; row < rows; ++row) total += losses[row];
  return total;
}

}  // namespace tessera
#endif
