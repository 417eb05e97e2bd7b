#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/vector_products.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include <algorithm>
#include <cstring>
#include <type_traits>

#include "hwy/cache_control.h"
#include "hwy/highway.h"
#include "runtime/bfloat16-inl.h"
#include "runtime/error.h"
#include "runtime/vector_products.h"

// How a block is cut: six rows of a against a sliver of 32 columns of b, whose sums, of two vectors
// of columns at a time, stay in registers over a step of the inner dimension. The step's sliver
// (16 KiB) stays in the first cache while all rows pass it. A step's sums begin at zero and are
// added to the result at its end.
HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr std::int64_t kBlock = kPackGroup * kPackChunk;  // elements of a group's chunk
constexpr std::int64_t kStep = 4 * kPackChunk;            // terms
static_assert(kPackedDepth % kStep == 0);
constexpr std::int64_t kTileRows = 6;

constexpr std::int64_t kLine = 16;                        // elements of a line of the caches
constexpr std::int64_t kChunkLines = kPackChunk / kLine;  // of a row
static_assert(kPackedPanel / kPackGroup == kStep / kLine);

// Into the second cache.
HWY_INLINE void fetch(const float* line) { __builtin_prefetch(line, 0, 2); }

using Lanes8 = hn::CappedTag<float, 8>;
using Vector8 = hn::Vec<Lanes8>;

// Two vectors of a row's sums.
struct RowSums {
  HWY_INLINE void clear() { s0 = s1 = hn::Zero(Lanes8()); }
  HWY_INLINE void add(float a, Vector8 b0, Vector8 b1) {
    const Vector8 factor = hn::Set(Lanes8(), a);
    s0 = hn::MulAdd(factor, b0, s0);
    s1 = hn::MulAdd(factor, b1, s1);
  }
  HWY_INLINE void store(float* to, bool add_to) {
    const Lanes8 d;
    const std::size_t n = hn::Lanes(d);
    if (add_to) {
      s0 = hn::Add(hn::LoadU(d, to), s0);
      s1 = hn::Add(hn::LoadU(d, to + n), s1);
    }
    hn::StoreU(s0, d, to);
    hn::StoreU(s1, d, to + n);
  }
  Vector8 s0, s1;
};

// Rows of a: the first term of each, and how far its chunks lie apart.
struct TileRows {
  const float* first[kTileRows];
  std::int64_t chunk;
};

// c [kRows, columns] = a b, or added, over `terms` terms; columns are whole passes of two vectors.
template <std::int64_t kRows>
void multiply_tile(const TileRows& a, const float* b, std::int64_t terms, float* c,
                   std::int64_t stride, std::int64_t columns, bool add) {
  const Lanes8 d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < kRows; ++row) {
    hwy::Prefetch(c + row * stride);
    hwy::Prefetch(c + row * stride + columns - 1);
  }
  for (std::int64_t column = 0; column < columns; column += 2 * n) {
    RowSums sums0, sums1, sums2, sums3, sums4, sums5;
    sums0.clear();
    sums1.clear();
    sums2.clear();
    sums3.clear();
    sums4.clear();
    sums5.clear();
    const float* sliver = b + column;
    const auto multiply_chunk = [&](std::int64_t before, std::int64_t count) HWY_ATTR {
      const auto row = [&](std::int64_t i) HWY_ATTR { return a.first[i < kRows ? i : 0] + before; };
      const float *const a0 = row(0), *const a1 = row(1), *const a2 = row(2);
      const float *const a3 = row(3), *const a4 = row(4), *const a5 = row(5);
#pragma GCC unroll 4
      for (std::int64_t term = 0; term < count; ++term) {
        const Vector8 b0 = hn::Load(d, sliver), b1 = hn::Load(d, sliver + n);
        sums0.add(a0[term], b0, b1);
        if constexpr (kRows > 1) sums1.add(a1[term], b0, b1);
        if constexpr (kRows > 2) sums2.add(a2[term], b0, b1);
        if constexpr (kRows > 3) sums3.add(a3[term], b0, b1);
        if constexpr (kRows > 4) sums4.add(a4[term], b0, b1);
        if constexpr (kRows > 5) sums5.add(a5[term], b0, b1);
        sliver += kPackGroup;
      }
    };
    std::int64_t before = 0, left = terms;
    for (; left >= kPackChunk; left -= kPackChunk) {
      multiply_chunk(before, kPackChunk);
      before += a.chunk;
    }
    if (left > 0) multiply_chunk(before, left);
    float* const to = c + column;
    sums0.store(to, add);
    if constexpr (kRows > 1) sums1.store(to + stride, add);
    if constexpr (kRows > 2) sums2.store(to + 2 * stride, add);
    if constexpr (kRows > 3) sums3.store(to + 3 * stride, add);
    if constexpr (kRows > 4) sums4.store(to + 4 * stride, add);
    if constexpr (kRows > 5) sums5.store(to + 5 * stride, add);
  }
}

void multiply_rows(std::int64_t rows, const TileRows& a, const float* b, std::int64_t terms,
                   float* c, std::int64_t stride, std::int64_t columns, bool add) {
  switch (rows) {
    case 1:
      return multiply_tile<1>(a, b, terms, c, stride, columns, add);
    case 2:
      return multiply_tile<2>(a, b, terms, c, stride, columns, add);
    case 3:
      return multiply_tile<3>(a, b, terms, c, stride, columns, add);
    case 4:
      return multiply_tile<4>(a, b, terms, c, stride, columns, add);
    case 5:
      return multiply_tile<5>(a, b, terms, c, stride, columns, add);
    default:
      return multiply_tile<kTileRows>(a, b, terms, c, stride, columns, add);
  }
}

// A tile whose columns are no whole passes.
void multiply_narrow(std::int64_t rows, std::int64_t columns, const TileRows& a, const float* b,
                     std::int64_t terms, float* c, std::int64_t stride, bool add) {
  HWY_ALIGN float sums[kTileRows * kPackGroup] = {};
  const auto pass = 2 * static_cast<std::int64_t>(hn::Lanes(Lanes8()));
  multiply_rows(rows, a, b, terms, sums, kPackGroup, rounded_up(columns, pass), false);
  for (std::int64_t row = 0; row < rows; ++row) {
    float* const to = c + row * stride;
    const float* const from = sums + row * kPackGroup;
    for (std::int64_t i = 0; i < columns; ++i) to[i] = add ? to[i] + from[i] : from[i];
  }
}

void round_row(const float* from, BFloat16* to, std::int64_t count) {
  const hn::ScalableTag<float> d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  std::int64_t i = 0;
  for (; i + n <= count; i += n) {
    hn::StoreU(bfloat16_bits(hn::LoadU(d, from + i)), BFloat16Bits(),
               reinterpret_cast<std::uint16_t*>(to + i));
  }
  for (; i < count; ++i) to[i] = to_bfloat16(from[i]);
}

void multiply(std::int64_t rows, std::int64_t columns, std::int64_t inner, FactorRows a,
              PackedColumns b, PackedResult c, bool accumulate, std::byte* room) {
  constexpr auto kElement = static_cast<std::int64_t>(sizeof(float));
  const bool in_place = c.dtype == DType::kF32;
  const auto* const right = reinterpret_cast<const float*>(b.data);
  const std::int64_t sliver = kPackGroup * rounded_up(b.inner, kPackChunk);
  const std::int64_t chunk_stride = a.chunk / kElement;
  const auto pass = 2 * static_cast<std::int64_t>(hn::Lanes(Lanes8()));
  // Lines of the next sliver's step, which comes along with all tiles of rows.
  const std::int64_t tiles = rounded_up(rows, kTileRows) / kTileRows;
  const std::int64_t lines = rounded_up(kStep * kPackGroup / kLine, tiles) / tiles;
  for (std::int64_t panel = 0; panel < columns; panel += kPackedPanel) {
    const std::int64_t panel_end = std::min(columns, panel + kPackedPanel);
    float* sums = reinterpret_cast<float*>(room);
    std::int64_t stride = rounded_up(panel_end - panel, kPackGroup);
    if (in_place) {
      sums = reinterpret_cast<float*>(c.data) + panel;
      stride = c.stride;
    }
    for (std::int64_t first = 0; first < inner; first += kStep) {
      const std::int64_t terms = std::min(kStep, inner - first);
      const bool add = accumulate || first > 0;
      // The next step's rows, or the next panel's first ones, come along with this one's slivers.
      const std::int64_t next = first + terms < inner ? first + terms : 0;
      for (std::int64_t column = panel; column < panel_end; column += kPackGroup) {
        const std::int64_t width = std::min(kPackGroup, columns - column);
        const float* const of_sliver = right + column / kPackGroup * sliver + first * kPackGroup;
        const float* ahead = of_sliver + sliver;
        if (column + kPackGroup >= panel_end) {
          ahead = next > 0 ? right + panel / kPackGroup * sliver + next * kPackGroup
                           : right + (column / kPackGroup + 1) * sliver;
        }
        const std::int64_t line = (column - panel) / kPackGroup;
        const std::int64_t rows_ahead =
            ((next - first) / kPackChunk + line / kChunkLines) * chunk_stride +
            line % kChunkLines * kLine;
        for (std::int64_t row = 0; row < rows; row += kTileRows) {
          const std::int64_t height = std::min(kTileRows, rows - row);
          TileRows tile;
          tile.chunk = chunk_stride;
          for (std::int64_t i = 0; i < height; ++i) {
            tile.first[i] =
                reinterpret_cast<const float*>(a.at(row + i)) + first / kPackChunk * chunk_stride;
            fetch(tile.first[i] + rows_ahead);
          }
          for (std::int64_t i = 0; i < lines; ++i) {
            fetch(ahead);
            ahead += kLine;
          }
          float* const to = sums + row * stride + column - panel;
          if (width % pass == 0) {
            multiply_rows(height, tile, of_sliver, terms, to, stride, width, add);
          } else if (in_place) {
            multiply_narrow(height, width, tile, of_sliver, terms, to, stride, add);
          } else {
            multiply_rows(height, tile, of_sliver, terms, to, stride, kPackGroup, add);
          }
        }
      }
    }
    if (in_place) continue;
    for (std::int64_t row = 0; row < rows; ++row) {
      round_row(sums + row * stride, reinterpret_cast<BFloat16*>(c.data) + row * c.stride + panel,
                panel_end - panel);
    }
  }
}

HWY_INLINE hn::Vec<Lanes8> load(const float* from) { return hn::LoadU(Lanes8(), from); }
HWY_INLINE hn::Vec<Lanes8> load(const BFloat16* from) {
  const hn::Rebind<std::uint16_t, Lanes8> bits;
  const hn::Rebind<std::uint32_t, Lanes8> wide;
  return hn::BitCast(Lanes8(),
                     hn::ShiftLeft<16>(hn::PromoteTo(
                         wide, hn::LoadU(bits, reinterpret_cast<const std::uint16_t*>(from)))));
}
float widened(float value) { return value; }
float widened(BFloat16 value) { return to_float(value); }

// to [32, 32] = from [rows, columns], zero where that ends.
template <class T>
void copy_block(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                float* to) {
  if (rows < kPackGroup || columns < kPackChunk) {
    std::memset(to, 0, kBlock * sizeof(float));
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = 0; column < columns; ++column) {
        to[row * kPackChunk + column] = widened(from[row * stride + column]);
      }
    }
    return;
  }
  const Lanes8 d;
  const auto n = static_cast<std::int64_t>(hn::Lanes(d));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t column = 0; column < kPackChunk; column += n) {
      hn::Store(load(from + column), d, to + column);
    }
    from += stride;
    to += kPackChunk;
  }
}

// to [32, 32] = from [32, 32]'.
void turn_block(const float* from, std::int64_t stride, float* to) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t i = 0; i < kPackGroup; ++i) {
    for (std::int64_t j = 0; j < kPackChunk; ++j) to[j * kPackGroup + i] = from[i * stride + j];
  }
#else
  const hn::Full128<float> d;
  const hn::Repartition<std::uint64_t, decltype(d)> pairs;
  for (std::int64_t i = 0; i < kPackGroup; i += 4) {
    for (std::int64_t row = i; row < i + 4; ++row) {
      hwy::Prefetch(from + row * stride + kPackChunk);
    }
    for (std::int64_t j = 0; j < kPackChunk; j += 4) {
      const float* const block = from + i * stride + j;
      const auto r0 = hn::LoadU(d, block), r1 = hn::LoadU(d, block + stride);
      const auto r2 = hn::LoadU(d, block + 2 * stride), r3 = hn::LoadU(d, block + 3 * stride);
      const auto low01 = hn::BitCast(pairs, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(pairs, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(pairs, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(pairs, hn::InterleaveUpper(d, r2, r3));
      float* const place = to + j * kPackGroup + i;
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, low01, low23)), d, place);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, low01, low23)), d, place + kPackGroup);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(pairs, high01, high23)), d,
                place + 2 * kPackGroup);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(pairs, high01, high23)), d,
                place + 3 * kPackGroup);
    }
  }
#endif
}

// Blocks [32, 32] of an operand [rows, columns], or of its transpose where `turned`: those of one
// stretch of 32 of `extent` after another, each stretch along the other axis. A block's own rows
// are the operand's.
template <class T>
void pack_blocks(const T* from, std::int64_t stride, std::int64_t rows, std::int64_t columns,
                 bool turned, bool along_rows, float* to) {
  const std::int64_t outer = along_rows ? rows : columns, within = along_rows ? columns : rows;
  for (std::int64_t first = 0; first < outer; first += kPackGroup) {
    for (std::int64_t second = 0; second < within; second += kPackChunk) {
      const std::int64_t row = along_rows ? first : second, column = along_rows ? second : first;
      const std::int64_t height = std::min(kPackGroup, rows - row);
      const std::int64_t width = std::min(kPackChunk, columns - column);
      if (!turned) {
        copy_block(from + row * stride + column, stride, height, width, to);
      } else {
        const T* const source = from + column * stride + row;
        HWY_ALIGN float room[kBlock];
        const float* plain = room;
        std::int64_t plain_stride = kPackChunk;
        if constexpr (std::is_same_v<T, float>) {
          plain = source;
          plain_stride = stride;
        }
        if (plain == room || height < kPackGroup || width < kPackChunk) {
          copy_block(source, stride, width, height, room);
          plain = room;
          plain_stride = kPackChunk;
        }
        turn_block(plain, plain_stride, to);
      }
      to += kBlock;
    }
  }
}

template <class T>
void pack_operand(PackOperand of, std::int64_t rows, std::int64_t columns, bool along_rows,
                  std::byte* to) {
  const bool turned = of.column_stride != 1;
  pack_blocks(reinterpret_cast<const T*>(of.data), turned ? of.column_stride : of.row_stride, rows,
              columns, turned, along_rows, reinterpret_cast<float*>(to));
}

void pack(PackOperand of, std::int64_t rows, std::int64_t columns, bool along_rows, std::byte* to) {
  const auto by_type = of.dtype == DType::kBF16 ? &pack_operand<BFloat16> : &pack_operand<float>;
  by_type(of, rows, columns, along_rows, to);
}

void turn_rows(const std::byte* from, std::int64_t rows, std::int64_t inner, std::byte* to) {
  const std::int64_t groups = rounded_up(rows, kPackGroup) / kPackGroup;
  const std::int64_t chunks = rounded_up(inner, kPackChunk) / kPackChunk;
  auto* place = reinterpret_cast<float*>(to);
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const float* const block =
          reinterpret_cast<const float*>(from) + (group * chunks + chunk) * kBlock;
      pack_blocks(block, kPackChunk, kPackChunk, std::min(kPackGroup, rows - group * kPackGroup),
                  true, true, place);
      place += kBlock;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {
namespace {
HWY_EXPORT(multiply);
HWY_EXPORT(pack);
HWY_EXPORT(turn_rows);
}  // namespace

const PackedKernels& vector_kernels() {
  static const PackedKernels kernels = {
      DType::kF32,
      // Wider rows would throw one another, and the sliver, out of the first cache.
      [](PackOperand a) {
        return a.dtype == DType::kF32 && a.column_stride == 1 && a.row_stride <= 512;
      },
      [](PackOperand a, std::int64_t rows, std::int64_t inner, std::byte* to) {
        HWY_DYNAMIC_DISPATCH(pack)(a, rows, inner, true, to);
      },
      [](PackOperand b, std::int64_t columns, std::int64_t inner, std::byte* to) {
        HWY_DYNAMIC_DISPATCH(pack)(b, inner, columns, false, to);
      },
      [](const std::byte* from, std::int64_t rows, std::int64_t inner, std::byte* to) {
        HWY_DYNAMIC_DISPATCH(turn_rows)(from, rows, inner, to);
      },
      [](std::int64_t rows, std::int64_t columns, std::int64_t inner, FactorRows a, PackedColumns b,
         PackedResult c, bool accumulate, std::byte* room) {
        TESSERA_CHECK(c.dtype == DType::kF32 || !accumulate);
        HWY_DYNAMIC_DISPATCH(multiply)(rows, columns, inner, a, b, c, accumulate, room);
      }};
  return kernels;
}

}  // namespace tessera
#endif
