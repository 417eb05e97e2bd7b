#include "layers/attention/attention.h"

#include <array>
#include <ostream>
#include <set>
#include <span>

#include "layers/kernels/elementwise.h"
#include "layers/rope/rope.h"
#include "runtime/products.h"
#include "tests/layers/testing.h"
#include "tests/reference/attention.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kAll = Visibility::kNoWindow;

struct Case {
  std::int64_t batch, length, heads, key_value_heads, width, window;
  std::vector<std::int64_t> starts = {0};
  std::int64_t value_width = width;
  std::int64_t maps = 1;
  std::int64_t block = 1, stride = 1;

  Visibility visibility() const {
    return block == 1 ? Visibility::tokens(window) : Visibility::blocks(block, stride);
  }
};
std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.batch << " x " << c.length << ", heads " << c.heads << "/" << c.key_value_heads
             << " of " << c.width << ", values of " << c.value_width << ", maps " << c.maps
             << ", window " << c.window << ", blocks of " << c.block << " every " << c.stride
             << ", documents " << c.starts.size();
}

constexpr std::array kWeights = {1.0F, -0.6F};  // of the maps

constexpr std::array kTypes = {DType::kF32, DType::kBF16};

std::vector<float> floats_of(const View& view) {
  const reference::Array all = to_double(view);
  return {all.begin(), all.end()};
}

// Attention alone: operands by row, as projections give them, and by head, as it takes them.
struct AttentionRun {
  explicit AttentionRun(const Case& c, int threads = 1, double deviation = 1.0,
                        DType dtype = DType::kF32)
      : given(c),
        shape{{c.batch, c.length, threads},
              c.heads,
              c.key_value_heads,
              c.width,
              c.value_width,
              c.visibility(),
              c.maps},
        key_batch{c.batch, shape.visibility.keys(c.length), threads},
        inputs(c.batch, c.length, threads, c.starts),
        queue(threads),
        rows({{"q", dtype, {shape.batch.rows(), c.heads * c.maps * c.width}},
              {"k", dtype, {key_batch.rows(), c.key_value_heads * c.maps * c.width}},
              {"v", dtype, {key_batch.rows(), c.key_value_heads * c.value_width}},
              {"out", dtype, shape.out()},
              {"d_out", dtype, shape.d_out()},
              {"d_q", DType::kF32, {shape.batch.rows(), c.heads * c.maps * c.width}},
              {"d_k", DType::kF32, {key_batch.rows(), c.key_value_heads * c.maps * c.width}},
              {"d_v", DType::kF32, {key_batch.rows(), c.key_value_heads * c.value_width}}}),
        by_head({{"q", dtype, shape.queries()},
                 {"k", dtype, shape.keys()},
                 {"v", dtype, shape.values()},
                 {"d_q", DType::kF32, shape.queries()},
                 {"d_k", DType::kF32, shape.d_keys()},
                 {"d_v", DType::kF32, shape.d_values()},
                 {"d_out", dtype, shape.d_out_by_head()},
                 {"lse", DType::kF32, shape.rows()},
                 {"delta", DType::kF32, shape.rows()},
                 {"tiles", DType::kF32, shape.tile_room()}}) {
    fill_normal(rows[0], "q", deviation);
    fill_normal(rows[1], "k", deviation);
    fill_normal(rows[2], "v");
    fill_normal(rows[4], "d_out");
  }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(shape.key_width)); }
  void forward() {
    for (std::size_t i = 0; i < 3; ++i)
      split_heads(queue, i == 0 ? shape.batch : key_batch, nullptr, rows[i], by_head[i]);
    attention_forward(queue, shape, inputs.batch.segments, scale(), by_head[0], by_head[1],
                      by_head[2], rows[3], by_head[7], by_head[9]);
  }
  void backward() {
    attention_backward(queue, shape, inputs.batch.segments, scale(),
                       std::span(kWeights).first(static_cast<std::size_t>(shape.maps)), by_head[0],
                       by_head[1], by_head[2], rows[3], by_head[7], rows[4], by_head[6], by_head[8],
                       by_head[3], by_head[4], by_head[5], by_head[9]);
    merge_heads(queue, shape.batch, nullptr, 1, by_head[3], rows[5]);
    merge_heads(queue, key_batch, nullptr, shape.group(), by_head[4], rows[6]);
    merge_heads(queue, key_batch, nullptr, shape.group(), by_head[5], rows[7]);
  }
  // Of one map.
  reference::Attention reference_of() const {
    return {given.batch,  given.length,    given.heads,       given.key_value_heads, given.width,
            given.window, inputs.segments, given.value_width, given.block,           given.stride};
  }
  std::vector<float> results() const {
    std::vector<float> all;
    for (const std::size_t i : {3, 5, 6, 7}) {
      const std::vector<float> more = floats_of(rows[i]);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  Case given;
  AttentionShape shape;
  BatchShape key_batch;
  TestBatch inputs;
  Queue queue;
  Buffers rows, by_head;
};

// The part of one map in an array [..., maps, width].
reference::Array map_of(const reference::Array& all, std::int64_t map, std::int64_t maps,
                        std::int64_t width) {
  reference::Array part;
  for (std::int64_t i = 0; i < static_cast<std::int64_t>(all.size()); ++i) {
    if (i / width % maps == map) part.push_back(all[static_cast<std::size_t>(i)]);
  }
  return part;
}

void expect_reference(AttentionRun& run, std::int64_t scores_magnitude = 1) {
  run.forward();
  run.backward();
  const reference::Array q = to_double(run.rows[0]), k = to_double(run.rows[1]),
                         v = to_double(run.rows[2]), d_out = to_double(run.rows[4]);
  const reference::Attention attention = run.reference_of();
  const std::int64_t maps = run.shape.maps, width = run.shape.key_width;
  // A score's error goes into its probability times the score's size; a query sums over the keys
  // and the width, a key over the queries of its group.
  const std::int64_t length =
      (run.shape.batch.length * run.shape.group() + width) * scores_magnitude * scores_magnitude;
  // In bf16 the roundings of probabilities, of out and of the gradients of scores count alone.
  const bool halved = run.rows[0].dtype() == DType::kBF16;
  const double epsilon = halved ? kHalfEpsilon : kEpsilon;
  const std::int64_t roundings = halved ? 3 : length;
  // The gradient of a score is a difference, which cancels altogether where one key is all that is
  // seen; its terms are as large as the products of d_out and v.
  const double d_score = largest(d_out) * largest(v) * run.scale();
  reference::Array d_v(v.size());
  for (std::int64_t map = 0; map < maps; ++map) {
    const auto part = [&](const reference::Array& all, std::int64_t of) {
      return map_of(all, map, maps, of);
    };
    const auto found = [&](const View& view, std::int64_t of) {
      std::vector<float> floats;
      for (const double value : part(to_double(view), of)) {
        floats.push_back(static_cast<float>(value));
      }
      return floats;
    };
    const reference::Array q_m = part(q, width), k_m = part(k, width);
    reference::Array d_q(q_m.size()), d_k(k_m.size()), d_map = d_out;
    for (double& value : d_map) value *= kWeights[static_cast<std::size_t>(map)];
    attention.backward(q_m, k_m, v, d_map, d_q, d_k, d_v);
    expect_close("out", found(run.rows[3], run.shape.value_width).data(),
                 attention.forward(q_m, k_m, v), roundings, 0.0, epsilon);
    expect_close("d_q", found(run.rows[5], width).data(), d_q, roundings, d_score * largest(k),
                 epsilon);
    expect_close("d_k", found(run.rows[6], width).data(), d_k, roundings, d_score * largest(q),
                 epsilon);
  }
  expect_close("d_v", run.rows[7], d_v, roundings, 0.0, epsilon);
}

class Attention : public ::testing::Test {
 protected:
  void SetUp() override {}
};

TEST_F(Attention, AgreesWithFloat64) {
  const std::vector<Case> cases = {
      {1, 1, 1, 1, 2, kAll},
      {1, 2, 2, 1, 4, kAll},
      {2, 31, 4, 2, 6, kAll},
      {1, 64, 2, 2, 16, kAll},
      {2, 65, 3, 1, 10, kAll},
      {1, 131, 4, 4, 32, kAll},
      {1, 193, 6, 2, 8, kAll},
      {1, 1, 2, 1, 4, 1},
      {2, 50, 2, 1, 4, 1},
      {1, 131, 2, 1, 8, 7},
      {2, 127, 4, 2, 6, 64},
      {1, 197, 2, 1, 8, 65},
      {1, 257, 2, 2, 4, 128},
      {1, 200, 2, 1, 4, 200},
      {1, 130, 2, 1, 8, 1000},
      {1, 131, 4, 2, 8, kAll, {0, 1, 40, 64, 65, 129}},
      {2, 197, 2, 1, 8, 33, {0, 63, 64, 100, 190}},
      {1, 320, 2, 2, 4, kAll, {0, 256}},
      // Values wider and narrower than keys.
      {2, 131, 4, 2, 4, kAll, {0, 40}, 10},
      {1, 200, 2, 1, 12, 33, {0, 129}, 3},
      // Two maps that share the values.
      {1, 1, 1, 1, 2, kAll, {0}, 4, 2},
      {2, 131, 4, 2, 4, kAll, {0, 50}, 8, 2},
      {1, 260, 6, 2, 3, 65, {0, 128, 140}, 7, 2},
      // Widths of more than one group, with and without a rest, and whole tiles.
      {1, 256, 2, 1, 64, kAll, {0, 200}, 32, 2},
      {2, 259, 2, 1, 40, 90, {0, 127, 250}, 72, 2},
      {1, 270, 2, 2, 33, kAll, {0, 128, 129}, 65, 2, 4, 2},
      // Blocks: none at all, one, a document's start within blocks and at their edges, many tiles.
      {2, 31, 4, 2, 6, kAll, {0}, 6, 1, 32, 16},
      {1, 32, 2, 1, 6, kAll, {0}, 6, 1, 32, 16},
      {1, 33, 2, 1, 6, kAll, {0}, 4, 1, 32, 16},
      {2, 130, 4, 2, 6, kAll, {0, 7, 64, 97}, 6, 1, 32, 16},
      {1, 300, 2, 1, 4, kAll, {0, 130}, 4, 1, 2, 1},
      {1, 401, 2, 1, 4, kAll, {0, 255, 257}, 5, 2, 6, 3},
      {1, 90, 2, 2, 4, kAll, {0}, 4, 1, 3, 7},
      {1, 200, 2, 1, 4, kAll, {0}, 4, 1, 128, 64},  // the last position of a tile sees the first
  };
  for (const Case& c : cases) {
    for (const DType dtype : kTypes) {
      SCOPED_TRACE(::testing::Message() << c << ", type " << static_cast<int>(dtype));
      AttentionRun run(c, 2, 1.0, dtype);
      expect_reference(run);
    }
  }
}

// Scores up to about 30 * 30: probabilities that underflow, and rows that one key takes whole.
TEST_F(Attention, LargeScoresAgreeWithFloat64) {
  AttentionRun run({1, 97, 2, 1, 8, kAll}, 1, 8.0);
  expect_reference(run, 256);
}

TEST_F(Attention, HugeScoresStayFinite) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t width : {8, 40, 128}) {
      AttentionRun run({1, 397, 2, 1, width, kAll}, 1, 1e6, dtype);
      run.forward();
      run.backward();
      for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value)) << width;
    }
  }
}

TEST_F(Attention, APositionThatSeesNothingGivesZeroAndGetsNoGradient) {
  for (const DType dtype : kTypes) {
    AttentionRun run({1, 140, 2, 1, 8, 5}, 1, 1.0, dtype);
    // Positions 70..79 and those at the end see nothing: their documents begin behind them.
    for (std::size_t i = 70; i < 140; ++i) run.inputs.segments[i] = i < 120 ? 80 : 1000;
    expect_reference(run);
    const std::vector<float> out = floats_of(run.rows[3]);
    for (const std::int64_t i : {70, 79, 120, 139}) {
      for (std::int64_t c = 0; c < 16; ++c) {
        EXPECT_EQ(out[static_cast<std::size_t>(i * 16 + c)], 0.0F);
        EXPECT_EQ(run.rows[5].as<float>()[i * 16 + c], 0.0F);
      }
    }
    for (std::int64_t c = 0; c < 8; ++c)
      EXPECT_EQ(run.rows[6].as<float>()[std::int64_t{139} * 8 + c], 0.0F);
  }
}

TEST_F(Attention, SameBitsForEveryNumberOfThreads) {
  for (const Case& c :
       {Case{2, 211, 4, 2, 16, kAll, {0, 90, 150}}, Case{2, 211, 4, 2, 16, 70, {0, 90, 150}},
        Case{2, 211, 4, 2, 8, kAll, {0, 90, 150}, 16, 2},
        Case{2, 300, 4, 2, 16, kAll, {0, 90, 150}, 16, 1, 4, 2}}) {
    for (const DType dtype : kTypes) {
      AttentionRun one(c, 1, 1.0, dtype);
      one.forward();
      one.backward();
      for (const int threads : {2, 3}) {
        AttentionRun more(c, threads, 1.0, dtype);
        more.forward();
        more.backward();
        EXPECT_TRUE(same_bits(one.results(), more.results())) << threads << " threads";
      }
    }
  }
}

TEST_F(Attention, ARowsBitsDontDependOnTheLength) {
  for (const Case& c :
       {Case{1, 300, 2, 1, 24, kAll}, Case{1, 300, 2, 1, 24, 50},
        Case{1, 300, 2, 1, 12, kAll, {0}, 24, 2}, Case{1, 300, 2, 1, 24, kAll, {0}, 24, 1, 4, 2}}) {
    for (const DType dtype : kTypes) {
      const auto run_of = [&](std::int64_t length) {
        Case of = c;
        of.length = length;
        AttentionRun run(of, 1, 1.0, dtype);
        run.forward();
        return floats_of(run.rows[3]);
      };
      const std::vector<float> longest = run_of(300);
      for (const std::int64_t length : {1, 17, 63, 64, 65, 128, 200, 299}) {
        const std::vector<float> some = run_of(length);
        EXPECT_TRUE(same_bits(some.data(), longest.data(), length * 48 * c.maps)) << length;
      }
    }
  }
}

TEST_F(Attention, AWindowNoShorterThanTheSequenceIsNone) {
  AttentionRun all({1, 150, 2, 1, 8, kAll}), wide({1, 150, 2, 1, 8, 150});
  for (AttentionRun* run : {&all, &wide}) {
    run->forward();
    run->backward();
  }
  EXPECT_TRUE(same_bits(all.results(), wide.results()));
}

// Tiles that a document's start hides are skipped: the document has the very bits that it has
// alone.
TEST_F(Attention, ADocumentInAPackHasTheBitsItHasAlone) {
  for (const DType dtype : kTypes) {
    for (const std::int64_t window : {kAll, std::int64_t{40}}) {
      AttentionRun pack({1, 128 + 90, 2, 1, 8, window, {0, 128}}, 1, 1.0, dtype);
      AttentionRun alone({1, 90, 2, 1, 8, window}, 1, 1.0, dtype);
      // The document's rows of an array of the pack.
      const auto rows_of = [&](std::size_t i) {
        const Elements all = elements(pack.rows[i]);
        return (all + 128 * pack.rows[i].extent(1)).data;
      };
      for (std::size_t i = 0; i < 5; ++i) {
        std::copy_n(rows_of(i), alone.rows[i].bytes(), alone.rows[i].raw());
      }
      for (AttentionRun* run : {&pack, &alone}) {
        run->forward();
        run->backward();
      }
      for (const std::size_t i : {3, 5, 6, 7}) {
        const View& expected = alone.rows[i];
        EXPECT_EQ(
            std::memcmp(rows_of(i), expected.raw(), static_cast<std::size_t>(expected.bytes())), 0)
            << i;
      }
    }
  }
}

TEST_F(Attention, MemoryGrowsWithTheLengthNotItsSquare) {
  AttentionShape shape = {{1, 4096, 2}, 4, 2, 64, 64};
  const std::int64_t room = shape.tile_room().count();
  shape.batch.length = 65536;
  EXPECT_EQ(shape.tile_room().count(), room);
}

// The rule against its definition, pair by pair.
TEST(Visibility, IsARunOfKeys) {
  struct Rule {
    std::int64_t block, stride, window;
  };
  for (const Rule& rule : {Rule{1, 1, kAll}, Rule{1, 1, 1}, Rule{1, 1, 7}, Rule{32, 16, kAll},
                           Rule{2, 1, kAll}, Rule{4, 4, kAll}, Rule{3, 7, kAll}}) {
    const Visibility sees = rule.block == 1 ? Visibility::tokens(rule.window)
                                            : Visibility::blocks(rule.block, rule.stride);
    for (const std::int64_t length : {1, 2, 3, 7, 31, 32, 33, 47, 48, 65, 101}) {
      std::int64_t keys = 0;
      while (rule.stride * keys + rule.block <= length) ++keys;
      ASSERT_EQ(sees.keys(length), keys);
      std::int64_t pairs = 0;
      for (std::int64_t i = 0; i < length; ++i) {
        for (const std::int64_t segment : std::set<std::int64_t>{0, i / 3, i / 2 + 1, i}) {
          const Range run = sees.keys_of(i, segment);
          for (std::int64_t j = 0; j < keys; ++j) {
            const std::int64_t first = rule.stride * j;
            const bool visible =
                first + rule.block - 1 <= i && i - first < rule.window && first >= segment;
            ASSERT_EQ(run.begin <= j && j < run.end, visible) << i << " " << j << " " << segment;
            if (segment > 0) continue;
            pairs += visible ? 1 : 0;
            const Range queries = sees.queries_of({j, j + 1}, length);
            ASSERT_EQ(queries.begin <= i && i < queries.end, visible) << i << " " << j;
          }
        }
      }
      EXPECT_DOUBLE_EQ(sees.mean_keys(length),
                       static_cast<double>(pairs) / static_cast<double>(length));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
