#include "runtime/amx.h"

#include <algorithm>
#include <cstring>

#include "runtime/error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace tessera {

// How a block is cut: groups of 32 rows of a, as two tiles of 16, against slivers of 32 columns of
// b, as two tiles of 16 pairs of rows by 16 columns (dword n of row p holds elements 2p and 2p + 1
// of column n). A tile is 1 KiB in one piece: rows that lie a power of two apart would throw one
// another out of the first cache. The inner dimension goes in steps whose sliver stays in that
// cache; a step's sums start from the last one's, so that the steps don't show in the result.
namespace {

constexpr std::int64_t kSliver = kPackGroup;  // columns
constexpr std::int64_t kHalf = 16;            // rows of a tile
constexpr std::int64_t kChunk = kPackChunk;   // terms of one tile operation
constexpr std::int64_t kElement = 2;          // bytes
constexpr std::int64_t kLine = 64;            // bytes of a tile's row
constexpr std::int64_t kTile = 1024;          // bytes
constexpr std::int64_t kDepth = 640;          // terms of a step at most: 40 KiB of a sliver
constexpr std::int64_t kLines = 32;           // lines of a chunk of a sliver
constexpr std::int64_t kFewRows = 96;

}  // namespace

#if defined(__x86_64__)

namespace {

#define TESSERA_AMX \
  __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))

__attribute__((target("xsave"))) std::uint64_t enabled_state() { return _xgetbv(0); }

// 16 rows of 16 dwords become 16 columns.
TESSERA_AMX inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
#pragma GCC unroll 8
  for (std::int64_t i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (std::int64_t i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}

__mmask32 first_lanes(std::int64_t count) {
  return count >= 32 ? 0xFFFFFFFFU : static_cast<__mmask32>((std::uint32_t{1} << count) - 1);
}

// b's rows lie along its columns: interleaves two of them. One sliver.
TESSERA_AMX void pack_along(const BFloat16* from, std::int64_t stride, std::int64_t columns,
                            std::int64_t depth, std::byte* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __mmask32 lanes = first_lanes(columns);
  for (std::int64_t k = 0; k < rounded_up(depth, kChunk); k += 2) {
    const BFloat16* const row = from + k * stride;
    // The next sliver lies beside this one, in lines that no prefetcher sees coming.
    _mm_prefetch(row + kSliver, _MM_HINT_T1);
    _mm_prefetch(row + stride + kSliver, _MM_HINT_T1);
    const __m512i x = k < depth ? _mm512_maskz_loadu_epi16(lanes, row) : _mm512_setzero_si512();
    const __m512i y =
        k + 1 < depth ? _mm512_maskz_loadu_epi16(lanes, row + stride) : _mm512_setzero_si512();
    std::byte* const place = to + k / kChunk * 2 * kTile + k % kChunk / 2 * kLine;
    _mm512_store_si512(place, _mm512_permutex2var_epi16(x, low, y));
    _mm512_store_si512(place + kTile, _mm512_permutex2var_epi16(x, high, y));
  }
}

// b's columns lie one after another: 16 of them by 16 pairs, transposed. One sliver.
TESSERA_AMX void pack_across(const BFloat16* from, std::int64_t stride, std::int64_t columns,
                             std::int64_t depth, std::byte* to) {
  for (std::int64_t k = 0; k < depth; k += kChunk) {
    const __mmask32 lanes = first_lanes(depth - k);
    for (std::int64_t half = 0; half < 2; ++half) {
      __m512i rows[kHalf];
      for (std::int64_t i = 0; i < kHalf; ++i) {
        const std::int64_t column = half * kHalf + i;
        rows[i] = column < columns ? _mm512_maskz_loadu_epi16(lanes, from + column * stride + k)
                                   : _mm512_setzero_si512();
      }
      transpose(rows);
      for (std::int64_t p = 0; p < kHalf; ++p) _mm512_store_si512(to + p * kLine, rows[p]);
      to += kTile;
    }
  }
}

// One group of a transposed a, [depth, rows] with `stride` between the terms.
TESSERA_AMX void pack_transposed(const BFloat16* from, std::int64_t stride, std::int64_t rows,
                                 std::int64_t depth, std::byte* to) {
  const __mmask32 lanes = first_lanes(rows);
  const auto row = [&](std::int64_t term) TESSERA_AMX {
    if (term >= depth) return _mm512_setzero_si512();
    // As above.
    _mm_prefetch(from + term * stride + kPackGroup, _MM_HINT_T1);
    return _mm512_maskz_loadu_epi16(lanes, from + term * stride);
  };
  for (std::int64_t k = 0; k < depth; k += kChunk) {
    // Dword p of row i of the first half holds terms 2p and 2p + 1 of row i.
    __m512i first[kHalf], second[kHalf];
    for (std::int64_t p = 0; p < kHalf; ++p) {
      const __m512i x = row(k + 2 * p), y = row(k + 2 * p + 1);
      const __m512i x_low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(x));
      const __m512i y_low = _mm512_cvtepu16_epi32(_mm512_castsi512_si256(y));
      const __m512i x_high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(x, 1));
      const __m512i y_high = _mm512_cvtepu16_epi32(_mm512_extracti64x4_epi64(y, 1));
      first[p] = _mm512_or_si512(x_low, _mm512_slli_epi32(y_low, 16));
      second[p] = _mm512_or_si512(x_high, _mm512_slli_epi32(y_high, 16));
    }
    transpose(first);
    transpose(second);
    for (std::int64_t i = 0; i < kHalf; ++i) {
      _mm512_store_si512(to + i * kLine, first[i]);
      _mm512_store_si512(to + kTile + i * kLine, second[i]);
    }
    to += 2 * kTile;
  }
}

// One group of a's own rows.
TESSERA_AMX void pack_along_rows(const BFloat16* from, std::int64_t stride, std::int64_t rows,
                                 std::int64_t depth, std::byte* to) {
  for (std::int64_t r = 0; r < kPackGroup; ++r) {
    std::byte* place = to + r * kLine;  // the second tile follows the first
    for (std::int64_t k = 0; k < depth; k += kChunk) {
      const __m512i value =
          r < rows ? _mm512_maskz_loadu_epi16(first_lanes(depth - k), from + r * stride + k)
                   : _mm512_setzero_si512();
      _mm512_store_si512(place, value);
      place += 2 * kTile;
    }
  }
}

// A result [16 or 32, 32] f32 in place.
struct Target {
  float* data;
  std::int64_t stride;
};

// The tile intrinsics don't tell the compiler that they read memory.
inline void memory_is_read() { asm volatile("" : : : "memory"); }

// What is fetched with each chunk: some rows of the next result into the first cache, some lines of
// the next sliver into the second.
struct Ahead {
  const std::byte* result;
  std::int64_t stride, rows;
  const std::byte* sliver;
  std::int64_t lines;
};

// c [16 or 32 (kTwo), 32] = a b, or added, over `chunks` chunks of packed operands. Registers 0 to
// 3 hold the result, 4 and 5 a's halves, 6 and 7 b's. kMany: b's sliver
// meets many groups of a, which are read past the first cache.
template <bool kTwo, bool kMany>
TESSERA_AMX void multiply(const std::byte* a, const std::byte* b, std::int64_t chunks, Target c,
                          bool add, const Ahead& ahead) {
  const std::int64_t stride = c.stride * 4;
  float* const below = c.data + kHalf * c.stride;
  memory_is_read();
  if (add) {
    _tile_loadd(0, c.data, stride);
    _tile_loadd(1, c.data + 16, stride);
    if constexpr (kTwo) {
      _tile_loadd(2, below, stride);
      _tile_loadd(3, below + 16, stride);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (kTwo) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  const std::byte* result = ahead.result;
  const std::byte* sliver = ahead.sliver;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    if constexpr (kMany) {
      for (std::int64_t row = 0; row < ahead.rows; ++row) {
        _mm_prefetch(result, _MM_HINT_T0);
        _mm_prefetch(result + kLine, _MM_HINT_T0);
        result += ahead.stride;
      }
      for (std::int64_t line = 0; line < ahead.lines; ++line) {
        _mm_prefetch(sliver, _MM_HINT_T1);
        sliver += kLine;
      }
    }
    _tile_loadd(6, b, kLine);
    if constexpr (kMany) {
      _tile_stream_loadd(4, a, kLine);
    } else {
      _tile_loadd(4, a, kLine);
    }
    _tile_loadd(7, b + kTile, kLine);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kTwo && kMany) _tile_stream_loadd(5, a + kTile, kLine);
    if constexpr (kTwo && !kMany) _tile_loadd(5, a + kTile, kLine);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += 2 * kTile;
    b += 2 * kTile;
  }
  _tile_stored(0, c.data, stride);
  _tile_stored(1, c.data + 16, stride);
  if constexpr (kTwo) {
    _tile_stored(2, below, stride);
    _tile_stored(3, below + 16, stride);
  }
}

TESSERA_AMX void configure_tiles() {
  struct alignas(64) {
    std::uint8_t palette = 1, start = 0, reserved[14] = {};
    std::uint16_t bytes[16] = {kLine, kLine, kLine, kLine, kLine, kLine, kLine, kLine};
    std::uint8_t rows[16] = {kHalf, kHalf, kHalf, kHalf, kHalf, kHalf, kHalf, kHalf};
  } configuration;
  asm volatile("" : : "g"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

TESSERA_AMX void release_tiles() { _tile_release(); }

// The result's sliver between its place and the room.
TESSERA_AMX void copy_in(const PackedResult& c, std::int64_t column, std::int64_t rows,
                         std::int64_t columns, float* room) {
  const auto low = static_cast<__mmask16>(first_lanes(std::min<std::int64_t>(columns, 16)));
  const auto high = static_cast<__mmask16>(first_lanes(std::max<std::int64_t>(columns - 16, 0)));
  for (std::int64_t r = 0; r < rows; ++r) {
    const float* const from = reinterpret_cast<const float*>(c.data) + r * c.stride + column;
    _mm512_store_ps(room + r * kSliver, _mm512_maskz_loadu_ps(low, from));
    _mm512_store_ps(room + r * kSliver + 16, _mm512_maskz_loadu_ps(high, from + 16));
  }
}

TESSERA_AMX void copy_out(const float* room, std::int64_t column, std::int64_t rows,
                          std::int64_t columns, const PackedResult& c) {
  const auto low = static_cast<__mmask16>(first_lanes(std::min<std::int64_t>(columns, 16)));
  const auto high = static_cast<__mmask16>(first_lanes(std::max<std::int64_t>(columns - 16, 0)));
  const __mmask32 both = first_lanes(columns);
  for (std::int64_t r = 0; r < rows; ++r) {
    const __m512 x = _mm512_load_ps(room + r * kSliver);
    const __m512 y = _mm512_load_ps(room + r * kSliver + 16);
    if (c.dtype == DType::kF32) {
      float* const to = reinterpret_cast<float*>(c.data) + r * c.stride + column;
      _mm512_mask_storeu_ps(to, low, x);
      _mm512_mask_storeu_ps(to + 16, high, y);
    } else {
      BFloat16* const to = reinterpret_cast<BFloat16*>(c.data) + r * c.stride + column;
      _mm512_mask_storeu_epi16(to, both, (__m512i)_mm512_cvtne2ps_pbh(y, x));
    }
  }
}

template <bool kMany>
TESSERA_AMX void multiply_all(std::int64_t rows, std::int64_t columns, std::int64_t inner,
                              FactorRows a, PackedColumns b, PackedResult c, bool accumulate,
                              std::byte* room) {
  const bool in_f32 = c.dtype == DType::kF32;
  const std::int64_t b_sliver = packed_bytes(kSliver, b.inner, kElement);
  const std::int64_t room_rows = rounded_up(rows, kPackGroup);
  // Steps as even as whole chunks allow.
  std::int64_t step = rounded_up(inner, kChunk);
  if (step > kDepth) {
    const std::int64_t steps = (inner + kDepth - 1) / kDepth;
    step = rounded_up((inner + steps - 1) / steps, kChunk);
  }
  // The next sliver comes along with all groups of rows.
  const std::int64_t groups = room_rows / kPackGroup;
  const std::int64_t lines = kMany ? (kLines + groups - 1) / groups : 0;
  configure_tiles();
  for (std::int64_t panel = 0; panel < columns; panel += kPackedPanel) {
    const std::int64_t panel_end = std::min(columns, panel + kPackedPanel);
    for (std::int64_t first = 0; first < inner; first += step) {
      const std::int64_t depth = std::min(step, inner - first);
      const std::int64_t chunks = rounded_up(depth, kChunk) / kChunk;
      const std::int64_t before = first / kChunk * 2 * kTile;
      const std::int64_t rows_ahead = kMany ? (kPackGroup + chunks - 1) / chunks : 0;
      for (std::int64_t column = panel; column < panel_end; column += kSliver) {
        const std::int64_t width = std::min(kSliver, columns - column);
        const std::byte* const sliver = b.data + column / kSliver * b_sliver + before;
        const std::byte* next_sliver = sliver + b_sliver;
        if (column + kSliver >= panel_end && first + depth < inner) {
          next_sliver = b.data + panel / kSliver * b_sliver + before + chunks * 2 * kTile;
        } else if (column + kSliver >= panel_end) {
          next_sliver -= before;
        }
        float* const room_sliver = reinterpret_cast<float*>(room) + (column - panel) * room_rows;
        for (std::int64_t row = 0; row < rows; row += kPackGroup) {
          const std::int64_t height = std::min(kPackGroup, rows - row);
          // Whole tiles of f32 are summed in their place, others in the room until the last step.
          const bool direct =
              in_f32 && width == kSliver && (height == kPackGroup || height == kHalf);
          Target here = {room_sliver + row * kSliver, kSliver};
          if (direct) here = {reinterpret_cast<float*>(c.data) + row * c.stride + column, c.stride};
          const PackedResult place = {c.data + row * c.stride * size_of(c.dtype), c.stride,
                                      c.dtype};
          const bool goes = !direct && first + depth == inner;  // to its place
          Ahead ahead = {reinterpret_cast<const std::byte*>(here.data + kPackGroup * here.stride),
                         here.stride * 4, rows_ahead,
                         next_sliver + row / kPackGroup * chunks * lines * kLine, lines};
          if (direct || goes) {
            const std::int64_t element = size_of(c.dtype);
            const bool last = row + kPackGroup >= rows;
            ahead.stride = c.stride * element;
            ahead.result = last ? c.data + (column + kSliver) * element
                                : place.data + kPackGroup * ahead.stride + column * element;
          }
          if (!direct && accumulate && first == 0) copy_in(place, column, height, width, here.data);
          const std::byte* const terms = a.data + row / kPackGroup * a.group + before;
          const bool add = accumulate || first > 0;
          if (height > kHalf) {
            multiply<true, kMany>(terms, sliver, chunks, here, add, ahead);
          } else {
            multiply<false, kMany>(terms, sliver, chunks, here, add, ahead);
          }
          if (goes) copy_out(here.data, column, height, width, place);
        }
      }
    }
  }
  release_tiles();
}

void pack_rows(PackOperand a, std::int64_t rows, std::int64_t inner, std::byte* to) {
  const auto* from = reinterpret_cast<const BFloat16*>(a.data);
  for (std::int64_t row = 0; row < rows; row += kPackGroup) {
    const std::int64_t height = std::min(kPackGroup, rows - row);
    if (a.column_stride == 1) {
      pack_along_rows(from, a.row_stride, height, inner, to);
    } else {
      pack_transposed(from, a.column_stride, height, inner, to);
    }
    from += kPackGroup * a.row_stride;
    to += packed_bytes(kPackGroup, inner, kElement);
  }
}

void pack_columns(PackOperand b, std::int64_t columns, std::int64_t inner, std::byte* to) {
  const auto* from = reinterpret_cast<const BFloat16*>(b.data);
  for (std::int64_t column = 0; column < columns; column += kSliver) {
    const std::int64_t width = std::min(kSliver, columns - column);
    if (b.column_stride == 1) {
      pack_along(from, b.row_stride, width, inner, to);
    } else {
      pack_across(from, b.column_stride, width, inner, to);
    }
    from += kSliver * b.column_stride;
    to += packed_bytes(kSliver, inner, kElement);
  }
}

void turn_rows(const std::byte* from, std::int64_t rows, std::int64_t inner, std::byte* to) {
  // 32 rows by 32 terms at a time: 64 bytes a row, the upper and the lower tile in one piece. What
  // lies behind the last row is undefined; turned it would be terms of every sum.
  const std::int64_t groups = rounded_up(rows, kPackGroup) / kPackGroup;
  const std::int64_t chunks = rounded_up(inner, kChunk) / kChunk;
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    for (std::int64_t group = 0; group < groups; ++group) {
      const std::byte* const block = from + (group * chunks + chunk) * 2 * kTile;
      pack_transposed(reinterpret_cast<const BFloat16*>(block), kChunk, kPackGroup,
                      std::min(kPackGroup, rows - group * kPackGroup), to);
      to += 2 * kTile;
    }
  }
}

void multiply_packed(std::int64_t rows, std::int64_t columns, std::int64_t inner, FactorRows a,
                     PackedColumns b, PackedResult c, bool accumulate, std::byte* room) {
  TESSERA_CHECK(c.dtype == DType::kF32 || !accumulate);
  const auto run = rows > kFewRows ? multiply_all<true> : multiply_all<false>;
  run(rows, columns, inner, a, b, c, accumulate, room);
}

}  // namespace

bool amx_granted() {
  static const bool granted = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return false;
    const bool has_tiles = (d & 1U << 22U) != 0 && (d & 1U << 24U) != 0;  // AMX-BF16, AMX-TILE
    const bool has_vectors =
        __builtin_cpu_supports("avx512bw") != 0 && __builtin_cpu_supports("avx512bf16") != 0;
    if (!has_tiles || !has_vectors) return false;
    constexpr std::uint64_t kTileState = 3U << 17U;
    if ((enabled_state() & kTileState) != kTileState) return false;
    // Linux gives the tiles' registers to processes that ask (Documentation/arch/x86/xstate.rst).
    constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
    constexpr long kTileData = 18;               // XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  }();
  return granted;
}

#else

bool amx_granted() { return false; }

#endif

const PackedKernels& amx_kernels() {
  TESSERA_CHECK(amx_granted());
#if defined(__x86_64__)
  static const PackedKernels kernels = {DType::kBF16, [](PackOperand) { return false; },
                                        &pack_rows,   &pack_columns,
                                        &turn_rows,   &multiply_packed};
  return kernels;
#else
  throw Error(ExitCode::kInternal, "AMX tiles are of x86-64 CPUs only");
#endif
}

}  // namespace tessera
