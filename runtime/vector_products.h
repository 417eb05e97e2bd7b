// Products of f32 in the CPU's vectors, of whatever instruction set. Private to runtime/.
#pragma once

#include "runtime/packed.h"

namespace tessera {

// Operands may be bf16: they are widened as they are packed, which is exact.
const PackedKernels& vector_kernels();

}  // namespace tessera
