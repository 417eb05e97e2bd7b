// Elementwise work on whole activations.
#pragma once

#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// Rows that one piece of elementwise work covers. A fixed number: the cut depends on shape alone.
constexpr std::int64_t kRowsPerPiece = 64;

inline std::int64_t pieces_of(std::int64_t extent, std::int64_t size) {
  return (extent + size - 1) / size;
}

// Elements of f32 or bf16 as kernels take them: loaded into f32 lanes, rounded when stored.
struct Elements {
  std::byte* data = nullptr;
  DType dtype = DType::kF32;
  Elements operator+(std::int64_t count) const { return {data + count * size_of(dtype), dtype}; }
};
inline Elements elements(const View& view) {
  TESSERA_CHECK(view.dtype() == DType::kF32 || view.dtype() == DType::kBF16);
  return {view.raw(), view.dtype()};
}

// to += from; both f32 of the same count.
void add(Queue& queue, const View& to, const View& from);

// to = from, rounded where `to` is bf16; the same count.
void convert(Queue& queue, const View& to, const View& from);

// `from` itself where it is of this type, else its conversion in `room`.
inline View converted(Queue& queue, const View& from, DType dtype, const View& room) {
  if (from.dtype() == dtype) return from;
  convert(queue, room, from);
  return room;
}

}  // namespace tessera
