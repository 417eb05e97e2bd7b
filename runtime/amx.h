// A bf16 matrix product on one thread's AMX tiles, summed in f32. Private to runtime/: products.cc
// cuts its work into blocks, and uses the library where the CPU has no such tiles.
#pragma once

#include <cstdint>

#include "runtime/view.h"

namespace tessera {

// The CPU has tiles for bf16, the system saves their state, and gives this process leave to use
// them. Asks once.
bool amx_granted();

// Of an operand: element (row, column) at data[row * row_stride + column * column_stride], one of
// the strides 1.
struct AmxOperand {
  const BFloat16* data;
  std::int64_t row_stride, column_stride;
};

// c [rows, columns], f32 or bf16, row-major with `stride` elements between its rows.
struct AmxResult {
  std::byte* data;
  std::int64_t stride;
  DType dtype;
};

// c = a [rows, inner] b [inner, columns], or (f32) added when `accumulate`. An element's bits
// depend on its row of a, its column of b and what was in c alone: not on rows, columns or where it
// lies. room: amx_room(rows, columns) bytes at a multiple of 64.
void amx_product(std::int64_t rows, std::int64_t columns, std::int64_t inner, AmxOperand a,
                 AmxOperand b, AmxResult c, bool accumulate, std::byte* room);
std::int64_t amx_room(std::int64_t rows, std::int64_t columns);

}  // namespace tessera
