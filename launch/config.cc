#include "launch/config.h"

#include <google/protobuf/stubs/strutil.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <memory>
#include <optional>

#include "data/text_format.h"
#include "launch/config_fields.h"
#include "layers/configuration.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;

constexpr std::int64_t kLargestFile = std::int64_t{1} << 20;

[[noreturn]] void refuse(const std::string& message) { throw Error(ExitCode::kUsage, message); }

// Segments of "model.mixer[1].sliding": name and index, -1 where there is none.
struct Segment {
  std::string name;
  int index = -1;
};

std::optional<std::vector<Segment>> split_path(const std::string& path) {
  std::vector<Segment> segments;
  std::size_t begin = 0;
  while (begin <= path.size()) {
    const std::size_t end = std::min(path.find('.', begin), path.size());
    Segment segment;
    segment.name = path.substr(begin, end - begin);
    const std::size_t bracket = segment.name.find('[');
    if (bracket != std::string::npos) {
      const char* const first = segment.name.data() + bracket + 1;
      const char* const last = segment.name.data() + segment.name.size();
      const auto [stop, error] = std::from_chars(first, last, segment.index);
      if (error != std::errc() || stop + 1 != last || *stop != ']' || segment.index < 0) {
        return std::nullopt;
      }
      segment.name.resize(bracket);
    }
    if (segment.name.empty()) {
      return std::nullopt;
    }
    segments.push_back(segment);
    begin = end + 1;
  }
  return segments;
}

// The line, counted from 1, of a field or of the nearest thing around it that the file sets; 0:
// none.
int line_of(const std::string& path, const TextFormat::ParseInfoTree& root) {
  int line = 0;
  const TextFormat::ParseInfoTree* tree = &root;
  const Descriptor* type = Config::descriptor();
  const auto segments = split_path(path);
  if (!segments) {
    return 0;
  }
  for (const Segment& segment : *segments) {
    const FieldDescriptor* const field =
        type == nullptr ? nullptr : type->FindFieldByName(segment.name);
    if (tree == nullptr || field == nullptr) {
      break;
    }
    const int index = field->is_repeated() ? std::max(segment.index, 0) : -1;
    const int at = tree->GetLocation(field, index).line;
    if (at < 0) {
      break;
    }
    line = at + 1;
    type = field->message_type();
    tree = type == nullptr ? nullptr : tree->GetTreeForNested(field, index);
  }
  return line;
}

// --- overrides ---------------------------------------------------------------------------------

class Override {
 public:
  explicit Override(const std::string& text) : text_(text) {
    const std::size_t equals = text.find('=');
    if (equals == std::string::npos) {
      fail("expected path=value");
    }
    path_ = text.substr(0, equals);
    value_ = text.substr(equals + 1);
    const auto segments = split_path(path_);
    if (!segments) {
      fail("expected a field path such as model.mixer[1].sliding.window before the =");
    }
    segments_ = *segments;
  }

  // Whether the override is where the field at `path`, or something in it, was set.
  bool concerns(const std::string& path) const {
    const auto within = [](const std::string& inner, const std::string& outer) {
      return inner.starts_with(outer) && (inner.size() == outer.size() ||
                                          inner[outer.size()] == '.' || inner[outer.size()] == '[');
    };
    return within(path, path_) || within(path_, path);
  }

  void apply(Config& config) const {
    Message* message = &config;
    std::string so_far;
    for (std::size_t i = 0; i + 1 < segments_.size(); ++i) {
      const FieldDescriptor& field = find(*message, segments_[i], so_far);
      if (field.message_type() == nullptr) {
        fail(so_far + ": expected " + expected_value(field) + ", it has no fields");
      }
      message = &enter(*message, field, segments_[i].index, so_far);
    }
    set(*message, find(*message, segments_.back(), so_far), segments_.back().index, so_far);
  }

  [[noreturn]] void fail(const std::string& message) const {
    refuse("--set " + printable(text_) + ": " + message);
  }

 private:
  const FieldDescriptor& find(const Message& message, const Segment& segment,
                              std::string& so_far) const {
    so_far += (so_far.empty() ? "" : ".") + printable(segment.name);
    const FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName(segment.name);
    if (field == nullptr) {
      fail(so_far + ": " +
           unknown_field(*Config::descriptor(), *message.GetDescriptor(), segment.name));
    }
    if (segment.index >= 0) {
      if (!field->is_repeated()) {
        fail(so_far + ": this isn't a list; expected no index");
      }
      const int size = message.GetReflection()->FieldSize(message, field);
      so_far += "[" + std::to_string(segment.index) + "]";
      if (segment.index > size) {
        fail(so_far + ": the list has " + std::to_string(size) +
             " entries; expected an index of at most " + std::to_string(size));
      }
    }
    return *field;
  }

  Message& enter(Message& message, const FieldDescriptor& field, int index,
                 const std::string& so_far) const {
    const auto* const reflection = message.GetReflection();
    if (!field.is_repeated()) {
      return *reflection->MutableMessage(&message, &field);
    }
    if (index < 0) {
      fail(so_far + ": this is a list; expected an index, as in " + so_far + "[0]");
    }
    return index == reflection->FieldSize(message, &field)
               ? *reflection->AddMessage(&message, &field)
               : *reflection->MutableRepeatedMessage(&message, &field, index);
  }

  // Parses the value alone in a message of the same type, so that it can't reach other fields.
  void set(Message& message, const FieldDescriptor& field, int index,
           const std::string& so_far) const {
    const std::unique_ptr<Message> fresh(message.New());
    std::string value = value_;
    const bool quoted = value.starts_with('"') || value.starts_with('\'');
    const bool list = field.is_repeated() && index < 0 && value.starts_with('[');
    if (field.cpp_type() == FieldDescriptor::CPPTYPE_STRING && !quoted && !list) {
      value = "\"" + google::protobuf::CEscape(value) + "\"";
    }
    std::vector<const FieldDescriptor*> filled;
    const auto fault = find_text_fault(field.name() + ": " + value, fresh.get());
    fresh->GetReflection()->ListFields(*fresh, &filled);
    const bool alone = std::all_of(filled.begin(), filled.end(),
                                   [&](const auto* other) { return other == &field; });
    if (fault && field.message_type() != nullptr && value.starts_with('{')) {
      // The fault's path begins with this field, which stands in `so_far` already.
      const std::size_t dot = std::min(fault->path.find('.'), fault->path.size());
      fail(so_far + fault->path.substr(dot) + ": " + fault->what);
    }
    if (fault || !alone) {
      fail(so_far + ": " + wrong_value(field, value_.empty() ? "nothing" : value_));
    }
    const auto* const reflection = message.GetReflection();
    if (index < 0) {
      reflection->ClearField(&message, &field);
      message.MergeFrom(*fresh);
      return;
    }
    const int size = reflection->FieldSize(message, &field);
    if (reflection->FieldSize(*fresh, &field) != 1) {
      fail(so_far + ": expected one value");
    }
    message.MergeFrom(*fresh);
    if (index < size) {
      reflection->SwapElements(&message, &field, index, size);
      reflection->RemoveLast(&message, &field);
    }
  }

  std::string text_, path_, value_;
  std::vector<Segment> segments_;
};

}  // namespace

std::string find_config(const std::string& name) {
  namespace fs = std::filesystem;
  const bool plain = !name.empty() && name.find_first_of("/.") == std::string::npos;
  std::error_code error;  // of a name that can't be one of a file
  if (!plain || fs::exists(name, error)) return name;
  const fs::path folder = TESSERA_CONFIG_FOLDER;
  const fs::path file = folder / (name + ".textproto");
  if (fs::exists(file, error)) return file.string();
  std::vector<std::string> ready;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string stem = entry.path().stem().string();
    if (entry.path().extension() == ".textproto" && !stem.ends_with("recipe")) {
      ready.push_back(stem);
    }
  }
  std::sort(ready.begin(), ready.end());
  std::string all;
  for (const std::string& stem : ready) all += (all.empty() ? "" : ", ") + stem;
  refuse(printable(name) + ": no such file, and no ready config; the ready ones are " + all);
}

std::string absolute_path(const std::string& path) {
  if (path.empty()) return path;
  std::error_code error;
  const std::filesystem::path whole = std::filesystem::absolute(path, error);
  if (error) {
    refuse(path + ": the working folder can't be told (" + error.message() +
           "); start from a folder that is there, or give whole paths");
  }
  return whole.lexically_normal().string();
}

Config load_config(const std::string& name, const std::vector<std::string>& overrides) {
  const std::string path = find_config(name);
  Config config;
  TextFormat::ParseInfoTree places;
  const std::string text =
      read_text_file(path, ExitCode::kUsage, "a config in protobuf text format", kLargestFile);
  parse_text_format(text, path, ExitCode::kUsage, &config, &places);
  std::vector<Override> applied;
  for (const std::string& text : overrides) {
    applied.emplace_back(text).apply(config);
  }
  const auto fault = find_fault(config);
  if (fault) {
    const auto source = std::find_if(applied.rbegin(), applied.rend(),
                                     [&](const Override& o) { return o.concerns(fault->path); });
    const std::string what = fault->path + ": " + fault->message;
    if (source != applied.rend()) {
      source->fail(what);
    }
    const int line = line_of(fault->path, places);
    refuse(path + (line > 0 ? ":" + std::to_string(line) : "") + ": " + what);
  }
  complete(*config.mutable_model());
  return config;
}

void validate(const Config& config) {
  const auto fault = find_fault(config);
  if (fault) {
    refuse(fault->path + ": " + fault->message);
  }
}

}  // namespace tessera
