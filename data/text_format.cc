#include "data/text_format.h"

#include <google/protobuf/descriptor.h>
#include <google/protobuf/io/tokenizer.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <numeric>
#include <sstream>
#include <vector>

namespace tessera {
namespace {

namespace pb = google::protobuf;

class FirstError : public pb::io::ErrorCollector {
 public:
  void AddError(int line, pb::io::ColumnNumber column, const std::string& message) override {
    if (!message_.empty()) return;
    line_ = line;
    column_ = column;
    message_ = message;
  }
  int line() const { return line_; }
  int column() const { return column_; }
  const std::string& message() const { return message_; }

 private:
  int line_ = -1;
  int column_ = -1;
  std::string message_;
};

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i;
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] == b[j - 1] ? 0 : 1)});
      diagonal = above;
    }
  }
  return row[b.size()];
}

// The first and the second quoted word of protobuf's message, which names a type and a field, or a
// value and a field.
std::vector<std::string> quoted(const std::string& message) {
  std::vector<std::string> words;
  std::size_t open = message.find('"');
  while (open != std::string::npos) {
    const std::size_t close = message.find('"', open + 1);
    if (close == std::string::npos) break;
    words.push_back(message.substr(open + 1, close - open - 1));
    open = message.find('"', close + 1);
  }
  return words;
}

const pb::EnumDescriptor* find_enum(const pb::Descriptor* type, const std::string& field,
                                    int depth) {
  if (const pb::FieldDescriptor* found = type->FindFieldByName(field)) {
    if (found->enum_type() != nullptr) return found->enum_type();
  }
  if (depth == 0) return nullptr;
  for (int i = 0; i < type->field_count(); ++i) {
    if (type->field(i)->message_type() == nullptr) continue;
    if (const auto* found = find_enum(type->field(i)->message_type(), field, depth - 1)) {
      return found;
    }
  }
  return nullptr;
}

std::string suggestion(const pb::Message& message, const std::string& error) {
  const std::vector<std::string> words = quoted(error);
  if (words.size() != 2) return "";
  std::vector<std::string> names;
  std::string wrong;
  if (error.find("has no field named") != std::string::npos) {
    const pb::Descriptor* type =
        message.GetDescriptor()->file()->pool()->FindMessageTypeByName(words[0]);
    if (type == nullptr) return "";
    wrong = words[1];
    for (int i = 0; i < type->field_count(); ++i) names.push_back(type->field(i)->name());
  } else if (error.find("nknown enumeration value") != std::string::npos) {
    const pb::EnumDescriptor* type = find_enum(message.GetDescriptor(), words[1], 8);
    if (type == nullptr) return "";
    wrong = words[0];
    for (int i = 0; i < type->value_count(); ++i) names.push_back(type->value(i)->name());
  }
  if (names.empty()) return "";
  return " The nearest valid name is \"" +
         *std::min_element(names.begin(), names.end(),
                           [&](const std::string& a, const std::string& b) {
                             return edit_distance(wrong, a) < edit_distance(wrong, b);
                           }) +
         "\".";
}

}  // namespace

std::string read_text_file(const std::string& path, ExitCode code) {
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  std::stringstream text;
  if (in) text << in.rdbuf();
  // An empty file leaves failbit on `text`, not on `in`; a folder opens but can't be read.
  if (!in || errno == EISDIR) {
    throw Error(code, path + ": cannot be read: " + std::strerror(errno != 0 ? errno : EIO));
  }
  return std::move(text).str();
}

void parse_text_format(const std::string& text, const std::string& file, ExitCode code,
                       pb::Message* message, pb::TextFormat::ParseInfoTree* places) {
  FirstError first;
  pb::TextFormat::Parser parser;
  parser.RecordErrorsTo(&first);
  if (places != nullptr) parser.WriteLocationsTo(places);
  if (parser.ParseFromString(text, message)) return;
  std::string what = first.message() + suggestion(*message, first.message());
  std::replace(what.begin(), what.end(), '\n', ' ');
  const std::string place = first.line() < 0 ? ""
                                             : ":" + std::to_string(first.line() + 1) + ":" +
                                                   std::to_string(first.column() + 1);
  throw Error(code, file + place + ": " + what);
}

}  // namespace tessera
