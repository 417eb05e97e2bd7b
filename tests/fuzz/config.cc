// A run's config. The input is the file and, each after a zero, overrides.
#include "launch/config.h"

#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

void fuzz::take(std::string_view input) {
  std::vector<std::string> overrides = fuzz::split(input, '\0');
  fuzz::write_file("config.textproto", overrides[0]);
  overrides.erase(overrides.begin());
  Config config;
  const bool taken = fuzz::accepts({ExitCode::kUsage},
                                   [&] { config = load_config("config.textproto", overrides); });
  if (!taken) return;
  // What a run leaves of its config reads back as the same config.
  const std::string numbers = numerics(config);
  fuzz::write_file("config.textproto", resolved_text(config));
  const Config again = load_config("config.textproto");
  fuzz::require(numerics(again) == numbers, "the resolved text is another config");
  check_resume(numbers, numerics(again), {});
}
