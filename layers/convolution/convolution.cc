#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/convolution/convolution.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/convolution/convolution.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// u of one vector of channels: bias + sum over m < taps of weight_m x_{t-m}, m ascending. by_tap
// [taps + 1, channels]: row m multiplies what lies m positions back, the last row is the bias.
HWY_INLINE FloatVector convolve(Elements x, const float* by_tap, std::int64_t taps,
                                std::int64_t seen, std::int64_t channels, std::int64_t i,
                                std::int64_t count) {
  FloatVector u = load(by_tap + taps * channels + i, count);
  for (std::int64_t m = 0; m < seen; ++m) {
    u = hn::MulAdd(load(by_tap + m * channels + i, count), load(x + (i - m * channels), count), u);
  }
  return u;
}

// One position; `seen` of the taps lie in its document.
void convolve_row(Elements x, const float* by_tap, std::int64_t taps, std::int64_t seen, bool silu,
                  Elements y, std::int64_t channels) {
  for_vectors(channels, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector u = convolve(x, by_tap, taps, seen, channels, i, count);
    store(silu ? hn::Mul(u, sigmoid(u)) : u, y + i, count);
  });
}

// d_u = d_y SiLU'(u), in place; sums [taps + 1, channels] += the position's part of the gradients
// of weight and bias.
void convolve_backward_row(Elements x, const float* by_tap, std::int64_t taps, std::int64_t seen,
                           bool silu, Elements d_y, float* sums, std::int64_t channels) {
  const FloatVector one = hn::Set(Floats(), 1.0F);
  for_vectors(channels, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector d_u = load(d_y + i, count);
    if (silu) {
      const FloatVector u = convolve(x, by_tap, taps, seen, channels, i, count);
      const FloatVector s = sigmoid(u);
      d_u = hn::Mul(d_u, hn::Mul(s, hn::MulAdd(u, hn::Sub(one, s), one)));
      store(d_u, d_y + i, count);
    }
    for (std::int64_t m = 0; m < seen; ++m) {
      float* const sum = sums + m * channels + i;
      store(hn::MulAdd(d_u, load(x + (i - m * channels), count), load(sum, count)), sum, count);
    }
    float* const sum = sums + taps * channels + i;
    store(hn::Add(load(sum, count), d_u), sum, count);
  });
}

// d_x_t = sum over m < reach of weight_m d_u_{t+m}, m ascending.
void convolve_transposed_row(Elements d_u, const float* by_tap, std::int64_t reach, Elements d_x,
                             std::int64_t channels) {
  for_vectors(channels, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector sum = hn::Zero(Floats());
    for (std::int64_t m = 0; m < reach; ++m) {
      sum = hn::MulAdd(load(by_tap + m * channels + i, count),
                       load(d_u + (i + m * channels), count), sum);
    }
    store(sum, d_x + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <cmath>

namespace tessera {
namespace {
HWY_EXPORT(convolve_row);
HWY_EXPORT(convolve_backward_row);
HWY_EXPORT(convolve_transposed_row);
HWY_EXPORT(add_row);

float value_at(const View& view, std::int64_t i) {
  return view.dtype() == DType::kF32 ? view.as<float>()[i] : to_float(view.as<BFloat16>()[i]);
}

// weight and bias in f32 with the taps outside, the current token's first: whole vectors of
// channels.
void arrange(const ConvolutionConfig& config, const View& weight, const View& bias, float* by_tap) {
  for (std::int64_t c = 0; c < config.channels; ++c) {
    for (std::int64_t m = 0; m < config.taps; ++m) {
      by_tap[m * config.channels + c] = value_at(weight, (c + 1) * config.taps - 1 - m);
    }
    by_tap[config.taps * config.channels + c] = config.bias ? value_at(bias, c) : 0.0F;
  }
}

// Calls body(piece, first row, one past the last) for blocks of rows.
template <class Body>
void for_row_blocks(Queue& queue, std::int64_t rows, const Body& body) {
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    body(piece, piece * kRowsPerPiece, std::min(rows, (piece + 1) * kRowsPerPiece));
  });
}

// How many of the taps lie in the document of this row.
std::int64_t taps_seen(const std::int32_t* segments, std::int64_t length, std::int64_t row,
                       std::int64_t taps) {
  return std::min(taps, row % length - segments[row] + 1);
}

}  // namespace

Shape ConvolutionConfig::scratch(BatchShape shape) const {
  // The weights by tap, then each block's sums of their gradients.
  return {1 + pieces_of(shape.rows(), kRowsPerPiece), taps + 1, channels};
}

Init ConvolutionConfig::init() const {
  return {Init::Kind::kUniform, 1.0 / std::sqrt(static_cast<double>(taps))};
}

void convolution_forward(Queue& queue, const ConvolutionConfig& config, BatchShape shape,
                         const View& segments, const View& x, const View& weight, const View& bias,
                         const View& y, const View& scratch) {
  const std::int64_t channels = config.channels, taps = config.taps;
  float* const by_tap = shaped(scratch, DType::kF32, config.scratch(shape)).as<float>();
  arrange(config, weight, bias, by_tap);
  const auto* const starts = segments.as<std::int32_t>();
  const Elements in = elements(x), out = elements(y);
  for_row_blocks(queue, shape.rows(), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      HWY_DYNAMIC_DISPATCH(convolve_row)
      (in + row * channels, by_tap, taps, taps_seen(starts, shape.length, row, taps), config.silu,
       out + row * channels, channels);
    }
  });
}

void convolution_backward(Queue& queue, const ConvolutionConfig& config, BatchShape shape,
                          const View& segments, const View& x, const View& weight, const View& bias,
                          const View& d_y, const View& d_x, const View& d_weight,
                          const View& d_bias, const View& scratch) {
  const std::int64_t channels = config.channels, taps = config.taps;
  const std::int64_t weights = (taps + 1) * channels;
  float* const by_tap = shaped(scratch, DType::kF32, config.scratch(shape)).as<float>();
  float* const partial = by_tap + weights;
  arrange(config, weight, bias, by_tap);
  const auto* const starts = segments.as<std::int32_t>();
  const Elements in = elements(x), d_out = elements(d_y), d_in = elements(d_x);
  for_row_blocks(queue, shape.rows(),
                 [&](std::int64_t block, std::int64_t begin, std::int64_t end) {
                   float* const sums = partial + block * weights;
                   std::fill_n(sums, weights, 0.0F);
                   for (std::int64_t row = begin; row < end; ++row) {
                     HWY_DYNAMIC_DISPATCH(convolve_backward_row)
                     (in + row * channels, by_tap, taps, taps_seen(starts, shape.length, row, taps),
                      config.silu, d_out + row * channels, sums, channels);
                   }
                 });
  for_row_blocks(queue, shape.rows(), [&](std::int64_t, std::int64_t begin, std::int64_t end) {
    for (std::int64_t row = begin; row < end; ++row) {
      // The following positions of the same document, at most taps - 1 of them.
      const std::int64_t position = row % shape.length;
      std::int64_t reach = 1;
      while (reach < taps && position + reach < shape.length && starts[row + reach] <= position) {
        ++reach;
      }
      HWY_DYNAMIC_DISPATCH(convolve_transposed_row)
      (d_out + row * channels, by_tap, reach, d_in + row * channels, channels);
    }
  });
  // Blocks ascending, into the first one's sums.
  constexpr std::int64_t kColumns = 1024;
  const std::int64_t blocks = pieces_of(shape.rows(), kRowsPerPiece);
  queue.parallel_for(pieces_of(weights, kColumns), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kColumns;
    for (std::int64_t block = 1; block < blocks; ++block) {
      HWY_DYNAMIC_DISPATCH(add_row)
      (partial + block * weights + begin, partial + begin, std::min(kColumns, weights - begin));
    }
  });
  for (std::int64_t c = 0; c < channels; ++c) {
    for (std::int64_t m = 0; m < taps; ++m) {
      d_weight.as<float>()[(c + 1) * taps - 1 - m] = partial[m * channels + c];
    }
    if (config.bias) d_bias.as<float>()[c] = partial[taps * channels + c];
  }
}

}  // namespace tessera
#endif
