// Configs as text: the lines that a checkpoint keeps, and the resolved config.
#include <google/protobuf/stubs/strutil.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <map>

#include "launch/config.h"
#include "launch/config_fields.h"
#include "runtime/error.h"
#include "runtime/schema.pb.h"

namespace tessera {
namespace {

using google::protobuf::FieldDescriptor;
using google::protobuf::Message;

std::string double_text(double value) {
  std::array<char, 32> digits{};
  const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
  return {digits.data(), end};
}

// A member of a oneof that isn't the one that is set.
bool is_unset_choice(const Message& message, const FieldDescriptor& field) {
  return field.containing_oneof() != nullptr && !message.GetReflection()->HasField(message, &field);
}

// Calls visit(index) for each value of the field: -1 for one that isn't repeated, set or default.
template <class Visit>
void for_each_value(const Message& message, const FieldDescriptor& field, const Visit& visit) {
  if (is_unset_choice(message, field)) {
    return;
  }
  if (!field.is_repeated()) {
    visit(-1);
    return;
  }
  const int size = message.GetReflection()->FieldSize(message, &field);
  for (int i = 0; i < size; ++i) {
    visit(i);
  }
}

const Message& nested(const Message& message, const FieldDescriptor& field, int index) {
  const auto* const reflection = message.GetReflection();
  return index < 0 ? reflection->GetMessage(message, &field)
                   : reflection->GetRepeatedMessage(message, &field, index);
}

void write_numerics(const Message& message, const std::string& prefix, std::string& out) {
  for (const FieldDescriptor* field : fields_of(*message.GetDescriptor())) {
    for_each_value(message, *field, [&](int index) {
      std::string path = prefix + field->name();
      if (index >= 0) {
        path += "[" + std::to_string(index) + "]";
      }
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        write_numerics(nested(message, *field, index), path + ".", out);
      } else if (field->options().GetExtension(effect) == NUMERICS) {
        out += path;
        out += "=" + value_text(message, *field, index) + "\n";
      }
    });
  }
}

void write_resolved(const Message& message, const std::string& indent, std::string& out) {
  for (const FieldDescriptor* field : fields_of(*message.GetDescriptor())) {
    for_each_value(message, *field, [&](int index) {
      out += indent + field->name();
      if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) {
        out += " {\n";
        write_resolved(nested(message, *field, index), indent + "  ", out);
        out += indent + "}\n";
      } else {
        out += ": " + value_text(message, *field, index) + "\n";
      }
    });
  }
}

// The lines "path=value" of a text, in order; a line without "=" has an empty value.
std::vector<std::pair<std::string, std::string>> read_lines(std::string_view text) {
  std::vector<std::pair<std::string, std::string>> lines;
  while (!text.empty()) {
    const auto end = std::min(text.find('\n'), text.size());
    const std::string_view line = text.substr(0, end);
    const auto equals = std::min(line.find('='), line.size());
    if (!line.empty()) {
      lines.emplace_back(line.substr(0, equals),
                         equals < line.size() ? line.substr(equals + 1) : std::string_view());
    }
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return lines;
}

bool covers(const std::string& allowed, const std::string& path) {
  return path.starts_with(allowed) && !allowed.empty() &&
         (path.size() == allowed.size() || path[allowed.size()] == '.' ||
          path[allowed.size()] == '[');
}

}  // namespace

std::vector<const FieldDescriptor*> fields_of(const google::protobuf::Descriptor& type) {
  std::vector<const FieldDescriptor*> fields;
  fields.reserve(static_cast<std::size_t>(type.field_count()));
  for (int i = 0; i < type.field_count(); ++i) {
    fields.push_back(type.field(i));
  }
  std::sort(fields.begin(), fields.end(), [](const FieldDescriptor* a, const FieldDescriptor* b) {
    return a->number() < b->number();
  });
  return fields;
}

std::string value_text(const Message& message, const FieldDescriptor& field, int index) {
  const auto* const r = message.GetReflection();
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return std::to_string(index < 0 ? r->GetInt64(message, &field)
                                      : r->GetRepeatedInt64(message, &field, index));
    case FieldDescriptor::CPPTYPE_UINT64:
      return std::to_string(index < 0 ? r->GetUInt64(message, &field)
                                      : r->GetRepeatedUInt64(message, &field, index));
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return double_text(index < 0 ? r->GetDouble(message, &field)
                                   : r->GetRepeatedDouble(message, &field, index));
    case FieldDescriptor::CPPTYPE_BOOL:
      return (index < 0 ? r->GetBool(message, &field) : r->GetRepeatedBool(message, &field, index))
                 ? "true"
                 : "false";
    case FieldDescriptor::CPPTYPE_ENUM:
      return (index < 0 ? r->GetEnum(message, &field) : r->GetRepeatedEnum(message, &field, index))
          ->name();
    case FieldDescriptor::CPPTYPE_STRING:
      return "\"" +
             google::protobuf::CEscape(index < 0 ? r->GetString(message, &field)
                                                 : r->GetRepeatedString(message, &field, index)) +
             "\"";
    default:
      // The schema uses no other type; tests/launch/config_test.cc walks it.
      TESSERA_CHECK(false);
  }
}

std::string numerics(const Config& config) {
  std::string out;
  write_numerics(config, "", out);
  return out;
}

std::string resolved_text(const Config& config) {
  std::string out;
  write_resolved(config, "", out);
  return out;
}

std::vector<Difference> compare_numerics(std::string_view saved, std::string_view now) {
  const auto saved_lines = read_lines(saved);
  const auto now_lines = read_lines(now);
  const std::map<std::string, std::string> saved_values(saved_lines.begin(), saved_lines.end());
  const std::map<std::string, std::string> now_values(now_lines.begin(), now_lines.end());
  std::vector<Difference> differences;
  for (const auto& [path, value] : saved_lines) {
    const auto other = now_values.find(path);
    if (other == now_values.end()) {
      differences.push_back({path, value, ""});
    } else if (other->second != value) {
      differences.push_back({path, value, other->second});
    }
  }
  for (const auto& [path, value] : now_lines) {
    if (!saved_values.contains(path)) {
      differences.push_back({path, "", value});
    }
  }
  return differences;
}

void check_resume(std::string_view saved, std::string_view now,
                  const std::vector<std::string>& allowed) {
  for (const std::string& entry : allowed) {
    const auto names_a_line = [&](std::string_view text) {
      for (const auto& [path, value] : read_lines(text)) {
        if (covers(entry, path)) return true;
      }
      return false;
    };
    if (!names_a_line(saved) && !names_a_line(now)) {
      throw Error(ExitCode::kUsage,
                  "--allow-change " + entry + ": no NUMERICS field has that path");
    }
  }
  for (const Difference& d : compare_numerics(saved, now)) {
    const bool is_allowed = std::any_of(allowed.begin(), allowed.end(),
                                        [&](const auto& entry) { return covers(entry, d.path); });
    if (!is_allowed) {
      const auto shown = [](const std::string& value) { return value.empty() ? "not set" : value; };
      throw Error(ExitCode::kUsage, d.path + ": the checkpoint was trained with " + shown(d.saved) +
                                        ", this run has " + shown(d.now) +
                                        "; put the old value back, or add --allow-change " +
                                        d.path);
    }
  }
}

}  // namespace tessera
