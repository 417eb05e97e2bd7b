#include "launch/tokenize.h"

#include <sys/stat.h>
#include <unistd.h>

#include <charconv>
#include <cstdint>
#include <iostream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "data/text_format.h"
#include "data/utf8.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using nlohmann::json;

constexpr char kUnreadable[] = "standard input: can't be read; is it closed?";

void encode_plain(const Tokenizer& tokenizer, const TokenizeOptions& options, std::istream& in,
                  std::ostream& out) {
  const std::string text{std::istreambuf_iterator<char>(in), {}};
  std::vector<std::uint32_t> ids;
  tokenizer.encode(text, ids, options.parse_special);
  std::string line;
  for (const std::uint32_t id : ids) {
    if (!line.empty()) line += ' ';
    line += std::to_string(id);
  }
  out << line << '\n';
}

void decode_plain(const Tokenizer& tokenizer, std::istream& in, std::ostream& out) {
  std::string word;
  std::vector<std::uint32_t> ids;
  while (in >> word) {
    std::uint32_t id = 0;
    const char* end = word.data() + word.size();
    const auto [stop, error] = std::from_chars(word.data(), end, id);
    if (error != std::errc() || stop != end) {
      throw Error(ExitCode::kData, "word " + std::to_string(ids.size() + 1) + ", '" +
                                       word.substr(0, 40) + "', isn't a token id");
    }
    ids.push_back(id);
  }
  out << tokenizer.decode(ids.data(), ids.size());
}

// Writing JSON recurses, so what is nested deeper than this is refused.
constexpr int kDeepest = 500;

json parse_line(const std::string& line) {
  return json::parse(line, [](int depth, json::parse_event_t, json&) {
    if (depth > kDeepest) throw Error(ExitCode::kData, "is nested too deeply");
    return true;
  });
}

void convert(const Tokenizer& tokenizer, const TokenizeOptions& options, json& object) {
  const char* from = options.decode ? "ids" : "text";
  if (!object.is_object()) throw Error(ExitCode::kData, "isn't a JSON object");
  const auto found = object.find(from);
  if (found == object.end()) throw Error(ExitCode::kData, std::string("has no '") + from + "'");
  if (options.decode) {
    std::vector<std::uint32_t> ids;
    if (!found->is_array()) throw Error(ExitCode::kData, "'ids' isn't an array");
    for (const json& id : *found) {
      if (!id.is_number_unsigned() || id.get<std::uint64_t>() > UINT32_MAX) {
        throw Error(ExitCode::kData, "'ids' holds something that isn't a token id");
      }
      ids.push_back(id.get<std::uint32_t>());
    }
    std::string text = tokenizer.decode(ids.data(), ids.size());
    const std::size_t invalid = first_invalid_utf8(text);
    if (invalid != std::string_view::npos) {
      throw Error(ExitCode::kData, "the ids' bytes aren't UTF-8 at byte " +
                                       std::to_string(invalid) +
                                       ", which JSON can't hold: decode without --jsonl");
    }
    object.erase(found);
    object["text"] = std::move(text);
  } else {
    if (!found->is_string()) throw Error(ExitCode::kData, "'text' isn't a string");
    std::vector<std::uint32_t> ids;
    tokenizer.encode(found->get_ref<const std::string&>(), ids, options.parse_special);
    object.erase(found);
    object["ids"] = ids;
  }
}

void convert_lines(const Tokenizer& tokenizer, const TokenizeOptions& options, std::istream& in,
                   std::ostream& out) {
  std::string line;
  for (std::int64_t number = 1; std::getline(in, line); ++number) {
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    const std::string where = "standard input, line " + std::to_string(number) + ": ";
    try {
      json object = parse_line(line);
      convert(tokenizer, options, object);
      out << object.dump() << '\n';
    } catch (const json::exception& error) {
      throw Error(ExitCode::kData, where + "isn't JSON: " + printable(error.what()));
    } catch (const Error& error) {
      throw Error(error.code(), where + error.what());
    }
  }
}

}  // namespace

void tokenize(const Tokenizer& tokenizer, const TokenizeOptions& options, std::istream& in,
              std::ostream& out) {
  if (options.json_lines) {
    convert_lines(tokenizer, options, in, out);
  } else {
    try {
      if (options.decode) {
        decode_plain(tokenizer, in, out);
      } else {
        encode_plain(tokenizer, options, in, out);
      }
    } catch (const Error& error) {
      throw Error(error.code(), std::string("standard input: ") + error.what());
    }
  }
  if (in.bad()) throw Error(ExitCode::kData, kUnreadable);
  out.flush();
  if (!out) throw Error(ExitCode::kCheckpoint, "standard output can't be written");
}

void add_tokenize_command(CLI::App& app) {
  struct Arguments {
    std::string tokenizer;
    TokenizeOptions options;
  };
  const auto arguments = std::make_shared<Arguments>();
  CLI::App* command =
      app.add_subcommand("tokenize", "Text to token ids and back, standard input to output");
  command
      ->add_option("--tokenizer", arguments->tokenizer,
                   "tokenizer.json, a .tiktoken file, or 'byte'")
      ->required()
      ->type_name("FILE");
  command->add_flag("--decode", arguments->options.decode, "Ids to text");
  command->add_flag("--jsonl", arguments->options.json_lines,
                    "One JSON object a line: 'text' becomes 'ids', the rest stays");
  command->add_flag("--parse-special", arguments->options.parse_special,
                    "Control strings such as <|im_end|> become their ids, not text");
  command->footer(
      "All of the input is one text, its last newline included; the ids come on one line.\n"
      "Example: printf 'Hello' | tessera tokenize --tokenizer \"$(launch/fetch_tokenizer)\"");
  command->callback([arguments] {
    const auto tokenizer = open_tokenizer(arguments->tokenizer);
    struct stat status {};
    if (::fstat(STDIN_FILENO, &status) == 0 && S_ISDIR(status.st_mode)) {
      throw Error(ExitCode::kData, "standard input: is a folder; expected text");
    }
    std::ios::sync_with_stdio(false);
    try {
      tokenize(*tokenizer, arguments->options, std::cin, std::cout);
    } catch (const std::ios_base::failure&) {
      throw Error(ExitCode::kData, kUnreadable);
    }
  });
}

}  // namespace tessera
