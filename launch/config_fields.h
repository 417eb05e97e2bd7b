// What config.cc, config_rules.cc and config_text.cc share; no other file needs it.
#pragma once

#include <google/protobuf/descriptor.h>
#include <google/protobuf/message.h>

#include <optional>
#include <string>
#include <vector>

#include "launch/config.pb.h"

namespace tessera {

// What is wrong with a config, and where in it.
struct ConfigFault {
  std::string path;     // "model.mixer[1].sliding.window"
  std::string message;  // "expected at least 1, got 0"
};
std::optional<ConfigFault> find_fault(const Config& config);

// A message's fields in order of their numbers.
std::vector<const google::protobuf::FieldDescriptor*> fields_of(
    const google::protobuf::Descriptor& type);

// A value as text format writes it; `index` is -1 for a field that isn't repeated.
std::string value_text(const google::protobuf::Message& message,
                       const google::protobuf::FieldDescriptor& field, int index);

}  // namespace tessera
