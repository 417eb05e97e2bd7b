// The peak rate of this CPU's arithmetic, measured by loops that live in registers: the ceiling
// that a share of peak is a share of.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

enum class Precision : std::uint8_t { kF32, kBF16 };

// What a precision's loop computes with here: "f32 AVX3", "bf16 AMX", "bf16 AVX-512", or the f32
// loop for bf16 where the CPU (or the system) has no bf16 arithmetic.
std::string peak_instructions(Precision precision);

// The numbers of the cores that this process may run on; at least one.
std::vector<int> usable_cores();

// Floating-point operations per second (a multiply-add is two) of `threads` threads that run at
// once, on at most as many cores as the process may use. Takes about 30 ms of every core, and so is
// measured at every start: what a CPU calls itself doesn't tell how fast it is.
double measure_peak_flops(Precision precision, int threads);

}  // namespace tessera
