// One line of JSONL. The input is the field's name, a zero, and the line; without a zero the field
// is "text". The library's own tree is what it is held against.
#include <nlohmann/json.hpp>
#include <optional>

#include "data/documents.h"
#include "data/utf8.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

void fuzz::take(std::string_view input) {
  std::string_view line = input;
  std::string field = "text";
  if (const std::size_t zero = line.find('\0'); zero != std::string_view::npos) {
    field = line.substr(0, zero);
    line.remove_prefix(zero + 1);
  }
  std::string why;
  const std::optional<std::string> text = text_of_json(line, field, why);

  const nlohmann::json tree = nlohmann::json::parse(line, nullptr, false);
  const bool expected = tree.is_object() && tree.contains(field) && tree.at(field).is_string();
  fuzz::require(text.has_value() == expected, "a text is there that isn't, or the reverse");
  fuzz::require(text.has_value() == why.empty(), "it isn't said why there is no text");
  if (!text) return;
  fuzz::require(*text == tree.at(field).get<std::string>(), "the text is another");
  fuzz::require(first_invalid_utf8(*text) == std::string_view::npos, "the text isn't UTF-8");
}
