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

// to may begin where x does, of a narrower type.
void scale_flat(const float* x, float factor, Elements to, std::int64_t n) {
  const FloatVector by = hn::Set(Floats(), factor);
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(hn::Mul(load(x + i, count), by), to + i, count); });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>
#include <cstring>
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

// Positions whose logits exist at once: whole blocks of the norm's backward, as many as make about
// 64 MiB, since every chunk reads and adds to the whole weight matrix.
std::int64_t chunk_rows(std::int64_t vocabulary) {
  constexpr std::int64_t kLogits = std::int64_t{1} << 24;
  constexpr std::int64_t kUnit = 128;
  static_assert(kUnit % kRmsNormBlock == 0);
  return std::clamp<std::int64_t>(kLogits / vocabulary / kUnit * kUnit, kUnit, 1024);
}
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
// no label; the logits become their gradient times scale where `gradient`, of `dtype`, each row at
// the start of its logits; else undefined.
void cross_entropy(Queue& queue, const Batch& batch, std::int64_t begin, std::int64_t rows,
                   std::int64_t vocabulary, bool gradient, double scale, DType dtype, float* logits,
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
        if (gradient) std::memset(x, 0, static_cast<std::size_t>(vocabulary * size_of(dtype)));
        continue;
      }
      const float chosen = x[label];
      const float largest = HWY_DYNAMIC_DISPATCH(largest_of)(x, vocabulary);
      const double sum = HWY_DYNAMIC_DISPATCH(exponentials)(x, largest, vocabulary);
      losses[begin + row] =
          std::log(sum) + (static_cast<double>(largest) - static_cast<double>(chosen));
      if (!gradient) continue;
      const auto factor = static_cast<float>(scale / sum);
      const float of_label = x[label] * factor - static_cast<float>(scale);
      const Elements d_x = {reinterpret_cast<std::byte*>(x), dtype};
      HWY_DYNAMIC_DISPATCH(scale_flat)(x, factor, d_x, vocabulary);
      if (dtype == DType::kF32) {
        x[label] = of_label;
      } else {
        reinterpret_cast<BFloat16*>(x)[label] = to_bfloat16(of_label);
      }
    }
  });
}

}  // namespace

Head::Head(const ModelConfig& config, DType compute)
    : vocabulary_(require_range("model.vocabulary", config.vocabulary(), 1, kMaxVocabulary)),
      width_(require_range("model.width", config.width(), 1, kMaxWidth)),
      epsilon_(require_positive("model.norm_epsilon", config.norm_epsilon())),
      deviation_(require_positive("model.init_deviation", config.init_deviation())),
      dtype_(compute) {}

std::vector<ParameterSpec> Head::parameters() const {
  return {{"norm.weight", {width_}, {Init::Kind::kConstant, 1.0}, false},
          {"lm_head.weight", {vocabulary_, width_}, {Init::Kind::kNormal, deviation_}, true}};
}

std::vector<BufferSpec> Head::scratch(BatchShape shape) const {
  const std::int64_t chunk = std::min(chunk_rows(vocabulary_), shape.rows());
  return {{"logits", DType::kF32, {chunk, vocabulary_}},
          {"normed", dtype_, {chunk, width_}},
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
  const std::int64_t chunk = chunk_rows(vocabulary_);
  for (std::int64_t begin = 0; begin < rows; begin += chunk) {
    const std::int64_t count = std::min(chunk, rows - begin);
    const View in = x.slice(begin, begin + count);
    const View normed = shaped(scratch[kNormed], dtype_, {count, width_});
    const View d_normed = shaped(scratch[kDNormed], DType::kF32, {count, width_});
    const View logits = shaped(scratch[kLogits], DType::kF32, {count, vocabulary_});
    const View inverse = shaped(scratch[kInverse], DType::kF32, {count});
    rms_norm(queue, in, parameters[kNorm], epsilon_, normed, inverse);
    linear_forward(queue, matrix(normed), matrix(parameters[kWeight]), matrix(logits));
    cross_entropy(queue, batch, begin, count, vocabulary_, gradient != nullptr,
                  gradient ? gradient->scale : 0.0, dtype_, logits.as<float>(), losses);
    if (!gradient) continue;
    const Matrix d_logits = {dtype_, logits.raw(), count, vocabulary_,
                             vocabulary_ * size_of(DType::kF32) / size_of(dtype_)};
    linear_backward_weight(queue, d_logits, matrix(normed), matrix(gradient->d_parameters[kWeight]),
                           begin > 0);
    linear_backward_input(queue, d_logits, matrix(parameters[kWeight]), matrix(d_normed), false);
    rms_norm_backward(queue, in, parameters[kNorm], inverse, d_normed,
                      gradient->d_x.slice(begin, begin + count), false,
                      scratch[kPartial].slice(begin / kRmsNormBlock,
                                              begin / kRmsNormBlock + rms_norm_blocks(count)));
  }
  if (gradient) {
    rms_norm_weight_gradient(
        queue, shaped(scratch[kPartial], DType::kF32, {rms_norm_blocks(rows), width_}),
        gradient->d_parameters[kNorm]);
  }
  double total = 0.0;
  for (std::int64_t row = 0; row < rows; ++row) total += losses[row];
  return total;
}

}  // namespace tessera
#endif
