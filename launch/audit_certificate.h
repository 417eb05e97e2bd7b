// An audit's result as others read it. Nothing in it depends on ranks, threads or time.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "launch/audit.h"

namespace tessera {

// Whose audit it is.
struct AuditedModel {
  std::string config;      // its name or file
  std::string checkpoint;  // "": parameters drawn from `seed`
  std::int64_t step = 0;   // of the checkpoint
  std::uint64_t seed = 0;  // of the parameters
  std::int64_t parameters = 0;
  std::int64_t length = 0;  // that the model is trained at
};

nlohmann::ordered_json certificate_json(const AuditedModel& model, const AuditResult& result);
// Markdown.
std::string certificate_page(const AuditedModel& model, const AuditResult& result);
// "leak: layer 3 (sliding): position 511 sees token 512, a later one; ...": one line.
std::string verdict_line(const AuditResult& result);

}  // namespace tessera
