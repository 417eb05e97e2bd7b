// Attention over compressed blocks alone: no gate, no rotation. See compress.md.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "layers/compression/compressed_attention.h"
#include "layers/mixers/mechanism.h"
#include "layers/mixers/mixers.h"

namespace tessera {

// Parameters: q_proj.weight [H*dh, d], then CompressedAttention's. Saved: q by head, then
// CompressedAttention's.
class Compress : public Mechanism {
 public:
  // Throws Error(kUsage) naming the field below `path` that can't be.
  Compress(const CompressConfig& config, const MixerContext& context, const std::string& path);

  std::int64_t out_width() const override { return heads_ * head_width_; }
  std::vector<ParameterSpec> parameters() const override;
  std::vector<BufferSpec> saved(BatchShape shape) const override;
  std::vector<BufferSpec> scratch(BatchShape shape) const override;
  double flops_per_token(std::int64_t length) const override;
  std::vector<LayerSize> sizes() const override { return attention_.sizes(); }
  void forward(Queue& queue, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override;
  void backward(Queue& queue, const Batch& batch, const View& in, const View& out,
                const View& d_out, const View& d_in, bool accumulate,
                std::span<const View> d_parameters, const LayerMemory& memory) const override;

 private:
  std::int64_t width_, heads_, head_width_;
  double deviation_;
  DType dtype_;
  CompressedAttention attention_;
};

std::unique_ptr<Layer> make_compress(const MixerConfig& config, const MixerContext& context,
                                     const std::string& path);

}  // namespace tessera
