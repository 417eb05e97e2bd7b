// The chunked scan against the recurrence position by position in float64, forward and every
// gradient; steps and decays; how their parameters start.
#include "layers/scan/scan.h"

#include "layers/scan/steps.h"
#include "runtime/products.h"
#include "tests/layers/count_allocations.h"
#include "tests/layers/testing.h"
#include "tests/reference/scan.h"

namespace tessera::testing {
namespace {

struct Heads {
  std::int64_t heads, query_heads, key_heads, value_heads;
};

// A scan with everything that it reads and writes.
struct ScanRun {
  ScanRun(const ScanConfig& c, const TestBatch& b, bool with_skip = true)
      : config(c),
        scan(c),
        batch(b),
        skip(with_skip),
        queue(b.batch.shape.threads),
        arrays(specs(c, b.batch.shape.rows(), "")),
        gradients(specs(c, b.batch.shape.rows(), "d_")),
        saved(scan.saved(b.batch.shape)),
        scratch(scan.scratch(b.batch.shape)) {
    for (std::size_t i = 0; i <= kOut; ++i) fill_normal(arrays[i], std::to_string(i));
    fill_normal(gradients[kOut], "d_out");
    for (std::int64_t i = 0; i < arrays[kDt].count(); ++i) {
      const double step = reference::softplus(static_cast<double>(arrays[kDt].as<float>()[i]) - 1);
      const double rate = std::exp(static_cast<double>(arrays[kLogDecay].as<float>()[i]) - 1);
      set(i, step, rate);
    }
  }
  enum : std::size_t { kQ, kK, kV, kDt, kLogDecay, kSkip, kOut };
  void set(std::int64_t i, double step, double rate) {
    arrays[kDt].as<float>()[i] = static_cast<float>(step);
    arrays[kLogDecay].as<float>()[i] = static_cast<float>(-step * rate);
  }
  View skip_of(const Buffers& of) const { return skip ? of[kSkip] : View(); }
  ScanInput input() const {
    return {{arrays[kQ]}, {arrays[kK]},      {arrays[kV]},
            arrays[kDt],  arrays[kLogDecay], skip_of(arrays)};
  }
  void forward() {
    scan.forward(queue, batch.batch, input(), arrays[kOut], saved.views(), scratch.views());
  }
  void backward() {
    scan.backward(queue, batch.batch, input(), gradients[kOut],
                  {{gradients[kQ]},
                   {gradients[kK]},
                   {gradients[kV]},
                   gradients[kDt],
                   gradients[kLogDecay],
                   skip_of(gradients)},
                  saved.views(), scratch.views());
  }
  reference::Scan plain() const {
    const BatchShape shape = batch.batch.shape;
    return {shape.batch,        shape.length,      config.heads,
            config.query_heads, config.key_heads,  config.value_heads,
            config.state_width, config.head_width, batch.segments};
  }
  reference::Array value(std::size_t i) const {
    return i == kSkip && !skip ? reference::Array() : to_double(arrays[i]);
  }
  reference::Array expected_out() const {
    return plain().forward(value(kQ), value(kK), value(kV), value(kDt), value(kLogDecay),
                           value(kSkip));
  }
  reference::Scan::Gradient expected_gradient() const {
    return plain().backward(value(kQ), value(kK), value(kV), value(kDt), value(kLogDecay),
                            value(kSkip), to_double(gradients[kOut]));
  }
  // Everything computed, as bytes.
  std::vector<float> results() const {
    std::vector<float> all;
    for (const View& view : {arrays[kOut], gradients[kQ], gradients[kK], gradients[kV],
                             gradients[kDt], gradients[kLogDecay]}) {
      for (const double x : to_double(view)) all.push_back(static_cast<float>(x));
    }
    if (skip) {
      for (const double x : to_double(gradients[kSkip])) all.push_back(static_cast<float>(x));
    }
    return all;
  }

  static std::vector<BufferSpec> specs(const ScanConfig& c, std::int64_t rows,
                                       const std::string& prefix) {
    return {{prefix + "q", c.compute, {rows, c.query_heads * c.state_width}},
            {prefix + "k", c.compute, {rows, c.key_heads * c.state_width}},
            {prefix + "v", c.compute, {rows, c.value_heads * c.head_width}},
            {prefix + "dt", DType::kF32, {rows, c.heads}},
            {prefix + "log_decay", DType::kF32, {rows, c.heads}},
            {prefix + "skip", DType::kF32, {c.heads}},
            {prefix + "out", c.compute, {rows, c.heads * c.head_width}}};
  }

  ScanConfig config;
  Scan scan;
  const TestBatch& batch;
  bool skip;
  Queue queue;
  Buffers arrays, gradients, saved, scratch;
};

void expect_close_any(const std::string& what, const View& found, const reference::Array& expected,
                      double length, double epsilon) {
  ASSERT_EQ(static_cast<std::size_t>(found.count()), expected.size()) << what;
  const double allowed = 8 * epsilon * std::sqrt(length + 1) * std::max(largest(expected), 1e-30);
  const reference::Array at = to_double(found);
  for (std::size_t i = 0; i < expected.size(); ++i) {
    ASSERT_NEAR(at[i], expected[i], allowed) << what << " at " << i << " of " << expected.size();
  }
}

// f32: sums of `length` terms in a row; bf16: of that many roundings.
void expect_scan(ScanRun& run, double length, double epsilon) {
  run.forward();
  run.backward();
  const reference::Scan::Gradient g = run.expected_gradient();
  expect_close_any("out", run.arrays[ScanRun::kOut], run.expected_out(), length, epsilon);
  expect_close_any("d_q", run.gradients[ScanRun::kQ], g.q, length, epsilon);
  expect_close_any("d_k", run.gradients[ScanRun::kK], g.k, length, epsilon);
  expect_close_any("d_v", run.gradients[ScanRun::kV], g.v, length, epsilon);
  expect_close_any("d_dt", run.gradients[ScanRun::kDt], g.dt, length, epsilon);
  expect_close_any("d_log_decay", run.gradients[ScanRun::kLogDecay], g.log_decay, length, epsilon);
  if (run.skip) {
    expect_close_any("d_skip", run.gradients[ScanRun::kSkip], g.skip, length, epsilon);
  }
}

ScanConfig config_of(const Heads& h, std::int64_t n, std::int64_t p, std::int64_t chunk,
                     DType compute = DType::kF32) {
  return {h.heads, h.query_heads, h.key_heads, h.value_heads, n, p, chunk, compute};
}

const std::vector<Heads> kHeads = {{1, 1, 1, 1}, {4, 4, 2, 2},   {6, 1, 1, 6},
                                   {8, 2, 2, 8}, {4, 4, 4, 4},   {12, 6, 2, 2},
                                   {4, 1, 2, 4}, {10, 10, 2, 2}, {16, 1, 1, 1}};

TEST(Scan, TheReferencesGradientIsThatOfItsForward) {
  const TestBatch batch(2, 7, 1, {0, 3});
  ScanRun run(config_of({4, 4, 2, 2}, 3, 2, 16), batch);
  const reference::Scan plain = run.plain();
  const reference::Scan::Gradient g = run.expected_gradient();
  const reference::Array d_out = to_double(run.gradients[ScanRun::kOut]);
  const std::vector<const reference::Array*> all = {&g.q, &g.k, &g.v, &g.dt, &g.log_decay, &g.skip};
  for (std::size_t which = 0; which < all.size(); ++which) {
    std::vector<reference::Array> at;
    for (std::size_t i = 0; i < all.size(); ++i) at.push_back(run.value(i));
    for (std::size_t i = 0; i < at[which].size(); ++i) {
      const double before = at[which][i], step = 1e-5;
      const auto loss = [&](double value) {
        at[which][i] = value;
        return reference::dot(plain.forward(at[0], at[1], at[2], at[3], at[4], at[5]), d_out);
      };
      EXPECT_NEAR((*all[which])[i], (loss(before + step) - loss(before - step)) / (2 * step), 1e-7)
          << which << " " << i;
      at[which][i] = before;
    }
  }
}

TEST(Scan, AgreesWithTheRecurrenceForEverySharingOfHeads) {
  for (const Heads& heads : kHeads) {
    for (const bool skip : {false, true}) {
      SCOPED_TRACE(::testing::Message() << heads.heads << " " << heads.query_heads << " "
                                        << heads.key_heads << " " << heads.value_heads);
      const TestBatch batch(2, 77, 2, {0, 20, 51});
      ScanRun run(config_of(heads, 5, 3, 16), batch, skip);
      expect_scan(run, 2 * 77, kEpsilon);
    }
  }
}

// Lengths at every edge of chunks and of tiles within them, documents across and at the edges.
TEST(Scan, AgreesWithTheRecurrenceAtEveryEdge) {
  for (const std::int64_t chunk : {16, 64, 128, 256}) {
    for (const std::int64_t length :
         {std::int64_t{1}, std::int64_t{2}, std::int64_t{31}, std::int64_t{33}, std::int64_t{63},
          std::int64_t{65}, chunk - 1, chunk, chunk + 1, 2 * chunk - 1, 2 * chunk, 2 * chunk + 1}) {
      for (const std::vector<std::int64_t>& starts :
           {std::vector<std::int64_t>{0},
            std::vector<std::int64_t>{0, chunk / 2, chunk - 1, chunk, chunk + 1, 2 * chunk - 1},
            std::vector<std::int64_t>{0, 1, 15, 16, 17, 64, chunk + chunk / 2}}) {
        SCOPED_TRACE(::testing::Message() << "chunk " << chunk << ", length " << length << ", "
                                          << starts.size() << " documents");
        const TestBatch batch(1, length, 2, starts);
        ScanRun run(config_of({4, 4, 2, 2}, 4, 3, chunk), batch);
        expect_scan(run, 2.0 * static_cast<double>(length), kEpsilon);
      }
    }
  }
}

// Slow decays: states and gradients travel through many chunks.
TEST(Scan, StatesTravelFar) {
  const TestBatch batch(1, 700, 2);
  ScanRun run(config_of({3, 1, 1, 3}, 8, 8, 64), batch);
  for (std::int64_t i = 0; i < run.arrays[ScanRun::kDt].count(); ++i) run.set(i, 0.01, 0.3);
  expect_scan(run, 2 * 700, kEpsilon);
}

// States of more rows than are carried in one piece, the last piece a part.
TEST(Scan, WideStatesAgreeWithTheRecurrence) {
  for (const std::int64_t n : {17, 39}) {
    const TestBatch batch(2, 50, 2, {0, 20});
    ScanRun run(config_of({2, 2, 1, 2}, n, 5, 16), batch);
    expect_scan(run, 2 * 50, kEpsilon);
  }
}

// Without decay the state counts the positions, and its gradient those that follow. Carried in f32
// both are exact; in bf16 they would stop at the 256th of equal additions. What rounds, to 8 bits,
// is the copy that a chunk reads, then the result.
TEST(Scan, StatesAreCarriedInFullPrecision) {
  constexpr std::int64_t kLength = std::int64_t{16} * 600;
  const TestBatch batch(1, kLength, 2);
  ScanRun run(config_of({1, 1, 1, 1}, 1, 1, 16, DType::kBF16), batch, false);
  for (const View& ones : {run.arrays[ScanRun::kQ], run.arrays[ScanRun::kK],
                           run.arrays[ScanRun::kV], run.gradients[ScanRun::kOut]}) {
    std::fill_n(ones.as<BFloat16>(), kLength, to_bfloat16(1.0F));
  }
  for (std::int64_t i = 0; i < kLength; ++i) run.set(i, 1.0, 0.0);
  run.forward();
  run.backward();
  const reference::Array out = to_double(run.arrays[ScanRun::kOut]);
  const reference::Array d_v = to_double(run.gradients[ScanRun::kV]);
  for (std::size_t i = 0; i < out.size(); ++i) {
    const auto before = static_cast<double>(i) + 1, behind = static_cast<double>(kLength) - before;
    ASSERT_NEAR(out[i], before, 2.01 / 256 * before) << i;
    ASSERT_NEAR(d_v[i], behind + 1, 2.01 / 256 * (behind + 1)) << i;
  }
}

// The result is the same however the sequence is cut.
TEST(Scan, B22_TheChunkDoesNotShow) {
  const TestBatch batch(2, 300, 2, {0, 101, 192});
  ScanRun whole(config_of({4, 2, 2, 4}, 16, 8, 320), batch);
  whole.forward();
  whole.backward();
  const std::vector<float> expected = whole.results();
  for (const std::int64_t chunk : {16, 64, 128, 256}) {
    ScanRun run(config_of({4, 2, 2, 4}, 16, 8, chunk), batch);
    run.forward();
    run.backward();
    const std::vector<float> found = run.results();
    double most = 0.0;
    for (const float value : expected) most = std::max(most, std::abs(static_cast<double>(value)));
    for (std::size_t i = 0; i < expected.size(); ++i) {
      ASSERT_NEAR(found[i], expected[i], tolerance(most, 600)) << chunk << " at " << i;
    }
  }
}

TEST(Scan, B22_NoBitBeforeAChangedPositionMoves) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const TestBatch batch(1, 270, 2);
    ScanRun run(config_of({4, 1, 1, 4}, 16, 16, 128, compute), batch);
    run.forward();
    const reference::Array before = to_double(run.arrays[ScanRun::kOut]);
    for (const std::int64_t t :
         {0, 1, 15, 16, 63, 64, 65, 127, 128, 129, 191, 192, 255, 256, 269}) {
      ScanRun moved(config_of({4, 1, 1, 4}, 16, 16, 128, compute), batch);
      for (std::int64_t h = 0; h < 4; ++h) moved.set(t * 4 + h, 0.7, 0.1 + static_cast<double>(h));
      for (const std::size_t which : {ScanRun::kQ, ScanRun::kK, ScanRun::kV}) {
        const std::int64_t width = moved.arrays[which].extent(1);
        fill_normal({compute, {width}, moved.arrays[which].raw() + t * width * size_of(compute)},
                    "moved");
      }
      moved.forward();
      const reference::Array after = to_double(moved.arrays[ScanRun::kOut]);
      const auto edge = static_cast<std::ptrdiff_t>(t * 64);
      EXPECT_TRUE(std::equal(before.begin(), before.begin() + edge, after.begin())) << t;
      EXPECT_FALSE(std::equal(before.begin() + edge, before.end(), after.begin() + edge)) << t;
    }
  }
}

// A document's results and gradients have the bits that they have whatever lies before and after.
TEST(Scan, B22_NothingCrossesADocumentsStart) {
  for (const std::int64_t start : {1, 40, 63, 64, 65, 128, 150}) {
    const TestBatch batch(1, 200, 2, {0, start});
    ScanRun run(config_of({4, 4, 2, 2}, 8, 8, 64), batch), moved(run.config, batch);
    run.forward();
    run.backward();
    for (const std::size_t which : {ScanRun::kQ, ScanRun::kK, ScanRun::kV}) {
      const std::int64_t width = moved.arrays[which].extent(1);
      fill_normal(moved.arrays[which].slice(0, start), "moved");
      fill_normal(moved.gradients[ScanRun::kOut].slice(0, start), "moved");
      ASSERT_GT(width, 0);
    }
    for (std::int64_t i = 0; i < start * 4; ++i) moved.set(i, 0.3, 2.0);
    moved.forward();
    moved.backward();
    const auto expect_same = [&](const View& a, const View& b) {
      const std::int64_t from = start * a.extent(1), count = a.count() - from;
      EXPECT_TRUE(same_bits(a.as<float>() + from, b.as<float>() + from, count)) << start;
      EXPECT_FALSE(same_bits(a.as<float>(), b.as<float>(), from)) << start;
    };
    expect_same(run.arrays[ScanRun::kOut], moved.arrays[ScanRun::kOut]);
    for (const std::size_t which : {ScanRun::kQ, ScanRun::kK, ScanRun::kV, ScanRun::kDt}) {
      expect_same(run.gradients[which], moved.gradients[which]);
    }
    const View a = run.gradients[ScanRun::kLogDecay], b = moved.gradients[ScanRun::kLogDecay];
    EXPECT_TRUE(
        same_bits(a.as<float>() + start * 4, b.as<float>() + start * 4, a.count() - start * 4));
    for (std::int64_t h = 0; h < 4; ++h) {
      EXPECT_EQ(a.as<float>()[h], 0.0F);
      EXPECT_EQ(a.as<float>()[start * 4 + h], 0.0F);
    }
  }
}

// Nor does anything that follows move a bit of a document's results and gradients.
TEST(Scan, B22_NothingComesBackFromTheNextDocument) {
  for (const std::int64_t start : {1, 40, 63, 64, 65, 128, 150}) {
    const TestBatch batch(1, 200, 2, {0, start});
    ScanRun run(config_of({4, 4, 2, 2}, 8, 8, 64), batch, false), moved(run.config, batch, false);
    for (const std::size_t which : {ScanRun::kQ, ScanRun::kK, ScanRun::kV}) {
      fill_normal(moved.arrays[which].slice(start, 200), "moved");
    }
    fill_normal(moved.gradients[ScanRun::kOut].slice(start, 200), "moved");
    for (std::int64_t i = start * 4; i < 800; ++i) moved.set(i, 0.3, 2.0);
    for (ScanRun* each : {&run, &moved}) {
      each->forward();
      each->backward();
    }
    const auto same = [&](const View& a, const View& b) {
      return same_bits(a.as<float>(), b.as<float>(), start * a.extent(1));
    };
    EXPECT_TRUE(same(run.arrays[ScanRun::kOut], moved.arrays[ScanRun::kOut])) << start;
    for (const std::size_t which :
         {ScanRun::kQ, ScanRun::kK, ScanRun::kV, ScanRun::kDt, ScanRun::kLogDecay}) {
      EXPECT_TRUE(same(run.gradients[which], moved.gradients[which])) << start << " " << which;
    }
  }
}

// Steps and rates from next to nothing to far beyond where every decay is 0.
TEST(Scan, B23_ExtremeStepsAndRatesAreFiniteAndRight) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    for (const std::int64_t chunk : {64, 256}) {
      for (const double step : {1e-4, 1.0, 20.0}) {
        for (const double rate : {1e-4, 1.0, 16.0, 200.0}) {
          SCOPED_TRACE(::testing::Message()
                       << "chunk " << chunk << " dt " << step << " A " << rate);
          const TestBatch batch(1, 1024, 2);
          ScanRun run(config_of({2, 1, 1, 2}, 8, 8, chunk, compute), batch);
          for (std::int64_t i = 0; i < run.arrays[ScanRun::kDt].count(); ++i)
            run.set(i, step, rate);
          // bf16: operands of two products behind one another, values times steps, the results.
          if (compute == DType::kF32) {
            expect_scan(run, 1024, kEpsilon);
          } else {
            expect_scan(run, 5, kHalfEpsilon);
          }
          for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
        }
      }
    }
  }
}

// Small and large steps next to one another, as large as their product stays in range: the
// cumulative log-decays reach -1e9 and the differences that matter stay exact.
TEST(Scan, B23_AMixtureOfExtremesIsFiniteAndRight) {
  const TestBatch batch(1, 600, 2, {0, 333});
  ScanRun run(config_of({4, 4, 2, 2}, 8, 8, 256), batch);
  const RandomStream stream(3, "mixture");
  for (std::int64_t i = 0; i < run.arrays[ScanRun::kDt].count(); ++i) {
    const bool large = stream.uniform(static_cast<std::uint64_t>(i)) < 0.05;
    run.set(i, large ? 20.0 : 1e-3, large ? 1e6 : 0.5);
  }
  expect_scan(run, 600, kEpsilon);
  for (const float value : run.results()) ASSERT_TRUE(std::isfinite(value));
}

TEST(Scan, SameBitsForEveryNumberOfThreadsSequencesAndPositions) {
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    const ScanConfig config = config_of({8, 2, 2, 8}, 16, 8, 64, compute);
    std::vector<float> expected;
    for (const int threads : {1, 2, 3}) {
      const TestBatch batch(2, 210, threads, {0, 70});
      ScanRun run(config, batch);
      run.forward();
      run.backward();
      if (threads == 1) expected = run.results();
      EXPECT_TRUE(same_bits(run.results(), expected)) << threads;
    }
    // A row's bits for every length, and those of a sequence that has another beside it.
    const TestBatch long_batch(1, 210, 2);
    ScanRun all(config, long_batch);
    all.forward();
    const reference::Array out = to_double(all.arrays[ScanRun::kOut]);
    for (const std::int64_t length : {1, 63, 64, 65, 130}) {
      const TestBatch batch(2, length, 2);
      ScanRun run(config, batch);
      for (std::size_t i = 0; i < ScanRun::kSkip; ++i) {
        const View part = all.arrays[i].slice(0, length);
        for (const std::int64_t sequence : {0, 1}) {
          std::memcpy(run.arrays[i].raw() + sequence * part.bytes(), part.raw(),
                      static_cast<std::size_t>(part.bytes()));
        }
      }
      run.forward();
      const reference::Array found = to_double(run.arrays[ScanRun::kOut]);
      const auto count = static_cast<std::ptrdiff_t>(found.size() / 2);
      EXPECT_TRUE(std::equal(found.begin(), found.begin() + count, out.begin())) << length;
      EXPECT_TRUE(std::equal(found.begin() + count, found.end(), out.begin())) << length;
    }
  }
}

TEST(Scan, BFloat16AgreesWithTheRecurrence) {
  for (const Heads& heads : kHeads) {
    SCOPED_TRACE(heads.heads);
    const TestBatch batch(2, 300, 2, {0, 101, 192});
    ScanRun run(config_of(heads, 16, 8, 128, DType::kBF16), batch);
    expect_scan(run, 5, kHalfEpsilon);
  }
}

TEST(Scan, NothingIsAllocated) {
  const TestBatch batch(1, 200, 2);
  ScanRun run(config_of({8, 2, 2, 8}, 16, 8, 64), batch);
  run.forward();
  run.backward();
  EXPECT_EQ(count_allocations([&] {
              run.forward();
              run.backward();
            }),
            0);
}

// What is kept for the backward grows with T/chunk, and nothing grows faster than T.
TEST(Scan, B36_MemoryAndWorkGrowWithTheLength) {
  const Scan scan(config_of({16, 1, 1, 16}, 128, 64, 256, DType::kBF16));
  const auto bytes = [](const std::vector<BufferSpec>& list) {
    std::int64_t sum = 0;
    for (const BufferSpec& buffer : list) sum += buffer.bytes();
    return sum;
  };
  EXPECT_EQ(bytes(scan.saved({1, 256, 1})), 0);
  EXPECT_EQ(bytes(scan.saved({1, 2048, 1})), 7 * 16 * 128 * 64 * 2);
  EXPECT_EQ(bytes(scan.saved({3, 4096, 1})), 3 * 15 * 16 * 128 * 64 * 2);
  const std::int64_t rooms = bytes(scan.scratch({0, 1, 1}));
  EXPECT_LE(
      bytes(scan.scratch({1, 8192, 1})) - rooms,
      2 * (bytes(scan.scratch({1, 4096, 1})) - rooms) + std::int64_t{16} * (128 * 64 * 6 + 4));
  // Two chunks of 256 and one of 88: (2 * 256 * 257 / 2 + 88 * 89 / 2) / 600 visible positions;
  // 512 of 600 positions make a state that is read, 344 read one.
  const double visible = (256.0 * 257.0 + 44.0 * 89.0) / 600.0;
  EXPECT_DOUBLE_EQ(
      scan.flops_per_token(600),
      2.0 * visible * (128.0 + 16.0 * 64.0) + 2.0 * 16.0 * 128.0 * 64.0 * (512.0 + 344.0) / 600.0);
  EXPECT_NEAR(scan.flops_per_token(8192) / scan.flops_per_token(4096), 1.0, 0.05);
}

// softplus and its slope for every kind of argument, relative to the value itself.
TEST(Steps, AgreeWithFloat64) {
  constexpr int kSteps = 13577;
  std::vector<float> raw;
  raw.reserve(kSteps + 16);
  for (int i = 0; i < kSteps; ++i) raw.push_back(static_cast<float>(-86.0 + 0.0137 * i));
  for (const double x : {1e-30, -1e-30, 1e-7, -1e-7, 1e4, 1e30}) {
    raw.push_back(static_cast<float>(x));
  }
  const auto rows = static_cast<std::int64_t>(raw.size());
  Buffers b({{"a", DType::kF32, {1}},
             {"bias", DType::kF32, {1}},
             {"dt", DType::kF32, {rows, 1}},
             {"decay", DType::kF32, {rows, 1}},
             {"d_dt", DType::kF32, {rows, 1}},
             {"d_decay", DType::kF32, {rows, 1}},
             {"d_raw", DType::kF32, {rows, 1}},
             {"d_a", DType::kF32, {1}},
             {"d_bias", DType::kF32, {1}},
             {"partial", DType::kF32, scan_steps_partial(rows, 1)}});
  b[0].as<float>()[0] = std::log(3.0F);
  b[1].as<float>()[0] = 0.0F;
  fill_normal(b[4], "d_dt");
  fill_normal(b[5], "d_decay", 1e-3);
  Queue queue(2);
  scan_steps(queue, View(raw.data(), {rows, 1}), b[0], b[1], b[2], b[3]);
  scan_steps_backward(queue, View(raw.data(), {rows, 1}), b[0], b[1], b[4], b[5], b[6], b[7], b[8],
                      b[9]);
  double d_a = 0.0, d_bias = 0.0, terms_a = 0.0, terms_bias = 0.0;
  for (std::size_t i = 0; i < raw.size(); ++i) {
    const double x = static_cast<double>(raw[i]);
    const double step = reference::softplus(x),
                 rate = std::exp(static_cast<double>(std::log(3.0F)));
    // exp within 2 units, the quotient and the series' sum: 8 roundings.
    ASSERT_NEAR(b[2].as<float>()[i], step, 8 * kEpsilon * step) << x;
    ASSERT_NEAR(b[3].as<float>()[i], -rate * step, 12 * kEpsilon * rate * step) << x;
    const double d_decay = static_cast<double>(b[5].as<float>()[i]);
    const double terms =
        std::abs(static_cast<double>(b[4].as<float>()[i])) + std::abs(d_decay) * rate;
    const double d_raw =
        (static_cast<double>(b[4].as<float>()[i]) - d_decay * rate) * reference::sigmoid(x);
    // Below the smallest normal number there is nothing.
    const double smallest = static_cast<double>(std::numeric_limits<float>::min());
    ASSERT_NEAR(b[6].as<float>()[i], d_raw,
                16 * kEpsilon * terms * reference::sigmoid(x) + smallest)
        << x;
    if (x > 1e3) continue;
    d_bias += d_raw;
    d_a -= d_decay * rate * step;
    terms_bias += std::abs(d_raw);
    terms_a += std::abs(d_decay * rate * step);
  }
  // The last two rows alone are beyond the scale of the others: without them.
  const auto few = rows - 2;
  scan_steps_backward(queue, View(raw.data(), {few, 1}), b[0], b[1], b[4].slice(0, few),
                      b[5].slice(0, few), b[6].slice(0, few), b[7], b[8], b[9]);
  EXPECT_NEAR(b[7].as<float>()[0], d_a, 16 * kEpsilon * terms_a);
  EXPECT_NEAR(b[8].as<float>()[0], d_bias, 16 * kEpsilon * terms_bias);
}

TEST(Steps, NothingBelowTheSmallestStepIsANumberTooFew) {
  std::vector<float> raw = {-88.0F, -1e4F, -3e38F, 3e38F};
  std::vector<float> ones(4, 1.0F), dt(4), decay(4), d_raw(4), d_a(1), d_bias(1), partial(2);
  std::vector<float> a_log = {8.0F}, bias = {-50.0F};
  Queue queue(1);
  const auto view = [](std::vector<float>& v) {
    return View(v.data(), {static_cast<std::int64_t>(v.size()), 1});
  };
  const View a(a_log.data(), {1}), b(bias.data(), {1});
  raw.back() = 1e30F;
  scan_steps(queue, view(raw), a, b, view(dt), view(decay));
  scan_steps_backward(queue, view(raw), a, b, view(ones), view(ones), view(d_raw),
                      View(d_a.data(), {1}), View(d_bias.data(), {1}),
                      View(partial.data(), {1, 2, 1}));
  for (std::size_t i = 0; i < 3; ++i) EXPECT_EQ(dt[i], 0.0F);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_TRUE(std::isfinite(dt[i]) && std::isfinite(decay[i]) && std::isfinite(d_raw[i])) << i;
  }
}

// exp(A_log) uniform in [1, 16], softplus(dt_bias) log-uniform in [1e-3, 0.1]: the share below
// every tenth of the range (Kolmogorov and Smirnov's distance, 1.63/sqrt(n) at 1 %), and the ends.
TEST(Initialise, RatesAndStepsHaveTheirDistributions) {
  constexpr std::int64_t kCount = 20000;
  for (const bool step : {false, true}) {
    const ParameterSpec spec = step ? step_bias_parameter(kCount) : decay_rate_parameter(kCount);
    EXPECT_TRUE(spec.full_precision);
    EXPECT_FALSE(spec.decay);
    std::vector<float> drawn(kCount);
    initialise(spec, 5, 0, View(drawn.data(), {kCount}));
    std::vector<double> at;
    for (const float value : drawn) {
      const auto x = static_cast<double>(value);
      at.push_back(step ? std::log(reference::softplus(x) / 1e-3) / std::log(100.0)
                        : (std::exp(x) - 1.0) / 15.0);
    }
    std::sort(at.begin(), at.end());
    EXPECT_GE(at.front(), -1e-5);
    EXPECT_LE(at.back(), 1.0 + 1e-5);
    for (std::size_t i = 0; i < at.size(); ++i) {
      ASSERT_NEAR(at[i], (static_cast<double>(i) + 0.5) / kCount, 1.63 / std::sqrt(kCount));
    }
    // By element, whatever the cut.
    std::vector<float> part(10);
    initialise(spec, 5, 777, View(part.data(), {10}));
    EXPECT_TRUE(same_bits(part.data(), drawn.data() + 777, 10));
  }
  // The floor holds what is drawn below it.
  ParameterSpec low = step_bias_parameter(1000);
  low.init.low = 1e-6;
  low.init.high = 1e-5;
  std::vector<float> drawn(1000);
  initialise(low, 5, 0, View(drawn.data(), {1000}));
  for (const float value : drawn) {
    EXPECT_NEAR(reference::softplus(static_cast<double>(value)), 1e-4, 1e-9);
  }
}

}  // namespace
}  // namespace tessera::testing
