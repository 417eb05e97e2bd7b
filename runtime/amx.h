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

// Operands as the tiles want them: groups of 32 rows of a, slivers of 32 columns of b, chunk after
// chunk of 32 terms; what is missing is zero. `extent` is the number of rows or columns.
constexpr std::int64_t kAmxGroup = 32;
std::int64_t amx_packed_bytes(std::int64_t extent, std::int64_t inner);
// `to` at a multiple of 64, as every room below.
void amx_pack_rows(AmxOperand a, std::int64_t rows, std::int64_t inner, std::byte* to);
void amx_pack_columns(AmxOperand b, std::int64_t columns, std::int64_t inner, std::byte* to);

// Packed rows [rows, inner], turned into packed rows [inner, rows].
void amx_turn_rows(const std::byte* from, std::int64_t rows, std::int64_t inner, std::byte* to);

// A packed operand's terms from some multiple of 32 on; its groups hold `inner` terms each.
struct AmxPacked {
  const std::byte* data;
  std::int64_t inner;
  AmxPacked from(std::int64_t term) const { return {data + term * kAmxGroup * 2, inner}; }
};

// c = a [rows, inner] b [inner, columns], or (f32) added when `accumulate`, of packed operands. An
// element's bits depend on its row of a, its column of b and what was in c alone: not on rows,
// columns or where it lies, nor on how the terms were cut into calls at multiples of kAmxDepth.
// room: amx_room(rows, columns) bytes.
constexpr std::int64_t kAmxDepth = 512;
void amx_multiply(std::int64_t rows, std::int64_t columns, std::int64_t inner, AmxPacked a,
                  AmxPacked b, AmxResult c, bool accumulate, std::byte* room);
std::int64_t amx_room(std::int64_t rows, std::int64_t columns);

}  // namespace tessera
