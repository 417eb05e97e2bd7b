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

// to += from; both f32 of the same count.
void add(Queue& queue, const View& to, const View& from);

}  // namespace tessera
