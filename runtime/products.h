// Matrix products under the CANONICAL rules, on oneDNN (static shapes, one thread a library call)
// or where it has no fast kernels on our own: work is cut by shape. A row of a product has the same
// bits whatever the number of rows, and nothing depends on the number of threads. All matrices are
// row-major with a stride between rows (in elements); operands are both f32 or both bf16, a result
// is f32 or of the operands' type, and sums are formed in f32.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/device.h"

namespace tessera {

struct Matrix {
  Matrix() = default;
  Matrix(DType type, void* elements, std::int64_t row_count, std::int64_t column_count,
         std::int64_t row_stride)
      : data(static_cast<std::byte*>(elements)),
        rows(row_count),
        columns(column_count),
        stride(row_stride),
        dtype(type) {}
  template <class T>
  Matrix(T* elements, std::int64_t row_count, std::int64_t column_count, std::int64_t row_stride)
      : Matrix(dtype_of<T>(), elements, row_count, column_count, row_stride) {}
  std::byte* at(std::int64_t row, std::int64_t column) const {
    return data + (row * stride + column) * size_of(dtype);
  }

  std::byte* data = nullptr;
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::int64_t stride = 0;  // elements from one row to the next, >= columns
  DType dtype = DType::kF32;
};
// A view of rank >= 1 as [all but the last axis, last axis].
Matrix matrix(const View& view);

enum class Transpose : std::uint8_t { kNo, kYes };

// On the calling worker's thread alone: C = op(A) op(B), or C += op(A) op(B). For use inside a
// piece of parallel_for. Prepared products are kept, so a shape costs its creation once. The
// bits of a row may depend on the shape: see product_of_rows.
void product(Worker& worker, Matrix a, Transpose transpose_a, Matrix b, Transpose transpose_b,
             Matrix c, bool accumulate);

// A factor of several products. Where the kernels are our own (bf16 on the CPU's tiles, f32 where
// there is no AVX-512) it is packed once, into the caller's room; elsewhere it is the matrix as it
// lies. Either way it is good for as long as matrix and room are left alone.
bool packs_factors(DType dtype);
constexpr std::int64_t kFactorGroup = 32;  // rows of a left factor that lie together
constexpr std::int64_t kFactorChunk = 32;  // terms of a row that do
// Of the room of op(A) [extent, inner] or op(B) [inner, extent], which begins at a multiple of 64.
std::int64_t factor_bytes(std::int64_t extent, std::int64_t inner);

// Where the terms of a left factor's rows lie: row r begins at at(r), its chunks of kFactorChunk
// terms are `chunk` bytes apart.
struct FactorRows {
  std::byte* at(std::int64_t row) const {
    return data + row / kFactorGroup * group + row % kFactorGroup * this->row;
  }
  std::byte* data = nullptr;
  std::int64_t row = 0, group = 0, chunk = 0;
};

class Factor {
 public:
  Factor() = default;
  // op(A) of a product.
  static Factor left(Matrix a, Transpose transpose, std::byte* room);
  // op(B).
  static Factor right(Matrix b, Transpose transpose, std::byte* room);
  // Of A B + A' B', equal in their inner extent, one [A A'] and one [B; B'], in rooms of two. Only
  // where factors are packed.
  static Factor left_pair(Matrix a, Matrix also, std::byte* room);
  static Factor right_pair(Matrix b, Matrix also, std::byte* room);
  // An A, its columns a multiple of kFactorChunk, whose terms the caller is to write at rows(): in
  // the room where factors are packed, else in `a` itself.
  static Factor to_be_written(Matrix a, std::byte* room);
  FactorRows rows() const;
  // The transpose of a left factor, as a left factor too.
  Factor transposed(std::byte* room) const;
  // Rows of a left factor, from some multiple of kFactorGroup on.
  Factor from_row(std::int64_t row, std::int64_t rows) const;

 private:
  friend void product(Worker& worker, const Factor& a, const Factor& b, Matrix c, bool accumulate);
  Factor(Matrix plain, Transpose transpose, std::byte* packed, std::int64_t extent,
         std::int64_t inner)
      : plain_(plain), transpose_(transpose), packed_(packed), extent_(extent), inner_(inner) {}

  Matrix plain_;
  Transpose transpose_ = Transpose::kNo;
  std::byte* packed_ = nullptr;  // null where the matrix serves
  std::int64_t extent_ = 0, inner_ = 0;
};

// As above, of factors.
void product(Worker& worker, const Factor& a, const Factor& b, Matrix c, bool accumulate);

// C = A op(B), or C += A op(B) (C f32), computed with exactly `tile_rows` rows (A's missing ones
// are zeros in the worker's own scratch; a.rows <= tile_rows). The library picks its kernel by
// shape and stride, and different kernels round differently: a row has the same bits for every
// number of rows only when the shape that computes it is the same. Tails of row tiles go through
// this.
void product_of_rows(Worker& worker, std::int64_t tile_rows, Matrix a, Matrix b,
                     Transpose transpose_b, Matrix c, bool accumulate);

// The library, its version and what bf16 goes over, as the log states it: bits depend on it.
std::string products_library();

// The three products of a linear layer, on all threads of the queue.
//   y [M, N] = x [M, K] w' (w [N, K])
void linear_forward(Queue& queue, Matrix x, Matrix w, Matrix y);
//   d_x [M, K] = d_y [M, N] w, or added when `accumulate`
void linear_backward_input(Queue& queue, Matrix d_y, Matrix w, Matrix d_x, bool accumulate);
//   d_w [N, K] = d_y' x, or added when `accumulate`
void linear_backward_weight(Queue& queue, Matrix d_y, Matrix x, Matrix d_w, bool accumulate);

}  // namespace tessera
