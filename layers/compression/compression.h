// phi: overlapping blocks of keys (or values) become one each. Block i of a sequence covers the
// tokens [stride i, stride i + length), complete blocks only; with u_i the block's rows of one head
// and P a table of positions, its result is SiLU(flatten(u_i + P) W_1) W_2, token by token
// flattened, without norm or bias, the same for every head. Derivation: compression.md.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "layers/attention/visibility.h"
#include "layers/layer.h"
#include "layers/model.pb.h"

namespace tessera {

class Compression {
 public:
  // heads and head_width: of the rows that it gets. Throws Error(kUsage) naming the field below
  // `path` that can't be.
  Compression(const CompressionConfig& config, std::int64_t heads, std::int64_t head_width,
              double deviation, DType compute, const std::string& path);

  std::int64_t length() const { return length_; }
  std::int64_t stride() const { return stride_; }
  // Which blocks a position sees.
  Visibility visibility() const { return Visibility::blocks(length_, stride_); }
  // The sequences of blocks: [B, N], N blocks of each.
  BatchShape blocks(BatchShape shape) const {
    return {shape.batch, visibility().keys(shape.length), shape.threads};
  }

  // position [length, dh] (without weight decay), in_proj.weight [inner, length*dh],
  // out_proj.weight [dh, inner].
  std::vector<ParameterSpec> parameters() const;
  // What W_1 gives, before SiLU: [B*N*heads, inner].
  std::vector<BufferSpec> saved(BatchShape shape) const;
  std::vector<BufferSpec> scratch(BatchShape shape) const;
  double flops_per_token(std::int64_t length) const;

  // rows [B*T, heads*dh] -> compressed [B*N, heads*dh], overwritten; both of the compute type.
  void forward(Queue& queue, BatchShape shape, const View& rows, const View& compressed,
               const LayerMemory& memory) const;
  // d_compressed, d_rows: of the compute type; d_rows is overwritten, zero where no block lies.
  // d_parameters: f32, overwritten.
  void backward(Queue& queue, BatchShape shape, const View& rows, const View& d_compressed,
                const View& d_rows, std::span<const View> d_parameters,
                const LayerMemory& memory) const;

 private:
  void gather(Queue& queue, BatchShape shape, const View& rows, const View& positions,
              const View& gathered) const;

  std::int64_t length_, stride_, inner_, heads_, width_;
  double deviation_;
  DType dtype_;
};

}  // namespace tessera
