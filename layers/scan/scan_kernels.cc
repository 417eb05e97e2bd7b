#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/scan/scan_kernels.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/scan/scan_kernels.h"

HWY_BEFORE_NAMESPACE();
namespace tessera::scan {
namespace HWY_NAMESPACE {
using namespace tessera::HWY_NAMESPACE;  // NOLINT(google-build-using-namespace): the shared kernels

// What an element of a tile of scores is multiplied by: e^(cumulative log-decay of the row minus
// that of the column), both in two parts. Rounding may leave a difference above 0, and what isn't
// visible always does.
HWY_INLINE FloatVector decay_between(FloatVector row_high, FloatVector row_low, const float* high,
                                     const float* low, std::int64_t count) {
  const FloatVector difference =
      hn::Add(hn::Sub(row_high, load(high, count)), hn::Sub(row_low, load(low, count)));
  return exponential(hn::Min(difference, hn::Zero(Floats())));
}

// Lanes of columns [column, column + lanes) that lie in [begin, end).
HWY_INLINE hn::Mask<Floats> inside(std::int64_t column, std::int64_t begin, std::int64_t end) {
  const Floats d;
  const FloatVector at = hn::Iota(d, static_cast<float>(column));
  return hn::And(hn::Ge(at, hn::Set(d, static_cast<float>(begin))),
                 hn::Lt(at, hn::Set(d, static_cast<float>(end))));
}

// Rows [first, first + rows) of a chunk: mixed = scores * decay on the columns [begin[i], i] that
// position i sees, 0 on the others up to `columns`. Both have `stride` elements between rows.
template <class T>
HWY_INLINE void mix_as(const float* scores, T* mixed, std::int64_t stride, std::int64_t first,
                       std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
                       const float* high, const float* low) {
  const Floats d;
  const std::int64_t step = lanes();
  for (std::int64_t i = first; i < first + rows; ++i) {
    const float* const row = scores + (i - first) * stride;
    T* const out = mixed + (i - first) * stride;
    const FloatVector row_high = hn::Set(d, high[i]), row_low = hn::Set(d, low[i]);
    for (std::int64_t c = 0; c < columns; c += step) {
      const std::int64_t count = HWY_MIN(step, columns - c);
      if (c + step <= begin[i] || c > i || begin[i] > i) {
        store(hn::Zero(d), out + c, count);
        continue;
      }
      FloatVector value =
          hn::Mul(load(row + c, count), decay_between(row_high, row_low, high + c, low + c, count));
      if (c < begin[i] || c + step > i + 1) {
        value = hn::IfThenElseZero(inside(c, begin[i], i + 1), value);
      }
      store(value, out + c, count);
    }
  }
}

void mix(DType dtype, const float* scores, std::byte* mixed, std::int64_t stride,
         std::int64_t first, std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
         const float* high, const float* low) {
  if (dtype == DType::kF32) {
    mix_as(scores, reinterpret_cast<float*>(mixed), stride, first, rows, columns, begin, high, low);
  } else {
    mix_as(scores, reinterpret_cast<BFloat16*>(mixed), stride, first, rows, columns, begin, high,
           low);
  }
}

// As mix, and d_scores += d_mixed * decay (overwritten by the `fresh` first head), and f added to
// the sums, without the diagonal, whose decay is 1 whatever the log-decays are.
template <class T>
HWY_INLINE void mix_backward_as(const float* scores, const float* d_mixed, T* mixed,
                                float* d_scores, bool fresh, std::int64_t stride,
                                std::int64_t first, std::int64_t rows, std::int64_t columns,
                                const std::int64_t* begin, const float* high, const float* low,
                                const PairSums& sums) {
  const Floats d;
  const std::int64_t step = lanes();
  for (std::int64_t i = first; i < first + rows; ++i) {
    const std::int64_t at = (i - first) * stride;
    const FloatVector row_high = hn::Set(d, high[i]), row_low = hn::Set(d, low[i]);
    FloatVector before = hn::Zero(d);
    for (std::int64_t c = 0; c < columns; c += step) {
      const std::int64_t count = HWY_MIN(step, columns - c);
      if (c + step <= begin[i] || c > i || begin[i] > i) {
        store(hn::Zero(d), mixed + at + c, count);
        if (fresh) store(hn::Zero(d), d_scores + at + c, count);
        continue;
      }
      const FloatVector score = load(scores + at + c, count);
      const FloatVector gradient = load(d_mixed + at + c, count);
      const FloatVector decay = decay_between(row_high, row_low, high + c, low + c, count);
      FloatVector value = hn::Mul(score, decay);
      FloatVector d_score = hn::Mul(gradient, decay);
      FloatVector f = hn::Mul(gradient, value);
      const bool own = c + step > i;
      if (c < begin[i] || own) {
        const auto visible = inside(c, begin[i], i + 1);
        value = hn::IfThenElseZero(visible, value);
        d_score = hn::IfThenElseZero(visible, d_score);
        f = hn::IfThenElseZero(inside(c, begin[i], i), f);
      }
      store(value, mixed + at + c, count);
      if (!fresh) d_score = hn::Add(d_score, load(d_scores + at + c, count));
      store(d_score, d_scores + at + c, count);
      if (own) {
        sums.row_before[i] = sum_of(before);
        sums.own_rows[i] = sum_of(f);
        store(hn::Add(load(sums.own_columns + c, count), f), sums.own_columns + c, count);
      } else {
        store(hn::Add(load(sums.before + c, count), before), sums.before + c, count);
        store(hn::Add(load(sums.columns + c, count), f), sums.columns + c, count);
        before = hn::Add(before, f);
      }
    }
  }
}

void mix_backward(DType dtype, const float* scores, const float* d_mixed, std::byte* mixed,
                  float* d_scores, bool fresh, std::int64_t stride, std::int64_t first,
                  std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
                  const float* high, const float* low, const PairSums& sums) {
  if (dtype == DType::kF32) {
    mix_backward_as(scores, d_mixed, reinterpret_cast<float*>(mixed), d_scores, fresh, stride,
                    first, rows, columns, begin, high, low, sums);
  } else {
    mix_backward_as(scores, d_mixed, reinterpret_cast<BFloat16*>(mixed), d_scores, fresh, stride,
                    first, rows, columns, begin, high, low, sums);
  }
}

std::int64_t vector_lanes() { return lanes(); }

void exponentials(float* x, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(exponential(load(x + i, count)), x + i, count); });
}

// to = from, row by row, or from * factors[row] where there are factors.
template <class From, class To>
HWY_INLINE void pack_as(const From* from, std::int64_t from_stride, const float* factors,
                        std::int64_t rows, std::int64_t width, To* to, std::int64_t to_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const FloatVector factor = hn::Set(Floats(), factors == nullptr ? 1.0F : factors[r]);
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      store(hn::Mul(load(from + r * from_stride + i, count), factor), to + r * to_stride + i,
            count);
    });
  }
}

void pack(Elements from, std::int64_t from_stride, const float* factors, std::int64_t rows,
          std::int64_t width, Elements to, std::int64_t to_stride) {
  if (factors == nullptr && from.dtype == to.dtype) {
    const auto bytes = static_cast<std::size_t>(width * size_of(to.dtype));
    for (std::int64_t r = 0; r < rows; ++r) {
      std::memcpy((to + r * to_stride).data, (from + r * from_stride).data, bytes);
    }
    return;
  }
  const auto* const floats = reinterpret_cast<const float*>(from.data);
  const auto* const halves = reinterpret_cast<const BFloat16*>(from.data);
  auto* const to_floats = reinterpret_cast<float*>(to.data);
  auto* const to_halves = reinterpret_cast<BFloat16*>(to.data);
  if (from.dtype == DType::kF32 && to.dtype == DType::kF32) {
    pack_as(floats, from_stride, factors, rows, width, to_floats, to_stride);
  } else if (from.dtype == DType::kF32) {
    pack_as(floats, from_stride, factors, rows, width, to_halves, to_stride);
  } else if (to.dtype == DType::kF32) {
    pack_as(halves, from_stride, factors, rows, width, to_floats, to_stride);
  } else {
    pack_as(halves, from_stride, factors, rows, width, to_halves, to_stride);
  }
}

// state = add + decay * before, head by head, in place of `add`, and its copy in the compute type.
void carry(float* state, const float* before, const float* decays, std::int64_t rows,
           std::int64_t heads, std::int64_t width, Elements copy) {
  for (std::int64_t at = 0; at < rows * heads * width; at += width) {
    const FloatVector decay = hn::Set(Floats(), decays[at / width % heads]);
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      FloatVector value = load(state + at + i, count);
      if (before != nullptr) value = hn::MulAdd(decay, load(before + at + i, count), value);
      store(value, state + at + i, count);
      store(value, copy + at + i, count);
    });
  }
}

// x . y, summed in f32 lanes.
HWY_INLINE float dot_row(Elements x, Elements y, std::int64_t width) {
  FloatVector sum = hn::Zero(Floats());
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    sum = hn::MulAdd(load(x + i, count), load(y + i, count), sum);
  });
  return sum_of(sum);
}

// x *= factors by row; dots[r] = by[r] * (x_r . y_r) of the result.
void scale_and_dot(float* x, std::int64_t stride, const float* factors, std::int64_t rows,
                   std::int64_t width, Elements y, std::int64_t y_stride, const float* by,
                   float* dots) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const FloatVector factor = hn::Set(Floats(), factors[r]);
    FloatVector sum = hn::Zero(Floats());
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      const FloatVector value = hn::Mul(load(x + r * stride + i, count), factor);
      store(value, x + r * stride + i, count);
      if (dots != nullptr) sum = hn::MulAdd(value, load(y + r * y_stride + i, count), sum);
    });
    if (dots != nullptr) dots[r] = sum_of(sum) * (by == nullptr ? 1.0F : by[r]);
  }
}

// out = sums + skip * v, row by row.
void finish(const float* sums, std::int64_t stride, Elements v, std::int64_t v_stride, float skip,
            std::int64_t rows, std::int64_t width, Elements out, std::int64_t out_stride) {
  const FloatVector factor = hn::Set(Floats(), skip);
  for (std::int64_t r = 0; r < rows; ++r) {
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      store(
          hn::MulAdd(factor, load(v + r * v_stride + i, count), load(sums + r * stride + i, count)),
          out + r * out_stride + i, count);
    });
  }
}

// From the gradient g of dt v, in its place: d_v = dt g + skip d_out; d_dt[r] = v_r . g_r. Returns
// the sum over the rows of v . d_out.
double finish_backward(float* g, std::int64_t stride, Elements v, std::int64_t v_stride,
                       Elements d_out, std::int64_t d_stride, const float* dt, float skip,
                       std::int64_t rows, std::int64_t width, float* d_dt) {
  const FloatVector factor = hn::Set(Floats(), skip);
  double d_skip = 0.0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const FloatVector step = hn::Set(Floats(), dt[r]);
    FloatVector with_gradient = hn::Zero(Floats()), with_out = with_gradient;
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      const FloatVector gradient = load(g + r * stride + i, count);
      const FloatVector value = load(v + r * v_stride + i, count);
      const FloatVector out = load(d_out + r * d_stride + i, count);
      with_gradient = hn::MulAdd(value, gradient, with_gradient);
      with_out = hn::MulAdd(value, out, with_out);
      store(hn::MulAdd(step, gradient, hn::Mul(factor, out)), g + r * stride + i, count);
    });
    d_dt[r] = sum_of(with_gradient);
    d_skip += static_cast<double>(sum_of(with_out));
  }
  return d_skip;
}

// to = the sum of `parts` arrays that lie side by side in each row, ascending.
void add_parts(const float* from, std::int64_t stride, std::int64_t parts, std::int64_t rows,
               std::int64_t width, Elements to, std::int64_t to_stride) {
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const row = from + r * stride;
    for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
      FloatVector sum = load(row + i, count);
      for (std::int64_t p = 1; p < parts; ++p) {
        sum = hn::Add(sum, load(row + p * width + i, count));
      }
      store(sum, to + r * to_stride + i, count);
    });
  }
}

// The sum over rows of x_r . y_r.
double dot_rows(Elements x, Elements y, std::int64_t stride, std::int64_t rows,
                std::int64_t width) {
  double sum = 0.0;
  for (std::int64_t r = 0; r < rows; ++r) {
    sum += static_cast<double>(dot_row(x + r * stride, y + r * stride, width));
  }
  return sum;
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera::scan
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera::scan {
HWY_EXPORT(mix);
HWY_EXPORT(mix_backward);
HWY_EXPORT(exponentials);
HWY_EXPORT(pack);
HWY_EXPORT(carry);
HWY_EXPORT(scale_and_dot);
HWY_EXPORT(finish);
HWY_EXPORT(finish_backward);
HWY_EXPORT(add_parts);
HWY_EXPORT(dot_rows);
HWY_EXPORT(vector_lanes);

void mix(DType dtype, const float* scores, std::byte* mixed, std::int64_t stride,
         std::int64_t first, std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
         const float* high, const float* low) {
  HWY_DYNAMIC_DISPATCH(mix)(dtype, scores, mixed, stride, first, rows, columns, begin, high, low);
}

void mix_backward(DType dtype, const float* scores, const float* d_mixed, std::byte* mixed,
                  float* d_scores, bool fresh, std::int64_t stride, std::int64_t first,
                  std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
                  const float* high, const float* low, const PairSums& sums) {
  HWY_DYNAMIC_DISPATCH(mix_backward)
  (dtype, scores, d_mixed, mixed, d_scores, fresh, stride, first, rows, columns, begin, high, low,
   sums);
}

void exponentials(float* x, std::int64_t n) { HWY_DYNAMIC_DISPATCH(exponentials)(x, n); }

void pack(Elements from, std::int64_t from_stride, const float* factors, std::int64_t rows,
          std::int64_t width, Elements to, std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(pack)(from, from_stride, factors, rows, width, to, to_stride);
}

void carry(float* state, const float* before, const float* decays, std::int64_t rows,
           std::int64_t heads, std::int64_t width, Elements copy) {
  HWY_DYNAMIC_DISPATCH(carry)(state, before, decays, rows, heads, width, copy);
}

void scale_and_dot(float* x, std::int64_t stride, const float* factors, std::int64_t rows,
                   std::int64_t width, Elements y, std::int64_t y_stride, const float* by,
                   float* dots) {
  HWY_DYNAMIC_DISPATCH(scale_and_dot)(x, stride, factors, rows, width, y, y_stride, by, dots);
}

void finish(const float* sums, std::int64_t stride, Elements v, std::int64_t v_stride, float skip,
            std::int64_t rows, std::int64_t width, Elements out, std::int64_t out_stride) {
  HWY_DYNAMIC_DISPATCH(finish)(sums, stride, v, v_stride, skip, rows, width, out, out_stride);
}

double finish_backward(float* g, std::int64_t stride, Elements v, std::int64_t v_stride,
                       Elements d_out, std::int64_t d_stride, const float* dt, float skip,
                       std::int64_t rows, std::int64_t width, float* d_dt) {
  return HWY_DYNAMIC_DISPATCH(finish_backward)(g, stride, v, v_stride, d_out, d_stride, dt, skip,
                                               rows, width, d_dt);
}

void add_parts(const float* from, std::int64_t stride, std::int64_t parts, std::int64_t rows,
               std::int64_t width, Elements to, std::int64_t to_stride) {
  HWY_DYNAMIC_DISPATCH(add_parts)(from, stride, parts, rows, width, to, to_stride);
}

double dot_rows(Elements x, Elements y, std::int64_t stride, std::int64_t rows,
                std::int64_t width) {
  return HWY_DYNAMIC_DISPATCH(dot_rows)(x, y, stride, rows, width);
}

std::int64_t vector_lanes() { return HWY_DYNAMIC_DISPATCH(vector_lanes)(); }

}  // namespace tessera::scan
#endif
