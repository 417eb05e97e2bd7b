#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/gated_norm/gated_norm.cc"
#include <cmath>

#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/gated_norm/gated_norm.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// gate(z) from s = sigmoid(z), and its slope.
HWY_INLINE FloatVector gate_of(Gate gate, FloatVector z, FloatVector s) {
  return gate == Gate::kSilu ? hn::Mul(z, s) : s;
}
HWY_INLINE FloatVector slope_of(Gate gate, FloatVector z, FloatVector s) {
  const FloatVector rest = hn::Sub(hn::Set(Floats(), 1.0F), s);
  return gate == Gate::kSilu ? hn::Mul(s, hn::MulAdd(z, rest, hn::Set(Floats(), 1.0F)))
                             : hn::Mul(s, rest);
}

HWY_INLINE FloatVector gated(Gate gate, Elements x, Elements z, std::int64_t i,
                             std::int64_t count) {
  const FloatVector at = load(z + i, count);
  return hn::Mul(load(x + i, count), gate_of(gate, at, sigmoid(at)));
}

// One group of one row. The squares are summed in double, as in RMSNorm.
float normalise(Gate gate, double epsilon, Elements x, Elements z, Elements weight, Elements y,
                std::int64_t width) {
  DoubleSum sum;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector u = gated(gate, x, z, i, count);
    sum.add_product(u, u);
  });
  const auto inverse_rms =
      static_cast<float>(1.0 / std::sqrt(sum.total() / static_cast<double>(width) + epsilon));
  const FloatVector r = hn::Set(Floats(), inverse_rms);
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector normalised = hn::Mul(gated(gate, x, z, i, count), r);
    store(hn::Mul(normalised, load(weight + i, count)), y + i, count);
  });
  return inverse_rms;
}

// With n = u r and g = gate(z): d_u = r (w dy - n mean(w dy n)), d_x = d_u g, d_z = d_u x g'(z);
// d_weight += dy n.
void normalise_backward(Gate gate, Elements x, Elements z, Elements weight, float inverse_rms,
                        Elements d_y, Elements d_x, Elements d_z, float* d_weight,
                        std::int64_t width) {
  const FloatVector r = hn::Set(Floats(), inverse_rms);
  DoubleSum sum;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector normalised = hn::Mul(gated(gate, x, z, i, count), r);
    sum.add_product(hn::Mul(load(d_y + i, count), load(weight + i, count)), normalised);
  });
  const FloatVector mean =
      hn::Set(Floats(), static_cast<float>(sum.total() / static_cast<double>(width)));
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector at = load(z + i, count);
    const FloatVector s = sigmoid(at);
    const FloatVector value = load(x + i, count);
    const FloatVector g = gate_of(gate, at, s);
    const FloatVector normalised = hn::Mul(hn::Mul(value, g), r);
    const FloatVector dy = load(d_y + i, count);
    store(hn::MulAdd(dy, normalised, load(d_weight + i, count)), d_weight + i, count);
    const FloatVector d_u =
        hn::Mul(r, hn::NegMulAdd(normalised, mean, hn::Mul(dy, load(weight + i, count))));
    store(hn::Mul(d_u, g), d_x + i, count);
    store(hn::Mul(hn::Mul(d_u, value), slope_of(gate, at, s)), d_z + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

#include "layers/rms_norm/rms_norm.h"

namespace tessera {
namespace {
HWY_EXPORT(normalise);
HWY_EXPORT(normalise_backward);

// Calls body(row) for the rows of a block.
template <class Body>
void for_rows(std::int64_t block, std::int64_t rows, const Body& body) {
  const std::int64_t end = std::min(rows, (block + 1) * kRmsNormBlock);
  for (std::int64_t row = block * kRmsNormBlock; row < end; ++row) body(row);
}

}  // namespace

void gated_norm(Queue& queue, const GatedNormConfig& config, const View& x, const View& z,
                const View& weight, const View& y, const View& inverse_rms) {
  const std::int64_t rows = x.count() / config.width;
  const std::int64_t groups = config.groups(), width = config.group;
  const std::int64_t weight_step = weight.count() == config.width ? width : 0;
  TESSERA_CHECK(groups * width == config.width && weight.count() >= width);
  const Elements in = elements(x), gate = elements(z), scale = elements(weight), out = elements(y);
  float* const inverse = inverse_rms.as<float>();
  queue.parallel_for(rms_norm_blocks(rows), [&](std::int64_t block, Worker&) {
    for_rows(block, rows, [&](std::int64_t row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t at = row * config.width + g * width;
        inverse[row * groups + g] =
            HWY_DYNAMIC_DISPATCH(normalise)(config.gate, config.epsilon, in + at, gate + at,
                                            scale + g * weight_step, out + at, width);
      }
    });
  });
}

void gated_norm_backward(Queue& queue, const GatedNormConfig& config, const View& x, const View& z,
                         const View& weight, const View& inverse_rms, const View& d_y,
                         const View& d_x, const View& d_z, const View& d_weight,
                         const View& partial) {
  const std::int64_t rows = x.count() / config.width;
  const std::int64_t groups = config.groups(), width = config.group;
  const std::int64_t weights = weight.count();
  const std::int64_t weight_step = weights == config.width ? width : 0;
  const Elements in = elements(x), gate = elements(z), scale = elements(weight);
  const Elements d_out = elements(d_y), d_in = elements(d_x), d_gate = elements(d_z);
  const float* const inverse = inverse_rms.as<float>();
  const View sums = shaped(partial, DType::kF32, {rms_norm_blocks(rows), weights});
  float* const first = sums.as<float>();
  queue.parallel_for(rms_norm_blocks(rows), [&](std::int64_t block, Worker&) {
    float* const sum = first + block * weights;
    std::fill_n(sum, weights, 0.0F);
    for_rows(block, rows, [&](std::int64_t row) {
      for (std::int64_t g = 0; g < groups; ++g) {
        const std::int64_t at = row * config.width + g * width;
        HWY_DYNAMIC_DISPATCH(normalise_backward)
        (config.gate, in + at, gate + at, scale + g * weight_step, inverse[row * groups + g],
         d_out + at, d_in + at, d_gate + at, sum + g * weight_step, width);
      }
    });
  });
  rms_norm_weight_gradient(queue, sums, d_weight);
}

}  // namespace tessera
#endif
