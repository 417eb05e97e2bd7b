// A component's manifest, and the corpus that it would open.
#include "data/shards.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

void fuzz::take(std::string_view input) {
  fuzz::write_file(kManifestName, input);
  Manifest manifest;
  const bool taken = fuzz::accepts({ExitCode::kData}, [&] { manifest = read_manifest("."); });
  if (!taken) return;
  std::int64_t tokens = 0;
  for (const ManifestShard& shard : manifest.shard()) {
    fuzz::require(shard.file().find('/') == std::string::npos, "a shard lies in another folder");
    fuzz::require(shard.tokens() > 0 && shard.bytes() == 4 * shard.tokens(), "sizes don't agree");
    tokens += shard.tokens();
  }
  fuzz::require(tokens == manifest.tokens(), "the sum isn't the shards'");
  const auto shards = static_cast<std::size_t>(manifest.shard_size());
  fuzz::require(check_sizes(".", manifest).size() <= shards, "there are more faults than shards");
  fuzz::accepts({ExitCode::kData}, [&] { ShardedTokens(".", make_shard_files()); });
}
