#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/scan/steps.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/scan/steps.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// log(1 + y) for y in [0, 1], within 4 units in the last place: 2 artanh(s) with s = y / (2 + y)
// <= 1/3, whose series in s^2 <= 1/9 ends below 2^-29.
HWY_INLINE FloatVector log_one_plus(FloatVector y) {
  const auto set = [](float value) HWY_ATTR { return hn::Set(Floats(), value); };
  const FloatVector s = hn::Div(y, hn::Add(y, set(2.0F)));
  const FloatVector z = hn::Mul(s, s);
  FloatVector p = set(1.0F / 17.0F);
  p = hn::MulAdd(p, z, set(1.0F / 15.0F));
  p = hn::MulAdd(p, z, set(1.0F / 13.0F));
  p = hn::MulAdd(p, z, set(1.0F / 11.0F));
  p = hn::MulAdd(p, z, set(1.0F / 9.0F));
  p = hn::MulAdd(p, z, set(1.0F / 7.0F));
  p = hn::MulAdd(p, z, set(1.0F / 5.0F));
  p = hn::MulAdd(p, z, set(1.0F / 3.0F));
  const FloatVector twice = hn::Add(s, s);
  return hn::MulAdd(hn::Mul(p, z), twice, twice);
}

// log(1 + e^x), without overflow or cancellation: max(x, 0) + log(1 + e^-|x|).
HWY_INLINE FloatVector softplus(FloatVector x) {
  return hn::Add(hn::Max(x, hn::Zero(Floats())), log_one_plus(exponential(hn::Neg(hn::Abs(x)))));
}

void steps_row(const float* raw, const float* a_log, const float* bias, float* dt, float* log_decay,
               std::int64_t heads) {
  for_vectors(heads, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector step = softplus(hn::Add(load(raw + i, count), load(bias + i, count)));
    store(step, dt + i, count);
    const FloatVector rate = hn::Neg(exponential(load(a_log + i, count)));
    store(hn::Mul(rate, step), log_decay + i, count);
  });
}

// With A = -exp(A_log): d_raw = (d_dt + d_log_decay A) sigmoid(raw + bias); d_A_log += d_log_decay
// A dt; d_bias += d_raw.
void steps_backward_row(const float* raw, const float* a_log, const float* bias, const float* d_dt,
                        const float* d_log_decay, Elements d_raw, float* d_a_log, float* d_bias,
                        std::int64_t heads) {
  for_vectors(heads, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector at = hn::Add(load(raw + i, count), load(bias + i, count));
    const FloatVector rate = hn::Neg(exponential(load(a_log + i, count)));
    const FloatVector d_rate = hn::Mul(load(d_log_decay + i, count), rate);
    const FloatVector gradient = hn::Mul(hn::Add(load(d_dt + i, count), d_rate), sigmoid(at));
    store(gradient, d_raw + i, count);
    store(hn::MulAdd(d_rate, softplus(at), load(d_a_log + i, count)), d_a_log + i, count);
    store(hn::Add(load(d_bias + i, count), gradient), d_bias + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

namespace tessera {
namespace {
HWY_EXPORT(steps_row);
HWY_EXPORT(steps_backward_row);

template <class Body>
void for_row_blocks(Queue& queue, std::int64_t rows, const Body& body) {
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    body(piece, piece * kRowsPerPiece, std::min(rows, (piece + 1) * kRowsPerPiece));
  });
}

}  // namespace

ParameterSpec decay_rate_parameter(std::int64_t heads) {
  Init init;
  init.kind = Init::Kind::kLogOfUniform;
  init.low = 1.0;
  init.high = 16.0;
  return {"A_log", {heads}, init, false, true};
}

ParameterSpec step_bias_parameter(std::int64_t heads) {
  Init init;
  init.kind = Init::Kind::kInverseSoftplusOfLogUniform;
  init.low = 1e-3;
  init.high = 0.1;
  init.floor = 1e-4;
  return {"dt_bias", {heads}, init, false, true};
}

void scan_steps(Queue& queue, const View& raw, const View& a_log, const View& dt_bias,
                const View& dt, const View& log_decay) {
  const std::int64_t heads = a_log.count();
  const float* const from = raw.as<float>();
  const float* const rates = a_log.as<float>();
  const float* const bias = dt_bias.as<float>();
  float* const steps = dt.as<float>();
  float* const decays = log_decay.as<float>();
  for_row_blocks(queue, raw.count() / heads,
                 [&](std::int64_t, std::int64_t begin, std::int64_t end) {
                   for (std::int64_t at = begin * heads; at < end * heads; at += heads) {
                     HWY_DYNAMIC_DISPATCH(steps_row)
                     (from + at, rates, bias, steps + at, decays + at, heads);
                   }
                 });
}

Shape scan_steps_partial(std::int64_t rows, std::int64_t heads) {
  return {pieces_of(rows, kRowsPerPiece), 2, heads};
}

void scan_steps_backward(Queue& queue, const View& raw, const View& a_log, const View& dt_bias,
                         const View& d_dt, const View& d_log_decay, const View& d_raw,
                         const View& d_a_log, const View& d_dt_bias, const View& partial) {
  const std::int64_t heads = a_log.count();
  const std::int64_t rows = raw.count() / heads;
  const float* const from = raw.as<float>();
  const float* const rates = a_log.as<float>();
  const float* const bias = dt_bias.as<float>();
  const float* const d_steps = d_dt.as<float>();
  const float* const d_decays = d_log_decay.as<float>();
  const Elements d_from = elements(d_raw);
  const View sums = shaped(partial, DType::kF32, scan_steps_partial(rows, heads));
  float* const first = sums.as<float>();
  for_row_blocks(queue, rows, [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
    float* const sum = first + block * 2 * heads;
    std::fill_n(sum, 2 * heads, 0.0F);
    for (std::int64_t at = begin * heads; at < end * heads; at += heads) {
      HWY_DYNAMIC_DISPATCH(steps_backward_row)
      (from + at, rates, bias, d_steps + at, d_decays + at, d_from + at, sum, sum + heads, heads);
    }
  });
  for (std::int64_t h = 0; h < heads; ++h) {
    double rate = 0.0, offset = 0.0;
    for (std::int64_t block = 0; block < sums.extent(0); ++block) {
      rate += static_cast<double>(first[block * 2 * heads + h]);
      offset += static_cast<double>(first[(block * 2 + 1) * heads + h]);
    }
    d_a_log.as<float>()[h] = static_cast<float>(rate);
    d_dt_bias.as<float>()[h] = static_cast<float>(offset);
  }
}

}  // namespace tessera
#endif
