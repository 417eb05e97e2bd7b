#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "layers/compression/compression.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include "layers/compression/compression.h"
#include "layers/kernels/vector-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {

void add_position(Elements row, Elements position, Elements to, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    store(hn::Add(load(row + i, count), load(position + i, count)), to + i, count);
  });
}

void silu_hidden(Elements x, Elements y, std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector v = load(x + i, count);
    store(hn::Mul(v, sigmoid(v)), y + i, count);
  });
}

// d <- d s (1 + x (1 - s)), s = sigmoid(x).
void silu_hidden_backward(Elements x, Elements d, std::int64_t n) {
  const FloatVector one = hn::Set(Floats(), 1.0F);
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    const FloatVector v = load(x + i, count);
    const FloatVector s = sigmoid(v);
    const FloatVector slope = hn::Mul(s, hn::MulAdd(v, hn::Sub(one, s), one));
    store(hn::Mul(load(d + i, count), slope), d + i, count);
  });
}

// to = the sum of `terms` rows that lie `step` elements apart, the first at `from`.
void sum_strided(const float* from, std::int64_t terms, std::int64_t step, Elements to,
                 std::int64_t n) {
  for_vectors(n, [&](std::int64_t i, std::int64_t count) HWY_ATTR {
    FloatVector sum = hn::Zero(Floats());
    for (std::int64_t term = 0; term < terms; ++term) {
      sum = hn::Add(sum, load(from + term * step + i, count));
    }
    store(sum, to + i, count);
  });
}

// to [n] = the sum over `rows` rows of a matrix, in blocks of `block` rows; each to[i] in `part`
// first, so that an error doesn't grow with the number of rows.
void sum_rows(const float* from, std::int64_t rows, std::int64_t stride, std::int64_t block,
              float* part, float* to, std::int64_t n) {
  for (std::int64_t first = 0; first < rows; first += block) {
    for_vectors(n, [&](std::int64_t i, std::int64_t count)
                       HWY_ATTR { store(hn::Zero(Floats()), part + i, count); });
    for (std::int64_t row = first; row < HWY_MIN(rows, first + block); ++row) {
      add_row(from + row * stride, part, n);
    }
    add_row(part, to, n);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <algorithm>
#include <array>

#include "layers/configuration.h"
#include "layers/kernels/elementwise.h"
#include "runtime/products.h"

namespace tessera {
namespace {
HWY_EXPORT(add_position);
HWY_EXPORT(silu_hidden);
HWY_EXPORT(silu_hidden_backward);
HWY_EXPORT(sum_strided);
HWY_EXPORT(sum_rows);

constexpr std::int64_t kPiece = 16384;

// Places in the lists.
enum Parameter : std::size_t { kPosition, kIn, kOut };
enum Scratch : std::size_t { kBlocks, kActivated, kDHidden };

template <class Body>
void for_flat(Queue& queue, std::int64_t count, const Body& body) {
  queue.parallel_for(pieces_of(count, kPiece), [&](std::int64_t piece, Worker&) {
    body(piece * kPiece, std::min(kPiece, count - piece * kPiece));
  });
}

}  // namespace

Compression::Compression(const CompressionConfig& config, std::int64_t heads,
                         std::int64_t head_width, double deviation, DType compute,
                         const std::string& path)
    : length_(require_range(path + ".block_length", config.block_length(), 1, kMaxLength)),
      stride_(require_range(path + ".block_stride", config.block_stride(), 1, length_)),
      inner_(require_range(path + ".inner_width", config.inner_width(), 1, kMaxWidth)),
      heads_(heads),
      width_(head_width),
      deviation_(deviation),
      dtype_(compute) {
  if (length_ % stride_ != 0) {
    refuse(path + ".block_stride", "must divide block_length, which is " + std::to_string(length_),
           std::to_string(stride_));
  }
}

std::vector<ParameterSpec> Compression::parameters() const {
  const Init normal = {Init::Kind::kNormal, deviation_};
  return {{"position", {length_, width_}, normal, false},
          {"in_proj.weight", {inner_, length_ * width_}, normal, true},
          {"out_proj.weight", {width_, inner_}, normal, true}};
}

std::vector<BufferSpec> Compression::saved(BatchShape shape) const {
  return {{"hidden", dtype_, {blocks(shape).rows() * heads_, inner_}}};
}

std::vector<BufferSpec> Compression::scratch(BatchShape shape) const {
  const std::int64_t rows = blocks(shape).rows() * heads_;
  return {{"blocks", DType::kF32, {rows, length_ * width_}},
          {"activated", dtype_, {rows, inner_}},
          {"d_hidden", dtype_, {rows, inner_}}};
}

double Compression::flops_per_token(std::int64_t length) const {
  const auto blocks = static_cast<double>(visibility().keys(length) * heads_);
  return 2.0 * blocks * static_cast<double>((length_ + 1) * width_ * inner_) /
         static_cast<double>(length);
}

// gathered [B*N*heads, length*dh]: row ((b N + i) heads + h) is block i of head h, with its
// positions added.
void Compression::gather(Queue& queue, BatchShape shape, const View& rows, const View& positions,
                         const View& gathered) const {
  const std::int64_t count = blocks(shape).length;
  const std::int64_t row_size = heads_ * width_;
  const Elements from = elements(rows), table = elements(positions), to = elements(gathered);
  queue.parallel_for(shape.batch * count, [&](std::int64_t piece, Worker&) {
    const std::int64_t first = piece / count * shape.length + piece % count * stride_;
    for (std::int64_t head = 0; head < heads_; ++head) {
      const Elements block = to + (piece * heads_ + head) * length_ * width_;
      for (std::int64_t token = 0; token < length_; ++token) {
        HWY_DYNAMIC_DISPATCH(add_position)
        (from + (first + token) * row_size + head * width_, table + token * width_,
         block + token * width_, width_);
      }
    }
  });
}

void Compression::forward(Queue& queue, BatchShape shape, const View& rows, const View& compressed,
                          const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters;
  const std::int64_t count = blocks(shape).rows() * heads_;
  const View gathered = shaped(memory.scratch[kBlocks], dtype_, {count, length_ * width_});
  const View activated = shaped(memory.scratch[kActivated], dtype_, {count, inner_});
  const View& hidden = memory.saved[0];
  gather(queue, shape, rows, p[kPosition], gathered);
  linear_forward(queue, matrix(gathered), matrix(p[kIn]), matrix(hidden));
  for_flat(queue, hidden.count(), [&](std::int64_t at, std::int64_t n) {
    HWY_DYNAMIC_DISPATCH(silu_hidden)(elements(hidden) + at, elements(activated) + at, n);
  });
  linear_forward(queue, matrix(activated), matrix(p[kOut]),
                 matrix(compressed.reshaped({count, width_})));
}

void Compression::backward(Queue& queue, BatchShape shape, const View& rows,
                           const View& d_compressed, const View& d_rows,
                           std::span<const View> d_parameters, const LayerMemory& memory) const {
  const std::span<const View> p = memory.parameters;
  const std::int64_t blocks_each = blocks(shape).length;
  const std::int64_t count = blocks(shape).rows() * heads_;
  const std::int64_t block_size = length_ * width_;
  const View gathered = shaped(memory.scratch[kBlocks], dtype_, {count, block_size});
  const View activated = shaped(memory.scratch[kActivated], dtype_, {count, inner_});
  const View d_hidden = shaped(memory.scratch[kDHidden], dtype_, {count, inner_});
  const View& hidden = memory.saved[0];
  const Matrix d_y = matrix(d_compressed.reshaped({count, width_}));

  for_flat(queue, hidden.count(), [&](std::int64_t at, std::int64_t n) {
    HWY_DYNAMIC_DISPATCH(silu_hidden)(elements(hidden) + at, elements(activated) + at, n);
  });
  linear_backward_weight(queue, d_y, matrix(activated), matrix(d_parameters[kOut]), false);
  linear_backward_input(queue, d_y, matrix(p[kOut]), matrix(d_hidden), false);
  for_flat(queue, hidden.count(), [&](std::int64_t at, std::int64_t n) {
    HWY_DYNAMIC_DISPATCH(silu_hidden_backward)(elements(hidden) + at, elements(d_hidden) + at, n);
  });
  gather(queue, shape, rows, p[kPosition], gathered);
  linear_backward_weight(queue, matrix(d_hidden), matrix(gathered), matrix(d_parameters[kIn]),
                         false);
  // The gathered rows are done with: their room takes their gradient.
  const View d_gathered = shaped(memory.scratch[kBlocks], DType::kF32, {count, block_size});
  linear_backward_input(queue, matrix(d_hidden), matrix(p[kIn]), matrix(d_gathered), false);

  constexpr std::int64_t kColumns = 256, kRows = 64;
  const float* const d_blocks = d_gathered.as<float>();
  float* const d_position = d_parameters[kPosition].as<float>();
  queue.parallel_for(pieces_of(block_size, kColumns), [&](std::int64_t piece, Worker&) {
    std::array<float, kColumns> part;
    const std::int64_t at = piece * kColumns;
    const std::int64_t n = std::min(kColumns, block_size - at);
    std::fill_n(d_position + at, n, 0.0F);
    HWY_DYNAMIC_DISPATCH(sum_rows)
    (d_blocks + at, count, block_size, kRows, part.data(), d_position + at, n);
  });

  // A token lies in the blocks first..last: in each one's row `stride` positions further to the
  // front.
  const std::int64_t pieces = pieces_of(shape.length, kRowsPerPiece);
  queue.parallel_for(shape.batch * pieces, [&](std::int64_t piece, Worker&) {
    const std::int64_t sequence = piece / pieces;
    const std::int64_t begin = piece % pieces * kRowsPerPiece;
    const std::int64_t end = std::min(shape.length, begin + kRowsPerPiece);
    for (std::int64_t t = begin; t < end; ++t) {
      const std::int64_t first = t < length_ ? 0 : (t - length_) / stride_ + 1;
      const std::int64_t last = std::min(t / stride_, blocks_each - 1);
      for (std::int64_t head = 0; head < heads_; ++head) {
        HWY_DYNAMIC_DISPATCH(sum_strided)
        (d_blocks + ((sequence * blocks_each + first) * heads_ + head) * block_size +
             (t - first * stride_) * width_,
         std::max<std::int64_t>(0, last - first + 1), heads_ * block_size - stride_ * width_,
         elements(d_rows) + ((sequence * shape.length + t) * heads_ + head) * width_, width_);
      }
    }
  });
}

}  // namespace tessera
#endif
