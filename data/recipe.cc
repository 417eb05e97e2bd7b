#include "data/recipe.h"

#include <algorithm>
#include <filesystem>
#include <map>
#include <set>

#include "data/recipe.pb.h"
#include "data/sha256.h"
#include "data/text_format.h"

namespace tessera {
namespace {

namespace pb = google::protobuf;
using Places = pb::TextFormat::ParseInfoTree;

// Token counts stay below this, so that masses fit into 128 bits.
constexpr std::int64_t kTokensLimit = std::int64_t{1} << 40;
constexpr Weight kMillion = 1000000;

// One message of the recipe, with where its fields stand, to say what is wrong with one.
struct Node {
  const pb::Message& message;
  const Places* places;
  const std::string& file;
  std::string place;  // "file:line" of the message
  std::string path;   // "component[2]." or ""

  // Where a field stands; where it is missing, its message's place.
  std::string place_of(const pb::FieldDescriptor* field, int index) const {
    if (places == nullptr || (field->is_repeated() && index < 0)) return place;
    const auto found = places->GetLocation(field, index);
    if (found.line < 0) return place;
    return file + ":" + std::to_string(found.line + 1);
  }

  [[noreturn]] void fail(const std::string& field, const std::string& what, int index = -1) const {
    const pb::FieldDescriptor* descriptor = message.GetDescriptor()->FindFieldByName(field);
    TESSERA_CHECK(descriptor != nullptr);
    const std::string element = index < 0 ? "" : "[" + std::to_string(index) + "]";
    throw Error(ExitCode::kUsage,
                place_of(descriptor, index) + ": " + path + field + element + ": " + what);
  }

  void require_range(const std::string& field, std::int64_t value, std::int64_t low,
                     std::int64_t high) const {
    if (value >= low && value < high) return;
    fail(field, "expected a number from " + std::to_string(low) + " to " +
                    std::to_string(high - 1) + ", found " + std::to_string(value));
  }

  Weight weight(const std::string& text) const {
    try {
      return parse_weight(text);
    } catch (const Error& error) {
      fail("weight", error.what());
    }
  }

  Node nested(const std::string& field, const pb::Message& child, int index = -1) const {
    const pb::FieldDescriptor* descriptor = message.GetDescriptor()->FindFieldByName(field);
    const std::string element = index < 0 ? "" : "[" + std::to_string(index) + "]";
    return Node{child, places == nullptr ? nullptr : places->GetTreeForNested(descriptor, index),
                file, place_of(descriptor, index), path + field + element + "."};
  }
};

bool is_name(const std::string& name) {
  if (name.empty() || name.size() > 200 || name[0] == '.') return false;
  for (const char c : name) {
    const bool ok = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
                    c == '.' || c == '_' || c == '-';
    if (!ok) return false;
  }
  return true;
}

void check_glob(const Node& node, int index, const std::string& glob) {
  if (glob.empty() || glob[0] == '/') {
    node.fail("glob", "expected a pattern relative to the sources' folder", index);
  }
  std::size_t begin = 0;
  while (begin <= glob.size()) {
    const std::size_t end = std::min(glob.find('/', begin), glob.size());
    const std::string part = glob.substr(begin, end - begin);
    if (part == ".." || part == "." || part.empty()) {
      node.fail("glob", "expected no empty part, '.' or '..' in \"" + printable(glob) + "\"",
                index);
    }
    begin = end + 1;
  }
}

NestedStream read_stream(const Node& node, const StreamConfig& config,
                         const std::map<std::string, std::int64_t>& names) {
  NestedStream stream;
  node.require_range("sequence_length", config.sequence_length(), 1, kTokensLimit);
  node.require_range("total_tokens", config.total_tokens(), config.sequence_length(), kTokensLimit);
  stream.sequence_length = config.sequence_length();
  stream.total_tokens = config.total_tokens();
  stream.seed = config.seed();
  if (config.component().empty()) node.fail("component", "expected at least one");
  std::set<std::int64_t> seen;
  for (int i = 0; i < config.component_size(); ++i) {
    const StreamPartConfig& part = config.component(i);
    const Node part_node = node.nested("component", part, i);
    const auto found = names.find(part.name());
    if (found == names.end()) {
      part_node.fail("name", "the recipe has no component \"" + printable(part.name()) + "\"");
    }
    if (!seen.insert(found->second).second) {
      part_node.fail("name", "\"" + part.name() + "\" stands in this stream twice");
    }
    stream.parts.push_back({found->second, part_node.weight(part.weight())});
  }
  if (std::all_of(stream.parts.begin(), stream.parts.end(),
                  [](const NestedStream::Part& part) { return part.weight == 0; })) {
    node.fail("component", "the weights sum to 0", 0);
  }
  return stream;
}

Component read_component(const Node& node, const ComponentConfig& config,
                         const std::map<std::string, std::int64_t>& names) {
  Component component;
  component.name = config.name();
  component.weight = node.weight(config.weight());
  node.require_range("tokens", config.tokens(), 0, kTokensLimit);
  component.expected_tokens = config.tokens();
  node.require_range("held_out_windows", config.held_out_windows(), 0, kTokensLimit);
  component.held_out_windows = config.held_out_windows();
  component.repository = config.repository();
  component.configuration = config.configuration();
  component.licence = config.licence();
  component.text_field = config.source().text_field();
  if (config.has_source() && config.has_stream()) {
    node.fail("stream", "expected a source or a stream, not both");
  }
  if (config.has_source()) {
    const Node source = node.nested("source", config.source());
    if (config.source().glob().empty()) source.fail("glob", "expected at least one");
    for (int i = 0; i < config.source().glob_size(); ++i) {
      check_glob(source, i, config.source().glob(i));
      component.globs.push_back(config.source().glob(i));
    }
    if (component.text_field.empty()) source.fail("text_field", "expected a key");
  }
  if (config.has_stream()) {
    component.stream = read_stream(node.nested("stream", config.stream()), config.stream(), names);
  }
  return component;
}

// Reading a stream recurses through those that it is made of.
constexpr int kDeepestStream = 100;
constexpr int kBeingVisited = -1;

// Depth-first over the streams: how many lie below one another, itself included. `depths` keeps
// what is known, 0 where nothing is yet.
int check_depth(const Recipe& recipe, std::int64_t component, std::vector<int>& depths, int above,
                const Node& root) {
  const auto index = static_cast<std::size_t>(component);
  const std::string too_deep =
      "is one of more than " + std::to_string(kDeepestStream) + " that lie in one another";
  const auto refuse = [&](const std::string& what) {
    root.fail("component", "the stream \"" + recipe.components[index].name + "\" " + what,
              static_cast<int>(component));
  };
  if (depths[index] == kBeingVisited) refuse("contains itself");
  if (depths[index] == 0) {
    if (above == kDeepestStream) refuse(too_deep);
    depths[index] = kBeingVisited;
    int deepest = 0;
    if (recipe.components[index].stream) {
      for (const auto& part : recipe.components[index].stream->parts) {
        deepest = std::max(deepest, check_depth(recipe, part.component, depths, above + 1, root));
      }
    }
    depths[index] = deepest + 1;
  }
  if (depths[index] > kDeepestStream) {
    refuse(too_deep);
  }
  return depths[index];
}

bool is_digest(const std::string& text) {
  return text.size() == 64 && text.find_first_not_of("0123456789abcdef") == std::string::npos;
}

// One field of a digest's serialisation: strings carry their length, so that nothing in them can
// imitate a field.
class Serialisation {
 public:
  explicit Serialisation(const std::string& title) : text_(title + "\n") {}
  void add(const std::string& field, const std::string& value) {
    text_ += field + " " + std::to_string(value.size()) + ":" + value + "\n";
  }
  void add(const std::string& field, std::int64_t value) {
    text_ += field + " " + std::to_string(value) + "\n";
  }
  void add_unsigned(const std::string& field, std::uint64_t value) {
    text_ += field + " " + std::to_string(value) + "\n";
  }
  std::string digest() const { return sha256_hex(text_); }

 private:
  std::string text_;
};

void add_build_options(Serialisation& out, const Recipe& recipe) {
  out.add("tokenizer_digest", recipe.tokenizer_digest);
  out.add("vocabulary_limit", recipe.vocabulary_limit);
  out.add("end_of_sequence", recipe.end_of_sequence);
  out.add("shard_tokens", recipe.shard_tokens);
  out.add("fail_on_bad_documents", std::int64_t{recipe.fail_on_bad_documents});
  out.add("parse_control_strings", std::int64_t{recipe.parse_control_strings});
}

void add_source(Serialisation& out, const Component& component) {
  out.add("component", component.name);
  for (const std::string& glob : component.globs) out.add("glob", glob);
  out.add("text_field", component.text_field);
}

}  // namespace

Weight parse_weight(const std::string& text) {
  const std::string expected =
      "expected a decimal of at most six decimals from \"0\" to \"1000000\", found \"" +
      printable(text) + "\"";
  const std::size_t point = std::min(text.find('.'), text.size());
  const std::string whole = text.substr(0, point);
  const std::string fraction = point < text.size() ? text.substr(point + 1) : "";
  const auto digits = [](const std::string& s) {
    return s.find_first_not_of("0123456789") == std::string::npos;
  };
  if (whole.size() + fraction.size() == 0 || !digits(whole) || !digits(fraction) ||
      fraction.size() > 6 || (point < text.size() && fraction.empty())) {
    throw Error(ExitCode::kUsage, expected);
  }
  Weight weight = 0;
  for (const char c : whole) {
    weight = weight * 10 + static_cast<Weight>(c - '0');
    if (weight > kMillion) throw Error(ExitCode::kUsage, expected);
  }
  for (std::size_t i = 0; i < 6; ++i) {
    weight = weight * 10 + (i < fraction.size() ? static_cast<Weight>(fraction[i] - '0') : 0);
  }
  if (weight > kMillion * kMillion) throw Error(ExitCode::kUsage, expected);
  return weight;
}

Recipe parse_recipe(const std::string& text, const std::string& path) {
  RecipeConfig config;
  Places places;
  parse_text_format(text, path, ExitCode::kUsage, &config, &places);
  const Node root{config, &places, path, path, ""};

  Recipe recipe;
  recipe.text = text;
  recipe.name = config.name();
  if (config.tokenizer().empty()) root.fail("tokenizer", "expected \"byte\" or a file");
  recipe.tokenizer = config.tokenizer();
  if (recipe.tokenizer != "byte") {
    recipe.tokenizer =
        (std::filesystem::path(path).parent_path() / recipe.tokenizer).lexically_normal().string();
  }
  recipe.tokenizer_digest = config.tokenizer_digest();
  if (!recipe.tokenizer_digest.empty() && !is_digest(recipe.tokenizer_digest)) {
    root.fail("tokenizer_digest", "expected 64 lowercase hex digits");
  }
  constexpr std::int64_t kIds = std::int64_t{1} << 32;
  root.require_range("vocabulary_limit", config.vocabulary_limit(), 0, kIds);
  recipe.vocabulary_limit = config.vocabulary_limit();
  root.require_range("end_of_sequence", config.end_of_sequence(), -1, kIds);
  recipe.end_of_sequence = config.end_of_sequence();
  root.require_range("sequence_length", config.sequence_length(), 1, std::int64_t{1} << 31);
  recipe.sequence_length = config.sequence_length();
  root.require_range("total_tokens", config.total_tokens(), config.sequence_length(),
                     std::int64_t{1} << 62);
  recipe.total_tokens = config.total_tokens();
  recipe.seed = config.seed();
  root.require_range("shard_tokens", config.shard_tokens(), 1, kTokensLimit);
  recipe.shard_tokens = config.shard_tokens();
  recipe.fail_on_bad_documents = config.bad_documents() == RecipeConfig::FAIL;
  recipe.parse_control_strings = config.parse_control_strings();

  if (config.component().empty()) root.fail("component", "expected at least one");
  constexpr int kMostComponents = 10000;
  if (config.component_size() > kMostComponents) {
    root.fail("component", "expected at most " + std::to_string(kMostComponents) + ", found " +
                               std::to_string(config.component_size()));
  }
  std::map<std::string, std::int64_t> names;
  for (int i = 0; i < config.component_size(); ++i) {
    const std::string& name = config.component(i).name();
    const Node node = root.nested("component", config.component(i), i);
    if (!is_name(name)) {
      node.fail("name",
                "expected letters, digits, '.', '_' and '-', found \"" + printable(name) + "\"");
    }
    if (name == kRecipeName || name == std::string(kRecipeName) + ".partial") {
      node.fail("name", "\"" + name + "\" is a file that data build writes beside the components");
    }
    if (!names.emplace(name, i).second) node.fail("name", "\"" + name + "\" is there twice");
  }
  bool any_weight = false;
  for (int i = 0; i < config.component_size(); ++i) {
    recipe.components.push_back(read_component(root.nested("component", config.component(i), i),
                                               config.component(i), names));
    any_weight = any_weight || recipe.components.back().weight > 0;
  }
  if (!any_weight) root.fail("component", "the weights sum to 0", 0);
  std::vector<int> depths(recipe.components.size(), 0);
  for (std::size_t i = 0; i < recipe.components.size(); ++i) {
    check_depth(recipe, static_cast<std::int64_t>(i), depths, 0, root);
  }
  return recipe;
}

Recipe read_recipe(const std::string& path) {
  constexpr std::int64_t kLargestFile = std::int64_t{1} << 20;
  return parse_recipe(
      read_text_file(path, ExitCode::kUsage, "a recipe in protobuf text format", kLargestFile),
      path);
}

std::string recipe_digest(const Recipe& recipe) {
  Serialisation out("tessera recipe 1");
  out.add("sequence_length", recipe.sequence_length);
  out.add_unsigned("seed", recipe.seed);
  add_build_options(out, recipe);
  for (const Component& component : recipe.components) {
    add_source(out, component);
    out.add_unsigned("weight", component.weight);
    out.add("held_out_windows", component.held_out_windows);
    if (!component.stream) continue;
    out.add("stream_sequence_length", component.stream->sequence_length);
    out.add("stream_total_tokens", component.stream->total_tokens);
    out.add_unsigned("stream_seed", component.stream->seed);
    for (const auto& part : component.stream->parts) {
      out.add("stream_component", part.component);
      out.add_unsigned("stream_weight", part.weight);
    }
  }
  return out.digest();
}

std::string build_digest(const Recipe& recipe, const Component& component) {
  Serialisation out("tessera build 1");
  add_build_options(out, recipe);
  add_source(out, component);
  return out.digest();
}

}  // namespace tessera
