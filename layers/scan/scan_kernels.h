// The elementwise work of the chunked scan, on one chunk at a time. Strides are in elements; arrays
// without a type are f32.
#pragma once

#include <cstdint>

#include "layers/kernels/elementwise.h"

namespace tessera::scan {

// Where the gradients f = d_mixed * mixed of the log-decays between two positions are added up,
// each [chunk]. A log-decay at r is part of all pairs (i, j) with j < r <= i; they are added up
// without subtracting whole rows from whole columns, which would leave little of f's digits. With
// the columns cut into vectors:
struct PairSums {
  float* before;       // of a vector, by lane: rows beyond it, columns before it
  float* columns;      // rows beyond the column's vector
  float* row_before;   // of a row: columns before its own vector
  float* own_rows;     // of a row: columns of its own vector
  float* own_columns;  // of a column: rows of its own vector
};

// Rows [first, first + rows) of a chunk: mixed = scores * decay on the columns [begin[i], i] that
// position i sees, 0 on the others up to `columns`. decay = e^(cumulative log-decay of the row
// minus that of the column), both in two parts. Both arrays have `stride` elements between rows;
// mixed is of the given type.
void mix(DType dtype, const float* scores, std::byte* mixed, std::int64_t stride,
         std::int64_t first, std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
         const float* high, const float* low);

// As mix, and d_scores += d_mixed * decay (overwritten by the `fresh` first head), and f added to
// the sums, without the diagonal, whose decay is 1 whatever the log-decays are.
void mix_backward(DType dtype, const float* scores, const float* d_mixed, std::byte* mixed,
                  float* d_scores, bool fresh, std::int64_t stride, std::int64_t first,
                  std::int64_t rows, std::int64_t columns, const std::int64_t* begin,
                  const float* high, const float* low, const PairSums& sums);

// x = e^x
void exponentials(float* x, std::int64_t n);

// to = from, row by row, or from * factors[row] where there are factors.
void pack(Elements from, std::int64_t from_stride, const float* factors, std::int64_t rows,
          std::int64_t width, Elements to, std::int64_t to_stride);

// state = state + decay * before, head by head, and its copy in another type. before null: 0.
void carry(float* state, const float* before, const float* decays, std::int64_t rows,
           std::int64_t heads, std::int64_t width, Elements copy);

// x *= factors by row; dots[r] = by[r] (1 where null) * (x_r . y_r) of the result, where there are
// dots.
void scale_and_dot(float* x, std::int64_t stride, const float* factors, std::int64_t rows,
                   std::int64_t width, Elements y, std::int64_t y_stride, const float* by,
                   float* dots);

// out = sums + skip * v, row by row.
void finish(const float* sums, std::int64_t stride, Elements v, std::int64_t v_stride, float skip,
            std::int64_t rows, std::int64_t width, Elements out, std::int64_t out_stride);

// From the gradient g of dt v, in its place: d_v = dt g + skip d_out; d_dt[r] = v_r . g_r. Returns
// the sum over the rows of v . d_out.
double finish_backward(float* g, std::int64_t stride, Elements v, std::int64_t v_stride,
                       Elements d_out, std::int64_t d_stride, const float* dt, float skip,
                       std::int64_t rows, std::int64_t width, float* d_dt);

// to = the sum of `parts` arrays that lie side by side in each row, ascending.
void add_parts(const float* from, std::int64_t stride, std::int64_t parts, std::int64_t rows,
               std::int64_t width, Elements to, std::int64_t to_stride);

// The sum over rows of x_r . y_r.
double dot_rows(Elements x, Elements y, std::int64_t stride, std::int64_t rows, std::int64_t width);

// Elements of a vector on this CPU.
std::int64_t vector_lanes();

}  // namespace tessera::scan
