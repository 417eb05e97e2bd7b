#include "runtime/random.h"

#include <cmath>
#include <numbers>

namespace tessera {

std::array<std::uint32_t, 4> philox4x32_10(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t left = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t right = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(right >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(right),
               static_cast<std::uint32_t>(left >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(left)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

namespace {

// FNV-1a of the name, then the splitmix64 finaliser with the seed.
std::uint64_t key_of(std::uint64_t seed, std::string_view name) {
  std::uint64_t hash = 0xCBF29CE484222325;
  for (const char c : name) {
    hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001B3;
  }
  std::uint64_t z = hash + seed * 0x9E3779B97F4A7C15;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}

double unit(std::uint32_t high, std::uint32_t low) {
  const std::uint64_t bits = (std::uint64_t{high} << 32 | low) >> 11;
  return static_cast<double>(bits) * 0x1.0p-53;
}

std::array<std::uint32_t, 4> block(std::uint64_t index, std::array<std::uint32_t, 2> key) {
  return philox4x32_10(
      {static_cast<std::uint32_t>(index), static_cast<std::uint32_t>(index >> 32), 0, 0}, key);
}

}  // namespace

RandomStream::RandomStream(std::uint64_t seed, std::string_view name) {
  const std::uint64_t key = key_of(seed, name);
  key_ = {static_cast<std::uint32_t>(key), static_cast<std::uint32_t>(key >> 32)};
}

double RandomStream::uniform(std::uint64_t index) const {
  const auto words = block(index, key_);
  return unit(words[0], words[1]);
}

double RandomStream::normal(std::uint64_t index) const {
  // Elements 2j and 2j+1 are the two results of one Box-Muller transform.
  const auto words = block(index / 2, key_);
  const double radius = std::sqrt(-2.0 * std::log(1.0 - unit(words[0], words[1])));
  const double angle = 2.0 * std::numbers::pi * unit(words[2], words[3]);
  return radius * (index % 2 == 0 ? std::cos(angle) : std::sin(angle));
}

}  // namespace tessera
