#include "tests/runtime/emulated_amx.h"

// The source once more, with emulated/immintrin.h (see CMakeLists.txt) and under other names.
#define amx_granted emulated_amx_granted
#define amx_kernels named_as_in_the_program
#include "runtime/amx.cc"

#if defined(__x86_64__)

namespace tessera {

const PackedKernels& emulated_amx_kernels() {
  static const PackedKernels kernels = {DType::kBF16, [](PackOperand) { return false; },
                                        &pack_rows,   &pack_columns,
                                        &turn_rows,   &multiply_packed};
  return kernels;
}

}  // namespace tessera
#endif
