// Protobuf text format from files: configs, recipes and manifests. Every fault is one line that
// names the file, the line, the field and what was expected.
#pragma once

#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>

#include <cstdint>
#include <optional>
#include <string>

#include "runtime/error.h"

namespace tessera {

// The whole of a regular file of at most `largest` bytes; throws Error(code) naming it for
// anything else: a pipe or a device would block, or never end. `kind` says what was expected: "a
// recipe in protobuf text format".
std::string read_text_file(const std::string& path, ExitCode code, const std::string& kind,
                           std::int64_t largest);

// The first fault of a text: the line, counted from 1; the field's path, "" outside of any; what
// was expected, with the nearest valid name for an unknown field or enumeration value.
struct TextFault {
  int line = 0;
  std::string path;
  std::string what;
};

// Fills `message` and, unless null, where each field stands.
std::optional<TextFault> find_text_fault(
    const std::string& text, google::protobuf::Message* message,
    google::protobuf::TextFormat::ParseInfoTree* places = nullptr);

// The same; throws Error(code) with the fault as "file:line: field.path: what".
void parse_text_format(const std::string& text, const std::string& file, ExitCode code,
                       google::protobuf::Message* message,
                       google::protobuf::TextFormat::ParseInfoTree* places = nullptr);

// Words for errors about the fields of a schema whose outermost message is `root`.
// "there is no field `name` here; nearest: ..."
std::string unknown_field(const google::protobuf::Descriptor& root,
                          const google::protobuf::Descriptor& type, const std::string& name);
// What a value of the field looks like: "a whole number (64 bits)".
std::string expected_value(const google::protobuf::FieldDescriptor& field);
// "expected ..., got ..."
std::string wrong_value(const google::protobuf::FieldDescriptor& field, const std::string& got);
// A piece of a file or a command line for a message: control characters and what isn't UTF-8 become
// '?', and what is long is cut.
std::string printable(std::string text);

}  // namespace tessera
