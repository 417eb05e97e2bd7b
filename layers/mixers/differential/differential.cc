#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/mixers/differential/differential.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/mixers/differential/differential.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// u = o1 - lambda o2 of one head of one position; maps: o1, then o2.
HWY_INLINE FloatVector difference(Elements maps, FloatVector lambda, std::int64_t i,
                                  std::int64_t count, std::int64_t width) {
  return hn::NegMulAdd(lambda, load(maps + width + i, count), load(maps + i, count));
}

double squares_of_difference(Elements maps, float lambda, std::int64_t width) {
  const FloatVector l = hn::Set(Floats(), lambda);
  DoubleSum sum;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector u = difference(maps, l, i, count, width);
    sum.add_product(u, u);
  });
  return sum.total();
}

void scale_difference(Elements maps, float lambda, float factor, Elements out, std::int64_t width) {
  const FloatVector l = hn::Set(Floats(), lambda), f = hn::Set(Floats(), factor);
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Mul(difference(maps, l, i, count, width), f), out + i, count);
  });
}

// rows becomes the gradient of u: with n = u r and g = rows * factor, r (g - n mean(g n)).
// Returns its product with o2.
double difference_backward(Elements maps, float lambda, float inverse_rms, float factor,
                           Elements rows, std::int64_t width) {
  const Floats d;
  const FloatVector l = hn::Set(d, lambda), r = hn::Set(d, inverse_rms), f = hn::Set(d, factor);
  DoubleSum along;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector n = hn::Mul(difference(maps, l, i, count, width), r);
    along.add_product(hn::Mul(load(rows + i, count), f), n);
  });
  const FloatVector mean =
      hn::Set(d, static_cast<float>(along.total() / static_cast<double>(width)));
  DoubleSum product;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector n = hn::Mul(difference(maps, l, i, count, width), r);
    const FloatVector g = hn::Mul(load(rows + i, count), f);
    const FloatVector d_u = hn::Mul(r, hn::NegMulAdd(n, mean, g));
    product.add_product(d_u, load(maps + width + i, count));
    store(d_u, rows + i, count);
  });
  return product.total();
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "layers/kernels/elementwise.h"

namespace tessera {
namespace {
HWY_EXPORT(squares_of_difference);
HWY_EXPORT(scale_difference);
HWY_EXPORT(difference_backward);

constexpr double kEpsilon = 1e-5;
constexpr double kLambdaDeviation = 0.1;

// Places in the lists that are declared; the maps' follow, or in the parameters' case precede.
enum Saved : std::size_t { kMaps, kInverseRms, kSavedCount };
enum Scratch : std::size_t { kPartialLambda, kScratchCount };
constexpr std::size_t kLambdas = 4;  // the last parameters: q1, k1, q2, k2

double dot(const View& a, const View& b) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < a.count(); ++i) {
    sum += static_cast<double>(a.as<float>()[i]) * static_cast<double>(b.as<float>()[i]);
  }
  return sum;
}

}  // namespace

double differential_lambda_init(std::int64_t layer) {
  return 0.8 - 0.6 * std::exp(-0.3 * static_cast<double>(layer));
}

Differential::Differential(const DifferentialConfig& config, const MixerContext& context,
                           const std::string& path)
    : maps_(config.attention(), Visibility::tokens(), 2, context, path + ".attention"),
      dtype_(context.compute),
      lambda_init_(differential_lambda_init(context.layer)) {}

std::vector<ParameterSpec> Differential::parameters() const {
  std::vector<ParameterSpec> list = maps_.parameters();
  for (const char* const name : {"lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"}) {
    list.push_back({name,
                    {maps_.head_width() / 2},
                    {Init::Kind::kNormal, kLambdaDeviation},
                    /*decay=*/false,
                    /*full_precision=*/true});
  }
  return list;
}

std::vector<BufferSpec> Differential::saved(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"maps", dtype_, maps_.shape_of(shape).out()},
                                  {"inverse_rms", DType::kF32, {shape.rows() * maps_.heads()}}};
  for (BufferSpec& buffer : maps_.saved(shape)) list.push_back(std::move(buffer));
  return list;
}

std::vector<BufferSpec> Differential::scratch(BatchShape shape) const {
  std::vector<BufferSpec> list = {
      {"partial_lambda", DType::kF64, {pieces_of(shape.rows(), kRowsPerPiece)}}};
  for (BufferSpec& buffer : maps_.scratch(shape)) list.push_back(std::move(buffer));
  return list;
}

double Differential::flops_per_token(std::int64_t length) const {
  return maps_.flops_per_token(length);
}

std::vector<LayerSize> Differential::sizes() const { return {{"tile", kAttentionTile}}; }

LayerMemory Differential::maps_memory(const LayerMemory& memory) const {
  return {memory.parameters.first(memory.parameters.size() - kLambdas),
          memory.saved.subspan(kSavedCount), memory.scratch.subspan(kScratchCount)};
}

namespace {

// exp(lq1 . lk1) and exp(lq2 . lk2).
std::pair<double, double> exponentials(std::span<const View> parameters) {
  const std::span<const View> l = parameters.last(kLambdas);
  return {std::exp(dot(l[0], l[1])), std::exp(dot(l[2], l[3]))};
}

}  // namespace

void Differential::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                           const LayerMemory& memory) const {
  maps_.forward(queue, batch, in, memory.saved[kMaps], maps_memory(memory));
  const auto [first, second] = exponentials(memory.parameters);
  const auto lambda = static_cast<float>(first - second + lambda_init_);
  const std::int64_t width = maps_.head_width(), heads = maps_.heads();
  const std::int64_t rows = batch.shape.rows();
  const Elements maps = elements(memory.saved[kMaps]), result = elements(out);
  float* const inverse_rms = memory.saved[kInverseRms].as<float>();
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece) * heads;
    for (std::int64_t i = piece * kRowsPerPiece * heads; i < end; ++i) {
      const Elements both = maps + 2 * i * width;
      const double mean = HWY_DYNAMIC_DISPATCH(squares_of_difference)(both, lambda, width) /
                          static_cast<double>(width);
      const double inverse = 1.0 / std::sqrt(mean + kEpsilon);
      inverse_rms[i] = static_cast<float>(inverse);
      HWY_DYNAMIC_DISPATCH(scale_difference)
      (both, lambda, static_cast<float>(inverse * (1.0 - lambda_init_)), result + i * width, width);
    }
  });
}

void Differential::backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                            const View& d_out, const View& d_in, bool accumulate,
                            std::span<const View> d_parameters, const LayerMemory& memory) const {
  const auto [first, second] = exponentials(memory.parameters);
  const auto lambda = static_cast<float>(first - second + lambda_init_);
  const std::int64_t width = maps_.head_width(), heads = maps_.heads();
  const std::int64_t rows = batch.shape.rows();
  const std::int64_t pieces = pieces_of(rows, kRowsPerPiece);
  const Elements maps = elements(memory.saved[kMaps]), d_rows = elements(d_out);
  const float* const inverse_rms = memory.saved[kInverseRms].as<float>();
  double* const partial =
      shaped(memory.scratch[kPartialLambda], DType::kF64, {pieces}).as<double>();
  queue.parallel_for(pieces, [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece) * heads;
    double sum = 0.0;
    for (std::int64_t i = piece * kRowsPerPiece * heads; i < end; ++i) {
      sum += HWY_DYNAMIC_DISPATCH(difference_backward)(maps + 2 * i * width, lambda, inverse_rms[i],
                                                       static_cast<float>(1.0 - lambda_init_),
                                                       d_rows + i * width, width);
    }
    partial[piece] = sum;
  });
  double d_lambda = 0.0;
  for (std::int64_t piece = 0; piece < pieces; ++piece) d_lambda -= partial[piece];
  const std::span<const View> l = memory.parameters.last(kLambdas);
  const std::span<const View> d_l = d_parameters.last(kLambdas);
  const std::array factors = {d_lambda * first, -d_lambda * second};
  for (std::size_t k = 0; k < kLambdas; ++k) {
    const float* const other = l[k ^ 1U].as<float>();
    for (std::int64_t i = 0; i < width / 2; ++i) {
      d_l[k].as<float>()[i] = static_cast<float>(factors[k / 2] * static_cast<double>(other[i]));
    }
  }
  maps_.backward(queue, batch, in, memory.saved[kMaps], std::array{1.0F, -lambda}, d_out, d_in,
                 accumulate, d_parameters.first(d_parameters.size() - kLambdas),
                 maps_memory(memory));
}

std::unique_ptr<Layer> make_differential(const MixerConfig& config, const MixerContext& context,
                                         const std::string& path) {
  return std::make_unique<ProjectedMixer>(
      std::make_unique<Differential>(config.differential(), context, path), context.model.width(),
      context.compute, context.output_deviation());
}

}  // namespace tessera
#endif
