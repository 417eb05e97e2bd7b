// The recipe: components, weights, and what the training stream draws from them. A Recipe is
// validated; recipe.proto documents the fields.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "runtime/error.h"

namespace tessera {

// A copy of the recipe in the folder of the components.
constexpr char kRecipeName[] = "recipe.textproto";

// A decimal weight, exactly: millionths, at most 10^12.
using Weight = std::uint64_t;
// "2", "0.001", ".5"; nothing else, no sign, at most six decimals, at most 10^6. Throws
// Error(kUsage) that says what is wrong with it.
Weight parse_weight(const std::string& text);

struct NestedStream {
  struct Part {
    std::int64_t component = 0;  // index in the recipe
    Weight weight = 0;
  };
  std::vector<Part> parts;
  std::int64_t sequence_length = 0;
  std::int64_t total_tokens = 0;
  std::uint64_t seed = 0;
  // (total div length) * length
  std::int64_t tokens() const { return total_tokens / sequence_length * sequence_length; }
};

struct Component {
  std::string name;
  Weight weight = 0;
  std::int64_t expected_tokens = 0;
  std::int64_t held_out_windows = 0;
  std::vector<std::string> globs;
  std::string text_field;
  std::optional<NestedStream> stream;
  std::string repository;
  std::string configuration;
  std::string licence;
};

struct Recipe {
  std::string name;
  std::string tokenizer;  // "byte", or a path resolved against the recipe's folder
  std::string tokenizer_digest;
  std::int64_t vocabulary_limit = 0;
  std::int64_t end_of_sequence = -1;
  std::int64_t sequence_length = 0;
  std::int64_t total_tokens = 0;
  std::uint64_t seed = 0;
  std::int64_t shard_tokens = 0;
  bool fail_on_bad_documents = false;
  bool parse_control_strings = false;
  std::vector<Component> components;
  std::string text;  // of the file that it was read from

  // total_tokens div sequence_length: where the stream stops.
  std::int64_t samples() const { return total_tokens / sequence_length; }
};

// Throws Error(kUsage) in one line "file:line: field: what is wrong": a syntax error, an
// unknown field (with the nearest valid name), an impossible value, a cycle of streams.
Recipe read_recipe(const std::string& path);
// `path` names the text in errors and resolves the tokenizer's path.
Recipe parse_recipe(const std::string& text, const std::string& path);

// SHA-256, in hex, over everything of the recipe that shapes the stream or the shards, in a
// serialisation of our own (docs/data.md): no paths, no words for people, no expected tokens, and
// not total_tokens, which only says where to stop.
std::string recipe_digest(const Recipe& recipe);
// The same over what shapes one component's shards, the tokenizer's digest excepted.
std::string build_digest(const Recipe& recipe, const Component& component);

}  // namespace tessera
