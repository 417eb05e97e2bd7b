// runtime/amx.cc's kernels where the CPU has no tiles.
#pragma once

#include "runtime/packed.h"

namespace tessera {

const PackedKernels& emulated_amx_kernels();

}  // namespace tessera
