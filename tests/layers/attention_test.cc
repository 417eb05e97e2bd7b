#include "layers/attention/attention.h"

#include "layers/rope/rope.h"
#include "tests/layers/testing.h"
#include "tests/reference/attention.h"

namespace tessera::testing {
namespace {

constexpr std::int64_t kAll = AttentionShape::kNoWindow;

struct Case {
  std::int64_t batch, length, heads, key_value_heads, width, window;
  std::vector<std::int64_t> starts = {0};
};

// Attention alone: operands by row, as projections give them, and by head, as it takes them.
struct AttentionRun {
  explicit AttentionRun(const Case& c, int threads = 1, double deviation = 1.0)
      : shape{{c.batch, c.length, threads}, c.heads, c.key_value_heads, c.width, c.window},
        inputs(c.batch, c.length, threads, c.starts),
        queue(threads),
        rows({{"q", DType::kF32, row_shape(c.heads)},
              {"k", DType::kF32, row_shape(c.key_value_heads)},
              {"v", DType::kF32, row_shape(c.key_value_heads)},
              {"out", DType::kF32, row_shape(c.heads)},
              {"d_out", DType::kF32, row_shape(c.heads)},
              {"d_q", DType::kF32, row_shape(c.heads)},
              {"d_k", DType::kF32, row_shape(c.key_value_heads)},
              {"d_v", DType::kF32, row_shape(c.key_value_heads)}}),
        by_head({{"q", DType::kF32, shape.queries()},
                 {"k", DType::kF32, shape.keys()},
                 {"v", DType::kF32, shape.keys()},
                 {"d_q", DType::kF32, shape.queries()},
                 {"d_k", DType::kF32, shape.queries()},
                 {"d_v", DType::kF32, shape.queries()},
                 {"d_out", DType::kF32, shape.queries()},
                 {"lse", DType::kF32, shape.rows()},
                 {"delta", DType::kF32, shape.rows()},
                 {"tiles", DType::kF32, shape.tile_room()}}) {
    fill_normal(rows[0], "q", deviation);
    fill_normal(rows[1], "k", deviation);
    fill_normal(rows[2], "v");
    fill_normal(rows[4], "d_out");
  }
  Shape row_shape(std::int64_t heads) const {
    return {shape.batch.rows(), heads * shape.head_width};
  }
  double scale() const { return 1.0 / std::sqrt(static_cast<double>(shape.head_width)); }
  void forward() {
    for (std::size_t i = 0; i < 3; ++i)
      split_heads(queue, shape.batch, nullptr, rows[i], by_head[i]);
    attention_forward(queue, shape, inputs.batch.segments, scale(), by_head[0], by_head[1],
                      by_head[2], rows[3], by_head[7], by_head[9]);
  }
  void backward() {
    attention_backward(queue, shape, inputs.batch.segments, scale(), by_head[0], by_head[1],
                       by_head[2], rows[3], by_head[7], rows[4], by_head[6], by_head[8], by_head[3],
                       by_head[4], by_head[5], by_head[9]);
    merge_heads(queue, shape.batch, nullptr, 1, by_head[3], rows[5]);
    merge_heads(queue, shape.batch, nullptr, shape.group(), by_head[4], rows[6]);
    merge_heads(queue, shape.batch, nullptr, shape.group(), by_head[5], rows[7]);
  }
  reference::Attention reference_of() const {
    return {shape.batch.batch, shape.batch.length, shape.heads,    shape.key_value_heads,
            shape.head_width,  shape.window,       inputs.segments};
  }
  std::vector<float> results() const {
    std::vector<float> all;
    for (const std::size_t i : {3, 5, 6, 7}) {
      const std::vector<float> more = values(rows[i]);
      all.insert(all.end(), more.begin(), more.end());
    }
    return all;
  }
  AttentionShape shape;
  TestBatch inputs;
  Queue queue;
  Buffers rows, by_head;
};

void expect_reference(AttentionRun& run, std::int64_t scores_magnitude = 1) {
  run.forward();
  run.backward();
  const reference::Array q = to_double(run.rows[0]), k = to_double(run.rows[1]),
                         v = to_double(run.rows[2]), d_out = to_double(run.rows[4]);
  const reference::Attention attention = run.reference_of();
  reference::Array d_q(q.size()), d_k(k.size()), d_v(v.size());
  attention.backward(q, k, v, d_out, d_q, d_k, d_v);
  // A score's error goes into its probability times the score's size; a query sums over the keys
  // and the width, a key over the queries of its group.
  const std::int64_t length = (run.shape.batch.length * run.shape.group() + run.shape.head_width) *
                              scores_magnitude * scores_magnitude;
  expect_close("out", run.rows[3], attention.forward(q, k, v), length);
  // The gradient of a score is a difference, which cancels altogether where one key is all that is
  // seen; its terms are as large as the products of d_out and v.
  const double d_score = largest(d_out) * largest(v) * run.scale();
  expect_close("d_q", run.rows[5], d_q, length, d_score * largest(k));
  expect_close("d_k", run.rows[6], d_k, length, d_score * largest(q));
  expect_close("d_v", run.rows[7], d_v, length);
}

TEST(Attention, AgreesWithFloat64) {
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
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(::testing::Message()
                 << c.batch << " x " << c.length << ", heads " << c.heads << "/"
                 << c.key_value_heads << " of " << c.width << ", window " << c.window
                 << ", documents " << c.starts.size());
    AttentionRun run(c, 2);
    expect_reference(run);
  }
}

// Scores up to about 30 * 30: probabilities that underflow, and rows that one key takes whole.
TEST(Attention, LargeScoresAgreeWithFloat64) {
  AttentionRun run({1, 97, 2, 1, 8, kAll}, 1, 8.0);
  expect_reference(run, 256);
}

TEST(Attention, HugeScoresStayFinite) {
  AttentionRun run({1, 97, 2, 1, 8, kAll}, 1, 1e6);
  run.forward();
  run.backward();
  for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
}

TEST(Attention, APositionThatSeesNothingGivesZeroAndGetsNoGradient) {
  AttentionRun run({1, 140, 2, 1, 8, 5}, 1);
  // Positions 70..79 and a whole tile's worth at the end see nothing.
  for (std::size_t i = 0; i < 140; ++i) {
    if ((i >= 70 && i < 80) || i >= 120) run.inputs.segments[i] = 1000;
  }
  expect_reference(run);
  for (const std::int64_t i : {70, 79, 120, 139}) {
    for (std::int64_t c = 0; c < 16; ++c) {
      EXPECT_EQ(run.rows[3].as<float>()[i * 16 + c], 0.0F);
      EXPECT_EQ(run.rows[5].as<float>()[i * 16 + c], 0.0F);
    }
  }
  for (std::int64_t c = 0; c < 8; ++c)
    EXPECT_EQ(run.rows[6].as<float>()[std::int64_t{139} * 8 + c], 0.0F);
}

TEST(Attention, SameBitsForEveryNumberOfThreads) {
  for (const std::int64_t window : {kAll, std::int64_t{70}}) {
    const Case c = {2, 211, 4, 2, 16, window, {0, 90, 150}};
    AttentionRun one(c, 1);
    one.forward();
    one.backward();
    for (const int threads : {2, 3}) {
      AttentionRun more(c, threads);
      more.forward();
      more.backward();
      EXPECT_TRUE(same_bits(one.results(), more.results())) << threads << " threads";
    }
  }
}

TEST(Attention, ARowsBitsDontDependOnTheLength) {
  for (const std::int64_t window : {kAll, std::int64_t{50}}) {
    const auto run_of = [&](std::int64_t length) {
      AttentionRun run({1, length, 2, 1, 24, window});
      run.forward();
      return values(run.rows[3]);
    };
    const std::vector<float> longest = run_of(300);
    for (const std::int64_t length : {1, 17, 63, 64, 65, 128, 200, 299}) {
      const std::vector<float> some = run_of(length);
      EXPECT_TRUE(same_bits(some.data(), longest.data(), length * 48)) << length;
    }
  }
}

TEST(Attention, AWindowNoShorterThanTheSequenceIsNone) {
  AttentionRun all({1, 150, 2, 1, 8, kAll}), wide({1, 150, 2, 1, 8, 150});
  for (AttentionRun* run : {&all, &wide}) {
    run->forward();
    run->backward();
  }
  EXPECT_TRUE(same_bits(all.results(), wide.results()));
}

// Tiles that a document's start hides are skipped: the document has the very bits that it has
// alone.
TEST(Attention, ADocumentInAPackHasTheBitsItHasAlone) {
  for (const std::int64_t window : {kAll, std::int64_t{40}}) {
    AttentionRun pack({1, 128 + 90, 2, 1, 8, window, {0, 128}});
    AttentionRun alone({1, 90, 2, 1, 8, window});
    for (std::size_t i = 0; i < 5; ++i) {
      const std::int64_t width = pack.rows[i].extent(1);
      std::copy_n(pack.rows[i].as<float>() + 128 * width, 90 * width, alone.rows[i].as<float>());
    }
    for (AttentionRun* run : {&pack, &alone}) {
      run->forward();
      run->backward();
    }
    for (const std::size_t i : {3, 5, 6, 7}) {
      const std::int64_t width = pack.rows[i].extent(1);
      EXPECT_TRUE(
          same_bits(pack.rows[i].as<float>() + 128 * width, alone.rows[i].as<float>(), 90 * width))
          << i;
    }
  }
}

TEST(Attention, MemoryGrowsWithTheLengthNotItsSquare) {
  AttentionShape shape = {{1, 4096, 2}, 4, 2, 64, kAll};
  const std::int64_t room = shape.tile_room().count();
  shape.batch.length = 65536;
  EXPECT_EQ(shape.tile_room().count(), room);
}

TEST(Attention, MeanVisibleKeysIsTheirCount) {
  for (const std::int64_t length : {1, 2, 7, 64, 101}) {
    for (const std::int64_t window : {std::int64_t{1}, std::int64_t{3}, std::int64_t{64}, kAll}) {
      std::int64_t pairs = 0;
      for (std::int64_t i = 0; i < length; ++i) {
        for (std::int64_t j = 0; j <= i; ++j) pairs += i - j < window ? 1 : 0;
      }
      EXPECT_DOUBLE_EQ(mean_visible_keys(length, window),
                       static_cast<double>(pairs) / static_cast<double>(length));
    }
  }
}

}  // namespace
}  // namespace tessera::testing
