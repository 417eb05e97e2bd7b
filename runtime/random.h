// Counter-based random numbers: Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as
// easy as 1, 2, 3"). An element's value depends on (seed, name, index) alone, so no layout and no
// order of filling changes it.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

namespace tessera {

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key);

class RandomStream {
 public:
  RandomStream(std::uint64_t seed, std::string_view name);
  // Uniform on [0, 1) with 53 bits.
  double uniform(std::uint64_t index) const;
  // Standard normal (Box-Muller, in double).
  double normal(std::uint64_t index) const;

 private:
  std::array<std::uint32_t, 2> key_;
};

}  // namespace tessera
