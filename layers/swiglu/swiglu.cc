#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/swiglu/swiglu.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/swiglu/swiglu.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

// h = gate sigmoid(gate) up
void gated(Elements gate, Elements up, Elements h, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector g = load(gate + i, count);
    store(hn::Mul(hn::Mul(g, sigmoid(g)), load(up + i, count)), h + i, count);
  });
}

// With s = sigmoid(g): d_up = d_h g s; d_gate = d_h up s (1 + g (1 - s)). d_gate may be d_h.
void gated_backward(Elements gate, Elements up, Elements d_h, Elements d_gate, Elements d_up,
                    std::int64_t n) {
  const FloatVector one = hn::Set(Floats(), 1.0F);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector g = load(gate + i, count);
    const FloatVector dh = load(d_h + i, count);
    const FloatVector s = sigmoid(g);
    const FloatVector slope = hn::Mul(s, hn::MulAdd(g, hn::Sub(one, s), one));
    store(hn::Mul(dh, hn::Mul(g, s)), d_up + i, count);
    store(hn::Mul(hn::Mul(dh, load(up + i, count)), slope), d_gate + i, count);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>

#include "layers/kernels/elementwise.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(gated);
HWY_EXPORT(gated_backward);

constexpr std::int64_t kPiece = 16384;

// Places in the lists that the layer declares.
enum Parameter : std::size_t { kGate, kUp, kDown };
enum Scratch : std::size_t { kHidden, kDHidden };

}  // namespace

std::vector<ParameterSpec> SwiGlu::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  return {{"gate_proj.weight", {inner_, width_}, normal, true},
          {"up_proj.weight", {inner_, width_}, normal, true},
          {"down_proj.weight", {width_, inner_}, {Init::Kind::kNormal, output_deviation_}, true}};
}

std::vector<BufferSpec> SwiGlu::saved(BatchShape shape) const {
  return {{"gate", dtype_, {shape.rows(), inner_}}, {"up", dtype_, {shape.rows(), inner_}}};
}

std::vector<BufferSpec> SwiGlu::scratch(BatchShape shape) const {
  return {{"hidden", dtype_, {shape.rows(), inner_}}, {"d_hidden", dtype_, {shape.rows(), inner_}}};
}

double SwiGlu::flops_per_token(std::int64_t /*length*/) const {
  return 6.0 * static_cast<double>(width_) * static_cast<double>(inner_);
}

void SwiGlu::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                     const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters;
  const View hidden = shaped(memory.scratch[kHidden], dtype_, {batch.shape.rows(), inner_});
  linear_forward(queue, matrix(in), matrix(p[kGate]), matrix(memory.saved[kGate]));
  linear_forward(queue, matrix(in), matrix(p[kUp]), matrix(memory.saved[kUp]));
  const Elements gate = elements(memory.saved[kGate]);
  const Elements up = elements(memory.saved[kUp]);
  const Elements h = elements(hidden);
  queue.parallel_for(pieces_of(hidden.count(), kPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(gated)
    (gate + begin, up + begin, h + begin, std::min(kPiece, hidden.count() - begin));
  });
  linear_forward(queue, matrix(hidden), matrix(p[kDown]), matrix(out));
}

void SwiGlu::backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                      const View& d_in, std::span<const View> d_parameters,
                      const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters;
  const View hidden = shaped(memory.scratch[kHidden], dtype_, {batch.shape.rows(), inner_});
  const View d_hidden = shaped(memory.scratch[kDHidden], dtype_, {batch.shape.rows(), inner_});
  const Elements gate = elements(memory.saved[kGate]);
  const Elements up = elements(memory.saved[kUp]);
  const Elements h = elements(hidden);
  const Elements d_h = elements(d_hidden);
  const std::int64_t pieces = pieces_of(hidden.count(), kPiece);
  const auto count_of = [&](std::int64_t piece) {
    return std::min(kPiece, hidden.count() - piece * kPiece);
  };

  queue.parallel_for(pieces, [&](std::int64_t piece, Worker&) {
    const std::int64_t at = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(gated)(gate + at, up + at, h + at, count_of(piece));
  });
  linear_backward_weight(queue, matrix(d_out), matrix(hidden), matrix(d_parameters[kDown]), false);
  linear_backward_input(queue, matrix(d_out), matrix(p[kDown]), matrix(d_hidden), false);
  // In place: hidden becomes the gradient of up, d_hidden that of gate.
  queue.parallel_for(pieces, [&](std::int64_t piece, Worker&) {
    const std::int64_t at = piece * kPiece;
    HWY_DYNAMIC_DISPATCH(gated_backward)
    (gate + at, up + at, d_h + at, d_h + at, h + at, count_of(piece));
  });
  linear_backward_weight(queue, matrix(d_hidden), matrix(in), matrix(d_parameters[kGate]), false);
  linear_backward_weight(queue, matrix(hidden), matrix(in), matrix(d_parameters[kUp]), false);
  linear_backward_input(queue, matrix(d_hidden), matrix(p[kGate]), matrix(d_in), false);
  linear_backward_input(queue, matrix(hidden), matrix(p[kUp]), matrix(d_in), true);
}

}  // namespace tessera
#endif
