// Step sizes and decays of a recurrence from what a projection gives, in f32:
//   dt = softplus(raw + dt_bias)      log_decay = -exp(A_log) dt
// Derivation: scan.md.
#pragma once

#include <cstdint>
#include <vector>

#include "layers/layer.h"
#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// The two parameters as Mamba-2 initialises them: exp(A_log) uniform in [1, 16], softplus(dt_bias)
// log-uniform in [1e-3, 0.1]. Both [heads], f32, without weight decay.
ParameterSpec decay_rate_parameter(std::int64_t heads);  // "A_log"
ParameterSpec step_bias_parameter(std::int64_t heads);   // "dt_bias"

// raw, dt, log_decay: [rows, heads] f32; dt and log_decay are overwritten.
void scan_steps(Queue& queue, const View& raw, const View& a_log, const View& dt_bias,
                const View& dt, const View& log_decay);

// Partial sums of the two parameters' gradients.
Shape scan_steps_partial(std::int64_t rows, std::int64_t heads);

// d_raw [rows, heads] f32 or bf16, d_a_log and d_dt_bias [heads] f32: overwritten. partial:
// scratch, f32 of scan_steps_partial().
void scan_steps_backward(Queue& queue, const View& raw, const View& a_log, const View& dt_bias,
                         const View& d_dt, const View& d_log_decay, const View& d_raw,
                         const View& d_a_log, const View& d_dt_bias, const View& partial);

}  // namespace tessera
