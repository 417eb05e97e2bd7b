// A recipe, its digests and the mixture that it asks for.
#include "data/recipe.h"

#include "data/stream.h"
#include "tests/fuzz/fuzz.h"

using namespace tessera;  // NOLINT(google-build-using-namespace)

namespace {

void use(const Recipe& recipe) {
  std::vector<std::int64_t> tokens;
  for (const Component& component : recipe.components) tokens.push_back(component.expected_tokens);
  const Mixture mixture = make_mixture(recipe, tokens);
  for (const std::int64_t sample : {std::int64_t{0}, recipe.samples() / 2, recipe.samples() - 1}) {
    const Location place = mixture.locate(sample);
    fuzz::require(place.component >= 0 && place.component < mixture.components(), "no component");
    const auto& component = recipe.components[static_cast<std::size_t>(place.component)];
    fuzz::require(component.weight > 0, "a component without weight is drawn");
    fuzz::require(place.window >= 0 && place.window < mixture.windows(place.component),
                  "a window past the component's end");
  }
}

}  // namespace

void fuzz::take(std::string_view input) {
  Recipe recipe;
  const bool taken = fuzz::accepts(
      {ExitCode::kUsage}, [&] { recipe = parse_recipe(std::string(input), "recipe.textproto"); });
  if (!taken) return;
  fuzz::require(recipe_digest(recipe).size() == 64, "there is no digest");
  for (const Component& component : recipe.components) {
    fuzz::require(build_digest(recipe, component).size() == 64, "there is no digest");
  }
  fuzz::accepts({ExitCode::kUsage}, [&] { use(recipe); });
}
