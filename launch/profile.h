// What one mixer costs alone: time and memory of its forward, and of forward and backward, at
// several lengths.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "layers/stack.h"
#include "runtime/device.h"

namespace tessera {

struct ProfileOptions {
  std::vector<std::string> mixers;  // types, "full" first where it is among them
  std::vector<std::int64_t> lengths = {2048, 8192, 32768};  // ascending
  std::int64_t sequences = 1;
  int repeats = 5;       // timed, after one that isn't
  bool backward = true;  // else the forward pass alone
};

struct ProfileCost {
  double seconds = 0.0;            // median of the repeats
  double least = 0.0, most = 0.0;  // of them
  // Parameters, input and output, what is saved and scratch; with the backward also the gradients
  // of parameters, input and output.
  std::int64_t booked_bytes = 0;
  // By how much the process grew at its largest, from before the memory was granted; -1 where the
  // system doesn't say.
  std::int64_t measured_bytes = -1;
};

struct ProfileLine {
  std::string mixer;
  std::int64_t length = 0;
  ProfileCost forward;
  ProfileCost both;  // forward and backward; unset without
};

// One line a mixer and length, mixers outermost. The model's length is replaced by each length.
// `progress` (may be empty) hears of each line. Throws Error(kUsage) for a type that the model
// doesn't configure.
std::vector<ProfileLine> profile(const ModelConfig& model, DType compute,
                                 const ProfileOptions& options, Device& device,
                                 const std::function<void(const ProfileLine&)>& progress = {});

// The slope of log(b / a) in log(length_b / length_a).
double log_slope(double a, double b, std::int64_t length_a, std::int64_t length_b);

// The paper's per-layer prefill (arXiv 2609.20269, table 3) as a multiple of its full attention's
// at this length; 0 where it has none.
double paper_ratio(const std::string& mixer, std::int64_t length);

// What the results are about, beside the lines.
struct ProfileSubject {
  std::string config;
  std::string device;
  std::int64_t width = 0;
  std::int64_t sequences = 1;
  bool bf16 = false;
  bool backward = true;
  int repeats = 0;
};

std::string profile_table(const ProfileSubject& subject, const std::vector<ProfileLine>& lines);
nlohmann::ordered_json profile_json(const ProfileSubject& subject,
                                    const std::vector<ProfileLine>& lines);
std::string profile_csv(const std::vector<ProfileLine>& lines);
// Time over length, both logarithmic, a curve a mixer.
std::string profile_svg(const ProfileSubject& subject, const std::vector<ProfileLine>& lines);

}  // namespace tessera
