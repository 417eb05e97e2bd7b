// The contract of a layer: it declares its parameters, what it saves for its backward and its
// scratch as functions of the shapes; forward and backward are written out.
//
// Conventions that hold for every layer:
//  * activations are [B, T, width] or, where positions don't matter, [B*T, width];
//  * what a product multiplies (its input, parameters, d_out, most of what is saved) has the run's
//    compute type, f32 or bf16; what is added up (the residual stream and its gradient, gradients
//    of parameters, statistics) is f32;
//  * parameter views come in the order of parameters(), [out, in] for matrices, of the compute type
//    except those declared full_precision;
//  * gradients of parameters are overwritten, never added to: one quantum, one gradient;
//  * forward and backward allocate nothing.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/expert_exchange.h"
#include "runtime/memory.h"
#include "runtime/view.h"

namespace tessera {

struct BatchShape {
  std::int64_t batch = 0;   // sequences
  std::int64_t length = 0;  // positions in each
  int threads = 1;          // of the queue; may shape the size of scratch, never a result
  // Where the experts are; shapes what a rank receives, never a result.
  ExpertPlacement experts = {};
  std::int64_t rows() const { return batch * length; }
};

// One quantum's worth of data.
struct Batch {
  BatchShape shape;
  View tokens;    // [B, T] u32
  View labels;    // [B, T] i32; kNoLabel where the position doesn't count
  View segments;  // [B, T] i32: the position at which this position's document starts (<= its own)
  // Sequences of the whole step, over all ranks, which routers' own losses are averaged over; 0
  // where nothing is trained: they have no gradient.
  std::int64_t step_sequences = 0;
};
constexpr std::int32_t kNoLabel = -1;

// How a parameter starts. The last two kinds draw what the parameter stands for from
// [low, high] and start at its inverse: a rate exp(A_log) and a step softplus(dt_bias).
struct Init {
  enum class Kind : std::uint8_t {
    kNormal,
    kConstant,
    kUniform,
    kLogOfUniform,                 // log(u), u uniform
    kInverseSoftplusOfLogUniform,  // log(exp(u) - 1), log u uniform, u at least `floor`
  };
  Kind kind = Kind::kNormal;
  double scale = 0.0;  // standard deviation, value, or half-width around 0
  double low = 0.0, high = 0.0, floor = 0.0;
};

struct ParameterSpec {
  std::string name;  // within its unit's or layer's prefix: "q_proj.weight"
  Shape shape;
  Init init;
  bool decay = true;  // weight decay applies
  // The layer takes it in f32 whatever the run's compute type.
  bool full_precision = false;
};

// The same parameters, their names behind a prefix.
inline std::vector<ParameterSpec> with_prefix(const std::string& prefix,
                                              std::vector<ParameterSpec> list) {
  for (ParameterSpec& parameter : list) parameter.name = prefix + parameter.name;
  return list;
}

// Room for these parameters in f32.
inline std::vector<BufferSpec> f32_buffers(const std::vector<ParameterSpec>& parameters) {
  std::vector<BufferSpec> buffers;
  buffers.reserve(parameters.size());
  for (const ParameterSpec& p : parameters) buffers.push_back({p.name, DType::kF32, p.shape});
  return buffers;
}

// A number of positions at which a layer's work is cut or ends: what an audit has to look across.
struct LayerSize {
  std::string name;  // "window", "chunk", "block", "stride", "selection"
  std::int64_t positions = 0;
};

// What every call of a layer gets besides its input and output.
struct LayerMemory {
  std::span<const View> parameters;
  std::span<const View> saved;  // as saved() declared; written by forward, read by backward
  // As scratch() declared or larger; contents undefined before and after. Layers that run one after
  // the other get the same memory, so its type and shape are what the layer says: shaped().
  std::span<const View> scratch;
  // Of layers with experts: the matrices of this rank's experts, each stacked parameter's in order
  // of the experts, one parameter after the other.
  std::span<const View> experts = {};
  // [N] f32, added to the probabilities when experts are chosen; empty: nothing is.
  View selection_bias = {};
  ExpertExchange* exchange = nullptr;  // null where all experts are this rank's
};

// The first bytes of a view as an array of this type and shape.
inline View shaped(const View& room, DType dtype, Shape shape) {
  TESSERA_CHECK(shape.count() * size_of(dtype) <= room.bytes());
  return {dtype, shape, room.raw()};
}

// A mixer or a feed-forward: [B, T, d] -> [B, T, d].
class Layer {
 public:
  virtual ~Layer() = default;
  virtual std::vector<ParameterSpec> parameters() const = 0;
  virtual std::vector<BufferSpec> saved(BatchShape shape) const = 0;
  virtual std::vector<BufferSpec> scratch(BatchShape shape) const = 0;
  // Floating-point operations of one forward pass per token at this length (a multiply-add is
  // two), averaged over the positions; the backward is counted as twice that.
  virtual double flops_per_token(std::int64_t length) const = 0;
  // Every window, chunk, block, stride and tile of its work; empty where positions don't meet.
  virtual std::vector<LayerSize> sizes() const { return {}; }

  // in: [B*T, d] of the compute type; out: [B*T, d] f32, overwritten, doesn't alias in.
  virtual void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                       const LayerMemory& memory) const = 0;
  // d_out of the compute type; d_in f32, overwritten; d_parameters f32, overwritten.
  virtual void backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                        const View& d_in, std::span<const View> d_parameters,
                        const LayerMemory& memory) const = 0;
};

}  // namespace tessera
