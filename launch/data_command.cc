#include "launch/data_command.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>
#include <vector>

#include "data/build.h"
#include "data/stream.h"
#include "launch/config.h"
#include "launch/together.h"
#include "parallel/communicator.h"
#include "runtime/disk_error.h"

namespace tessera {
namespace {

using Json = nlohmann::ordered_json;

// All options of all `data` commands; each command uses its own.
struct DataOptions {
  std::string recipe;
  std::string sources;
  std::string out;
  std::string data;
  int threads = static_cast<int>(std::max(1U, std::thread::hardware_concurrency()));
  std::int64_t from = 0;
  std::int64_t to = 0;
  std::int64_t sample = 0;
  bool digest = false;
  bool merkle = false;
  bool json = false;
};

void build_command(const DataOptions& options) {
  MpiSession session(nullptr, nullptr);
  Communicator communicator(MPI_COMM_WORLD);
  BuildOptions build_options;
  build_options.threads = options.threads;
  build_options.rank = communicator.rank();
  build_options.ranks = communicator.size();
  build_options.report = [](const std::string& line) { std::cout << line << std::endl; };

  // Ranks may start in different folders: rank 0 reads the recipe and resolves the paths.
  std::string recipe_path;
  Recipe recipe;
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    together(communicator, "read the recipe", [&] {
      if (communicator.rank() != 0) return;
      recipe_path = absolute_path(options.recipe);
      build_options.sources = absolute_path(options.sources);
      build_options.out = absolute_path(options.out);
      recipe = read_recipe(recipe_path);
    });
    std::string text = recipe.text;
    for (std::string* shared : {&recipe_path, &build_options.sources, &build_options.out, &text}) {
      communicator.broadcast("data build", *shared, 0);
    }
    recipe = parse_recipe(text, recipe_path);
    together(communicator, "open the tokenizer",
             [&] { tokenizer = open_recipe_tokenizer(recipe); });
    together(communicator, "look at the output's folder", [&] {
      if (communicator.rank() == 0) check_output(recipe, build_options);
    });
  } catch (const AgreedError&) {
    if (communicator.rank() == 0) throw;
    return;
  }
  try {
    build(recipe, *tokenizer, build_options);
  } catch (const Error& error) {
    if (communicator.size() == 1) throw;
    // The others may be hours from their end: what is finished is kept by the next start.
    std::cerr << "tessera: rank " << communicator.rank() << " on " << communicator.host() << ": "
              << error.what() << std::endl;
    MpiSession::abort(error.code());
  }
  // Who hasn't said this is the one that the others wait for.
  if (communicator.size() > 1) {
    std::cout << "rank " << communicator.rank() << " on " << communicator.host()
              << ": its components are done" << std::endl;
  }
  communicator.barrier("data build");
}

void verify_command(const DataOptions& options) {
  const std::vector<std::string> faults = verify_corpus(options.data, options.threads);
  for (const std::string& fault : faults) std::cerr << one_line(fault) << '\n';
  if (!faults.empty()) {
    throw Error(ExitCode::kData, options.data + ": " + std::to_string(faults.size()) +
                                     (faults.size() == 1 ? " fault" : " faults") +
                                     "; delete the files named and run `tessera data build` again");
  }
  std::cout << options.data << ": every size and digest is right\n";
}

TokenStream open_stream(const std::string& recipe_path, const std::string& data) {
  Recipe recipe = read_recipe(recipe_path);
  Corpus corpus = open_corpus(recipe, data);
  try {
    return TokenStream(std::move(recipe), std::move(corpus));
  } catch (const Error& error) {
    throw Error(error.code(), recipe_path + ": " + error.what());
  }
}

Json facts_of(const Manifest& manifest) {
  std::int64_t bytes = 0;
  for (const ManifestShard& shard : manifest.shard()) bytes += shard.bytes();
  return Json{{"documents", manifest.documents()},
              {"empty_documents", manifest.empty_documents()},
              {"bad_documents", manifest.bad_documents()},
              {"shards", manifest.shard_size()},
              {"bytes", bytes}};
}

// What the folder's own copy of the recipe makes of the components.
Json inspect_mixture(const std::string& folder) {
  const TokenStream stream = open_stream(folder + "/" + kRecipeName, folder);
  const Recipe& recipe = stream.recipe();
  Json components = Json::array();
  std::int64_t tokens = 0;
  for (std::int64_t c = 0; c < stream.components(); ++c) {
    const auto index = static_cast<std::size_t>(c);
    const std::int64_t windows = stream.mixture().windows(c);
    const double share = stream.mixture().share(c);
    Json component{{"component", c},
                   {"name", stream.component_name(c)},
                   {"tokens", stream.component_tokens(c)},
                   {"expected_tokens", recipe.components[index].expected_tokens},
                   {"weight", static_cast<double>(recipe.components[index].weight) / 1e6},
                   {"share", share},
                   {"windows", windows},
                   {"held_out_windows", stream.held_out_windows(c)},
                   {"epochs", windows == 0 ? 0.0
                                           : share * static_cast<double>(stream.samples()) /
                                                 static_cast<double>(windows)}};
    if (const auto& opened = stream.corpus().components[index]) {
      component.update(facts_of(opened->manifest()));
      tokens += opened->tokens();
    } else {
      component["stream"] = true;
    }
    components.push_back(std::move(component));
  }
  return Json{{"recipe", recipe.name},
              {"recipe_digest", recipe_digest(recipe)},
              {"tokenizer_digest", stream.corpus().tokenizer_digest},
              {"vocabulary", stream.corpus().vocabulary},
              {"end_of_sequence", stream.corpus().end_of_sequence},
              {"tokens", tokens},
              {"sequence_length", recipe.sequence_length},
              {"total_tokens", recipe.total_tokens},
              {"samples", recipe.samples()},
              {"components", std::move(components)}};
}

// Without a recipe: what the manifests tell.
Json inspect_manifests(const std::string& folder) {
  const std::vector<std::string> names = components_below(folder);
  if (names.empty()) throw Error(ExitCode::kData, folder + ": no component lies here");
  Json components = Json::array();
  std::int64_t tokens = 0;
  for (const std::string& name : names) {
    const ShardedTokens opened(folder + "/" + name, make_shard_files());
    Json component{{"name", name}, {"tokens", opened.tokens()}};
    component.update(facts_of(opened.manifest()));
    tokens += opened.tokens();
    components.push_back(std::move(component));
  }
  return Json{{"tokens", tokens}, {"components", std::move(components)}};
}

void print_inspection(const Json& found) {
  const bool mixture = found.contains("recipe");
  if (mixture) {
    std::printf("recipe %s: %lld samples of %lld tokens, end of sequence %lld\n",
                found["recipe"].get<std::string>().c_str(), found["samples"].get<long long>(),
                found["sequence_length"].get<long long>(),
                found["end_of_sequence"].get<long long>());
  }
  std::printf("%-28s %16s %12s %7s %7s", "component", "tokens", "documents", "bad", "shards");
  if (mixture) std::printf(" %9s %8s %9s %9s", "weight", "share", "epochs", "held out");
  std::printf("\n");
  for (const Json& component : found["components"]) {
    std::printf("%-28s %16lld", component["name"].get<std::string>().c_str(),
                component["tokens"].get<long long>());
    if (component.contains("stream")) {
      std::printf(" %12s %7s %7s", "stream", "-", "-");
    } else {
      std::printf(" %12lld %7lld %7lld", component["documents"].get<long long>(),
                  component["bad_documents"].get<long long>(),
                  component["shards"].get<long long>());
    }
    if (mixture) {
      std::printf(" %9g %7.3f%% %9.3f %9lld", component["weight"].get<double>(),
                  100.0 * component["share"].get<double>(), component["epochs"].get<double>(),
                  component["held_out_windows"].get<long long>());
    }
    std::printf("\n");
  }
  std::printf("%-28s %16lld\n", "on disk", found["tokens"].get<long long>());
}

void inspect_command(const DataOptions& options) {
  std::error_code none;
  const bool mixture = std::filesystem::exists(options.data + "/" + kRecipeName, none);
  const Json found = mixture ? inspect_mixture(options.data) : inspect_manifests(options.data);
  if (options.json) {
    std::cout << found.dump(2) << '\n';
  } else {
    print_inspection(found);
  }
}

void stream_command(const DataOptions& options) {
  const TokenStream stream = open_stream(options.recipe, options.data);
  if (options.digest) {
    std::cout << stream_digest(stream, options.from, options.to) << '\n';
    return;
  }
  if (options.merkle) {
    std::cout << merkle_root(merkle_leaves(stream, options.from, options.to, options.threads))
              << '\n';
    return;
  }
  if (options.from < 0 || options.from > options.to) {
    throw Error(ExitCode::kUsage, "data stream: expected 0 <= --from <= --to");
  }
  std::vector<std::uint32_t> window(static_cast<std::size_t>(stream.sequence_length() + 1));
  for (std::int64_t sample = options.from; sample < options.to; ++sample) {
    stream.read(sample, window.data());
    if (std::fwrite(window.data(), sizeof(std::uint32_t), window.size(), stdout) != window.size()) {
      break;
    }
  }
  if (std::fflush(stdout) != 0 || std::ferror(stdout) != 0) {
    throw Error(ExitCode::kCheckpoint, "standard output can't be written: " + disk_reason(errno));
  }
}

void locate_command(const DataOptions& options) {
  Json found;
  if (options.data.empty()) {
    const Recipe recipe = read_recipe(options.recipe);
    std::vector<std::int64_t> tokens;
    for (const Component& component : recipe.components) {
      tokens.push_back(component.expected_tokens);
    }
    const Location place = make_mixture(recipe, tokens).locate(options.sample);
    found =
        Json{{"sample", options.sample},
             {"component", place.component},
             {"component_name", recipe.components[static_cast<std::size_t>(place.component)].name},
             {"epoch", place.epoch},
             {"window", place.window}};
  } else {
    const TokenStream stream = open_stream(options.recipe, options.data);
    const Location place = stream.locate(options.sample);
    found = Json{{"sample", options.sample},
                 {"component", place.component},
                 {"component_name", stream.component_name(place.component)},
                 {"epoch", place.epoch},
                 {"window", place.window}};
    // A stream's windows lie nowhere on disk.
    if (const auto& opened =
            stream.corpus().components[static_cast<std::size_t>(place.component)]) {
      const auto shard = opened->place(place.window * stream.sequence_length());
      found["shard"] = shard.file;
      found["byte_offset"] = shard.byte_offset;
    }
  }
  if (options.json) {
    std::cout << found.dump(2) << '\n';
    return;
  }
  for (const auto& [key, value] : found.items()) {
    std::printf("%-15s %s\n", key.c_str(),
                value.is_string() ? value.get<std::string>().c_str() : value.dump().c_str());
  }
}

void add_threads(CLI::App* command, DataOptions& options) {
  command->add_option("--threads", options.threads, "Threads to work on; default: one a core")
      ->check(CLI::Range(1, 1024));
}

}  // namespace

void add_data_command(CLI::App& app) {
  CLI::App* data = app.add_subcommand("data", "Documents, token shards, and the training stream");
  data->require_subcommand(1);
  data->footer("Example: tessera data build --recipe R.textproto --sources text --out shards");
  const auto options = std::make_shared<DataOptions>();

  CLI::App* build = data->add_subcommand("build", "Documents to token shards and manifests");
  build->add_option("--recipe", options->recipe, "The recipe's file")->required();
  build->add_option("--sources", options->sources, "Folder that the recipe's globs start from")
      ->required();
  build->add_option("--out", options->out, "Folder for the components")->required();
  add_threads(build, *options);
  build->footer(
      "Restarts where it stopped; runs under mpirun too.\n"
      "Example: tessera data build --recipe R.textproto --sources text --out shards");
  build->callback([options] { build_command(*options); });

  CLI::App* verify = data->add_subcommand("verify", "Check every shard's size and SHA-256");
  verify->add_option("D", options->data, "Folder of the components")->required();
  add_threads(verify, *options);
  verify->footer("Example: tessera data verify shards");
  verify->callback([options] { verify_command(*options); });

  CLI::App* inspect = data->add_subcommand("inspect", "Components, tokens, mixture, epochs");
  inspect->add_option("D", options->data, "Folder of the components")->required();
  inspect->add_flag("--json", options->json, "One JSON object instead of the table");
  inspect->footer("Example: tessera data inspect shards --json");
  inspect->callback([options] { inspect_command(*options); });

  CLI::App* stream = data->add_subcommand("stream", "The bytes of samples A..B-1, or their digest");
  stream->add_option("--recipe", options->recipe, "The recipe's file")->required();
  stream->add_option("--data", options->data, "Folder of the components")->required();
  stream->add_option("--from", options->from, "First sample, A")->required();
  stream->add_option("--to", options->to, "One past the last sample, B")->required();
  CLI::Option* digest = stream->add_flag("--digest", options->digest, "SHA-256 of the bytes");
  stream->add_flag("--merkle", options->merkle, "Digest of digests, composes over ranges")
      ->excludes(digest);
  add_threads(stream, *options);
  stream->footer(
      "Example: tessera data stream --recipe R.textproto --data shards --from 0 --to 64 --digest");
  stream->callback([options] { stream_command(*options); });

  CLI::App* locate = data->add_subcommand("locate", "Where a sample comes from");
  locate->add_option("--recipe", options->recipe, "The recipe's file")->required();
  locate->add_option("--data", options->data,
                     "Folder of the components; default: the recipe's expected token counts");
  locate->add_option("--sample", options->sample, "The sample's number")->required();
  locate->add_flag("--json", options->json, "One JSON object instead of the table");
  locate->footer("Example: tessera data locate --recipe R.textproto --sample 1000000 --json");
  locate->callback([options] { locate_command(*options); });
}

}  // namespace tessera
