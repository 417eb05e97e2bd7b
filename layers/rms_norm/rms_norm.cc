#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/rms_norm/rms_norm.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/rms_norm/rms_norm.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// The squares are summed in double: no overflow, and no error that grows with the width.
double sum_of_squares(Elements x, std::int64_t d) {
  DoubleSum sum;
  for_vectors(d, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector value = load(x + i, count);
    sum.add_product(value, value);
  });
  return sum.total();
}

void scale_row(Elements x, Elements weight, float inverse_rms, Elements y, std::int64_t d) {
  const FloatVector r = hn::Set(Floats(), inverse_rms);
  for_vectors(d, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector normalised = hn::Mul(load(x + i, count), r);
    store(hn::Mul(normalised, load(weight + i, count)), y + i, count);
  });
}

// With n = x r: d_x = r (w dy - n mean(w dy n)); the block's d_w += dy n.
void backward_row(Elements x, Elements weight, float inverse_rms, Elements d_y, Elements d_x,
                  bool accumulate, float* d_weight, std::int64_t d) {
  const FloatVector r = hn::Set(Floats(), inverse_rms);
  DoubleSum sum;
  for_vectors(d, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector normalised = hn::Mul(load(x + i, count), r);
    sum.add_product(hn::Mul(load(d_y + i, count), load(weight + i, count)), normalised);
  });
  const FloatVector mean =
      hn::Set(Floats(), static_cast<float>(sum.total() / static_cast<double>(d)));
  for_vectors(d, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector normalised = hn::Mul(load(x + i, count), r);
    const FloatVector dy = load(d_y + i, count);
    store(hn::MulAdd(dy, normalised, load(d_weight + i, count)), d_weight + i, count);
    const FloatVector inner = hn::NegMulAdd(normalised, mean, hn::Mul(dy, load(weight + i, count)));
    FloatVector gradient = hn::Mul(r, inner);
    if (accumulate) gradient = hn::Add(load(d_x + i, count), gradient);
    store(gradient, d_x + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>

#include "layers/kernels/elementwise.h"

namespace tessera {
namespace {
HWY_EXPORT(sum_of_squares);
HWY_EXPORT(scale_row);
HWY_EXPORT(backward_row);
HWY_EXPORT(add_row);

// Calls body(row) for all rows, shared out over the threads.
template <class Body>
void for_rows(Queue& queue, std::int64_t rows, const Body& body) {
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece);
    for (std::int64_t row = piece * kRowsPerPiece; row < end; ++row) body(row);
  });
}

}  // namespace

void rms_norm(Queue& queue, const View& x, const View& weight, double epsilon, const View& y,
              const View& inverse_rms) {
  const std::int64_t d = weight.count();
  const Elements in = elements(x);
  const Elements scale = elements(weight);
  const Elements out = elements(y);
  float* const inverse = inverse_rms.as<float>();
  for_rows(queue, x.count() / d, [&](std::int64_t row) {
    const double mean =
        HWY_DYNAMIC_DISPATCH(sum_of_squares)(in + row * d, d) / static_cast<double>(d);
    inverse[row] = static_cast<float>(1.0 / std::sqrt(mean + epsilon));
    HWY_DYNAMIC_DISPATCH(scale_row)(in + row * d, scale, inverse[row], out + row * d, d);
  });
}

void rms_norm_again(Queue& queue, const View& x, const View& weight, const View& inverse_rms,
                    const View& y) {
  const std::int64_t d = weight.count();
  const Elements in = elements(x);
  const Elements scale = elements(weight);
  const float* const inverse = inverse_rms.as<float>();
  const Elements out = elements(y);
  for_rows(queue, x.count() / d, [&](std::int64_t row) {
    HWY_DYNAMIC_DISPATCH(scale_row)(in + row * d, scale, inverse[row], out + row * d, d);
  });
}

void rms_norm_backward(Queue& queue, const View& x, const View& weight, const View& inverse_rms,
                       const View& d_y, const View& d_x, bool accumulate,
                       const View& partial_d_weight) {
  const std::int64_t d = weight.count();
  const std::int64_t rows = x.count() / d;
  const Elements in = elements(x);
  const Elements scale = elements(weight);
  const float* const inverse = inverse_rms.as<float>();
  const Elements d_out = elements(d_y);
  const Elements d_in = elements(d_x);
  float* const partial = partial_d_weight.as<float>();
  queue.parallel_for(rms_norm_blocks(rows), [&](std::int64_t block, Worker&) {
    std::fill_n(partial + block * d, d, 0.0F);
    const std::int64_t end = std::min(rows, (block + 1) * kRmsNormBlock);
    for (std::int64_t row = block * kRmsNormBlock; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(backward_row)
      (in + row * d, scale, inverse[row], d_out + row * d, d_in + row * d, accumulate,
       partial + block * d, d);
    }
  });
}

void rms_norm_weight_gradient(Queue& queue, const View& partial_d_weight, const View& d_weight) {
  constexpr std::int64_t kColumns = 256;
  const std::int64_t d = d_weight.count();
  const std::int64_t blocks = partial_d_weight.count() / d;
  const float* const partial = partial_d_weight.as<float>();
  float* const sum = d_weight.as<float>();
  queue.parallel_for(pieces_of(d, kColumns), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kColumns;
    const std::int64_t count = std::min(kColumns, d - begin);
    std::copy_n(partial + begin, count, sum + begin);
    for (std::int64_t block = 1; block < blocks; ++block) {
      HWY_DYNAMIC_DISPATCH(add_row)(partial + block * d + begin, sum + begin, count);
    }
  });
}

}  // namespace tessera
#endif
