#include "launch/config.h"

#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <google/protobuf/stubs/strutil.h>
#include <google/protobuf/text_format.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <numeric>
#include <optional>

#include "launch/config_fields.h"
#include "layers/configuration.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;
namespace io = google::protobuf::io;

constexpr std::uintmax_t kLargestFile = std::uintmax_t{1} << 20;

[[noreturn]] void refuse(const std::string& message) { throw Error(ExitCode::kUsage, message); }

// Keeps the first error.
class FirstError : public io::ErrorCollector {
 public:
  void AddError(int line, int column, const std::string& message) override {
    if (message_.empty()) {
      line_ = line;
      column_ = column;
      message_ = message;
    }
  }
  int line() const { return line_; }
  int column() const { return column_; }
  const std::string& message() const { return message_; }

 private:
  int line_ = 0;
  int column_ = 0;
  std::string message_;
};

// Bytes that would spoil a line of the terminal become '?', and a long text is cut.
std::string printable(std::string text) {
  constexpr std::size_t kLongest = 200;
  for (char& c : text) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) {
      c = '?';
    }
  }
  if (text.size() > kLongest) {
    text = text.substr(0, kLongest) + "...";
  }
  return text;
}

// --- names -------------------------------------------------------------------------------------

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

// The valid name nearest to a wrong one, if it is at most this many letters away.
std::optional<std::string> nearest(const std::string& name, const std::vector<std::string>& valid,
                                   std::size_t limit) {
  const auto best = std::min_element(valid.begin(), valid.end(), [&](const auto& a, const auto& b) {
    return edit_distance(name, a) < edit_distance(name, b);
  });
  if (best == valid.end() || edit_distance(name, *best) > limit) {
    return std::nullopt;
  }
  return *best;
}

std::vector<std::string> names_of(const Descriptor& type) {
  std::vector<std::string> names;
  for (const FieldDescriptor* field : fields_of(type)) {
    names.push_back(field->name());
  }
  return names;
}

std::vector<std::string> names_of(const google::protobuf::EnumDescriptor& type) {
  std::vector<std::string> names;
  names.reserve(static_cast<std::size_t>(type.value_count()));
  for (int i = 0; i < type.value_count(); ++i) {
    names.push_back(type.value(i)->name());
  }
  return names;
}

// Where in the schema fields of this name stand.
void find_name(const Descriptor& type, const std::string& prefix, const std::string& name,
               std::vector<std::string>& paths) {
  for (const FieldDescriptor* field : fields_of(type)) {
    if (field->name() == name) {
      paths.push_back(prefix + name);
    }
    if (field->message_type() != nullptr) {
      find_name(*field->message_type(), prefix + field->name() + ".", name, paths);
    }
  }
}

// Says the nearest name: of the same message if it is a slip of the pen, else the same name in
// another place of the schema, else the nearest of the message, else all of them.
std::string unknown_field(const Descriptor& type, const std::string& name) {
  const std::string message = "there is no field " + printable(name) + " here; ";
  const std::vector<std::string> valid = names_of(type);
  std::vector<std::string> elsewhere;
  find_name(*Config::descriptor(), "", name, elsewhere);
  auto best = nearest(name, valid, std::min<std::size_t>(2, name.size() / 2));
  if (!best && !elsewhere.empty()) {
    best = elsewhere.front();
  }
  if (!best) {
    best = nearest(name, valid, name.size() / 2);
  }
  if (best) {
    return message + "nearest: " + *best;
  }
  std::string all;
  for (const std::string& v : valid) {
    all += (all.empty() ? "" : ", ") + v;
  }
  return message + "expected one of " + all;
}

std::string expected(const FieldDescriptor& field) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT64:
      return "a whole number (64 bits)";
    case FieldDescriptor::CPPTYPE_UINT64:
      return "a whole number of at least 0 (64 bits)";
    case FieldDescriptor::CPPTYPE_DOUBLE:
      return "a number";
    case FieldDescriptor::CPPTYPE_BOOL:
      return "true or false";
    case FieldDescriptor::CPPTYPE_STRING:
      return "a text in quotes";
    case FieldDescriptor::CPPTYPE_ENUM: {
      std::string all = "one of";
      for (const std::string& name : names_of(*field.enum_type())) {
        all += " " + name;
      }
      return all;
    }
    default:
      return "{ fields }";
  }
}

std::string wrong_value(const FieldDescriptor& field, const std::string& got) {
  std::string message = "expected " + expected(field) + ", got " + printable(got);
  if (field.enum_type() != nullptr) {
    const auto best =
        nearest(got, names_of(*field.enum_type()), std::max<std::size_t>(2, got.size() / 2));
    message += best ? "; nearest: " + *best : "";
  }
  return message;
}

// --- places in the file ------------------------------------------------------------------------

// The field that a place in the text belongs to.
struct Spot {
  std::string path;
  std::string name;
  const Descriptor* parent = nullptr;      // null: inside a field that doesn't exist
  const FieldDescriptor* field = nullptr;  // null: there is no such field
  std::string value;                       // of the field, as far as the text was read
  int line = 0;
};

// Follows text format's nesting from the start to a place, so that an error there can be given a
// field path: the parser itself reports line and column alone.
class Scanner {
 public:
  explicit Scanner(const std::string& text) : stream_(text.data(), static_cast<int>(text.size())) {}

  // The field whose text the place is in; and through `previous` the field before that.
  Spot find(int line, int column, Spot& previous) {
    io::Tokenizer tokens(&stream_, &errors_);
    tokens.set_comment_style(io::Tokenizer::SH_COMMENT_STYLE);
    tokens.set_require_space_after_number(false);
    tokens.set_allow_multiline_strings(true);
    frames_ = {Frame{Config::descriptor(), "", {}, false}};
    while (tokens.Next()) {
      const io::Tokenizer::Token& token = tokens.current();
      const bool reached = token.line > line || (token.line == line && token.column >= column);
      if (reached) {
        if (in_field_) {
          spot_.value += token.text;
          if (token.text == "-" && tokens.Next()) {
            spot_.value += tokens.current().text;
          }
          return spot_;
        }
        if (token.type != io::Tokenizer::TYPE_IDENTIFIER) {
          break;
        }
        previous = spot_;
        start_field(token);
        return spot_;
      }
      previous_ = in_field_ ? previous_ : spot_;
      take(token);
      previous = previous_;
    }
    previous = spot_;
    Spot here;
    here.path = frames_.back().prefix;
    if (!here.path.empty()) {
      here.path.pop_back();
    }
    here.line = line;
    return here;
  }

 private:
  struct Frame {
    const Descriptor* type;
    std::string prefix;  // "model."
    std::map<std::string, int> seen;
    bool in_list;  // opened between [ and ]
  };

  void start_field(const io::Tokenizer::Token& token) {
    Frame& frame = frames_.back();
    spot_ = Spot{};
    spot_.name = token.text;
    spot_.parent = frame.type;
    spot_.field = frame.type == nullptr ? nullptr : frame.type->FindFieldByName(token.text);
    spot_.path = frame.prefix + token.text;
    spot_.line = token.line;
    next_element();
    in_field_ = true;
    in_list_ = false;
  }

  // A further value of a repeated field.
  void next_element() {
    const std::string plain = frames_.back().prefix + spot_.name;
    const int index = frames_.back().seen[spot_.name]++;
    const bool repeated = spot_.field != nullptr && spot_.field->is_repeated();
    spot_.path = repeated ? plain + "[" + std::to_string(index) + "]" : plain;
    spot_.value.clear();
  }

  void take(const io::Tokenizer::Token& token) {
    const std::string& t = token.text;
    if (!in_field_) {
      if (token.type == io::Tokenizer::TYPE_IDENTIFIER) {
        start_field(token);
      } else if ((t == "}" || t == ">") && frames_.size() > 1) {
        const bool in_list = frames_.back().in_list;
        frames_.pop_back();
        in_field_ = in_list;
        in_list_ = in_list;
        if (in_list) {
          spot_ = lists_.back();
          lists_.pop_back();
        }
      }
      return;
    }
    if (t == ":" || t == "-") {
      spot_.value += t == "-" ? t : "";
    } else if (t == "{" || t == "<") {
      if (in_list_) {
        lists_.push_back(spot_);
      }
      frames_.push_back(Frame{spot_.field == nullptr ? nullptr : spot_.field->message_type(),
                              spot_.path + ".",
                              {},
                              in_list_});
      in_field_ = false;
    } else if (t == "[") {
      in_list_ = true;
    } else if (t == ",") {
      next_element();
    } else if (t == "]") {
      in_field_ = false;
    } else {
      spot_.value += t;
      in_field_ = in_list_;
    }
  }

  io::ArrayInputStream stream_;
  FirstError errors_;
  std::vector<Frame> frames_;
  std::vector<Spot> lists_;
  Spot spot_, previous_;
  bool in_field_ = false;
  bool in_list_ = false;
};

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

// --- the file ----------------------------------------------------------------------------------

std::string read_text(const std::string& path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (!std::filesystem::exists(status)) {
    refuse(path + ": no such file; expected a config in protobuf text format");
  }
  if (std::filesystem::is_directory(status)) {
    refuse(path + ": this is a folder; expected a config file in protobuf text format");
  }
  if (!std::filesystem::is_regular_file(status)) {
    refuse(path + ": this isn't a regular file; expected a config in protobuf text format");
  }
  const auto size = std::filesystem::file_size(path, error);
  if (!error && size > kLargestFile) {
    refuse(path + ": " + std::to_string(size) +
           " bytes are too many for a config; expected protobuf text format of at most 1 MiB");
  }
  std::ifstream file(path, std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  if (!file) {
    refuse(path + ": can't be read; check its permissions");
  }
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    refuse(path + ": the file is empty; expected a config, which sets model.width among others");
  }
  return text;
}

// What the parser's message says of the field, in our words.
std::string describe(const Spot& spot, const std::string& message) {
  if (spot.field == nullptr && spot.parent != nullptr) {
    return unknown_field(*spot.parent, spot.name);
  }
  if (spot.field != nullptr &&
      (message.starts_with("Expected integer") || message.starts_with("Expected double") ||
       message.starts_with("Expected string") || message.starts_with("Expected identifier") ||
       message.starts_with("Expected \"{\"") || message.starts_with("Integer out of range") ||
       message.starts_with("Unknown enumeration value") ||
       message.starts_with("Invalid value for boolean"))) {
    return wrong_value(*spot.field, spot.value);
  }
  if (message.starts_with("Non-repeated field")) {
    return "the field is set twice; expected once";
  }
  return "not protobuf text format: " + printable(message);
}

void parse_file(const std::string& path, const std::string& text, Config& config,
                TextFormat::ParseInfoTree& places) {
  FirstError error;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  parser.WriteLocationsTo(&places);
  if (parser.ParseFromString(text, &config)) {
    return;
  }
  Spot previous;
  Spot spot = Scanner(text).find(error.line(), error.column(), previous);
  // These two are noticed once the value has been read, at whatever comes next.
  if (error.message().starts_with("Unknown enumeration value") ||
      error.message().starts_with("Invalid value for boolean")) {
    spot = previous;
  }
  std::string where = path + ":" + std::to_string(spot.line + 1) + ": ";
  if (!spot.path.empty()) {
    where += printable(spot.path) + ": ";
  }
  refuse(where + describe(spot, error.message()));
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
        fail(so_far + ": expected " + expected(field) + ", it has no fields");
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
    so_far += (so_far.empty() ? "" : ".") + segment.name;
    const FieldDescriptor* const field = message.GetDescriptor()->FindFieldByName(segment.name);
    if (field == nullptr) {
      fail(so_far + ": " + unknown_field(*message.GetDescriptor(), segment.name));
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
    FirstError error;
    TextFormat::Parser parser;
    parser.RecordErrorsTo(&error);
    std::vector<const FieldDescriptor*> filled;
    const bool parsed = parser.ParseFromString(field.name() + ": " + value, fresh.get());
    fresh->GetReflection()->ListFields(*fresh, &filled);
    const bool alone = std::all_of(filled.begin(), filled.end(),
                                   [&](const auto* other) { return other == &field; });
    if (!parsed && field.message_type() != nullptr && value.starts_with('{')) {
      fail(so_far + ": " + printable(error.message()));
    }
    if (!parsed || !alone) {
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
  if (!plain || fs::exists(name)) return name;
  const fs::path folder = TESSERA_CONFIG_FOLDER;
  const fs::path file = folder / (name + ".textproto");
  if (fs::exists(file)) return file.string();
  std::vector<std::string> ready;
  std::error_code error;
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

Config load_config(const std::string& name, const std::vector<std::string>& overrides) {
  const std::string path = find_config(name);
  Config config;
  TextFormat::ParseInfoTree places;
  parse_file(path, read_text(path), config, places);
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
