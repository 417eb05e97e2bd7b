// Products of bf16 on the CPU's AMX tiles. Private to runtime/.
#pragma once

#include "runtime/packed.h"

namespace tessera {

// The CPU has tiles for bf16, the system saves their state, and gives this process leave to use
// them. Asks once.
bool amx_granted();

// Only where granted. Operands are bf16.
const PackedKernels& amx_kernels();

}  // namespace tessera
