// The feed-forward as a mixture of experts: each token goes through the `active` ones that its
// router finds most probable, and through a shared one. Sources and derivation: experts.md.
//
//   p = softmax(x W_r) in f32; T = the K experts of the largest p (+ bias), ties to the lower index
//   z = x, or x W_down in a latent space of width l;  u = sum over i in T of w_i E_i(z)
//   y = u, or (norm(u)) W_up;  + shared(x)
//
// with w_i = p_i, divided by their sum over T where renormalised; E_i a SwiGLU of width l -> m ->
// l. Products run per (expert, sequences' quantum), with rows in order of position that begin at a
// multiple of kExpertRows; the experts' results of a token are added by ascending expert.
// So a token's bits depend neither on the other tokens nor on how many ranks share the experts.
#pragma once

#include "layers/layer.h"
#include "layers/model.pb.h"
#include "layers/swiglu/swiglu.h"

namespace tessera {

constexpr std::int64_t kExpertRows = 64;

// What one forward pass says of its router. The sums are formed in a fixed order in double.
struct RouterStatistics {
  std::span<const std::int64_t> loads;  // [N] tokens that chose each expert, before any is dropped
  std::int64_t dropped = 0;             // choices that capacity left out
  double auxiliary = 0.0;  // sum over the sequences of N * sum_i f_i P_i; each is 1 when balanced
  double z = 0.0;          // sum over the tokens of the square of logsumexp
  double entropy = 0.0;    // sum over the tokens of the entropy of p, in nats
};

struct ExpertsShape {
  std::int64_t width = 0;                                       // d
  std::int64_t experts = 0, active = 0, inner = 0, shared = 0;  // N, K, m, m_s (0: none)
  std::int64_t latent = 0;                                      // l; 0: d itself
  bool latent_norm = false;
  bool renormalise = true;
  double auxiliary_coefficient = 0.0, z_coefficient = 0.0;
  bool selection_bias = false;
  double capacity_factor = 0.0;  // 0: nothing is dropped
  std::int64_t row_width() const { return latent > 0 ? latent : width; }
};

// Throws Error(kUsage) naming the field below `path` ("model.feed_forward.experts") that can't be.
ExpertsShape experts_shape(const ExpertsConfig& config, std::int64_t width,
                           const std::string& path);

// Of stacked parameters [N, ...] that are all here, the matrices as LayerMemory::experts lists
// them.
std::vector<View> expert_matrices(std::span<const View> stacked);

// Parameters: router.weight [N, d] (f32); with a latent space latent_down.weight [l, d],
// latent_norm.weight [l], latent_up.weight [d, l]; with a shared expert shared_expert.gate_proj
// .weight, .up_proj.weight [m_s, d], .down_proj.weight [d, m_s].
class MixtureOfExperts : public Layer {
 public:
  // Deviations of the initialisation, the second that of maps back into the residual stream.
  MixtureOfExperts(const ExpertsShape& shape, double deviation, double output_deviation,
                   DType compute = DType::kF32);

  const ExpertsShape& shape() const { return shape_; }
  std::vector<ParameterSpec> parameters() const override;
  // experts.gate_proj.weight, experts.up_proj.weight [N, m, l], experts.down_proj.weight [N, l, m]:
  // an expert's matrix is element i of the first axis. They aren't among parameters(): a rank has
  // those of its own experts alone, as LayerMemory::experts says.
  std::vector<ParameterSpec> expert_parameters() const;
  std::vector<BufferSpec> saved(BatchShape shape) const override;
  std::vector<BufferSpec> scratch(BatchShape shape) const override;
  double flops_per_token(std::int64_t length) const override;
  // Bytes of rows that a token sends one way to all its experts, wherever they are.
  std::int64_t dispatched_bytes_per_token() const;

  // Of saved() and scratch(): the bytes of rows that a rank may receive, if all tokens of its group
  // choose as many of its experts as they can.
  struct RowBytes {
    std::int64_t saved = 0, scratch = 0;
  };
  RowBytes row_bytes(BatchShape shape) const;

  // With an exchange, collective in its group: a rank without a quantum calls it with a batch of no
  // sequences and computes its experts for the others.
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  // The same. The experts' own gradients are made by expert_gradient, which must come before the
  // scratch memory is used by others.
  void backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                const View& d_in, std::span<const View> d_parameters,
                const LayerMemory& memory) const override;
  // After backward: the gradient of this rank's experts from the quantum of the group's rank
  // `source`, as LayerMemory::experts lists them, f32, overwritten; zero for an expert that no
  // token of that quantum chose.
  void expert_gradient(Queue& queue, const Batch& batch, int source,
                       std::span<const View> d_experts, const LayerMemory& memory) const;
  // Of the last forward; valid until `saved` is written again.
  RouterStatistics statistics(const LayerMemory& memory) const;

 private:
  ExpertsShape shape_;
  double deviation_, output_deviation_;
  DType dtype_;
  SwiGlu shared_;  // its lists follow the layer's own where there is a shared expert
};

}  // namespace tessera
