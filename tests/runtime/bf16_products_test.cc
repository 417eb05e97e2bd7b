// Products of bf16 operands: against double precision over shapes with every kind of tail, and the
// bits of a row.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "runtime/products.h"
#include "runtime/random.h"

namespace tessera {
namespace {

std::vector<BFloat16> values(const std::string& name, std::int64_t count) {
  const RandomStream stream(7, name);
  std::vector<BFloat16> result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    result[static_cast<std::size_t>(i)] =
        to_bfloat16(static_cast<float>(stream.normal(static_cast<std::uint64_t>(i))));
  }
  return result;
}

class BFloat16Products : public ::testing::Test {
 protected:
  void SetUp() override {}
};

struct Case {
  std::int64_t m, n, k;
  Transpose transpose_a, transpose_b;
  bool accumulate;
  DType result;
};

// Products of bf16 are exact in f32, so only the f32 sum and, for a bf16 result, its rounding
// differ: |computed - exact| <= (k eps |a||b|) and half a step of bf16.
void expect_product(const Case& c) {
  constexpr std::int64_t kMargin = 5;  // before each row and after, so that strides are odd too
  const bool ta = c.transpose_a == Transpose::kYes, tb = c.transpose_b == Transpose::kYes;
  const std::int64_t a_rows = ta ? c.k : c.m, a_columns = ta ? c.m : c.k;
  const std::int64_t b_rows = tb ? c.n : c.k, b_columns = tb ? c.k : c.n;
  const auto stride = [](std::int64_t columns) { return columns + 2 * kMargin; };
  std::vector<BFloat16> a = values("a", a_rows * stride(a_columns));
  std::vector<BFloat16> b = values("b", b_rows * stride(b_columns));
  const std::int64_t c_stride = stride(c.n);
  std::vector<float> f32(static_cast<std::size_t>(c.m * c_stride), 0.5F);
  std::vector<BFloat16> bf16(f32.size(), to_bfloat16(0.5F));
  Worker worker(0);
  const Matrix out = c.result == DType::kF32 ? Matrix(f32.data() + kMargin, c.m, c.n, c_stride)
                                             : Matrix(bf16.data() + kMargin, c.m, c.n, c_stride);
  product(worker, {a.data() + kMargin, a_rows, a_columns, stride(a_columns)}, c.transpose_a,
          {b.data() + kMargin, b_rows, b_columns, stride(b_columns)}, c.transpose_b, out,
          c.accumulate);
  for (std::int64_t i = 0; i < c.m; ++i) {
    for (std::int64_t j = -kMargin; j < c.n + kMargin; ++j) {
      const auto at = static_cast<std::size_t>(i * c_stride + kMargin + j);
      const double found =
          static_cast<double>(c.result == DType::kF32 ? f32[at] : to_float(bf16[at]));
      if (j < 0 || j >= c.n) {
        ASSERT_EQ(found, 0.5) << "outside the result";
        continue;
      }
      double sum = c.accumulate ? 0.5 : 0.0, magnitude = std::abs(sum);
      for (std::int64_t l = 0; l < c.k; ++l) {
        const BFloat16 x = a[static_cast<std::size_t>(ta ? l * stride(a_columns) + kMargin + i
                                                         : i * stride(a_columns) + kMargin + l)];
        const BFloat16 y = b[static_cast<std::size_t>(tb ? j * stride(b_columns) + kMargin + l
                                                         : l * stride(b_columns) + kMargin + j)];
        const double term = static_cast<double>(to_float(x)) * static_cast<double>(to_float(y));
        sum += term;
        magnitude += std::abs(term);
      }
      const double epsilon = std::numeric_limits<float>::epsilon() / 2;
      double allowed = static_cast<double>(c.k + 2) * epsilon * magnitude;
      if (c.result == DType::kBF16) allowed += std::abs(sum) / 256;
      ASSERT_NEAR(found, sum, allowed)
          << c.m << " x " << c.k << " by " << c.k << " x " << c.n << " at " << i << ", " << j;
    }
  }
}

TEST_F(BFloat16Products, AgreeWithDoublePrecision) {
  for (const std::int64_t m : {1, 15, 16, 17, 32, 33, 50}) {
    for (const std::int64_t n : {1, 16, 31, 32, 33, 70}) {
      for (const std::int64_t k : {1, 2, 31, 32, 33, 256, 257, 300, 512}) {
        for (const Transpose ta : {Transpose::kNo, Transpose::kYes}) {
          for (const Transpose tb : {Transpose::kNo, Transpose::kYes}) {
            if (::testing::Test::HasFatalFailure()) return;
            const bool even = (m + n + k) % 2 == 0;
            expect_product({m, n, k, ta, tb, even, DType::kF32});
            if (ta == Transpose::kNo) expect_product({m, n, k, ta, tb, false, DType::kBF16});
          }
        }
      }
    }
  }
}

// Sums that are cut into steps, and operands packed a part at a time: element by element of a
// sample.
TEST_F(BFloat16Products, LongSumsAgreeWithDoublePrecision) {
  for (const std::int64_t m : {1, 16, 17, 33}) {
    for (const std::int64_t n : {1, 32, 70}) {
      for (const std::int64_t k : {513, 1024, 1300}) {
        for (const bool accumulate : {false, true}) {
          if (::testing::Test::HasFatalFailure()) return;
          expect_product({m, n, k, Transpose::kNo, Transpose::kYes, accumulate, DType::kF32});
          if (accumulate) continue;
          expect_product({m, n, k, Transpose::kNo, Transpose::kNo, false, DType::kBF16});
        }
      }
    }
  }
  expect_product({33, 1030, 600, Transpose::kYes, Transpose::kNo, true, DType::kF32});
  expect_product({20, 1030, 600, Transpose::kNo, Transpose::kYes, false, DType::kBF16});
  Queue queue(2);
  for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
           {40, 24, 2049}, {24, 300, 4130}, {1, 1, 5000}, {530, 520, 2600}, {130, 513, 2048}}) {
    // a [m, k], b [n, k], and their transposes.
    std::vector<BFloat16> a = values("a", m * k), b = values("b", n * k);
    std::vector<BFloat16> a_turned(a.size()), b_turned(b.size());
    for (std::int64_t l = 0; l < k; ++l) {
      for (std::int64_t i = 0; i < m; ++i) a_turned[l * m + i] = a[i * k + l];
      for (std::int64_t j = 0; j < n; ++j) b_turned[l * n + j] = b[j * k + l];
    }
    const auto size = static_cast<std::size_t>(m * n);
    std::vector<BFloat16> rounded(size);
    std::vector<float> forward(size), input(size), added(size, 3.0F), weight(size);
    linear_forward(queue, {a.data(), m, k, k}, {b.data(), n, k, k}, {rounded.data(), m, n, n});
    linear_forward(queue, {a.data(), m, k, k}, {b.data(), n, k, k}, {forward.data(), m, n, n});
    linear_backward_input(queue, {a.data(), m, k, k}, {b_turned.data(), k, n, n},
                          {input.data(), m, n, n}, false);
    linear_backward_input(queue, {a.data(), m, k, k}, {b_turned.data(), k, n, n},
                          {added.data(), m, n, n}, true);
    linear_backward_weight(queue, {a_turned.data(), k, m, m}, {b_turned.data(), k, n, n},
                           {weight.data(), m, n, n}, false);
    for (std::size_t at = 0; at < size; at += std::max<std::size_t>(1, size / 997)) {
      const auto i = static_cast<std::int64_t>(at) / n, j = static_cast<std::int64_t>(at) % n;
      double sum = 0.0, magnitude = 0.0;
      for (std::int64_t l = 0; l < k; ++l) {
        const double term = static_cast<double>(to_float(a[i * k + l])) *
                            static_cast<double>(to_float(b[j * k + l]));
        sum += term;
        magnitude += std::abs(term);
      }
      const double allowed = static_cast<double>(k + 2) * (magnitude + 3.0) *
                             std::numeric_limits<float>::epsilon() / 2;
      SCOPED_TRACE(::testing::Message() << m << " x " << n << " x " << k << " at " << at);
      ASSERT_NEAR(static_cast<double>(to_float(rounded[at])), sum, allowed + std::abs(sum) / 256);
      ASSERT_NEAR(static_cast<double>(forward[at]), sum, allowed);
      ASSERT_NEAR(static_cast<double>(input[at]), sum, allowed);
      ASSERT_NEAR(static_cast<double>(added[at]), sum + 3.0, allowed);
      ASSERT_NEAR(static_cast<double>(weight[at]), sum, allowed);
    }
  }
}

// Aligned operands go another way than odd strides: whole arrays without margins.
TEST_F(BFloat16Products, ARowsBitsDontDependOnTheNumberOfRowsOrThreads) {
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {64, 64}, {512, 256}, {37, 129}, {1, 100}, {1365, 512}, {128, 352}}) {
    constexpr std::int64_t kMost = 600;
    std::vector<BFloat16> x = values("x", kMost * k), w = values("w", n * k);
    std::vector<BFloat16> y = values("y", kMost * n);
    std::vector<float> whole_back(kMost * k), whole_weight(n * k);
    std::vector<BFloat16> whole(kMost * n);
    {
      Queue queue(1);
      linear_forward(queue, {x.data(), kMost, k, k}, {w.data(), n, k, k},
                     {whole.data(), kMost, n, n});
      linear_backward_input(queue, {y.data(), kMost, n, n}, {w.data(), n, k, k},
                            {whole_back.data(), kMost, k, k}, false);
      linear_backward_weight(queue, {y.data(), kMost, n, n}, {x.data(), kMost, k, k},
                             {whole_weight.data(), n, k, k}, false);
    }
    Queue queue(3);
    for (const std::int64_t m : {1, 15, 16, 17, 31, 33, 127, 128, 129, 255, 256, 257, 599, 600}) {
      std::vector<float> back(m * k);
      std::vector<BFloat16> part(m * n);
      linear_forward(queue, {x.data(), m, k, k}, {w.data(), n, k, k}, {part.data(), m, n, n});
      ASSERT_EQ(std::memcmp(part.data(), whole.data(), part.size() * 2), 0) << m << " " << n;
      linear_backward_input(queue, {y.data(), m, n, n}, {w.data(), n, k, k}, {back.data(), m, k, k},
                            false);
      ASSERT_EQ(std::memcmp(back.data(), whole_back.data(), back.size() * 4), 0) << m << " " << n;
      linear_forward(queue, {x.data() + (kMost - m) * k, m, k, k}, {w.data(), n, k, k},
                     {part.data(), m, n, n});
      ASSERT_EQ(std::memcmp(part.data(), whole.data() + (kMost - m) * n, part.size() * 2), 0)
          << "from the end: " << m << " " << n << " " << k;
    }
    std::vector<float> weight(n * k);
    linear_backward_weight(queue, {y.data(), kMost, n, n}, {x.data(), kMost, k, k},
                           {weight.data(), n, k, k}, false);
    ASSERT_EQ(weight, whole_weight);
  }
}

// Infinity and NaN reach the result, from operands and from what it is added to.
TEST_F(BFloat16Products, WhatIsntFiniteShows) {
  Worker worker(0);
  constexpr std::size_t kCount = 1024;  // 32 rows of 32
  std::vector<BFloat16> a(kCount, to_bfloat16(1.0F)), b(kCount, to_bfloat16(1.0F));
  a[5] = to_bfloat16(std::numeric_limits<float>::infinity());
  a[32 + 5] = to_bfloat16(std::numeric_limits<float>::quiet_NaN());
  std::vector<float> c(kCount);
  c[64] = std::numeric_limits<float>::quiet_NaN();
  product(worker, {a.data(), 32, 32, 32}, Transpose::kNo, {b.data(), 32, 32, 32}, Transpose::kYes,
          {c.data(), 32, 32, 32}, true);
  for (std::size_t j = 0; j < 32; ++j) {
    EXPECT_TRUE(std::isinf(c[j]));
    EXPECT_TRUE(std::isnan(c[32 + j]));
    EXPECT_EQ(std::isnan(c[64 + j]), j == 0);
    EXPECT_EQ(c[96 + j], 32.0F);
  }
}

}  // namespace
}  // namespace tessera
