#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/mixers/hybrid/hybrid.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/kernels/vector-inl.h"
#include "layers/mixers/hybrid/hybrid.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

void hybrid_gates(float* logits, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count)
                     HWY_ATTR { store(sigmoid(load(logits + i, count)), logits + i, count); });
}

// One head of one position: out = g a + (1 - g) b.
void mix_pair(float gate, Elements a, Elements b, Elements out, std::int64_t width) {
  const FloatVector g = hn::Set(Floats(), gate), rest = hn::Set(Floats(), 1.0F - gate);
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::MulAdd(g, load(a + i, count), hn::Mul(rest, load(b + i, count))), out + i, count);
  });
}

// d_a = g rows, rows becomes (1 - g) rows. Returns the gradient of the gate, rows . (a - b).
double mix_pair_backward(float gate, Elements a, Elements b, Elements rows, Elements d_a,
                         std::int64_t width) {
  const FloatVector g = hn::Set(Floats(), gate), rest = hn::Set(Floats(), 1.0F - gate);
  DoubleSum sum;
  for_vectors(width, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector d_out = load(rows + i, count);
    sum.add_product(d_out, hn::Sub(load(a + i, count), load(b + i, count)));
    store(hn::Mul(g, d_out), d_a + i, count);
    store(hn::Mul(rest, d_out), rows + i, count);
  });
  return sum.total();
}

void store_value(float value, Elements to) { store(hn::Set(Floats(), value), to, 1); }

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <utility>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"
#include "layers/mixers/differential/differential.h"
#include "layers/mixers/nsa/nsa.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(hybrid_gates);
HWY_EXPORT(mix_pair);
HWY_EXPORT(mix_pair_backward);
HWY_EXPORT(store_value);

// Places in the lists that are declared; the mechanisms' follow.
enum Saved : std::size_t { kFirst, kSecond, kGates, kSavedCount };
enum Scratch : std::size_t { kDFirst, kDLogits, kScratchCount };

template <class Spec>
void append(std::vector<Spec>& list, const std::string& name, std::vector<Spec> more) {
  for (Spec& spec : more) {
    spec.name.insert(0, name + ".");
    list.push_back(std::move(spec));
  }
}

// Calls body(row and head) for all heads of all positions, shared out over the threads.
template <class Body>
void for_heads(Queue& queue, std::int64_t rows, std::int64_t heads, const Body& body) {
  queue.parallel_for(pieces_of(rows, kRowsPerPiece), [&](std::int64_t piece, Worker&) {
    const std::int64_t end = std::min(rows, (piece + 1) * kRowsPerPiece) * heads;
    for (std::int64_t i = piece * kRowsPerPiece * heads; i < end; ++i) body(i);
  });
}

}  // namespace

Hybrid::Hybrid(Part first, Part second, std::int64_t heads, const MixerContext& context)
    : first_(std::move(first)),
      second_(std::move(second)),
      heads_(heads),
      width_(context.model.width()),
      dtype_(context.compute),
      deviation_(context.model.init_deviation()),
      parameters_of_first_(first_.mechanism->parameters().size()),
      saved_of_first_(first_.mechanism->saved({1, 1, 1}).size()) {
  TESSERA_CHECK(first_.mechanism->out_width() == second_.mechanism->out_width());
  TESSERA_CHECK(first_.mechanism->out_width() % heads_ == 0);
}

std::vector<ParameterSpec> Hybrid::parameters() const {
  std::vector<ParameterSpec> list;
  append(list, first_.name, first_.mechanism->parameters());
  append(list, second_.name, second_.mechanism->parameters());
  list.push_back({"gate_proj.weight", {heads_, width_}, {Init::Kind::kNormal, deviation_}, true});
  return list;
}

std::vector<BufferSpec> Hybrid::saved(BatchShape shape) const {
  std::vector<BufferSpec> list = {{first_.name, dtype_, {shape.rows(), out_width()}},
                                  {second_.name, dtype_, {shape.rows(), out_width()}},
                                  {"gates", DType::kF32, {shape.rows(), heads_}}};
  append(list, first_.name, first_.mechanism->saved(shape));
  append(list, second_.name, second_.mechanism->saved(shape));
  return list;
}

std::vector<BufferSpec> Hybrid::scratch(BatchShape shape) const {
  std::vector<BufferSpec> list = {{"d_" + first_.name, dtype_, {shape.rows(), out_width()}},
                                  {"d_logits", dtype_, {shape.rows(), heads_}}};
  // The mechanisms run one after the other: the i-th buffer of one is that of the other.
  const std::vector<BufferSpec> first = first_.mechanism->scratch(shape);
  const std::vector<BufferSpec> second = second_.mechanism->scratch(shape);
  for (std::size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
    const std::int64_t bytes = std::max(i < first.size() ? first[i].bytes() : 0,
                                        i < second.size() ? second[i].bytes() : 0);
    list.push_back({"mechanism." + std::to_string(i), DType::kF32, {(bytes + 3) / 4}});
  }
  return list;
}

double Hybrid::flops_per_token(std::int64_t length) const {
  return first_.mechanism->flops_per_token(length) + second_.mechanism->flops_per_token(length) +
         2 * static_cast<double>(width_) * static_cast<double>(heads_);
}

std::vector<LayerSize> Hybrid::sizes() const {
  std::vector<LayerSize> list = first_.mechanism->sizes();
  for (LayerSize& size : second_.mechanism->sizes()) {
    const bool known = std::any_of(list.begin(), list.end(), [&](const LayerSize& other) {
      return other.name == size.name && other.positions == size.positions;
    });
    if (!known) list.push_back(std::move(size));
  }
  return list;
}

LayerMemory Hybrid::first_memory(const LayerMemory& memory) const {
  return {memory.parameters.first(parameters_of_first_),
          memory.saved.subspan(kSavedCount, saved_of_first_),
          memory.scratch.subspan(kScratchCount)};
}

LayerMemory Hybrid::second_memory(const LayerMemory& memory) const {
  return {memory.parameters.subspan(parameters_of_first_,
                                    memory.parameters.size() - parameters_of_first_ - 1),
          memory.saved.subspan(kSavedCount + saved_of_first_),
          memory.scratch.subspan(kScratchCount)};
}

void Hybrid::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                     const LayerMemory& memory) const {
  const View &first = memory.saved[kFirst], &second = memory.saved[kSecond];
  const View& gates = memory.saved[kGates];
  first_.mechanism->forward(queue, batch, in, first, first_memory(memory));
  second_.mechanism->forward(queue, batch, in, second, second_memory(memory));
  linear_forward(queue, matrix(in), matrix(memory.parameters.back()), matrix(gates));
  const std::int64_t width = out_width() / heads_;
  const Elements a = elements(first), b = elements(second), result = elements(out);
  float* const g = gates.as<float>();
  queue.parallel_for(
      pieces_of(batch.shape.rows(), kRowsPerPiece), [&](std::int64_t piece, Worker&) {
        const std::int64_t begin = piece * kRowsPerPiece * heads_;
        const std::int64_t end = std::min(gates.count(), begin + kRowsPerPiece * heads_);
        HWY_DYNAMIC_DISPATCH(hybrid_gates)(g + begin, end - begin);
      });
  for_heads(queue, batch.shape.rows(), heads_, [&](std::int64_t i) {
    HWY_DYNAMIC_DISPATCH(mix_pair)
    (g[i], a + i * width, b + i * width, result + i * width, width);
  });
}

void Hybrid::backward(Queue& queue, const Batch& batch, const View& in, const View& /*out*/,
                      const View& d_out, const View& d_in, bool accumulate,
                      std::span<const View> d_parameters, const LayerMemory& memory) const {
  const View &first = memory.saved[kFirst], &second = memory.saved[kSecond];
  const std::int64_t rows = batch.shape.rows();
  const std::int64_t width = out_width() / heads_;
  const View d_first = shaped(memory.scratch[kDFirst], dtype_, {rows, out_width()});
  const View d_logits = shaped(memory.scratch[kDLogits], dtype_, {rows, heads_});
  const Elements a = elements(first), b = elements(second);
  const Elements d_rows = elements(d_out), d_a = elements(d_first), d_gates = elements(d_logits);
  const float* const g = memory.saved[kGates].as<float>();
  // d_out becomes the second one's.
  for_heads(queue, rows, heads_, [&](std::int64_t i) {
    const double d_gate = HWY_DYNAMIC_DISPATCH(mix_pair_backward)(
        g[i], a + i * width, b + i * width, d_rows + i * width, d_a + i * width, width);
    const auto gate = static_cast<double>(g[i]);
    HWY_DYNAMIC_DISPATCH(store_value)
    (static_cast<float>(gate * (1.0 - gate) * d_gate), d_gates + i);
  });
  const LayerMemory second_of = second_memory(memory);
  first_.mechanism->backward(queue, batch, in, first, d_first, d_in, accumulate,
                             d_parameters.first(parameters_of_first_), first_memory(memory));
  second_.mechanism->backward(
      queue, batch, in, second, d_out, d_in, true,
      d_parameters.subspan(parameters_of_first_, second_of.parameters.size()), second_of);
  linear_backward_weight(queue, matrix(d_logits), matrix(in), matrix(d_parameters.back()), false);
  linear_backward_input(queue, matrix(d_logits), matrix(memory.parameters.back()), matrix(d_in),
                        true);
}

std::unique_ptr<Layer> make_hybrid(const MixerConfig& config, const MixerContext& context,
                                   const std::string& path) {
  const NsaConfig& nsa = config.hybrid().nsa();
  const DifferentialConfig& differential = config.hybrid().differential();
  Hybrid::Part first = {"nsa", std::make_unique<Nsa>(nsa, context, path + ".nsa")};
  Hybrid::Part second = {"differential", std::make_unique<Differential>(differential, context,
                                                                        path + ".differential")};
  const auto require_equal = [&](const char* field, std::int64_t of_nsa, std::int64_t found) {
    if (found == of_nsa) return;
    refuse(path + ".differential.attention." + field,
           "must be that of nsa, which is " + std::to_string(of_nsa), std::to_string(found));
  };
  require_equal("heads", nsa.attention().heads(), differential.attention().heads());
  require_equal("head_width", nsa.attention().head_width(), differential.attention().head_width());
  return std::make_unique<ProjectedMixer>(
      std::make_unique<Hybrid>(std::move(first), std::move(second), nsa.attention().heads(),
                               context),
      context.model.width(), context.compute, context.output_deviation());
}

}  // namespace tessera
#endif
