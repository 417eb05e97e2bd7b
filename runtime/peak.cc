#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "runtime/peak.cc"
#include "hwy/foreach_target.h"
// (after foreach_target)
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

constexpr int kSums = 12;  // independent chains: enough to hide the latency of two units

// One round adds `one` to each of kSums vectors, multiplied by `one` first; returns the sum of all.
// The chains start apart, or a compiler might keep one for all.
double f32_rounds(std::int64_t rounds, float one) {
  const hn::ScalableTag<float> d;
  const auto a = hn::Set(d, one);
  auto s0 = hn::Zero(d), s1 = hn::Set(d, 1), s2 = hn::Set(d, 2), s3 = hn::Set(d, 3);
  auto s4 = hn::Set(d, 4), s5 = hn::Set(d, 5), s6 = hn::Set(d, 6), s7 = hn::Set(d, 7);
  auto s8 = hn::Set(d, 8), s9 = hn::Set(d, 9), s10 = hn::Set(d, 10), s11 = hn::Set(d, 11);
  for (std::int64_t i = 0; i < rounds; ++i) {
    s0 = hn::MulAdd(s0, a, a);
    s1 = hn::MulAdd(s1, a, a);
    s2 = hn::MulAdd(s2, a, a);
    s3 = hn::MulAdd(s3, a, a);
    s4 = hn::MulAdd(s4, a, a);
    s5 = hn::MulAdd(s5, a, a);
    s6 = hn::MulAdd(s6, a, a);
    s7 = hn::MulAdd(s7, a, a);
    s8 = hn::MulAdd(s8, a, a);
    s9 = hn::MulAdd(s9, a, a);
    s10 = hn::MulAdd(s10, a, a);
    s11 = hn::MulAdd(s11, a, a);
  }
  double total = 0;
  for (const auto s : {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11}) {
    total += static_cast<double>(hn::GetLane(s));
  }
  return total;
}

// Operations of one round.
std::int64_t f32_operations() {
  return static_cast<std::int64_t>(hn::Lanes(hn::ScalableTag<float>())) * kSums * 2;
}
const char* f32_target() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "runtime/amx.h"
#include "runtime/error.h"
#include "runtime/peak.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

namespace tessera {
namespace {
HWY_EXPORT(f32_rounds);
HWY_EXPORT(f32_operations);
HWY_EXPORT(f32_target);

// A loop in registers. `rounds(n, 1)` gives the sum over its chains of (start + n * depth), which
// is exact and so proves that the loop has run.
struct Loop {
  double (*rounds)(std::int64_t rounds, float one) = nullptr;
  std::int64_t operations = 0;  // of one round
  int chains = 0;
  int depth = 1;
  std::string name;
};

double best_f32_rounds(std::int64_t rounds, float one) {
  return HWY_DYNAMIC_DISPATCH(f32_rounds)(rounds, one);
}

Loop f32_loop() {
  return {best_f32_rounds, HWY_DYNAMIC_DISPATCH(f32_operations)(), 12, 1,
          std::string("f32 ") + HWY_DYNAMIC_DISPATCH(f32_target)()};
}

#ifdef __x86_64__
// The chains of bf16 pairs: a round adds one * one twice to every lane.
__attribute__((target("avx512f,avx512bf16"))) double vector_bf16_rounds(std::int64_t rounds,
                                                                        float one) {
  const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(one), _mm512_set1_ps(one));
  __m512 s0 = _mm512_set1_ps(0), s1 = _mm512_set1_ps(1), s2 = _mm512_set1_ps(2);
  __m512 s3 = _mm512_set1_ps(3), s4 = _mm512_set1_ps(4), s5 = _mm512_set1_ps(5);
  __m512 s6 = _mm512_set1_ps(6), s7 = _mm512_set1_ps(7), s8 = _mm512_set1_ps(8);
  __m512 s9 = _mm512_set1_ps(9), s10 = _mm512_set1_ps(10), s11 = _mm512_set1_ps(11);
  for (std::int64_t i = 0; i < rounds; ++i) {
    s0 = _mm512_dpbf16_ps(s0, a, a);
    s1 = _mm512_dpbf16_ps(s1, a, a);
    s2 = _mm512_dpbf16_ps(s2, a, a);
    s3 = _mm512_dpbf16_ps(s3, a, a);
    s4 = _mm512_dpbf16_ps(s4, a, a);
    s5 = _mm512_dpbf16_ps(s5, a, a);
    s6 = _mm512_dpbf16_ps(s6, a, a);
    s7 = _mm512_dpbf16_ps(s7, a, a);
    s8 = _mm512_dpbf16_ps(s8, a, a);
    s9 = _mm512_dpbf16_ps(s9, a, a);
    s10 = _mm512_dpbf16_ps(s10, a, a);
    s11 = _mm512_dpbf16_ps(s11, a, a);
  }
  double total = 0;
  for (const __m512 s : {s0, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11}) {
    total += static_cast<double>(_mm512_cvtss_f32(s));
  }
  return total;
}

// The tile intrinsics don't tell the compiler what memory they read.
void written_for_tiles(const void* memory) { asm volatile("" : : "g"(memory) : "memory"); }

// Six tiles of 16 x 16 sums; a round adds a product of 16 x 32 by 32 x 16 ones to each.
constexpr int kTileChains = 6;
__attribute__((target("amx-tile,amx-bf16"))) double tile_bf16_rounds(std::int64_t rounds,
                                                                     float one) {
  struct alignas(64) {
    std::uint8_t palette = 1;
    std::uint8_t start_row = 0;
    std::uint8_t reserved[14] = {};
    std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    std::uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
  } config;
  const auto high_half = static_cast<std::uint16_t>(__builtin_bit_cast(std::uint32_t, one) >> 16);
  alignas(64) std::uint16_t ones[16][32];
  for (auto& row : ones) std::fill(std::begin(row), std::end(row), high_half);
  alignas(64) float start[kTileChains][16][16];
  for (int t = 0; t < kTileChains; ++t) {
    for (auto& row : start[t]) std::fill(std::begin(row), std::end(row), static_cast<float>(t));
  }
  written_for_tiles(&config);
  written_for_tiles(ones);
  written_for_tiles(start);
  _tile_loadconfig(&config);
  _tile_loadd(0, start[0], 64);
  _tile_loadd(1, start[1], 64);
  _tile_loadd(2, start[2], 64);
  _tile_loadd(3, start[3], 64);
  _tile_loadd(4, start[4], 64);
  _tile_loadd(5, start[5], 64);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (std::int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_stored(0, start[0], 64);
  _tile_stored(1, start[1], 64);
  _tile_stored(2, start[2], 64);
  _tile_stored(3, start[3], 64);
  _tile_stored(4, start[4], 64);
  _tile_stored(5, start[5], 64);
  _tile_release();
  double total = 0;
  for (const auto& tile : start) total += static_cast<double>(tile[15][15]);
  return total;
}

std::vector<Loop> bf16_loops() {
  std::vector<Loop> loops;
  if (amx_granted()) {
    loops.push_back({tile_bf16_rounds, std::int64_t{2} * 16 * 16 * 32 * kTileChains, kTileChains,
                     32, "bf16 AMX"});
  }
  if (__builtin_cpu_supports("avx512bf16")) {
    loops.push_back({vector_bf16_rounds, std::int64_t{2} * 2 * 16 * 12, 12, 2, "bf16 AVX-512"});
  }
  return loops;
}
#else
std::vector<Loop> bf16_loops() { return {}; }
#endif

// Tiles come first, since no CPU that has them is faster without.
Loop loop_of(Precision precision) {
  if (precision == Precision::kBF16) {
    const std::vector<Loop> loops = bf16_loops();
    if (!loops.empty()) return loops.front();
  }
  return f32_loop();
}

using Clock = std::chrono::steady_clock;
double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void run_checked(const Loop& loop, std::int64_t rounds) {
  const volatile float one = 1.0F;
  const double total = loop.rounds(rounds, one);
  const int chains = loop.chains;
  TESSERA_CHECK(total == static_cast<double>(rounds * loop.depth * chains) +
                             static_cast<double>(chains * (chains - 1)) / 2);
}

// The best of short runs, so that a moment's work of others on this core doesn't count.
double best_rate(const Loop& loop, std::atomic<int>& waiting) {
  constexpr double kWarmUp = 0.005, kMeasured = 0.025, kRun = 0.0005;
  std::int64_t rounds = 64;
  const auto begin = Clock::now();
  while (seconds_since(begin) < kWarmUp) {
    const auto start = Clock::now();
    run_checked(loop, rounds);
    // Sums of f32 are exact below 2^24.
    if (seconds_since(start) < kRun && rounds * loop.depth < (1 << 22)) rounds *= 2;
  }
  --waiting;
  while (waiting > 0) run_checked(loop, rounds);
  double best = 0;
  const auto measured = Clock::now();
  do {
    const auto start = Clock::now();
    run_checked(loop, rounds);
    best = std::max(best, static_cast<double>(rounds * loop.operations) / seconds_since(start));
  } while (seconds_since(measured) < kMeasured);
  return best;
}

}  // namespace

std::vector<int> usable_cores() {
  std::vector<int> cores;
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) {
    for (int core = 0; core < CPU_SETSIZE; ++core) {
      if (CPU_ISSET(core, &set)) cores.push_back(core);
    }
  }
  const int all = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  if (cores.empty()) {
    for (int core = 0; core < all; ++core) cores.push_back(core);
  }
  return cores;
}

std::string peak_instructions(Precision precision) { return loop_of(precision).name; }

double measure_peak_flops(Precision precision, int threads) {
  TESSERA_CHECK(threads >= 1);
  const Loop loop = loop_of(precision);
  const int running = std::min(threads, static_cast<int>(usable_cores().size()));
  std::vector<double> rates(static_cast<std::size_t>(running));
  std::atomic<int> waiting{running};
  {
    std::vector<std::jthread> others;
    for (std::size_t t = 1; t < rates.size(); ++t) {
      others.emplace_back([&, t] { rates[t] = best_rate(loop, waiting); });
    }
    rates[0] = best_rate(loop, waiting);
  }
  double sum = 0;
  for (const double rate : rates) sum += rate;
  return sum;
}

}  // namespace tessera
#endif
