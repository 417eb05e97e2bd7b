// Folders, shards and recipes for the tests of the data room.
#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <string>
#include <vector>

#include "data/recipe.h"
#include "data/sha256.h"
#include "data/shards.h"
#include "data/stream.h"
#include "data/tokenizer.h"
#include "tests/data/temp_folder.h"

namespace tessera {

inline void write_file(const std::string& path, const std::string& bytes) {
  std::filesystem::create_directories(std::filesystem::path(path).parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

inline std::string read_file(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream bytes;
  bytes << in.rdbuf();
  return bytes.str();
}

constexpr std::int64_t kByteEnd = 256;  // end of sequence of the byte tokenizer

// A component on disk with the given tokens, in shards of the given lengths.
inline void write_component(const std::string& root, const std::string& name,
                            const std::vector<std::uint32_t>& tokens,
                            const std::vector<std::int64_t>& shards) {
  std::ostringstream manifest;
  manifest << "component: \"" << name << "\" tokens: " << tokens.size()
           << " vocabulary: 4294967296 end_of_sequence: " << kByteEnd << " tokenizer_digest: \""
           << open_tokenizer("byte")->digest() << "\"\n";
  const std::string bytes(reinterpret_cast<const char*>(tokens.data()), tokens.size() * 4);
  std::int64_t begin = 0;
  for (std::size_t s = 0; s < shards.size(); ++s) {
    const std::string part =
        bytes.substr(static_cast<std::size_t>(begin) * 4, static_cast<std::size_t>(shards[s]) * 4);
    const std::string file = "part-" + std::to_string(s);
    write_file(root + "/" + name + "/" + file, part);
    manifest << "shard { file: \"" << file << "\" tokens: " << shards[s]
             << " bytes: " << part.size() << " sha256: \"" << sha256_hex(part) << "\" }\n";
    begin += shards[s];
  }
  write_file(root + "/" + name + "/" + kManifestName, manifest.str());
}

// first, first + 1, ...
inline std::vector<std::uint32_t> counting(std::int64_t count, std::uint32_t first) {
  std::vector<std::uint32_t> tokens(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    tokens[i] = first + static_cast<std::uint32_t>(i);
  }
  return tokens;
}

inline std::unique_ptr<TokenStream> open_stream(const std::string& recipe_text,
                                                const std::string& root) {
  Recipe recipe = parse_recipe(recipe_text, "recipe.textproto");
  Corpus corpus = open_corpus(recipe, root);
  return std::make_unique<TokenStream>(std::move(recipe), std::move(corpus));
}

// The message and code of the Error that `body` throws; "" and kDone when it throws none.
struct Thrown {
  ExitCode code = ExitCode::kDone;
  std::string message;
};
inline Thrown thrown_by(const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {};
}

inline std::string paper_recipe_text() {
  return read_file(TESSERA_SOURCE_DIR "/launch/configs/aether_recipe.textproto");
}

}  // namespace tessera
