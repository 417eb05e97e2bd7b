#include "data/recipe.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr char kHead[] = "tokenizer: \"byte\" sequence_length: 8 total_tokens: 800\n";

std::string error_of(const std::string& text) {
  const Thrown thrown = thrown_by([&] { parse_recipe(text, "r.textproto"); });
  EXPECT_EQ(thrown.code, ExitCode::kUsage) << text;
  EXPECT_EQ(thrown.message.find('\n'), std::string::npos);
  return thrown.message;
}

std::string with_component(const std::string& fields) {
  return kHead + std::string("component { ") + fields + " }\n";
}

TEST(Weight, IsAnExactDecimal) {
  EXPECT_EQ(parse_weight("0"), 0U);
  EXPECT_EQ(parse_weight("1"), 1000000U);
  EXPECT_EQ(parse_weight("2.5"), 2500000U);
  EXPECT_EQ(parse_weight(".5"), 500000U);
  EXPECT_EQ(parse_weight("0.000001"), 1U);
  EXPECT_EQ(parse_weight("0.999999"), 999999U);
}

TEST(Weight, RefusesEverythingElse) {
  for (const char* bad :
       {"", ".", "-1", "+1", "1e3", "0.1234567", "1000000.000001", "1000001",
        "99999999999999999999999", "1,5", " 1", "1 ", "nan", "0x1", "1.", "1.2.3"}) {
    EXPECT_EQ(thrown_by([&] { parse_weight(bad); }).code, ExitCode::kUsage) << bad;
  }
  EXPECT_EQ(parse_weight("1000000"), 1000000000000U);
  EXPECT_EQ(parse_weight("1000000.000000"), 1000000000000U);
}

TEST(Recipe, ReadsThePapersRecipe) {
  const Recipe recipe = read_recipe(TESSERA_SOURCE_DIR "/launch/configs/aether_recipe.textproto");
  ASSERT_EQ(recipe.components.size(), 8U);
  Weight weights = 0;
  std::int64_t unique = 0;
  for (const Component& component : recipe.components) {
    weights += component.weight;
    if (component.name != "earlier-blend") unique += component.expected_tokens;
  }
  EXPECT_EQ(weights, 18500000U);
  EXPECT_EQ(unique, 42149000000);
  EXPECT_EQ(recipe.sequence_length, 4096);
  EXPECT_EQ(recipe.end_of_sequence, 151645);
  EXPECT_EQ(recipe.seed, 20260530U);
  EXPECT_EQ(recipe.shard_tokens, std::int64_t{1} << 28);
  EXPECT_FALSE(recipe.fail_on_bad_documents);
  EXPECT_FALSE(recipe.parse_control_strings);
}

TEST(Recipe, ATokenizersPathIsRelativeToTheRecipe) {
  EXPECT_EQ(parse_recipe("tokenizer: \"../t/tokenizer.json\" sequence_length: 1 total_tokens: 1 "
                         "component { name: \"a\" weight: \"1\" }",
                         "/x/recipes/r.textproto")
                .tokenizer,
            "/x/t/tokenizer.json");
}

TEST(Recipe, ErrorsNameFileLineAndField) {
  EXPECT_THAT(
      error_of("tokenizer: \"byte\"\nseqence_length: 8\n"),
      AllOf(StartsWith("r.textproto:2: seqence_length: "), HasSubstr("nearest: sequence_length")));
  EXPECT_THAT(error_of("sequence_length: \"8\""), StartsWith("r.textproto:1:"));
  EXPECT_THAT(error_of("component {"), StartsWith("r.textproto:1:"));
  EXPECT_THAT(error_of("bad_documents: SKP"), AllOf(HasSubstr("SKP"), HasSubstr("nearest: SKIP")));
  EXPECT_THAT(error_of("tokenizer: \"byte\" tokenizer: \"byte\""), HasSubstr("tokenizer"));
  EXPECT_THAT(error_of("tokenizer: \"byte\"\n  sequence_length: 0"),
              AllOf(StartsWith("r.textproto:2: sequence_length:"), HasSubstr("found 0")));
  EXPECT_THAT(error_of(std::string(kHead) + "component {\n  name: \"a\"\n  weight: \"x\" }"),
              AllOf(StartsWith("r.textproto:4: component[0].weight:"), HasSubstr("found \"x\"")));
  EXPECT_THAT(error_of(std::string("total_tokens: 7 ") + "tokenizer: \"byte\" sequence_length: 8"),
              HasSubstr("total_tokens"));
  EXPECT_THAT(error_of(kHead), HasSubstr("component: expected at least one"));
  EXPECT_THAT(error_of(""), HasSubstr("tokenizer"));
}

// Each stream is over the next one: the deepest recipe that is taken, and one more.
TEST(Recipe, HasABoundedNumberOfComponents) {
  std::string text = kHead;
  constexpr int kMost = 10000;
  const auto component = [](int i) {
    return "component { name: \"" + std::to_string(i) +
           "\" weight: \"1\" source { glob: \"a\" } }\n";
  };
  for (int i = 1; i <= kMost; ++i) text += component(i);
  EXPECT_EQ(parse_recipe(text, "r.textproto").components.size(), kMost);
  EXPECT_THAT(error_of(text + component(0)),
              HasSubstr("component: expected at most 10000, found 10001"));
}

TEST(Recipe, RefusesImpossibleComponents) {
  EXPECT_THAT(error_of(with_component("weight: \"1\"")), HasSubstr("component[0].name"));
  EXPECT_THAT(error_of(with_component("name: \"../a\" weight: \"1\"")),
              HasSubstr("component[0].name"));
  EXPECT_THAT(error_of(with_component("name: \".a\" weight: \"1\"")),
              HasSubstr("component[0].name"));
  EXPECT_THAT(error_of(with_component("name: \"a\"")), HasSubstr("component[0].weight"));
  EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"0\"")), HasSubstr("weights sum to 0"));
  EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"1\" held_out_windows: -1")),
              HasSubstr("held_out_windows"));
  EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"1\" tokens: 1099511627776")),
              HasSubstr("tokens"));
  EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"1\" source { }")),
              HasSubstr("component[0].source.glob"));
  for (const char* glob : {"", "/etc/*", "../x", "a/../b", "a//b", "./a", "a/"}) {
    EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"1\" source { glob: \"ok\" glob: \"" +
                                        std::string(glob) + "\" }")),
                HasSubstr("component[0].source.glob[1]"));
  }
  EXPECT_THAT(error_of(with_component("name: \"a\" weight: \"1\" }\ncomponent { name: \"a\"")),
              HasSubstr("component[1].name"));
}

TEST(Recipe, RefusesImpossibleStreams) {
  const auto stream = [](const std::string& fields) {
    return with_component("name: \"a\" weight: \"1\" } component { name: \"s\" weight: \"1\" " +
                          fields);
  };
  EXPECT_THAT(error_of(stream("stream { }")), HasSubstr("component[1].stream.sequence_length"));
  EXPECT_THAT(error_of(stream("stream { sequence_length: 8 total_tokens: 7 }")),
              HasSubstr("component[1].stream.total_tokens"));
  EXPECT_THAT(error_of(stream("stream { sequence_length: 8 total_tokens: 80 }")),
              HasSubstr("component[1].stream.component"));
  EXPECT_THAT(
      error_of(stream("stream { sequence_length: 8 total_tokens: 80 "
                      "component { name: \"b\" weight: \"1\" } }")),
      HasSubstr("component[1].stream.component[0].name: the recipe has no component \"b\""));
  EXPECT_THAT(error_of(stream("stream { sequence_length: 8 total_tokens: 80 "
                              "component { name: \"a\" weight: \"1\" } "
                              "component { name: \"a\" weight: \"1\" } }")),
              HasSubstr("twice"));
  EXPECT_THAT(error_of(stream("stream { sequence_length: 8 total_tokens: 80 "
                              "component { name: \"a\" weight: \"0\" } }")),
              HasSubstr("component[1].stream.component[0]: the weights sum to 0"));
  EXPECT_THAT(error_of(stream("source { glob: \"x\" } stream { sequence_length: 8 total_tokens: 80 "
                              "component { name: \"a\" weight: \"1\" } }")),
              HasSubstr("not both"));
}

TEST(Recipe, RefusesCycles) {
  const auto one = [](const std::string& name, const std::string& over) {
    return "component { name: \"" + name + "\" weight: \"1\" stream { sequence_length: 8 " +
           "total_tokens: 80 component { name: \"" + over + "\" weight: \"1\" } } }\n";
  };
  EXPECT_THAT(error_of(kHead + one("s", "s")), HasSubstr("contains itself"));
  EXPECT_THAT(error_of(kHead + one("s", "t") + one("t", "u") + one("u", "s")),
              HasSubstr("contains itself"));
  // The same component on two ways is no cycle.
  const std::string diamond =
      kHead + one("s", "u") + one("t", "u") + "component { name: \"u\" weight: \"0\" }";
  EXPECT_EQ(parse_recipe(diamond, "r").components.size(), 3U);
}

// Reading recurses through streams of streams: the stack must not end before the recipe does.
TEST(Recipe, StreamsLieInOneAnotherToABoundOnly) {
  const auto chain = [](int streams, bool backwards) {
    std::string text = kHead;
    for (int i = 0; i < streams; ++i) {
      const int n = backwards ? streams - 1 - i : i;
      text += "component { name: \"s" + std::to_string(n) +
              "\" weight: \"1\" stream { sequence_length: 8 total_tokens: 80 component { name: "
              "\"s" +
              std::to_string(n + 1) + "\" weight: \"1\" } } }\n";
    }
    return text + "component { name: \"s" + std::to_string(streams) + "\" weight: \"1\" }\n";
  };
  for (const bool backwards : {false, true}) {
    EXPECT_EQ(parse_recipe(chain(99, backwards), "r").components.size(), 100U);
    EXPECT_THAT(error_of(chain(100, backwards)), HasSubstr("more than 100"));
    EXPECT_THAT(error_of(chain(9000, backwards)), HasSubstr("more than 100"));
  }
}

// Values of any length and kind stay on one line that can be read.
TEST(Recipe, ErrorsQuoteStrangeValuesSafely) {
  for (const std::string& value : {std::string("\\n\\033[31m"), std::string(65000, '9')}) {
    for (const char* field : {"name: ", "name: \"a\" weight: "}) {
      EXPECT_LT(error_of(with_component(std::string(field) + "\"" + value + "\"")).size(), 400U);
    }
  }
  EXPECT_LT(error_of(std::string(65000, 'x') + ": 1").size(), 1000U);
}

TEST(Recipe, AMissingFileIsAnError) {
  const Thrown thrown = thrown_by([] { read_recipe("/nowhere/r.textproto"); });
  EXPECT_EQ(thrown.code, ExitCode::kUsage);
  EXPECT_THAT(thrown.message, StartsWith("/nowhere/r.textproto: "));
  EXPECT_EQ(thrown_by([] { read_recipe("/tmp"); }).code, ExitCode::kUsage);
}

TEST(RecipeDigest, CoversWhatShapesStreamAndShards) {
  const std::string base =
      "name: \"n\" tokenizer: \"byte\" sequence_length: 8 total_tokens: 800 seed: 1\n"
      "component { name: \"a\" weight: \"1\" tokens: 5 source { glob: \"x\" } licence: \"l\" }\n"
      "component { name: \"s\" weight: \"1\" stream { sequence_length: 8 total_tokens: 80 seed: 2 "
      "component { name: \"a\" weight: \"1\" } } }\n";
  const std::string digest = recipe_digest(parse_recipe(base, "r"));
  EXPECT_EQ(digest.size(), 64U);
  const auto changed = [&](const std::string& from, const std::string& to) {
    std::string text = base;
    const std::size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    text.replace(at, from.size(), to);
    return recipe_digest(parse_recipe(text, "elsewhere/r")) != digest;
  };
  EXPECT_TRUE(
      changed("sequence_length: 8 total_tokens: 800", "sequence_length: 9 total_tokens: 800"));
  EXPECT_TRUE(changed("seed: 1", "seed: 3"));
  EXPECT_TRUE(changed("weight: \"1\"", "weight: \"1.5\""));
  EXPECT_TRUE(changed("glob: \"x\"", "glob: \"y\""));
  EXPECT_TRUE(changed("glob: \"x\"", "glob: \"x\" text_field: \"t\""));
  EXPECT_TRUE(changed("tokens: 5", "held_out_windows: 1"));
  EXPECT_TRUE(changed("name: \"s\"", "name: \"t\""));
  EXPECT_TRUE(changed("total_tokens: 80 seed: 2", "total_tokens: 88 seed: 2"));
  EXPECT_TRUE(changed("seed: 2", "seed: 1"));
  EXPECT_TRUE(changed("seed: 1", "seed: 1 shard_tokens: 100"));
  EXPECT_TRUE(changed("seed: 1", "seed: 1 parse_control_strings: true"));
  EXPECT_TRUE(changed("seed: 1", "seed: 1 end_of_sequence: 7"));
  EXPECT_TRUE(changed("seed: 1", "seed: 1 vocabulary_limit: 256"));
  EXPECT_TRUE(changed("seed: 1", "seed: 1 bad_documents: FAIL"));

  EXPECT_FALSE(changed("name: \"n\"", "name: \"m\""));
  EXPECT_FALSE(changed("total_tokens: 800", "total_tokens: 900"));
  EXPECT_FALSE(changed("tokens: 5", "tokens: 6"));
  EXPECT_FALSE(changed("licence: \"l\"", "licence: \"k\""));
  EXPECT_FALSE(changed("weight: \"1\"", "weight: \"1.0\""));
  EXPECT_FALSE(changed("tokenizer: \"byte\"", "tokenizer: \"some/where\""));
}

}  // namespace
}  // namespace tessera
