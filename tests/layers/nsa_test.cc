// The mixer nsa: against float64 with the choice that the layer made, the choice against float64,
// ties; documents, causality, bits, counted work, counts.
#include "layers/mixers/nsa/nsa.h"

#include <google/protobuf/text_format.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "layers/attention/attention.h"
#include "runtime/products.h"
#include "tests/layers/count_allocations.h"
#include "tests/layers/testing.h"
#include "tests/reference/nsa.h"

namespace tessera::testing {
namespace {

struct NsaSizes {
  std::int64_t width, heads, key_value_heads, head_width;
  std::int64_t block = 8, stride = 4, inner = 6, selected = 16, most = 3, window = 11;
  bool norm = false;
};
constexpr double kTheta = 100.0;

std::unique_ptr<Layer> make(const NsaSizes& s, DType compute = DType::kF32,
                            std::int64_t length = 1 << 15) {
  const std::string text =
      "width: " + std::to_string(s.width) + " vocabulary: 8 length: " + std::to_string(length) +
      " feed_forward { width: 8 } mixer { nsa { attention { heads: " + std::to_string(s.heads) +
      " key_value_heads: " + std::to_string(s.key_value_heads) +
      " head_width: " + std::to_string(s.head_width) +
      " rope_theta: 100 query_key_norm: " + (s.norm ? "true" : "false") +
      " } compression { block_length: " + std::to_string(s.block) +
      " block_stride: " + std::to_string(s.stride) + " inner_width: " + std::to_string(s.inner) +
      " } selected_block_length: " + std::to_string(s.selected) +
      " selected_blocks: " + std::to_string(s.most) + " window: " + std::to_string(s.window) +
      " } }";
  ModelConfig config;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(text, &config)) << text;
  return make_mixer("nsa", {config, 0, 2, compute});
}

// The sizes of the flagship's mechanism with few and narrow heads.
NsaSizes flagship_blocks() { return {6, 2, 1, 4, 32, 16, 5, 64, 16, 512}; }

const View& saved(const LayerRun& run, const std::string& name) {
  const std::vector<BufferSpec> specs = run.layer.saved(run.batch.batch.shape);
  for (std::size_t i = 0; i < specs.size(); ++i) {
    if (specs[i].name == name) return run.saved[i];
  }
  throw std::runtime_error("nothing saved is called " + name);
}

std::vector<std::int32_t> choice_of(const LayerRun& run) {
  const View& view = saved(run, "choice");
  return {view.as<std::int32_t>(), view.as<std::int32_t>() + view.count()};
}

reference::Nsa reference_of(const NsaSizes& s, const TestBatch& batch) {
  const BatchShape shape = batch.batch.shape;
  return {{shape.batch,
           shape.length,
           s.width,
           s.heads,
           s.key_value_heads,
           s.head_width,
           {s.block, s.stride},
           batch.segments},
          s.selected,
          s.most,
          s.window,
          kTheta,
          s.norm,
          {}};
}

std::int64_t sums(const NsaSizes& s, std::int64_t length) {
  return 2 * s.width + 2 * s.heads * s.head_width + s.block * s.head_width + s.inner + 2 * length;
}

// The blocks of one position and key/value head.
std::set<std::int64_t> chosen(const std::vector<std::int32_t>& choice, const NsaSizes& s,
                              std::int64_t length, std::int64_t shared, std::int64_t t) {
  std::set<std::int64_t> blocks;
  for (std::int64_t i = 0; i < s.most; ++i) {
    const std::int32_t block = choice[static_cast<std::size_t>((shared * length + t) * s.most + i)];
    if (block >= 0) {
      EXPECT_TRUE(blocks.insert(block).second) << block << " twice";
    }
  }
  return blocks;
}

struct Case {
  std::int64_t batch, length;
  NsaSizes sizes;
  std::vector<std::int64_t> starts = {0};
};

void expect_reference(const Case& c, DType compute, std::int64_t length, double epsilon) {
  SCOPED_TRACE(::testing::Message()
               << c.batch << " x " << c.length << ", blocks " << c.sizes.block << "/"
               << c.sizes.stride << "/" << c.sizes.selected << ", norm " << c.sizes.norm);
  const TestBatch batch(c.batch, c.length, 2, c.starts);
  const auto layer = make(c.sizes, compute);
  LayerRun run(*layer, batch, c.sizes.width, compute);
  run.forward();
  reference::Nsa mixer = reference_of(c.sizes, batch);
  mixer.choice = choice_of(run);
  expect_layer(
      run,
      [&](const reference::Array& x, const std::vector<reference::Array>& p) {
        return mixer.forward(x, p);
      },
      length, epsilon);
  EXPECT_EQ(choice_of(run), mixer.choice);
}

TEST(Nsa, AgreesWithFloat64) {
  const NsaSizes small = {10, 4, 2, 4};
  NsaSizes norm = small;
  norm.norm = true;
  const std::vector<Case> cases = {
      {1, 2, small},
      {2, 7, small},
      {1, 31, {7, 2, 1, 6, 32, 16, 3, 64, 3, 40}},
      {1, 49, {7, 2, 1, 6, 32, 16, 3, 64, 3, 5}},
      {2, 49, norm, {0, 21}},
      {1, 95, small, {0, 5, 40, 41}},
      {1, 96, {8, 3, 3, 2, 4, 4, 3, 8, 5, 2}},           // no group, blocks side by side
      {1, 83, {8, 4, 1, 4, 12, 4, 3, 8, 4, 9}, {0, 2}},  // compressed blocks longer than selected
      {1, 67, {6, 2, 1, 4, 4, 2, 3, 6, 4, 9}},           // a block that no vector divides
  };
  for (const Case& c : cases) {
    expect_reference(c, DType::kF32, sums(c.sizes, c.length), kEpsilon);
  }
}

// More positions than one piece of the selected branch keeps the sums of.
TEST(Nsa, ManyPositionsAgreeWithFloat64) {
  const NsaSizes s = {3, 1, 1, 2, 32, 16, 3, 64, 4, 20};
  const std::int64_t length = kSelectedPositions + 5;
  const TestBatch batch(1, length, 2);
  const auto layer = make(s);
  LayerRun run(*layer, batch, s.width);
  run.forward();
  reference::Nsa mixer = reference_of(s, batch);
  mixer.choice = choice_of(run);
  expect_close("out", run.out(), mixer.forward(to_double(run.in()), to_double(run.parameters)),
               sums(s, length));
}

TEST(Nsa, InBFloat16AgreesWithFloat64) {
  // Projection, phi's three, norm, rotation, probabilities, branch, output; the same backward.
  expect_reference({2, 67, {16, 4, 2, 8, 8, 4, 12, 16, 3, 11, true}, {0, 33}}, DType::kBF16, 18,
                   kHalfEpsilon);
}

// The choice, from the layer's own q and compressed keys: the forced blocks, and no block left out
// that is more important than one that is in, but for f32's rounding.
void expect_choice(const LayerRun& run, const NsaSizes& s) {
  const BatchShape shape = run.batch.batch.shape;
  const std::int64_t length = shape.length, keys_padded = saved(run, "compressed_keys").extent(2);
  const reference::Array q = to_double(saved(run, "q"));
  const reference::Array by_head = to_double(saved(run, "compressed_keys"));
  reference::Nsa mixer = reference_of(s, run.batch);
  const std::int64_t blocks = mixer.compressed.blocks.count(length);
  ASSERT_GT(blocks, 0);
  reference::Array keys(
      static_cast<std::size_t>(shape.batch * blocks * s.key_value_heads * s.head_width));
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(keys.size()); ++i) {
    const std::int64_t c = i % s.head_width, h = i / s.head_width % s.key_value_heads;
    const std::int64_t row = i / s.head_width / s.key_value_heads;
    keys[reference::at(i)] = by_head[reference::at(
        (((row / blocks) * s.key_value_heads + h) * keys_padded + row % blocks) * s.head_width +
        c)];
  }
  const reference::AnyAttention attention = mixer.compressed.attention();
  const std::vector<std::int32_t> choice = choice_of(run);
  const std::int64_t group = s.heads / s.key_value_heads;
  std::int64_t decided = 0;
  for (std::int64_t b = 0; b < shape.batch; ++b) {
    for (std::int64_t shared = 0; shared < s.key_value_heads; ++shared) {
      for (std::int64_t t = 0; t < length; ++t) {
        const std::int64_t first = run.batch.segments[reference::at(b * length + t)] / s.selected;
        const std::int64_t own = t / s.selected;
        const std::set<std::int64_t> found =
            chosen(choice, s, length, b * s.key_value_heads + shared, t);
        ASSERT_EQ(static_cast<std::int64_t>(found.size()), std::min(s.most, own - first + 1)) << t;
        ASSERT_GE(*found.begin(), first);
        ASSERT_LE(*found.rbegin(), own);
        ASSERT_TRUE(found.count(first) && found.count(own)) << t;
        ASSERT_TRUE(own == first || found.count(own - 1)) << t;
        if (own - first + 1 <= s.most) continue;
        std::vector<reference::Array> p;
        for (std::int64_t member = 0; member < group; ++member) {
          p.push_back(attention.probabilities(q, keys, b, shared * group + member, t));
        }
        const reference::Array importance = mixer.importance(p, own + 1);
        double least_in = 1e30, most_out = -1.0;
        for (std::int64_t j = first + 1; j < own - 1; ++j) {
          const double value = importance[reference::at(j)];
          if (found.count(j)) {
            least_in = std::min(least_in, value);
          } else {
            most_out = std::max(most_out, value);
          }
        }
        if (s.most > 3) {
          ASSERT_GE(least_in, most_out - tolerance(most_out, s.head_width + group * blocks)) << t;
          decided += least_in > most_out ? 1 : 0;
        }
      }
    }
  }
  if (s.most > 3) {
    EXPECT_GT(decided, 0);
  }
}

TEST(Nsa, TheChoiceIsThatOfFloat64) {
  const std::vector<Case> cases = {
      {1, 400, {8, 4, 2, 4}},  // three blocks: all of them forced
      {2, 300, {8, 4, 2, 4, 8, 4, 6, 16, 5, 11}, {0, 37, 130}},
      {1, 1300, {8, 2, 1, 4, 8, 4, 6, 16, 7, 11}, {0, 1}},
      {1, 400, {8, 4, 4, 4, 12, 4, 3, 8, 9, 9}},
      {1, 2500, flagship_blocks(), {0, 700}},
  };
  for (const Case& c : cases) {
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      SCOPED_TRACE(::testing::Message() << c.length << " " << name_of(compute));
      const TestBatch batch(c.batch, c.length, 2, c.starts);
      const auto layer = make(c.sizes, compute);
      LayerRun run(*layer, batch, c.sizes.width, compute);
      run.forward();
      expect_choice(run, c.sizes);
    }
  }
}

// Without a preference all blocks inside are equally important, to the bit.
TEST(Nsa, EqualBlocksAreChosenFromTheLowestOn) {
  const NsaSizes s = flagship_blocks();
  const auto layer = make(s);
  const TestBatch batch(1, 2000, 2, {0, 200});
  LayerRun run(*layer, batch, s.width);
  std::fill_n(run.parameters[0].as<float>(), run.parameters[0].count(), 0.0F);  // W_q
  run.forward();
  const std::vector<std::int32_t> choice = choice_of(run);
  for (std::int64_t t = 200 + 16 * 64 + 64; t < 2000; ++t) {
    std::set<std::int64_t> expected = {3, t / 64 - 1, t / 64};
    // The block of the document's start has a part of its own compressed blocks only: 208 is the
    // first start of one, so block 4 has all of its five.
    for (std::int64_t j = 4; expected.size() < 16; ++j) expected.insert(j);
    ASSERT_EQ(chosen(choice, s, 2000, 0, t), expected) << t;
  }
}

// One position's importances made by hand: keys of width 1, one query of 1, so that a compressed
// block's score is its key.
class Choice : public ::testing::Test {
 protected:
  static constexpr std::int64_t kLength = 80;  // 20 selected blocks of 4, 40 compressed of 2
  std::set<std::int64_t> choose(std::int64_t most) {
    const SelectionShape shape = {{1, kLength, 1}, 1, 1, 1, 4, most, 2, 2};
    const AttentionShape attention = {shape.batch, 1, 1, 1, 1, shape.compressed()};
    std::vector<std::int32_t> segments(kLength);
    Buffers b({{"q", DType::kF32, attention.queries()},
               {"k", DType::kF32, attention.keys()},
               {"out", DType::kF32, attention.out()},
               {"lse", DType::kF32, attention.rows()},
               {"tiles", DType::kF32, attention.tile_room()},
               {"choice", DType::kI32, shape.choice()},
               {"room", DType::kF32, shape.choice_room()}});
    std::fill_n(b[0].as<float>(), b[0].count(), 0.0F);
    std::fill_n(b[0].as<float>(), kLength, 1.0F);
    std::fill_n(b[1].as<float>(), b[1].count(), 0.0F);
    std::copy(scores.begin(), scores.end(), b[1].as<float>());
    Queue queue(1);
    const View starts(segments.data(), {1, kLength});
    attention_forward(queue, attention, starts, 1.0, b[0], b[1], b[1], b[2], b[3], b[4]);
    choose_blocks(queue, shape, starts, 1.0, b[0], b[1], b[3], b[5], b[6]);
    std::set<std::int64_t> found;
    for (std::int64_t i = 0; i < most; ++i) {
      found.insert(b[5].as<std::int32_t>()[(kLength - 1) * most + i]);
    }
    return found;
  }
  std::vector<float> scores = std::vector<float>(40, 0.0F);
};

TEST_F(Choice, AnExactTieGoesToTheLowerIndex) {
  scores[14] = scores[25] = 1.0F;  // of the blocks 7 and 12
  EXPECT_EQ(choose(4), (std::set<std::int64_t>{0, 7, 18, 19}));
  std::swap(scores[14], scores[15]);
  EXPECT_EQ(choose(4), (std::set<std::int64_t>{0, 7, 18, 19}));
  EXPECT_EQ(choose(5), (std::set<std::int64_t>{0, 7, 12, 18, 19}));
  EXPECT_EQ(choose(7), (std::set<std::int64_t>{0, 1, 2, 7, 12, 18, 19}));
}

TEST_F(Choice, ANearTieGoesToTheLarger) {
  scores[14] = 1.0F;
  scores[25] = 1.0F + 4e-6F;  // a few units of its probability's last place
  EXPECT_EQ(choose(4), (std::set<std::int64_t>{0, 12, 18, 19}));
}

TEST_F(Choice, ForcedBlocksCountOnceAndTheRestByImportance) {
  for (std::size_t i = 0; i < scores.size(); ++i) scores[i] = -0.1F * static_cast<float>(i);
  scores[0] = scores[39] = 5.0F;
  EXPECT_EQ(choose(3), (std::set<std::int64_t>{0, 18, 19}));
  EXPECT_EQ(choose(6), (std::set<std::int64_t>{0, 1, 2, 3, 18, 19}));
  std::reverse(scores.begin(), scores.end());
  EXPECT_EQ(choose(6), (std::set<std::int64_t>{0, 15, 16, 17, 18, 19}));
  EXPECT_EQ(choose(20).size(), 20U);
}

// What isn't a number chooses something, and nothing crashes.
TEST_F(Choice, NotANumberStillChooses) {
  for (float& score : scores) score = std::numeric_limits<float>::quiet_NaN();
  for (const std::int64_t block : choose(6)) EXPECT_TRUE(block >= 0 && block < 20);
  EXPECT_EQ(choose(6).size(), 6U);
}

// The weights of 32/16/64: blocks 4j-1 .. 4j+3 count 1, 2, 2, 2, 1.
TEST(Nsa, ImportanceCountsTheStridesShared) {
  const NsaSizes s = flagship_blocks();
  const TestBatch batch(1, 1, 1);
  const reference::Nsa mixer = reference_of(s, batch);
  for (std::int64_t i = 7; i <= 11; ++i) {
    reference::Array p(40, 0.0);
    p[reference::at(i)] = 1.0;
    const double weight = i == 7 || i == 11 ? 1.0 : 2.0;
    EXPECT_DOUBLE_EQ(mixer.importance({p}, 10)[2], weight) << i;
  }
}

// The gathered blocks are all that is multiplied: products of 64 queries with one block, at most
// those that are full, and one that isn't for each block and tile of positions. A masked product
// would grow with the square.
TEST(Nsa, TheSelectedBranchCostsItsBlocksAlone) {
  const NsaSizes s = flagship_blocks();
  const auto layer = make(s);
  double before = 0.0;
  for (const std::int64_t length : {2048, 4096, 8192, 16384}) {
    const TestBatch batch(1, length, 2);
    LayerRun run(*layer, batch, s.width);
    run.forward();
    const View& view = saved(run, "products");
    const std::int64_t products = std::accumulate(
        view.as<std::int64_t>(), view.as<std::int64_t>() + view.count(), std::int64_t{0});
    const std::vector<std::int32_t> choice = choice_of(run);
    const std::int64_t pairs = s.heads * (std::count_if(choice.begin(), choice.end(),
                                                        [](std::int32_t j) { return j >= 0; }));
    const std::int64_t tiles = (length + kSelectedPositions - 1) / kSelectedPositions;
    EXPECT_GE(products * kSelectedRows, pairs);
    EXPECT_LE(products, pairs / kSelectedRows + s.heads * tiles * (length / 64));
    const std::int64_t masked = s.heads * (length / 64) * (length / 64 + 1) / 2;
    if (length >= 8192) {
      EXPECT_LT(3 * products, masked * 2) << length;
    }
    const auto per_token = static_cast<double>(products) / static_cast<double>(length);
    if (length > 4096) {
      EXPECT_LT(per_token / before, 1.3) << length;
    }
    before = per_token;
  }
}

TEST(Nsa, APositionThatOnlySeesItselfTakesItsOwnValue) {
  // Every position a document of its own: both token branches give the own value, the compressed
  // branch nothing.
  const NsaSizes s = {10, 4, 2, 4};
  const auto layer = make(s);
  std::vector<std::int64_t> starts(40);
  std::iota(starts.begin(), starts.end(), 0);
  const TestBatch batch(1, 40, 1, starts);
  LayerRun run(*layer, batch, s.width);
  run.forward();
  run.backward();
  for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
  reference::Nsa mixer = reference_of(s, batch);
  mixer.choice = choice_of(run);
  expect_close("out", run.out(), mixer.forward(to_double(run.in()), to_double(run.parameters)),
               sums(s, 1));
  const View& compressed = saved(run, "compressed");
  for (std::int64_t i = 0; i < compressed.count(); ++i) ASSERT_EQ(compressed.as<float>()[i], 0.0F);
}

const std::vector<std::int64_t> kEdges = {0,  1,  3,  4,  7,  8,   10,  11,  12,  15,  16, 17,
                                          31, 32, 47, 48, 63, 100, 127, 128, 129, 255, 256};

void expect_causal(const NsaSizes& s, DType compute, std::int64_t length,
                   const std::vector<std::int64_t>& positions) {
  const auto layer = make(s, compute);
  const TestBatch batch(1, length, 2);
  LayerRun run(*layer, batch, s.width, compute);
  run.forward();
  const std::vector<float> before = values(run.out());
  for (const std::int64_t t : positions) {
    const std::int64_t bytes = s.width * size_of(compute);
    std::byte* const row = run.in().raw() + t * bytes;
    const std::vector<std::byte> kept(row, row + bytes);
    fill_normal(View(compute, {s.width}, row), "changed", 3.0);
    run.forward();
    EXPECT_TRUE(same_bits(run.out().as<float>(), before.data(), t * s.width)) << t;
    EXPECT_FALSE(
        same_bits(run.out().as<float>() + t * s.width, before.data() + t * s.width, s.width))
        << t;
    std::copy(kept.begin(), kept.end(), row);
  }
}

TEST(Nsa, B22_NoBitBeforeAChangedPositionMoves) {
  NsaSizes small = {12, 4, 2, 4};
  small.most = 5;
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const bool norm : {false, true}) {
      small.norm = norm;
      expect_causal(small, compute, 257, kEdges);
    }
    expect_causal(flagship_blocks(), compute, 2200,
                  {0, 15, 16, 31, 32, 63, 64, 511, 512, 1023, 1024, 1025, 2047, 2048, 2199});
  }
}

// Changes the whole first document, its choices too, so that the second one's queries stand
// elsewhere among those that are gathered for the block that both share.
void expect_documents_apart(const NsaSizes& s, DType compute, std::int64_t length,
                            const std::vector<std::int64_t>& starts) {
  const auto layer = make(s, compute);
  for (const std::int64_t start : starts) {
    const TestBatch batch(1, length, 2, {0, start});
    LayerRun run(*layer, batch, s.width, compute);
    run.forward();
    run.backward();
    const std::vector<float> out = values(run.out()), d_in = values(run.d_in());
    fill_normal(run.in().slice(0, start), "changed", 2.0);
    run.forward();
    run.backward();
    const std::int64_t from = start * s.width, count = length * s.width - from;
    EXPECT_TRUE(same_bits(run.out().as<float>() + from, out.data() + from, count)) << start;
    EXPECT_TRUE(same_bits(run.d_in().as<float>() + from, d_in.data() + from, count)) << start;
    EXPECT_FALSE(same_bits(run.out().as<float>(), out.data(), from)) << start;
  }
}

TEST(Nsa, B22_NothingCrossesADocumentsStart) {
  NsaSizes s = {12, 4, 2, 4};
  s.most = 5;
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    expect_documents_apart(s, compute, 300, {1, 4, 8, 15, 16, 40, 63, 64, 128});
    expect_documents_apart({16, 2, 1, 64, 32, 16, 5, 64, 4, 100}, compute, 700, {301, 333, 384});
  }
}

TEST(Nsa, SameBitsForEveryNumberOfThreadsAndRows) {
  NsaSizes s = {12, 4, 2, 4};
  s.most = 5;
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const auto layer = make(s, compute);
    std::vector<float> expected;
    for (const int threads : {1, 2, 3}) {
      const TestBatch batch(2, 387, threads, {0, 50});
      LayerRun run(*layer, batch, s.width, compute);
      run.forward();
      run.backward();
      if (threads == 1) expected = run.results();
      EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
    }
    const TestBatch all_batch(1, 300, 2);
    LayerRun all(*layer, all_batch, s.width, compute);
    all.forward();
    for (const std::int64_t length : {1, 7, 8, 64, 127, 128, 200}) {
      const TestBatch batch(2, length, 2);
      LayerRun run(*layer, batch, s.width, compute);
      const std::int64_t bytes = length * s.width * size_of(compute);
      for (const std::int64_t sequence : {0, 1}) {
        std::copy_n(all.in().raw(), bytes, run.in().raw() + sequence * bytes);
      }
      run.forward();
      for (const std::int64_t sequence : {0, 1}) {
        EXPECT_TRUE(same_bits(run.out().as<float>() + sequence * length * s.width,
                              all.out().as<float>(), length * s.width))
            << length;
      }
    }
  }
}

TEST(Nsa, ExtremeInputsStayFinite) {
  NsaSizes s = {12, 4, 2, 4};
  for (const bool norm : {false, true}) {
    s.norm = norm;
    for (const float factor : {0.0F, 1e-20F, 1e4F}) {
      const auto layer = make(s);
      const TestBatch batch(1, 175, 1);
      LayerRun run(*layer, batch, s.width);
      for (std::int64_t i = 0; i < run.in().count(); ++i) run.in().as<float>()[i] *= factor;
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << factor;
    }
  }
}

TEST(Nsa, AStepAllocatesNothing) {
  NsaSizes s = {12, 4, 2, 4};
  s.norm = true;
  const auto layer = make(s);
  const TestBatch batch(2, 150, 2, {0, 40});
  LayerRun run(*layer, batch, s.width);
  const auto step = [&] {
    run.forward();
    run.backward();
  };
  step();
  EXPECT_EQ(count_allocations(step), 0);
}

// Nothing that is kept grows faster than the length, but the scratch for one tile's choice.
TEST(Nsa, MemoryGrowsWithTheLength) {
  const auto layer = make({64, 4, 2, 16, 32, 16, 192, 64, 16, 512});
  const auto bytes = [&](std::int64_t length) {
    std::int64_t sum = 0;
    for (const BufferSpec& buffer : layer->saved({1, length, 2})) sum += buffer.bytes();
    for (const BufferSpec& buffer : layer->scratch({1, length, 2})) sum += buffer.bytes();
    return static_cast<double>(sum);
  };
  EXPECT_NEAR(bytes(32768) / bytes(16384), 2.0, 0.02);
}

NsaSizes flagship() { return {2048, 16, 4, 128, 32, 16, 192, 64, 16, 512}; }

TEST(Nsa, FlagshipParametersAreThePapers) {
  const auto layer = make(flagship());
  std::int64_t count = 0;
  for (const ParameterSpec& parameter : layer->parameters()) {
    count += parameter.shape.count();
    const bool table = parameter.name.find("position") != std::string::npos;
    EXPECT_EQ(parameter.decay, !table) << parameter.name;
  }
  EXPECT_EQ(count, 16408576);
}

// The hand sheet: projections 2 * 2048 * (2 * 2048 + 6 * 512 + 48) = 29,556,736 a token; phi, for
// each of 255 blocks of 4 heads, keys and values, 2 * (4096 * 192 + 192 * 128); 4 * 2048 for each
// key: compressed 16 positions each see 1..254, one 255; selected: the first 1024 positions see
// all, 3072 later ones 15 blocks and on average 32.5 of their own; window: 511 see 1..511, 3585 see
// 512.
TEST(Nsa, B36_FlopsAgreeWithTheHandSheet) {
  const auto layer = make(flagship());
  const double phi = 255.0 * 4 * 2 * 2 * (4096.0 * 192 + 192 * 128);
  const double compressed = 16.0 * (254.0 * 255 / 2) + 255;
  const double selected = 1024.0 * 1025 / 2 + 3072.0 * (960 + 32.5);
  const double window = 511.0 * 256 + 3585.0 * 512;
  const double expected = 29556736.0 + (phi + 8192.0 * (compressed + selected + window)) / 4096;
  EXPECT_NEAR(layer->flops_per_token(4096) / expected, 1.0, 1e-12);
  // Twice the length: only the compressed blocks grow.
  const double more = layer->flops_per_token(8192) / layer->flops_per_token(4096);
  EXPECT_GT(more, 1.0);
  EXPECT_LT(more, 1.08);
}

TEST(Nsa, MeanSelectedKeysIsTheirCount) {
  SelectionShape shape;
  shape.block_length = 8;
  shape.most = 3;
  for (const std::int64_t length : {1, 7, 8, 23, 24, 25, 31, 32, 100}) {
    double sum = 0.0;
    for (std::int64_t t = 0; t < length; ++t) {
      sum += static_cast<double>(t / 8 + 1 <= 3 ? t + 1 : 16 + t % 8 + 1);
    }
    EXPECT_DOUBLE_EQ(shape.mean_keys(length), sum / static_cast<double>(length)) << length;
  }
}

TEST(Nsa, ReportsItsSizes) {
  std::set<std::int64_t> sizes;
  for (const LayerSize& size : make(flagship())->sizes()) sizes.insert(size.positions);
  EXPECT_EQ(sizes, (std::set<std::int64_t>{16, 32, 64, 128, 512, 1024, kSelectedPositions}));
}

TEST(Nsa, RefusesWhatCantBe) {
  const auto refusal = [](const NsaSizes& sizes) -> std::string {
    try {
      make(sizes);
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      return error.what();
    }
    return "";
  };
  const std::string path = "model.mixer[0].nsa.";
  EXPECT_EQ(refusal({8, 4, 3, 4}),
            path + "attention.key_value_heads: must divide heads, which is 4, is 3");
  EXPECT_EQ(refusal({8, 4, 2, 5}),
            path + "attention.head_width: must be even for the rotation, is 5");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 3}),
            path + "compression.block_stride: must divide block_length, which is 8, is 3");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 4, 6, 18}),
            path +
                "selected_block_length: must be a multiple of compression.block_stride, which "
                "is 4, is 18");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 4, 6, 16, 2}),
            path + "selected_blocks: must be at least 3, is 2");
  EXPECT_EQ(refusal({8, 4, 2, 4, 8, 4, 6, 16, 3, 0}), path + "window: must be at least 1, is 0");
}

}  // namespace
}  // namespace tessera::testing
