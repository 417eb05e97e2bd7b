#include "data/text_format.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>
#include <google/protobuf/io/zero_copy_stream_impl_lite.h>
#include <sys/stat.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <numeric>
#include <optional>
#include <string_view>
#include <vector>

#include "data/utf8.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using google::protobuf::Message;
using google::protobuf::TextFormat;
namespace io = google::protobuf::io;

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

// --- names -------------------------------------------------------------------------------------

// Capitals are no difference.
std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const bool same = std::tolower(static_cast<unsigned char>(a[i - 1])) ==
                        std::tolower(static_cast<unsigned char>(b[j - 1]));
      const std::size_t replaced = diagonal + (same ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

// The valid name nearest to a wrong one, if it is at most this many letters away.
std::optional<std::string> nearest(const std::string& name, const std::vector<std::string>& valid,
                                   std::size_t limit) {
  constexpr std::size_t kLongestName = 100;
  if (name.size() > kLongestName) return std::nullopt;
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
  names.reserve(static_cast<std::size_t>(type.field_count()));
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
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
  for (int i = 0; i < type.field_count(); ++i) {
    const FieldDescriptor& field = *type.field(i);
    if (field.name() == name) {
      paths.push_back(prefix + name);
    }
    if (field.message_type() != nullptr) {
      find_name(*field.message_type(), prefix + field.name() + ".", name, paths);
    }
  }
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
  Scanner(const std::string& text, const Descriptor& root)
      : stream_(text.data(), static_cast<int>(text.size())), root_(root) {}

  // The field whose text the place is in; and through `previous` the field before that.
  Spot find(int line, int column, Spot& previous) {
    io::Tokenizer tokens(&stream_, &errors_);
    tokens.set_comment_style(io::Tokenizer::SH_COMMENT_STYLE);
    tokens.set_require_space_after_number(false);
    tokens.set_allow_multiline_strings(true);
    frames_ = {Frame{&root_, "", {}, false}};
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
  const Descriptor& root_;
  FirstError errors_;
  std::vector<Frame> frames_;
  std::vector<Spot> lists_;
  Spot spot_, previous_;
  bool in_field_ = false;
  bool in_list_ = false;
};

// What the parser's message says of the field, in our words.
std::string describe(const Descriptor& root, const Spot& spot, const std::string& message) {
  if (spot.field == nullptr && spot.parent != nullptr) {
    return unknown_field(root, *spot.parent, spot.name);
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
  return "not protobuf text format: " + printable(message) +
         "; fields are written as name: value or name { ... }";
}

}  // namespace

std::string printable(std::string text) {
  constexpr std::size_t kLongest = 200;
  const bool cut = text.size() > kLongest;
  if (cut) text.resize(kLongest);
  text = one_line(text);
  for (std::size_t at = 0; (at = first_invalid_utf8(text)) != std::string::npos;) text[at] = '?';
  return cut ? text + "..." : text;
}

// Says the nearest name: of the same message if it is a slip of the pen, else the same name in
// another place of the schema, else the nearest of the message, else all of them.
std::string unknown_field(const Descriptor& root, const Descriptor& type, const std::string& name) {
  const std::string message = "there is no field " + printable(name) + " here; ";
  const std::vector<std::string> valid = names_of(type);
  std::vector<std::string> elsewhere;
  find_name(root, "", name, elsewhere);
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

std::string expected_value(const FieldDescriptor& field) {
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
  std::string message = "expected " + expected_value(field) + ", got " + printable(got);
  if (field.enum_type() != nullptr) {
    const auto best =
        nearest(got, names_of(*field.enum_type()), std::max<std::size_t>(2, got.size() / 2));
    message += best ? "; nearest: " + *best : "";
  }
  return message;
}

std::string read_text_file(const std::string& path, ExitCode code, const std::string& kind,
                           std::int64_t largest) {
  const auto refuse = [&](const std::string& what) { throw Error(code, path + ": " + what); };
  struct stat status {};
  if (::stat(path.c_str(), &status) != 0) {
    const std::string why = errno == ENOENT ? "no such file" : std::strerror(errno);
    refuse(why + "; expected " + kind);
  }
  if (S_ISDIR(status.st_mode)) refuse("this is a folder; expected " + kind);
  if (!S_ISREG(status.st_mode)) refuse("this isn't a regular file; expected " + kind);
  if (status.st_size > largest) {
    refuse(std::to_string(status.st_size) + " bytes are too many; expected " + kind +
           " of at most " + std::to_string(largest));
  }
  errno = 0;
  std::ifstream file(path, std::ios::binary);
  if (!file) refuse(std::string("cannot be opened: ") + std::strerror(errno));
  std::string text;
  std::vector<char> piece(std::size_t{1} << 18);
  while (file && static_cast<std::int64_t>(text.size()) <= largest) {
    file.read(piece.data(), static_cast<std::streamsize>(piece.size()));
    const auto got = static_cast<std::size_t>(file.gcount());
    text.append(piece.data(), got);
    // No text has a zero byte, so that whoever parses it stops there.
    if (std::memchr(piece.data(), 0, got) != nullptr) return text;
  }
  if (file.bad()) refuse(std::string("cannot be read: ") + std::strerror(errno));
  if (text.find_first_not_of(" \t\r\n") == std::string::npos) {
    refuse("the file is empty; expected " + kind);
  }
  return text;
}

std::optional<TextFault> find_text_fault(const std::string& whole, Message* message,
                                         TextFormat::ParseInfoTree* places) {
  // Some editors begin a file with a byte order mark, which the parser doesn't know.
  constexpr std::string_view kMark = "\xef\xbb\xbf";
  const std::string text = whole.starts_with(kMark) ? whole.substr(kMark.size()) : whole;
  FirstError error;
  TextFormat::Parser parser;
  parser.RecordErrorsTo(&error);
  if (places != nullptr) parser.WriteLocationsTo(places);
  if (parser.ParseFromString(text, message)) return std::nullopt;
  const Descriptor& root = *message->GetDescriptor();
  Spot previous;
  Spot spot = Scanner(text, root).find(error.line(), error.column(), previous);
  // These two are noticed once the value has been read, at whatever comes next.
  if (error.message().starts_with("Unknown enumeration value") ||
      error.message().starts_with("Invalid value for boolean")) {
    spot = previous;
  }
  return TextFault{spot.line + 1, printable(spot.path), describe(root, spot, error.message())};
}

void parse_text_format(const std::string& text, const std::string& file, ExitCode code,
                       Message* message, TextFormat::ParseInfoTree* places) {
  const std::optional<TextFault> fault = find_text_fault(text, message, places);
  if (!fault) return;
  throw Error(code, file + ":" + std::to_string(fault->line) + ": " +
                        (fault->path.empty() ? "" : fault->path + ": ") + fault->what);
}

}  // namespace tessera
