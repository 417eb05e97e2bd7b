// What a model's configuration may be: every refusal is an Error(kUsage) that begins with the
// field's path, as in "model.mixer[1].sliding.window: must be at least 1, is 0".
#pragma once

#include <cstdint>
#include <string>

#include "layers/model.pb.h"

namespace tessera {

// Limits far above any model, so that sizes computed from them fit 64 bits.
constexpr std::int64_t kMaxWidth = std::int64_t{1} << 18;
constexpr std::int64_t kMaxHeads = std::int64_t{1} << 12;
constexpr std::int64_t kMaxHeadWidth = std::int64_t{1} << 12;
constexpr std::int64_t kMaxFeedForwardWidth = std::int64_t{1} << 22;
constexpr std::int64_t kMaxVocabulary = (std::int64_t{1} << 31) - 1;  // labels are 32-bit
constexpr std::int64_t kMaxLength = std::int64_t{1} << 24;
constexpr std::int64_t kMaxLayers = 4096;

// Throws Error(kUsage): "PATH: EXPECTED, is FOUND".
[[noreturn]] void refuse(const std::string& path, const std::string& expected,
                         const std::string& found);
// Returns the value when it lies in [least, most].
std::int64_t require_range(const std::string& path, std::int64_t value, std::int64_t least,
                           std::int64_t most);
double require_at_least_zero(const std::string& path, double value);  // finite too
// Finite and above 0.
double require_positive(const std::string& path, double value);

// Sets what isn't set and whose default depends on other fields.
void complete(ExpertsConfig& config);
void complete(ModelConfig& config);

// The fields that every unit shares: width, vocabulary, length, epsilon, deviation, feed-forward.
// `length` must have been set (the recipe's when the config says 0).
void validate(const ModelConfig& config);

}  // namespace tessera
