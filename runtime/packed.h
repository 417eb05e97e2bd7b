// Kernels of a matrix product on one thread whose operands were packed before. Private to runtime/:
// products.cc chooses one by type and CPU, and cuts its work into blocks.
#pragma once

#include <algorithm>
#include <cstdint>

#include "runtime/products.h"

namespace tessera {

// Of an operand, f32 or bf16: element (row, column) at data[row * row_stride + column *
// column_stride], in elements, one of the strides 1.
struct PackOperand {
  const std::byte* data;
  std::int64_t row_stride, column_stride;
  DType dtype;
};

// c [rows, columns], f32 or bf16, row-major with `stride` elements between its rows.
struct PackedResult {
  std::byte* data;
  std::int64_t stride;
  DType dtype;
};

// Operands are packed in groups of 32 rows of a, or of 32 columns of b, each chunk after chunk of
// 32 terms; what is missing is zero.
constexpr std::int64_t kPackGroup = kFactorGroup;
constexpr std::int64_t kPackChunk = kFactorChunk;
constexpr std::int64_t kPackedPanel = 256;  // columns whose sums are formed together
// An element's bits don't depend on how its terms were cut into calls at multiples of this.
constexpr std::int64_t kPackedDepth = 512;

constexpr std::int64_t rounded_up(std::int64_t value, std::int64_t to) {
  return (value + to - 1) / to * to;
}

// Of an operand's room, which begins at a multiple of 64, as every room below. `extent` is the
// number of a's rows or b's columns, `element` the bytes of a packed element.
constexpr std::int64_t packed_bytes(std::int64_t extent, std::int64_t inner, std::int64_t element) {
  return rounded_up(extent, kPackGroup) * rounded_up(inner, kPackChunk) * element;
}

// Of the sums of a product, in f32.
constexpr std::int64_t packed_room(std::int64_t rows, std::int64_t columns) {
  return rounded_up(rows, kPackGroup) * rounded_up(std::min(columns, kPackedPanel), kPackGroup) * 4;
}

// Packed rows of a, whose groups hold `inner` terms each.
constexpr FactorRows packed_rows(std::byte* data, std::int64_t inner, std::int64_t element) {
  return {data, kPackChunk * element, packed_bytes(kPackGroup, inner, element),
          kPackGroup * kPackChunk * element};
}

// Packed columns of b, or their terms from a multiple of kPackChunk on; the groups hold `inner`
// terms each.
struct PackedColumns {
  const std::byte* data;
  std::int64_t inner;
};

struct PackedKernels {
  DType element;  // of packed operands
  // Whether this a need not be packed: multiply reads its rows where they lie.
  bool (*takes_rows)(PackOperand a);
  void (*pack_rows)(PackOperand a, std::int64_t rows, std::int64_t inner, std::byte* to);
  void (*pack_columns)(PackOperand b, std::int64_t columns, std::int64_t inner, std::byte* to);
  // Packed rows [rows, inner], turned into packed rows [inner, rows]. What lies behind the last row
  // may be anything.
  void (*turn_rows)(const std::byte* from, std::int64_t rows, std::int64_t inner, std::byte* to);
  // c = a [rows, inner] b [inner, columns], or (f32) added when `accumulate`, summed in f32. An
  // element's bits depend on its row of a, its column of b and what was in c alone: not on rows,
  // columns or where it lies. room: packed_room(rows, columns) bytes.
  void (*multiply)(std::int64_t rows, std::int64_t columns, std::int64_t inner, FactorRows a,
                   PackedColumns b, PackedResult c, bool accumulate, std::byte* room);

  std::int64_t element_bytes() const { return size_of(element); }
};

}  // namespace tessera
