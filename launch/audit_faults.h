// The audit's positive control: faults that let a mixer's output see the future, in the ways that
// real implementations have.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/layer.h"

namespace tessera {

// o: the mixer's output [T, d] of one sequence. Each adds what it takes from the future in full.
enum class AuditFault : std::uint8_t {
  kShift,          // o[t + 1]; the last is kept
  kPeek,           // o + o[t + 1]; nothing is added to the last
  kPool,           // o + mean over time
  kGlobalMax,      // o + maximum over time
  kFutureMean,     // o + mean of o[t + 1 .. min(t + 4, T - 1)]; nothing is added to the last
  kNormLeak,       // (o - mean) / sd, both over time and width
  kReverseScan,    // o + (sum of o[t .. T - 1]) / T
  kLastBroadcast,  // o + o[T - 1]
};
inline constexpr std::array kAuditFaults = {AuditFault::kShift,       AuditFault::kPeek,
                                            AuditFault::kPool,        AuditFault::kGlobalMax,
                                            AuditFault::kFutureMean,  AuditFault::kNormLeak,
                                            AuditFault::kReverseScan, AuditFault::kLastBroadcast};
const char* name_of(AuditFault fault);  // "shift", "norm leak"

// In place on o [T, d].
void inject(AuditFault fault, std::int64_t length, std::int64_t width, float* o);

// A mixer whose output is spoilt. Forward only.
class FaultyMixer : public Layer {
 public:
  // `fault` is read at every forward pass and outlives this.
  FaultyMixer(std::unique_ptr<Layer> mixer, const AuditFault& fault)
      : mixer_(std::move(mixer)), fault_(fault) {}
  std::vector<ParameterSpec> parameters() const override { return mixer_->parameters(); }
  std::vector<BufferSpec> saved(BatchShape shape) const override { return mixer_->saved(shape); }
  std::vector<BufferSpec> scratch(BatchShape shape) const override {
    return mixer_->scratch(shape);
  }
  double flops_per_token(std::int64_t length) const override {
    return mixer_->flops_per_token(length);
  }
  std::vector<LayerSize> sizes() const override { return mixer_->sizes(); }
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& d_out,
                const View& d_in, std::span<const View> d_parameters,
                const LayerMemory& memory) const override;

 private:
  std::unique_ptr<Layer> mixer_;
  const AuditFault& fault_;
};

}  // namespace tessera
