#include <set>

#include "layers/configuration.h"
#include "layers/mixers/mixers.h"
#include "layers/stack.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using Names = google::protobuf::RepeatedPtrField<std::string>;

const std::string& require_type(const std::string& path, const std::string& name) {
  if (find_mixer_type(name) == nullptr) {
    refuse(path, "must be one of " + mixer_names(), "\"" + name + "\"");
  }
  return name;
}

std::vector<std::string> require_order(const std::string& path, const Names& order) {
  if (order.empty()) throw Error(ExitCode::kUsage, path + ".order: must name at least one mixer");
  require_range(path + ".order's length", order.size(), 1, kMaxLayers);
  std::vector<std::string> types;
  types.reserve(static_cast<std::size_t>(order.size()));
  for (int i = 0; i < order.size(); ++i) {
    types.push_back(require_type(path + ".order[" + std::to_string(i) + "]", order[i]));
  }
  return types;
}

std::vector<std::string> latin(const LatinSchedule& schedule) {
  const std::string path = "model.schedule.latin";
  const std::vector<std::string> order = require_order(path, schedule.order());
  const std::size_t n = order.size();
  require_range(path + ".order's length", schedule.order_size(), 1, 64);
  std::set<std::string> seen;
  for (std::size_t i = 0; i < n; ++i) {
    if (!seen.insert(order[i]).second) {
      throw Error(ExitCode::kUsage, path + ".order[" + std::to_string(i) + "]: \"" + order[i] +
                                        "\" stands twice; a Latin square needs different types");
    }
  }
  std::vector<std::string> types;
  for (std::size_t l = 0; l < n * n; ++l) types.push_back(order[latin_place(l, n)]);
  return types;
}

std::vector<std::string> periodic(const OrderedSchedule& schedule) {
  const std::string path = "model.schedule.periodic";
  const std::vector<std::string> order = require_order(path, schedule.order());
  const auto layers =
      static_cast<std::size_t>(require_range(path + ".layers", schedule.layers(), 1, kMaxLayers));
  std::vector<std::string> types;
  for (std::size_t l = 0; l < layers; ++l) types.push_back(order[l % order.size()]);
  return types;
}

std::vector<std::string> block(const OrderedSchedule& schedule) {
  const std::string path = "model.schedule.block";
  const std::vector<std::string> order = require_order(path, schedule.order());
  const auto layers =
      static_cast<std::size_t>(require_range(path + ".layers", schedule.layers(), 1, kMaxLayers));
  std::vector<std::string> types;
  for (std::size_t l = 0; l < layers; ++l) types.push_back(order[l * order.size() / layers]);
  return types;
}

std::vector<std::string> homogeneous(const HomogeneousSchedule& schedule) {
  const std::string path = "model.schedule.homogeneous";
  const std::string& type = require_type(path + ".type", schedule.type());
  const std::int64_t layers = require_range(path + ".layers", schedule.layers(), 1, kMaxLayers);
  return {static_cast<std::size_t>(layers), type};
}

// The whole character that begins at a byte of a text in UTF-8.
std::string character_at(const std::string& text, std::size_t begin) {
  std::size_t end = begin + 1;
  while (end < text.size() && (static_cast<unsigned char>(text[end]) & 0xC0U) == 0x80U) ++end;
  return text.substr(begin, end - begin);
}

std::vector<std::string> explicit_letters(const std::string& letters) {
  const std::string path = "model.schedule.explicit";
  std::vector<std::string> types;
  for (std::size_t i = 0; i < letters.size(); ++i) {
    const char letter = letters[i];
    if (letter == ' ' || letter == '\t' || letter == '\n' || letter == '\r') continue;
    const MixerType* type = nullptr;
    std::string known;
    for (const MixerType& candidate : mixer_types()) {
      known +=
          (known.empty() ? "" : ", ") + std::string(1, candidate.letter) + " " + candidate.name;
      if (candidate.letter == letter) type = &candidate;
    }
    if (type == nullptr) {
      throw Error(ExitCode::kUsage, path + ": unknown letter '" + character_at(letters, i) +
                                        "' for layer " + std::to_string(types.size()) +
                                        "; known: " + known);
    }
    types.emplace_back(type->name);
  }
  if (types.empty()) throw Error(ExitCode::kUsage, path + ": must name at least one layer");
  require_range(path + "'s layers", static_cast<std::int64_t>(types.size()), 1, kMaxLayers);
  return types;
}

}  // namespace

std::vector<std::string> schedule_types(const Schedule& schedule) {
  switch (schedule.kind_case()) {
    case Schedule::kLatin:
      return latin(schedule.latin());
    case Schedule::kPeriodic:
      return periodic(schedule.periodic());
    case Schedule::kBlock:
      return block(schedule.block());
    case Schedule::kHomogeneous:
      return homogeneous(schedule.homogeneous());
    case Schedule::kExplicit:
      return explicit_letters(schedule.explicit_());
    case Schedule::KIND_NOT_SET:
      break;
  }
  throw Error(ExitCode::kUsage,
              "model.schedule: must be one of latin, periodic, block, homogeneous, explicit");
}

}  // namespace tessera
