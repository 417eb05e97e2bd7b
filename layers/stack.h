// The model as a row of units: the embedding, the blocks, and the head with the final norm. A unit
// is what is gathered, computed with and released as a whole. Source of the shape:
// docs/architecture.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/layer.h"
#include "layers/model.pb.h"

namespace tessera {

class MixtureOfExperts;  // layers/experts/experts.h

// One residual block: y = x + Mixer(RMSNorm(x)); x' = y + FeedForward(RMSNorm(y)).
class Block {
 public:
  // Throws Error(kUsage) when the configuration can't be. compute: kF32 or kBF16.
  Block(const ModelConfig& config, std::int64_t layer, DType compute = DType::kF32);
  // With this mixer in place of the schedule's, whose name it keeps.
  Block(const ModelConfig& config, std::int64_t layer, DType compute, std::unique_ptr<Layer> mixer);
  ~Block();
  Block(Block&&) noexcept;

  const std::string& mixer_type() const;  // "full"
  const Layer& mixer() const;
  const Layer& feed_forward() const;
  // The feed-forward where it is a mixture of experts, else null.
  const MixtureOfExperts* experts() const;

  std::vector<ParameterSpec> parameters() const;  // names from "input_norm.weight" on
  // The experts' own, stacked: "feed_forward.experts.gate_proj.weight" [N, m, l]; none without.
  std::vector<ParameterSpec> expert_parameters() const;
  std::vector<BufferSpec> saved(BatchShape shape) const;
  std::vector<BufferSpec> scratch(BatchShape shape) const;
  double flops_per_token(std::int64_t length) const;

  // x, out: [B*T, d] f32; x is kept by the caller until backward. With experts and an exchange all
  // passes are collective in its group, a rank without a quantum making them with no sequences.
  void forward(Queue& queue, const Batch& batch, const View& x, const View& out,
               const LayerMemory& memory) const;
  // The same in two parts, of which only the second needs the experts.
  void forward_mixer(Queue& queue, const Batch& batch, const View& x,
                     const LayerMemory& memory) const;
  void forward_feed_forward(Queue& queue, const Batch& batch, const View& out,
                            const LayerMemory& memory) const;
  // The backward pass in two parts, the feed-forward's first; between them the experts' gradients
  // are made (MixtureOfExperts::expert_gradient, with of_feed_forward's memory). d_x holds the
  // gradient of the output on entry and of the input on return of the second. d_parameters: of
  // parameters(), each part overwriting its own.
  void backward_feed_forward(Queue& queue, const Batch& batch, const View& d_x,
                             std::span<const View> d_parameters, const LayerMemory& memory) const;
  void backward_mixer(Queue& queue, const Batch& batch, const View& x, const View& d_x,
                      std::span<const View> d_parameters, const LayerMemory& memory) const;
  // The part of the block's memory that is its feed-forward's.
  LayerMemory of_feed_forward(const LayerMemory& memory) const;

 private:
  struct Parts;
  std::unique_ptr<Parts> parts_;
};

// x = Embedding[tokens] [B*T, d] f32; parameter: weight [V, d], of the compute type.
class Embedding {
 public:
  explicit Embedding(const ModelConfig& config);
  std::vector<ParameterSpec> parameters() const;
  std::vector<BufferSpec> scratch(BatchShape shape) const;
  void forward(Queue& queue, const Batch& batch, std::span<const View> parameters,
               const View& x) const;
  // d_parameters are overwritten: each token's rows summed in order of position.
  void backward(Queue& queue, const Batch& batch, const View& d_x,
                std::span<const View> d_parameters, std::span<const View> scratch) const;

 private:
  std::int64_t vocabulary_, width_;
  double deviation_;
};

// Final RMSNorm, the head's product and the cross-entropy, fused in chunks of positions so that
// the logits (f32) never exist at once; parameters: norm.weight [d], lm_head.weight [V, d].
class Head {
 public:
  explicit Head(const ModelConfig& config, DType compute = DType::kF32);
  std::vector<ParameterSpec> parameters() const;
  std::vector<BufferSpec> scratch(BatchShape shape) const;
  double flops_per_token() const;
  // The cross-entropy summed over the valid labels, in nats, formed in a fixed order in double.
  double loss(Queue& queue, const Batch& batch, const View& x, std::span<const View> parameters,
              std::span<const View> scratch) const;
  // The same; and the gradient of (that sum * scale) into d_x [B*T, d] and d_parameters, both
  // overwritten. A batch without a valid label gives 0 and zero gradients.
  double loss_and_gradient(Queue& queue, const Batch& batch, const View& x, double scale,
                           const View& d_x, std::span<const View> parameters,
                           std::span<const View> d_parameters, std::span<const View> scratch) const;

 private:
  struct Gradient {
    double scale;
    View d_x;
    std::span<const View> d_parameters;
  };
  // Without a gradient the loss alone.
  double run(Queue& queue, const Batch& batch, const View& x, const Gradient* gradient,
             std::span<const View> parameters, std::span<const View> scratch) const;

  std::int64_t vocabulary_, width_;
  double epsilon_, deviation_;
  DType dtype_;
};

// One unit's parameters as the rest of the program sees them, with their full names.
struct UnitSpec {
  enum class Kind : std::uint8_t { kEmbedding, kBlock, kHead };
  Kind kind = Kind::kBlock;
  std::int64_t layer = 0;                 // for blocks
  std::string name;                       // "embedding", "layers.3", "head"
  std::vector<ParameterSpec> parameters;  // "model.layers.3.mixer.q_proj.weight"
  // Stacked over the first axis: "model.layers.3.feed_forward.experts.gate_proj.weight".
  std::vector<ParameterSpec> experts;
};

class Stack {
 public:
  // compute: the type of parameters and activations in products, kF32 or kBF16; sums and the
  // residual stream are f32. Throws Error(kUsage) naming the field of the config that can't be.
  explicit Stack(const ModelConfig& config, DType compute = DType::kF32);
  DType compute() const { return compute_; }
  const Embedding& embedding() const { return embedding_; }
  const std::vector<Block>& blocks() const { return blocks_; }
  const Head& head() const { return head_; }
  std::vector<UnitSpec> units() const;
  std::int64_t parameter_count() const;
  double flops_per_token(std::int64_t length) const;  // one forward pass

 private:
  DType compute_;
  Embedding embedding_;
  std::vector<Block> blocks_;
  Head head_;
};

// The type of mixer of every layer. Throws Error(kUsage) for an empty or unknown one.
std::vector<std::string> schedule_types(const Schedule& schedule);

// Which of n types stands in layer l of a Latin schedule's n*n.
constexpr std::size_t latin_place(std::size_t l, std::size_t n) { return (l / n + l % n) % n; }

// Fills elements [begin, begin + values.count()) of a parameter (flat, row-major) as its init says,
// from Philox keyed by (seed, name).
void initialise(const ParameterSpec& parameter, std::uint64_t seed, std::int64_t begin,
                const View& values);

}  // namespace tessera
