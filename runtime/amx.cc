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

// How a block is cut: slivers of 32 columns of b, packed in pairs of rows as the tiles want them
// (dword n of row p holds elements 2p and 2p + 1 of column n), against groups of 16 rows of a. The
// inner dimension goes in steps whose operands stay in the first cache; a step's sums start from
// the last one's, so that the steps don't show in the result.
namespace {

constexpr std::int64_t kSliver = 32;  // columns
constexpr std::int64_t kGroup = 16;   // rows
constexpr std::int64_t kChunk = 32;   // terms of one tile operation
constexpr std::int64_t kDepth = 256;  // terms of a step
constexpr std::int64_t kLine = 64;    // bytes of a chunk, and of 16 f32

std::int64_t rounded_up(std::int64_t value, std::int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

std::int64_t amx_room(std::int64_t rows, std::int64_t columns) {
  const std::int64_t groups = rounded_up(rows, kGroup);
  // b's sliver, a's step, the result.
  return kDepth * kSliver * 2 + groups * kDepth * 2 + groups * rounded_up(columns, kSliver) * 4;
}

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

// b's rows lie along its columns: interleaves two of them.
TESSERA_AMX void pack_along(const BFloat16* from, std::int64_t stride, std::int64_t columns,
                            std::int64_t depth, std::byte* to) {
  const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8,
                                       39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
  const __mmask32 lanes = first_lanes(columns);
  const std::int64_t pairs = rounded_up(depth, kChunk) / 2;
  for (std::int64_t p = 0; p < pairs; ++p) {
    const BFloat16* const row = from + 2 * p * stride;
    const __m512i x = 2 * p < depth ? _mm512_maskz_loadu_epi16(lanes, row) : _mm512_setzero_si512();
    const __m512i y =
        2 * p + 1 < depth ? _mm512_maskz_loadu_epi16(lanes, row + stride) : _mm512_setzero_si512();
    _mm512_store_si512(to + p * 2 * kLine, _mm512_permutex2var_epi16(x, low, y));
    _mm512_store_si512(to + p * 2 * kLine + kLine, _mm512_permutex2var_epi16(x, high, y));
  }
}

// b's columns lie one after another: 16 of them by 16 pairs, transposed.
TESSERA_AMX void pack_across(const BFloat16* from, std::int64_t stride, std::int64_t columns,
                             std::int64_t depth, std::byte* to) {
  for (std::int64_t chunk = 0; chunk < depth; chunk += kChunk) {
    const __mmask32 lanes = first_lanes(depth - chunk);
    for (std::int64_t half = 0; half < 2; ++half) {
      __m512i rows[16];
      for (std::int64_t i = 0; i < 16; ++i) {
        const std::int64_t column = half * 16 + i;
        rows[i] = column < columns ? _mm512_maskz_loadu_epi16(lanes, from + column * stride + chunk)
                                   : _mm512_setzero_si512();
      }
      transpose(rows);
      for (std::int64_t p = 0; p < 16; ++p) {
        _mm512_store_si512(to + (chunk / 2 + p) * 2 * kLine + half * kLine, rows[p]);
      }
    }
  }
}

// A transposed a, [depth, rows] with `stride` between the terms, to [rows in whole groups, kDepth].
TESSERA_AMX void pack_transposed(const BFloat16* from, std::int64_t stride, std::int64_t rows,
                                 std::int64_t depth, std::byte* to) {
  constexpr std::int64_t row_bytes = kDepth * 2;
  const auto row = [&](std::int64_t term, std::int64_t group) TESSERA_AMX {
    if (term >= depth) return _mm512_setzero_si512();
    const auto lanes = static_cast<__mmask16>(first_lanes(std::min(rows - group, kGroup)));
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + term * stride + group));
  };
  for (std::int64_t chunk = 0; chunk < depth; chunk += kChunk) {
    for (std::int64_t group = 0; group < rows; group += kGroup) {
      __m512i pairs[16];
      for (std::int64_t p = 0; p < 16; ++p) {
        pairs[p] = _mm512_or_si512(row(chunk + 2 * p, group),
                                   _mm512_slli_epi32(row(chunk + 2 * p + 1, group), 16));
      }
      transpose(pairs);
      for (std::int64_t i = 0; i < 16; ++i) {
        _mm512_store_si512(to + (group + i) * row_bytes + chunk * 2, pairs[i]);
      }
    }
  }
}

// a's own rows to [rows in whole groups, kDepth], what is missing zero.
TESSERA_AMX void pack_rows(const BFloat16* from, std::int64_t stride, std::int64_t rows,
                           std::int64_t depth, std::byte* to) {
  for (std::int64_t r = 0; r < rounded_up(rows, kGroup); ++r) {
    for (std::int64_t k = 0; k < depth; k += kChunk) {
      const __m512i value =
          r < rows ? _mm512_maskz_loadu_epi16(first_lanes(depth - k), from + r * stride + k)
                   : _mm512_setzero_si512();
      _mm512_store_si512(to + (r * kDepth + k) * 2, value);
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

// c [16 or 32 (kTwo), 32] = a b, or added, over `chunks` chunks of packed operands. Registers 0 to
// 3 hold the result, 4 and 5 a's groups, 6 and 7 b's halves. next: a result to be fetched ahead.
template <bool kTwo>
TESSERA_AMX void multiply(const std::byte* a, const std::byte* b, std::int64_t chunks, Target c,
                          bool add, const float* next) {
  constexpr std::int64_t kRow = kDepth * 2;
  const std::int64_t stride = c.stride * 4;
  float* const below = c.data + kGroup * c.stride;
  memory_is_read();
  if (next != nullptr) {
    for (std::int64_t r = 0; r < 2 * kGroup; ++r) {
      _mm_prefetch(next + r * c.stride, _MM_HINT_T0);
      _mm_prefetch(next + r * c.stride + 16, _MM_HINT_T0);
    }
  }
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
  for (std::int64_t chunk = 0; chunk < chunks; ++chunk) {
    _tile_loadd(6, b, 2 * kLine);
    _tile_loadd(7, b + kLine, 2 * kLine);
    _tile_loadd(4, a, kRow);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if constexpr (kTwo) {
      _tile_loadd(5, a + kGroup * kRow, kRow);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    a += kLine;
    b += kChunk * kLine;
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
    std::uint8_t rows[16] = {kGroup, kGroup, kGroup, kGroup, kGroup, kGroup, kGroup, kGroup};
  } configuration;
  asm volatile("" : : "g"(&configuration) : "memory");
  _tile_loadconfig(&configuration);
}

TESSERA_AMX void release_tiles() { _tile_release(); }

// The result's sliver between its place and the room.
TESSERA_AMX void copy_in(const AmxResult& c, std::int64_t column, std::int64_t rows,
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
                          std::int64_t columns, const AmxResult& c) {
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

void amx_product(std::int64_t rows, std::int64_t columns, std::int64_t inner, AmxOperand a,
                 AmxOperand b, AmxResult c, bool accumulate, std::byte* room) {
  const bool in_f32 = c.dtype == DType::kF32;
  TESSERA_CHECK(in_f32 || !accumulate);
  const std::int64_t groups = rounded_up(rows, kGroup);
  std::byte* const b_room = room;
  std::byte* const a_room = b_room + kDepth * kSliver * 2;
  auto* const c_room = reinterpret_cast<float*>(a_room + groups * kDepth * 2);

  configure_tiles();
  for (std::int64_t first = 0; first < inner; first += kDepth) {
    const std::int64_t depth = std::min(kDepth, inner - first);
    const std::int64_t chunks = rounded_up(depth, kChunk) / kChunk;
    // Packed, for rows that lie a power of two apart would throw one another out of the cache.
    if (a.column_stride == 1) {
      pack_rows(a.data + first, a.row_stride, rows, depth, a_room);
    } else {
      pack_transposed(a.data + first * a.column_stride, a.column_stride, rows, depth, a_room);
    }
    for (std::int64_t column = 0; column < columns; column += kSliver) {
      const std::int64_t width = std::min(kSliver, columns - column);
      const BFloat16* const from = b.data + first * b.row_stride + column * b.column_stride;
      if (b.column_stride == 1) {
        pack_along(from, b.row_stride, width, depth, b_room);
      } else {
        pack_across(from, b.column_stride, width, depth, b_room);
      }
      // Whole tiles of f32 are summed in their place, others in the room until the last step.
      const bool direct = in_f32 && width == kSliver && groups == rows;
      const bool fetch = !direct && accumulate && first == 0;
      const bool put = !direct && first + depth == inner;
      Target target = {c_room + column * groups, kSliver};
      if (direct) target = {reinterpret_cast<float*>(c.data) + column, c.stride};
      for (std::int64_t row = 0; row < rows; row += 2 * kGroup) {
        const std::int64_t height = std::min(2 * kGroup, rows - row);
        const Target here = {target.data + row * target.stride, target.stride};
        const AmxResult place = {c.data + row * c.stride * size_of(c.dtype), c.stride, c.dtype};
        if (fetch) copy_in(place, column, height, width, here.data);
        const std::byte* const terms = a_room + row * kDepth * 2;
        const bool add = accumulate || first > 0;
        if (height > kGroup) {
          const bool more = row + 4 * kGroup <= rows;
          multiply<true>(terms, b_room, chunks, here, add,
                         more ? here.data + 2 * kGroup * here.stride : nullptr);
        } else {
          multiply<false>(terms, b_room, chunks, here, add, nullptr);
        }
        if (put) copy_out(here.data, column, height, width, place);
      }
    }
  }
  release_tiles();
}

#else

bool amx_granted() { return false; }

void amx_product(std::int64_t, std::int64_t, std::int64_t, AmxOperand, AmxOperand, AmxResult, bool,
                 std::byte*) {
  throw Error(ExitCode::kInternal, "AMX tiles are of x86-64 CPUs only");
}

#endif

}  // namespace tessera
