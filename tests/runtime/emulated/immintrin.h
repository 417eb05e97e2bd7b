// Takes the compiler's place for emulated_amx.cc: the intrinsics that runtime/amx.cc uses, in plain
// C++, as Intel's intrinsics guide describes them. Wrong use aborts: tiles that aren't configured,
// stores that aren't aligned, lanes of memory that a mask leaves out and a sanitizer watches.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>

// NOLINTBEGIN(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp,readability-identifier-naming)

#define target(features)  // of functions: none

struct __m512i {
  alignas(64) std::array<unsigned char, 64> bytes{};
};
struct __m256i {
  std::array<unsigned char, 32> bytes{};
};
using __m512 = __m512i;
using __mmask16 = std::uint16_t;
using __mmask32 = std::uint32_t;

namespace emulated {

inline void require(bool condition) {
  if (!condition) std::abort();
}
inline void require_aligned(const void* address) {
  require(reinterpret_cast<std::uintptr_t>(address) % 64 == 0);
}

template <class T, class Vector>
T lane(const Vector& vector, int i) {
  T value;
  std::memcpy(&value, vector.bytes.data() + sizeof(T) * static_cast<std::size_t>(i), sizeof(T));
  return value;
}
template <class T>
void set_lane(__m512i& vector, int i, T value) {
  std::memcpy(vector.bytes.data() + sizeof(T) * static_cast<std::size_t>(i), &value, sizeof(T));
}
// A vector of T whose lane i is of(i).
template <class T, class Function>
__m512i vector_of(const Function& of) {
  __m512i result;
  for (int i = 0; i < static_cast<int>(64 / sizeof(T)); ++i) set_lane<T>(result, i, of(i));
  return result;
}

// Within each quarter the lower or the upper lanes of a and b by turns.
template <class T>
__m512i interleaved(const __m512i& a, const __m512i& b, bool upper) {
  constexpr int kLanes = 16 / sizeof(T);
  return vector_of<T>([&](int i) {
    const int from = i / kLanes * kLanes + i % kLanes / 2 + (upper ? kLanes / 2 : 0);
    return lane<T>(i % 2 == 0 ? a : b, from);
  });
}

// Denormals are zeros of their sign, in and out.
inline float flushed(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? 0 * value : value;
}
inline float widened(std::uint16_t value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value) << 16;
  float result;
  std::memcpy(&result, &bits, 4);
  return flushed(result);
}
// To nearest, ties to even.
inline std::uint16_t narrowed(float value) {
  value = flushed(value);
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if (std::isnan(value)) return static_cast<std::uint16_t>(bits >> 16 | 0x40);
  return static_cast<std::uint16_t>((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

using Tile = std::array<std::array<unsigned char, 64>, 16>;
struct Tiles {
  std::array<Tile, 8> tile{};
  bool configured = false;
};
inline thread_local Tiles tiles;

inline Tile& tile(int which) {
  require(tiles.configured);
  return tiles.tile[static_cast<std::size_t>(which)];
}

}  // namespace emulated

constexpr int _MM_HINT_T0 = 3, _MM_HINT_T1 = 2;
inline void _mm_prefetch(const void*, int) {}
inline std::uint64_t _xgetbv(unsigned) { return 0; }

inline __m512i _mm512_setzero_si512() { return {}; }
inline __m512i _mm512_set1_epi16(std::int16_t value) {
  return emulated::vector_of<std::int16_t>([&](int) { return value; });
}
// The last argument is lane 0.
template <class... Values>
__m512i _mm512_set_epi16(Values... values) {
  static_assert(sizeof...(values) == 32);
  const std::array<std::int16_t, 32> all{static_cast<std::int16_t>(values)...};
  return emulated::vector_of<std::int16_t>(
      [&](int i) { return all[static_cast<std::size_t>(31 - i)]; });
}
inline __m512i _mm512_add_epi16(const __m512i& a, const __m512i& b) {
  return emulated::vector_of<std::uint16_t>([&](int i) {
    return emulated::lane<std::uint16_t>(a, i) + emulated::lane<std::uint16_t>(b, i);
  });
}
inline __m512i _mm512_or_si512(const __m512i& a, const __m512i& b) {
  return emulated::vector_of<std::uint32_t>([&](int i) {
    return emulated::lane<std::uint32_t>(a, i) | emulated::lane<std::uint32_t>(b, i);
  });
}
inline __m512i _mm512_slli_epi32(const __m512i& a, unsigned count) {
  return emulated::vector_of<std::uint32_t>(
      [&](int i) { return emulated::lane<std::uint32_t>(a, i) << count; });
}
inline __m512i _mm512_unpacklo_epi32(const __m512i& a, const __m512i& b) {
  return emulated::interleaved<std::uint32_t>(a, b, false);
}
inline __m512i _mm512_unpackhi_epi32(const __m512i& a, const __m512i& b) {
  return emulated::interleaved<std::uint32_t>(a, b, true);
}
inline __m512i _mm512_unpacklo_epi64(const __m512i& a, const __m512i& b) {
  return emulated::interleaved<std::uint64_t>(a, b, false);
}
inline __m512i _mm512_unpackhi_epi64(const __m512i& a, const __m512i& b) {
  return emulated::interleaved<std::uint64_t>(a, b, true);
}
// Two quarters of a, then two of b, chosen by two bits each.
inline __m512i _mm512_shuffle_i32x4(const __m512i& a, const __m512i& b, unsigned choice) {
  return emulated::vector_of<std::uint32_t>([&](int i) {
    const int quarter = static_cast<int>(choice >> (2 * (i / 4)) & 3);
    return emulated::lane<std::uint32_t>(i < 8 ? a : b, quarter * 4 + i % 4);
  });
}
inline __m512i _mm512_permutex2var_epi16(const __m512i& a, const __m512i& index, const __m512i& b) {
  return emulated::vector_of<std::uint16_t>([&](int i) {
    const int from = emulated::lane<std::uint16_t>(index, i) & 63;
    return emulated::lane<std::uint16_t>(from < 32 ? a : b, from & 31);
  });
}
inline __m256i _mm512_extracti64x4_epi64(const __m512i& a, int half) {
  __m256i result;
  std::memcpy(result.bytes.data(), a.bytes.data() + 32 * static_cast<std::size_t>(half), 32);
  return result;
}
inline __m256i _mm512_castsi512_si256(const __m512i& a) { return _mm512_extracti64x4_epi64(a, 0); }
inline __m512i _mm512_cvtepu16_epi32(const __m256i& a) {
  return emulated::vector_of<std::uint32_t>(
      [&](int i) { return emulated::lane<std::uint16_t>(a, i); });
}
// b's lanes come first.
inline __m512i _mm512_cvtne2ps_pbh(const __m512& a, const __m512& b) {
  return emulated::vector_of<std::uint16_t>(
      [&](int i) { return emulated::narrowed(emulated::lane<float>(i < 16 ? b : a, i & 15)); });
}

inline __m512i _mm512_maskz_loadu_epi16(__mmask32 mask, const void* from) {
  __m512i result;
  for (std::size_t i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    std::memcpy(result.bytes.data() + 2 * i, static_cast<const char*>(from) + 2 * i, 2);
  }
  return result;
}
inline __m512 _mm512_maskz_loadu_ps(__mmask16 mask, const float* from) {
  __m512 result;
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) emulated::set_lane<float>(result, i, from[i]);
  }
  return result;
}
inline __m512 _mm512_load_ps(const float* from) {
  emulated::require_aligned(from);
  return _mm512_maskz_loadu_ps(0xFFFF, from);
}
inline void _mm512_mask_storeu_epi16(void* to, __mmask32 mask, const __m512i& value) {
  for (std::size_t i = 0; i < 32; ++i) {
    if ((mask >> i & 1) == 0) continue;
    std::memcpy(static_cast<char*>(to) + 2 * i, value.bytes.data() + 2 * i, 2);
  }
}
inline void _mm512_mask_storeu_ps(float* to, __mmask16 mask, const __m512& value) {
  for (int i = 0; i < 16; ++i) {
    if ((mask >> i & 1) != 0) to[i] = emulated::lane<float>(value, i);
  }
}
inline void _mm512_store_si512(void* to, const __m512i& value) {
  emulated::require_aligned(to);
  std::memcpy(to, value.bytes.data(), 64);
}
inline void _mm512_store_ps(float* to, const __m512& value) { _mm512_store_si512(to, value); }

// Only eight tiles of 16 rows of 64 bytes.
inline void _tile_loadconfig(const void* from) {
  std::array<unsigned char, 64> bytes;
  std::memcpy(bytes.data(), from, 64);
  emulated::require(bytes[0] == 1 && bytes[1] == 0);
  for (std::size_t i = 0; i < 8; ++i) {
    emulated::require(bytes[16 + 2 * i] == 64 && bytes[17 + 2 * i] == 0 && bytes[48 + i] == 16);
  }
  emulated::tiles = {};
  emulated::tiles.configured = true;
}
inline void _tile_release() {
  emulated::require(emulated::tiles.configured);
  emulated::tiles = {};
}
inline void _tile_zero(int to) { emulated::tile(to) = {}; }
inline void _tile_loadd(int to, const void* from, std::int64_t stride) {
  const auto* row = static_cast<const unsigned char*>(from);
  for (auto& of_tile : emulated::tile(to)) {
    std::memcpy(of_tile.data(), row, 64);
    row += stride;
  }
}
inline void _tile_stream_loadd(int to, const void* from, std::int64_t stride) {
  _tile_loadd(to, from, stride);
}
inline void _tile_stored(int from, void* to, std::int64_t stride) {
  auto* row = static_cast<unsigned char*>(to);
  for (const auto& of_tile : emulated::tile(from)) {
    std::memcpy(row, of_tile.data(), 64);
    row += stride;
  }
}
// c += a b: row p of b holds the pairs of terms 2p and 2p + 1, the even ones of which go first.
inline void _tile_dpbf16ps(int c, int a, int b) {
  for (std::size_t m = 0; m < 16; ++m) {
    std::array<float, 16> sums;
    std::memcpy(sums.data(), emulated::tile(c)[m].data(), 64);
    std::array<std::uint16_t, 32> terms, row;
    std::memcpy(terms.data(), emulated::tile(a)[m].data(), 64);
    for (std::size_t p = 0; p < 16; ++p) {
      std::memcpy(row.data(), emulated::tile(b)[p].data(), 64);
      for (std::size_t n = 0; n < 16; ++n) {
        for (std::size_t i = 0; i < 2; ++i) {
          const float left = emulated::widened(terms[2 * p + i]);
          const float right = emulated::widened(row[2 * n + i]);
          sums[n] = emulated::flushed(std::fma(left, right, sums[n]));
        }
      }
    }
    std::memcpy(emulated::tile(c)[m].data(), sums.data(), 64);
  }
}

// NOLINTEND(bugprone-reserved-identifier,cert-dcl37-c,cert-dcl51-cpp,readability-identifier-naming)
