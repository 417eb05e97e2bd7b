#include "data/stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>

#include "tests/data/data_fixture.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Wide = unsigned __int128;

std::vector<Mixture::Part> parts(const std::vector<std::int64_t>& tokens,
                                 const std::vector<std::string>& weights) {
  std::vector<Mixture::Part> made;
  for (std::size_t c = 0; c < tokens.size(); ++c) {
    made.push_back({"c" + std::to_string(c), tokens[c], parse_weight(weights[c]), 0});
  }
  return made;
}

TEST(Stream, Mix64Vector) { EXPECT_EQ(mix64(1), 0x5692161d100b05e5ULL); }

TEST(Stream, DeriveVector) { EXPECT_EQ(derive(7, {1, 0}), 0x7010c70c013e27ecULL); }

TEST(Stream, PermuteVectors) {
  std::vector<std::uint64_t> image;
  for (std::uint64_t x = 0; x < 10; ++x) image.push_back(permute(x, 10, derive(7, {1, 0})));
  EXPECT_THAT(image, ElementsAre(8, 2, 5, 0, 1, 9, 7, 4, 3, 6));
  EXPECT_EQ(permute(0, 1000003, 12345), 255326U);
  EXPECT_EQ(permute(1, 1000003, 12345), 232758U);
  EXPECT_EQ(permute(999999, 1000003, 12345), 761380U);
}

TEST(Stream, PermuteIsABijection) {
  std::mt19937_64 random(3);
  for (const std::uint64_t n : {0, 1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 1000, 4097, 70000}) {
    const std::uint64_t key = random();
    std::vector<bool> hit(n, false);
    for (std::uint64_t x = 0; x < n; ++x) {
      const std::uint64_t y = permute(x, n, key);
      ASSERT_LT(y, n);
      ASSERT_FALSE(hit[y]) << "n " << n << ", x " << x;
      hit[y] = true;
    }
  }
  EXPECT_EQ(permute(0, 0, 1), 0U);
}

TEST(Stream, PermuteStaysInARangeOf63Bits) {
  const std::uint64_t n = (std::uint64_t{1} << 63) - 25;
  std::set<std::uint64_t> images;
  for (std::uint64_t x = 0; x < 1000; ++x) images.insert(permute(n - 1 - x, n, 5));
  EXPECT_EQ(images.size(), 1000U);
  EXPECT_LT(*images.rbegin(), n);
}

TEST(Stream, SmallMixtureVector) {
  const Mixture mixture(parts({10000, 7001, 513, 90000}, {"1", "2.5", "4", "0.5"}), 16, 7, 0);
  EXPECT_EQ(mixture.block(), 1024);
  // q = 20000 35005 4104 90000
  EXPECT_DOUBLE_EQ(mixture.share(0), 20000.0 / 149109.0);
  EXPECT_DOUBLE_EQ(mixture.share(1), 35005.0 / 149109.0);
  EXPECT_DOUBLE_EQ(mixture.share(2), 4104.0 / 149109.0);
  EXPECT_DOUBLE_EQ(mixture.share(3), 90000.0 / 149109.0);
  EXPECT_EQ(mixture.locate(0), (Location{3, 0, 126}));
  EXPECT_EQ(mixture.locate(1), (Location{0, 0, 189}));
  EXPECT_EQ(mixture.locate(2), (Location{3, 0, 1504}));
  EXPECT_EQ(mixture.locate(3), (Location{3, 0, 390}));
  EXPECT_EQ(mixture.locate(4095), (Location{3, 0, 4338}));
  EXPECT_EQ(mixture.locate(7498), (Location{2, 6, 28}));
  EXPECT_EQ(mixture.locate(7499), (Location{0, 1, 290}));
  EXPECT_EQ(mixture.locate(1000000), (Location{3, 107, 1273}));
}

TEST(Stream, PaperRecipeVector) {
  const Recipe recipe = parse_recipe(paper_recipe_text(), "aether_recipe.textproto");
  std::vector<std::int64_t> tokens;
  for (const Component& component : recipe.components) tokens.push_back(component.expected_tokens);
  EXPECT_EQ(recipe.samples(), 35205078);
  const Mixture mixture = make_mixture(recipe, tokens);
  EXPECT_EQ(mixture.locate(0), (Location{2, 0, 1001703}));
  EXPECT_EQ(mixture.locate(1), (Location{0, 0, 2579427}));
  EXPECT_EQ(mixture.locate(2), (Location{7, 0, 15885142}));
  EXPECT_EQ(mixture.locate(1023), (Location{7, 0, 5853575}));
  EXPECT_EQ(mixture.locate(1024), (Location{7, 0, 6400661}));
  EXPECT_EQ(mixture.locate(1000000), (Location{0, 0, 2874243}));
  EXPECT_NEAR(mixture.share(7), 0.469, 0.0005);
}

// Counts every component's samples up to each block's end, and holds them against the exact share.
void expect_shares_at_block_ends(const Mixture& mixture, const std::vector<Wide>& masses,
                                 std::int64_t blocks) {
  Wide sum = 0;
  for (const Wide mass : masses) sum += mass;
  std::vector<Wide> count(masses.size(), 0);
  for (std::int64_t b = 0; b < blocks; ++b) {
    for (std::int64_t i = b * mixture.block(); i < (b + 1) * mixture.block(); ++i) {
      ++count[static_cast<std::size_t>(mixture.locate(i).component)];
    }
    const auto position = static_cast<Wide>(b + 1) * static_cast<Wide>(mixture.block());
    for (std::size_t c = 0; c < masses.size(); ++c) {
      // |count - position * mass / sum| < 1, in integers.
      const Wide exact = position * masses[c];
      const Wide found = count[c] * sum;
      ASSERT_LT(exact > found ? exact - found : found - exact, sum) << "block " << b << ", c " << c;
      ASSERT_EQ(count[c], static_cast<Wide>(mixture.drawn_before(static_cast<std::int64_t>(c),
                                                                 (b + 1) * mixture.block())));
    }
  }
}

TEST(Stream, B04_SharesAreExactAtEveryBlockEnd) {
  // Two of 50 windows at 0.001 and 0.999; thirds; a sum that isn't round; a weight of 0.
  expect_shares_at_block_ends(Mixture(parts({801, 801}, {"0.001", "0.999"}), 16, 1, 0), {1, 999},
                              10);
  expect_shares_at_block_ends(
      Mixture(parts({801, 801, 801}, {"0.333333", "0.333333", "0.333333"}), 16, 2, 0), {1, 1, 1},
      10);
  expect_shares_at_block_ends(
      Mixture(parts({801, 801, 801}, {"0.333333", "0.333333", "0.333334"}), 16, 2, 0),
      {333333, 333333, 333334}, 10);
  const Mixture with_zero(parts({801, 801, 801}, {"1", "0", "2"}), 16, 3, 0);
  expect_shares_at_block_ends(with_zero, {1, 0, 2}, 10);
  EXPECT_EQ(with_zero.drawn_before(1, 10240), 0);
}

TEST(Stream, B04_ThreeHundredComponents) {
  std::vector<std::int64_t> tokens;
  std::vector<std::string> weights;
  std::vector<Wide> masses;
  for (int c = 0; c < 300; ++c) {
    tokens.push_back(1000 + 7 * c);
    weights.push_back(std::to_string(1 + c % 5));
    masses.push_back(static_cast<Wide>((1000 + 7 * c) * (1 + c % 5)));
  }
  const Mixture mixture(parts(tokens, weights), 16, 5, 0);
  expect_shares_at_block_ends(mixture, masses, 12);
  EXPECT_EQ(mixture.components(), 300);
}

TEST(Stream, B04_ExtremeWeightsNeverIndexPastASource) {
  const Mixture mixture(parts({801, 801}, {"0.001", "0.999"}), 16, 1, 0);
  std::vector<std::set<std::pair<std::int64_t, std::int64_t>>> seen(2);
  for (std::int64_t i = 0; i < 10 * mixture.block(); ++i) {
    const Location place = mixture.locate(i);
    ASSERT_GE(place.window, 0);
    ASSERT_LT(place.window, 50);
    // Without replacement within an epoch.
    ASSERT_TRUE(
        seen[static_cast<std::size_t>(place.component)].emplace(place.epoch, place.window).second);
  }
}

TEST(Stream, RandomMixturesKeepTheirPromises) {
  std::mt19937_64 random(11);
  for (int round = 0; round < 30; ++round) {
    const int n = 1 + static_cast<int>(random() % 6);
    const auto length = static_cast<std::int64_t>(1 + random() % 20);
    std::vector<Mixture::Part> made;
    std::vector<Wide> masses;
    for (int c = 0; c < n; ++c) {
      const auto held = static_cast<std::int64_t>(random() % 5);
      const auto tokens = static_cast<std::int64_t>((held + 1) * length + 1 + random() % 5000);
      const Weight weight = c > 0 && random() % 5 == 0 ? 0 : 200000 + random() % 3000000;
      made.push_back({"c", tokens, weight, held});
      masses.push_back(static_cast<Wide>(weight) * static_cast<Wide>(tokens));
    }
    const Mixture mixture(made, length, random(), 0);
    expect_shares_at_block_ends(mixture, masses, 3);
    std::vector<std::set<std::pair<std::int64_t, std::int64_t>>> seen(made.size());
    for (std::int64_t i = 0; i < 3 * mixture.block(); ++i) {
      const Location place = mixture.locate(i);
      const auto c = static_cast<std::size_t>(place.component);
      ASSERT_LT(place.window, (made[c].tokens - 1) / length - made[c].held_out_windows);
      ASSERT_TRUE(seen[c].emplace(place.epoch, place.window).second);
    }
    // Epochs are used up: all windows of one come before any sample two epochs on can.
    for (std::size_t c = 0; c < made.size(); ++c) {
      if (seen[c].empty()) continue;
      const std::int64_t last = seen[c].rbegin()->first;
      if (last == 0) continue;
      const auto whole = static_cast<std::size_t>(mixture.windows(static_cast<std::int64_t>(c)));
      EXPECT_EQ(std::count_if(seen[c].begin(), seen[c].end(),
                              [](const auto& draw) { return draw.first == 0; }),
                static_cast<std::ptrdiff_t>(whole));
    }
  }
}

TEST(Stream, ALongerRunHasTheShorterAsItsPrefix) {
  const auto made = parts({10000, 7001}, {"1", "2"});
  const Mixture shorter(made, 16, 7, 100);
  const Mixture longer(made, 16, 7, 100000);
  for (std::int64_t i = 0; i < 100; ++i) ASSERT_EQ(shorter.locate(i), longer.locate(i));
}

TEST(Stream, TheBlockGrowsWithASmallShare) {
  // q = 1, 999: B = ceil(2 * 1000 / 1).
  EXPECT_EQ(Mixture(parts({801, 801}, {"0.001", "0.999"}), 16, 1, 0).block(), 2000);
  EXPECT_EQ(Mixture(parts({801, 801}, {"1", "1"}), 16, 1, 0).block(), 1024);
}

TEST(Stream, B04_RefusesWhatCantBeSatisfied) {
  const auto message = [](const std::vector<Mixture::Part>& made, std::int64_t samples) {
    const Thrown thrown = thrown_by([&] { Mixture(made, 16, 1, samples); });
    EXPECT_EQ(thrown.code, ExitCode::kUsage);
    return thrown.message;
  };
  EXPECT_THAT(message(parts({801, 801}, {"0", "0"}), 0), HasSubstr("sum to 0"));
  EXPECT_THAT(message({}, 0), HasSubstr("sum to 0"));
  EXPECT_THAT(message(parts({801, 16}, {"1", "1"}), 0), HasSubstr("component c1"));
  EXPECT_THAT(message(parts({801, 0}, {"1", "1"}), 0), HasSubstr("no window"));
  EXPECT_THAT(message({{"held", 161, 1000000, 10}}, 0), HasSubstr("no window"));
  EXPECT_THAT(message({{"held", 161, 0, 11}, {"x", 801, 1000000, 0}}, 0),
              HasSubstr("held_out_windows is 11"));
  EXPECT_THAT(message(parts({std::int64_t{1} << 40}, {"1"}), 0), HasSubstr("2^40"));
  // A block beyond 2^62: the largest mass against the smallest.
  EXPECT_THAT(message(parts({(std::int64_t{1} << 40) - 1, 18}, {"1000000", "0.000001"}), 0),
              HasSubstr("too uneven"));
  // Masses that sum to more than 2^72 can't number 2^56 samples in 128 bits.
  const auto heavy = parts({(std::int64_t{1} << 40) - 1, (std::int64_t{1} << 40) - 3},
                           {"1000000", "999999.999999"});
  EXPECT_THAT(message(heavy, std::int64_t{1} << 56), HasSubstr("128-bit"));
  EXPECT_EQ(thrown_by([&] { Mixture(heavy, 16, 1, std::int64_t{1} << 40); }).message, "");
}

TEST(Stream, SamplesBeyondTheNumberableAreRefused) {
  const Mixture mixture(parts({801, 801}, {"1", "1"}), 16, 1, 0);
  EXPECT_EQ(thrown_by([&] { mixture.locate(std::int64_t{1} << 62); }).message, "");
  EXPECT_EQ(thrown_by([&] { mixture.locate(INT64_MAX); }).code, ExitCode::kUsage);
  EXPECT_EQ(thrown_by([&] { mixture.locate(-1); }).code, ExitCode::kUsage);
}

// The formulas of the page once more, as plainly as they stand there.
Location plain_locate(const std::vector<std::uint64_t>& q,
                      const std::vector<std::uint64_t>& windows, std::uint64_t seed,
                      std::uint64_t i) {
  std::uint64_t z = 0;
  std::uint64_t smallest = UINT64_MAX;
  for (const std::uint64_t mass : q) {
    z += mass;
    if (mass > 0) smallest = std::min(smallest, mass);
  }
  const std::uint64_t block = std::max<std::uint64_t>(1024, (2 * z + smallest - 1) / smallest);
  const auto g = [&](std::size_t k, std::uint64_t p) {
    std::uint64_t sum = 0;
    for (std::size_t c = 0; c < k; ++c) sum += q[c];
    return static_cast<std::uint64_t>(static_cast<Wide>(p) * sum / z);
  };
  const std::uint64_t b = i / block;
  std::uint64_t u = permute(i % block, block, derive(seed, {1, b}));
  for (std::size_t c = 0;; ++c) {
    const std::uint64_t at_start = g(c + 1, b * block) - g(c, b * block);
    const std::uint64_t at_end = g(c + 1, (b + 1) * block) - g(c, (b + 1) * block);
    if (u < at_end - at_start) {
      const std::uint64_t j = at_start + u;
      const std::uint64_t e = j / windows[c];
      return {
          static_cast<std::int64_t>(c), static_cast<std::int64_t>(e),
          static_cast<std::int64_t>(permute(j % windows[c], windows[c], derive(seed, {2, c, e})))};
    }
    u -= at_end - at_start;
  }
}

TEST(Stream, AgreesWithThePlainFormulas) {
  const Mixture mixture(parts({10000, 7001, 513, 90000}, {"1", "2.5", "4", "0.5"}), 16, 99, 0);
  for (std::int64_t i = 0; i < 5000; ++i) {
    ASSERT_EQ(mixture.locate(i), plain_locate({20000, 35005, 4104, 90000}, {624, 437, 32, 5624}, 99,
                                              static_cast<std::uint64_t>(i)));
  }
}

// Three components, the third a stream over the first two, held-out windows in one of them.
constexpr char kNested[] = R"(
  tokenizer: "byte" sequence_length: 8 total_tokens: 8000 seed: 5
  component { name: "a" weight: "1" held_out_windows: 3 }
  component { name: "b" weight: "2" }
  component {
    name: "blend" weight: "0.5"
    stream { sequence_length: 6 total_tokens: 1000 seed: 9
             component { name: "b" weight: "1" } component { name: "a" weight: "3" } }
  }
)";

class NestedStreamTest : public ::testing::Test {
 protected:
  void SetUp() override {
    write_component(root_.path(), "a", a_, {100, 101});
    write_component(root_.path(), "b", b_, {150, 7, 1});
  }
  TempFolder root_;
  std::vector<std::uint32_t> a_ = counting(201, 1000);
  std::vector<std::uint32_t> b_ = counting(158, 5000);
};

TEST_F(NestedStreamTest, IsTheInputTokensOfItsOwnStream) {
  const auto stream = open_stream(kNested, root_.path());
  // (1000 div 6) * 6 tokens.
  ASSERT_EQ(stream->component_tokens(2), 996);
  // a: 25 windows of 8, 3 held out: 22 * 8 + 1 tokens are seen; b: 19 windows, 153 tokens.
  const Mixture inner({{"b", 153, 1000000, 0}, {"a", 177, 3000000, 0}}, 6, 9, 0);
  std::vector<std::uint32_t> expected;
  for (std::int64_t s = 0; s < 166; ++s) {
    const Location place = inner.locate(s);
    const auto& source = place.component == 0 ? b_ : a_;
    for (std::int64_t t = 0; t < 6; ++t) {
      expected.push_back(source[static_cast<std::size_t>(place.window * 6 + t)]);
    }
  }
  std::vector<std::uint32_t> window(9);
  int blends = 0;
  for (std::int64_t i = 0; i < stream->samples(); ++i) {
    const Location place = stream->locate(i);
    if (place.component != 2) continue;
    ++blends;
    stream->read(i, window.data());
    const auto begin = expected.begin() + place.window * 8;
    ASSERT_EQ(window, std::vector<std::uint32_t>(begin, begin + 9)) << "sample " << i;
  }
  EXPECT_GT(blends, 100);
}

TEST_F(NestedStreamTest, NoSampleHoldsHeldOutTokens) {
  const auto stream = open_stream(kNested, root_.path());
  ASSERT_EQ(stream->held_out_windows(0), 3);
  std::vector<std::uint32_t> window(9);
  stream->read_held_out(0, 0, window.data());
  EXPECT_EQ(window, counting(9, 1000 + 22 * 8));
  stream->read_held_out(0, 2, window.data());
  EXPECT_EQ(window, counting(9, 1000 + 24 * 8));
  const std::uint32_t first_held_out = 1000 + 22 * 8 + 1;  // a label of the last window is shared
  for (std::int64_t i = 0; i < 5000; ++i) {
    stream->read(i, window.data());
    for (const std::uint32_t token : window) {
      ASSERT_TRUE(token < first_held_out || token >= 5000) << "sample " << i;
    }
  }
}

TEST_F(NestedStreamTest, AStreamOverAStream) {
  const auto stream = open_stream(R"(
    tokenizer: "byte" sequence_length: 8 total_tokens: 800 seed: 5
    component { name: "outer" weight: "1"
                stream { sequence_length: 5 total_tokens: 300 seed: 1
                         component { name: "inner" weight: "1" } } }
    component { name: "inner" weight: "0"
                stream { sequence_length: 7 total_tokens: 420 seed: 2
                         component { name: "a" weight: "1" } } }
    component { name: "a" weight: "0" } )",
                                  root_.path());
  // a has 25 windows of 8, so 201 tokens are seen; inner has 420 tokens, 52 windows, 417 seen.
  const Mixture inner({{"a", 201, 1000000, 0}}, 7, 2, 0);
  const Mixture outer({{"inner", 417, 1000000, 0}}, 5, 1, 0);
  const auto inner_token = [&](std::int64_t t) {
    return a_[static_cast<std::size_t>(inner.locate(t / 7).window * 7 + t % 7)];
  };
  std::vector<std::uint32_t> window(9);
  for (std::int64_t i = 0; i < stream->samples(); ++i) {
    stream->read(i, window.data());
    for (std::int64_t t = 0; t < 9; ++t) {
      const std::int64_t token = stream->locate(i).window * 8 + t;
      ASSERT_EQ(window[static_cast<std::size_t>(t)],
                inner_token(outer.locate(token / 5).window * 5 + token % 5));
    }
  }
}

TEST_F(NestedStreamTest, UnsatisfiableStreamsAreRefused) {
  // All of a's windows are held out, so nothing is left for the stream over it.
  const Thrown thrown = thrown_by([&] {
    open_stream(R"(
      tokenizer: "byte" sequence_length: 8 total_tokens: 80
      component { name: "a" weight: "0" held_out_windows: 25 }
      component { name: "s" weight: "1" stream { sequence_length: 8 total_tokens: 80
                  component { name: "a" weight: "1" } } } )",
                root_.path());
  });
  EXPECT_EQ(thrown.code, ExitCode::kUsage);
  EXPECT_THAT(thrown.message, HasSubstr("s/a"));
}

TEST_F(NestedStreamTest, DigestsComposeOverRangesAndThreads) {
  const auto stream = open_stream(kNested, root_.path());
  std::string bytes;
  std::vector<std::uint32_t> window(9);
  const auto append = [&](std::int64_t from, std::int64_t to) {
    bytes.clear();
    for (std::int64_t i = from; i < to; ++i) {
      stream->read(i, window.data());
      bytes.append(reinterpret_cast<const char*>(window.data()), 36);
    }
    return sha256_hex(bytes);
  };
  EXPECT_EQ(stream_digest(*stream, 100, 9000), append(100, 9000));
  EXPECT_EQ(stream_digest(*stream, 5, 5), sha256_hex(""));
  // Pieces [100, 4096), [4096, 8192), [8192, 9000).
  const std::string leaves = merkle_leaves(*stream, 100, 9000, 1);
  ASSERT_EQ(leaves.size(), 96U);
  EXPECT_EQ(to_hex(leaves.substr(0, 32)), append(100, 4096));
  EXPECT_EQ(to_hex(leaves.substr(32, 32)), append(4096, 8192));
  EXPECT_EQ(to_hex(leaves.substr(64)), append(8192, 9000));
  EXPECT_EQ(merkle_root(leaves), sha256_hex(leaves));
  EXPECT_EQ(merkle_leaves(*stream, 100, 9000, 3), leaves);
  EXPECT_EQ(merkle_leaves(*stream, 100, 4096, 1) + merkle_leaves(*stream, 4096, 9000, 2), leaves);
  EXPECT_EQ(thrown_by([&] { merkle_leaves(*stream, 10, 9, 1); }).code, ExitCode::kUsage);
  EXPECT_EQ(thrown_by([&] { stream_digest(*stream, -1, 9); }).code, ExitCode::kUsage);
}

}  // namespace
}  // namespace tessera
