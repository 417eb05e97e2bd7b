// Protobuf text format from files, with errors that name file, line and column.
#pragma once

#include <google/protobuf/message.h>
#include <google/protobuf/text_format.h>

#include <string>

#include "runtime/error.h"

namespace tessera {

// The whole file; throws Error(code) naming it.
std::string read_text_file(const std::string& path, ExitCode code);

// Fills `message` and, unless null, where each field stands. Throws Error(code) with the first
// fault as one line "file:line:column: what", with the nearest valid name for an unknown field or
// enumeration value.
void parse_text_format(const std::string& text, const std::string& file, ExitCode code,
                       google::protobuf::Message* message,
                       google::protobuf::TextFormat::ParseInfoTree* places = nullptr);

}  // namespace tessera
