// Documents to shards and a manifest, one folder a component (docs/data.md).
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "data/recipe.h"
#include "data/shards.h"
#include "data/tokenizer.h"

namespace tessera {

struct BuildOptions {
  std::string sources;  // the folder that the recipe's globs start from
  std::string out;      // the folder that components are written to
  int threads = 1;      // that tokenize; the result doesn't depend on it
  // This process builds the components whose number among those with sources is `rank` modulo
  // `ranks`. Processes don't talk to one another.
  int rank = 0;
  int ranks = 1;
  // Told a line about the tokenizer, for each bad record (the first of a component's), now and then
  // how far it is, and one for each component; may be empty. Called on the thread of build().
  std::function<void(const std::string& line)> report;
};

struct BuiltComponent {
  std::string name;
  bool kept = false;  // it was complete and of the same sources already
  std::int64_t documents = 0;
  std::int64_t empty_documents = 0;
  std::int64_t bad_documents = 0;
  std::int64_t tokens = 0;
  std::int64_t shards = 0;
};

// Where a component's bad records are listed, one line each, when there are any.
constexpr char kBadDocumentsName[] = "bad_documents.txt";

// Opens the recipe's tokenizer; where its file is missing and the recipe tells its digest, the file
// that the environment's TESSERA_TOKENIZER names. Throws Error(kData) when there is neither, or
// when the digest (of the whole vocabulary, before a vocabulary_limit) is another.
std::unique_ptr<Tokenizer> open_recipe_tokenizer(const Recipe& recipe);

// Before any rank builds: throws Error(kUsage) where the build would write among its own sources,
// and Error(kCheckpoint) where it would replace what it didn't make.
void check_output(const Recipe& recipe, const BuildOptions& options);

// Builds this rank's components, in a folder that check_output found nothing against. The same
// sources, recipe and tokenizer give the same bytes whatever the threads and ranks, and after any
// interruption. A component whose manifest matches is kept; anything else of it is built anew.
// Memory is bounded by the longest document. Throws Error(kData) for sources, a bad record under
// FAIL, or no end of sequence; Error(kCheckpoint) when `out` can't be written.
std::vector<BuiltComponent> build(const Recipe& recipe, const Tokenizer& tokenizer,
                                  const BuildOptions& options);

}  // namespace tessera
