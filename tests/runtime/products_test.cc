#include "runtime/products.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

#include "runtime/random.h"

namespace tessera {
namespace {

std::vector<float> values(const char* name, std::int64_t count) {
  const RandomStream stream(7, name);
  std::vector<float> result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    result[static_cast<std::size_t>(i)] =
        static_cast<float>(stream.normal(static_cast<std::uint64_t>(i)));
  }
  return result;
}

struct Operands {
  std::int64_t m, n, k;
  std::vector<float> x, w, y;
  Operands(std::int64_t m, std::int64_t n, std::int64_t k)
      : m(m), n(n), k(k), x(values("x", m * k)), w(values("w", n * k)), y(values("y", m * n)) {}
  Matrix mx() { return {x.data(), m, k, k}; }
  Matrix mw() { return {w.data(), n, k, k}; }
  Matrix my() { return {y.data(), m, n, n}; }
};

// |computed - exact| <= gamma_k |x||w| (Higham), gamma_k = k eps / (1 - k eps).
double bound(std::int64_t k, double magnitude) {
  const double eps = std::numeric_limits<float>::epsilon() / 2;
  return (static_cast<double>(k) * eps + 2 * eps) * magnitude;
}

const std::vector<std::array<std::int64_t, 3>> kShapes = {
    {1, 1, 1}, {1, 5, 3}, {7, 1, 129}, {64, 64, 64}, {129, 1030, 17}, {300, 37, 256}, {2, 3, 2000}};

TEST(Products, AgreeWithDoublePrecision) {
  for (const auto& [m, n, k] : kShapes) {
    Operands o(m, n, k);
    const std::vector<float> before = o.y;
    for (const int threads : {1, 2}) {
      Queue queue(threads);
      linear_forward(queue, o.mx(), o.mw(), o.my());
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t j = 0; j < n; ++j) {
          double sum = 0, magnitude = 0;
          for (std::int64_t l = 0; l < k; ++l) {
            const double term = double(o.x[i * k + l]) * o.w[j * k + l];
            sum += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(o.y[i * n + j], sum, bound(k, magnitude)) << m << " " << n << " " << k;
        }
      }
      std::vector<float> d_x = values("dx", m * k);
      const std::vector<float> d_x_before = d_x;
      linear_backward_input(queue, o.my(), o.mw(), {d_x.data(), m, k, k}, true);
      std::vector<float> d_w(n * k);
      linear_backward_weight(queue, o.my(), o.mx(), {d_w.data(), n, k, k}, false);
      for (std::int64_t i = 0; i < m; ++i) {
        for (std::int64_t l = 0; l < k; ++l) {
          double sum = d_x_before[i * k + l], magnitude = std::abs(sum);
          for (std::int64_t j = 0; j < n; ++j) {
            const double term = double(o.y[i * n + j]) * o.w[j * k + l];
            sum += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(d_x[i * k + l], sum, bound(n + 1, magnitude));
        }
      }
      for (std::int64_t j = 0; j < n; ++j) {
        for (std::int64_t l = 0; l < k; ++l) {
          double sum = 0, magnitude = 0;
          for (std::int64_t i = 0; i < m; ++i) {
            const double term = double(o.y[i * n + j]) * o.x[i * k + l];
            sum += term;
            magnitude += std::abs(term);
          }
          ASSERT_NEAR(d_w[j * k + l], sum, bound(m, magnitude));
        }
      }
    }
  }
}

// The promise under CANONICAL: a row's bits are the same for every number of rows in the product.
TEST(Products, ARowsBitsDontDependOnTheNumberOfRows) {
  Queue queue(1);
  for (const auto& [n, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {64, 64}, {512, 256}, {37, 129}, {1, 100}, {1365, 512}, {128, 341}}) {
    constexpr std::int64_t kMost = 300;
    Operands o(kMost, n, k);
    std::vector<float> whole(kMost * n), whole_back(kMost * k);
    linear_forward(queue, o.mx(), o.mw(), {whole.data(), kMost, n, n});
    linear_backward_input(queue, o.my(), o.mw(), {whole_back.data(), kMost, k, k}, false);
    for (const std::int64_t m : {1,  2,  3,  5,   7,   8,   15,  16,  17,  31,  33, 48,
                                 63, 64, 65, 100, 127, 128, 129, 191, 255, 257, 299}) {
      std::vector<float> part(m * n), part_back(m * k);
      linear_forward(queue, {o.x.data(), m, k, k}, o.mw(), {part.data(), m, n, n});
      ASSERT_EQ(std::memcmp(part.data(), whole.data(), part.size() * 4), 0)
          << m << " " << n << " " << k;
      linear_backward_input(queue, {o.y.data(), m, n, n}, o.mw(), {part_back.data(), m, k, k},
                            false);
      ASSERT_EQ(std::memcmp(part_back.data(), whole_back.data(), part_back.size() * 4), 0)
          << "backward " << m << " " << n << " " << k;
      // Rows may also start anywhere.
      linear_forward(queue, {o.x.data() + (kMost - m) * k, m, k, k}, o.mw(),
                     {part.data(), m, n, n});
      ASSERT_EQ(std::memcmp(part.data(), whole.data() + (kMost - m) * n, part.size() * 4), 0)
          << "from the end: " << m << " " << n << " " << k;
    }
  }
}

TEST(Products, BitsDontDependOnThreads) {
  for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
           {512, 512, 512}, {4096, 64, 64}, {333, 1500, 129}, {16, 16, 8192}}) {
    Operands o(m, n, k);
    std::vector<std::vector<float>> forward, input, weight;
    for (const int threads : {1, 2, 3, 8}) {
      Queue queue(threads);
      forward.emplace_back(m * n);
      input.emplace_back(m * k);
      weight.emplace_back(n * k);
      linear_forward(queue, o.mx(), o.mw(), {forward.back().data(), m, n, n});
      linear_backward_input(queue, o.my(), o.mw(), {input.back().data(), m, k, k}, false);
      linear_backward_weight(queue, o.my(), o.mx(), {weight.back().data(), n, k, k}, false);
      EXPECT_EQ(forward.front(), forward.back());
      EXPECT_EQ(input.front(), input.back());
      EXPECT_EQ(weight.front(), weight.back());
    }
  }
}

TEST(Products, StridedOperandsAndAccumulation) {
  Worker worker(0);
  constexpr std::int64_t kM = 20, kN = 12, kK = 9, kStride = 40;
  std::vector<float> a = values("a", kM * kStride), b = values("b", kN * kStride);
  std::vector<float> c(kM * kStride, 0.5F);
  product(worker, {a.data() + 3, kM, kK, kStride}, Transpose::kNo, {b.data() + 1, kN, kK, kStride},
          Transpose::kYes, {c.data() + 2, kM, kN, kStride}, true);
  for (std::int64_t i = 0; i < kM; ++i) {
    for (std::int64_t j = 0; j < kStride; ++j) {
      if (j < 2 || j >= 2 + kN) {
        ASSERT_EQ(c[i * kStride + j], 0.5F) << "outside the output";
        continue;
      }
      double sum = 0.5, magnitude = 0.5;
      for (std::int64_t l = 0; l < kK; ++l) {
        const double term = double(a[3 + i * kStride + l]) * b[1 + (j - 2) * kStride + l];
        sum += term;
        magnitude += std::abs(term);
      }
      ASSERT_NEAR(c[i * kStride + j], sum, bound(kK + 1, magnitude));
    }
  }
}

// Factors give what the plain product gives: of both types, with the extents of tiles and others.
template <class T>
class Factors : public ::testing::Test {};
using FactorTypes = ::testing::Types<float, BFloat16>;
TYPED_TEST_SUITE(Factors, FactorTypes);

template <class T>
std::vector<T> values_of(const char* name, std::int64_t count) {
  const std::vector<float> from = values(name, count);
  std::vector<T> result(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) {
    if constexpr (std::is_same_v<T, float>) {
      result[i] = from[i];
    } else {
      result[i] = to_bfloat16(from[i]);
    }
  }
  return result;
}

// Filled with NaN.
struct FactorRoom {
  FactorRoom(std::int64_t extent, std::int64_t inner)
      : bytes(static_cast<std::size_t>(factor_bytes(extent, inner)) + 64, std::byte{0xFF}) {}
  std::byte* data() {
    auto address = reinterpret_cast<std::uintptr_t>(bytes.data());
    return bytes.data() + (64 - address % 64) % 64;
  }
  std::vector<std::byte> bytes;
};

TYPED_TEST(Factors, GiveThePlainProduct) {
  Worker worker(0);
  for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{
           {128, 128, 64}, {128, 64, 128}, {32, 128, 24}, {7, 5, 3}, {33, 40, 70}, {1, 1, 1}}) {
    for (const Transpose ta : {Transpose::kNo, Transpose::kYes}) {
      for (const Transpose tb : {Transpose::kNo, Transpose::kYes}) {
        const bool turned_a = ta == Transpose::kYes, turned_b = tb == Transpose::kYes;
        std::vector<TypeParam> a = values_of<TypeParam>("a", m * k);
        std::vector<TypeParam> b = values_of<TypeParam>("b", n * k);
        const Matrix ma(a.data(), turned_a ? k : m, turned_a ? m : k, turned_a ? m : k);
        const Matrix mb(b.data(), turned_b ? n : k, turned_b ? k : n, turned_b ? k : n);
        std::vector<float> expected = values("c", m * n), found = expected;
        FactorRoom room_a(m, k), room_b(n, k);
        const Factor left = Factor::left(ma, ta, room_a.data());
        const Factor right = Factor::right(mb, tb, room_b.data());
        for (const bool accumulate : {true, false, true}) {
          product(worker, ma, ta, mb, tb, {expected.data(), m, n, n}, accumulate);
          product(worker, left, right, {found.data(), m, n, n}, accumulate);
          ASSERT_EQ(found, expected) << m << " x " << n << " x " << k;
        }
        if (m % kFactorGroup != 0 || turned_a) continue;
        // A group of rows alone. (The library may take another kernel for fewer rows.)
        product(worker, left, right, {expected.data(), m, n, n}, false);
        std::vector<float> part(static_cast<std::size_t>(kFactorGroup * n));
        product(worker, left.from_row(m - kFactorGroup, kFactorGroup), right,
                {part.data(), kFactorGroup, n, n}, false);
        for (std::size_t i = 0; i < part.size(); ++i) {
          ASSERT_NEAR(part[i], expected[expected.size() - part.size() + i],
                      bound(2 * k, static_cast<double>(4 * k)));
        }
      }
    }
  }
}

TYPED_TEST(Factors, WithoutTermsGiveZeros) {
  Worker worker(0);
  std::vector<TypeParam> none(1);
  FactorRoom room_a(5, 0), room_b(3, 0);
  const Factor left = Factor::left({none.data(), 5, 0, 1}, Transpose::kNo, room_a.data());
  const Factor right = Factor::right({none.data(), 0, 3, 3}, Transpose::kNo, room_b.data());
  std::vector<float> c(15, 2.0F);
  product(worker, left, right, {c.data(), 5, 3, 3}, true);
  EXPECT_EQ(c, std::vector<float>(15, 2.0F));
  product(worker, left, right, {c.data(), 5, 3, 3}, false);
  EXPECT_EQ(c, std::vector<float>(15, 0.0F));
}

TYPED_TEST(Factors, AreWrittenByRowsAndTurned) {
  Worker worker(0);
  for (const auto& [m, k] : std::vector<std::pair<std::int64_t, std::int64_t>>{
           {128, 128}, {32, 128}, {64, 32}, {40, 96}}) {
    std::vector<TypeParam> a = values_of<TypeParam>("a", m * k);
    std::vector<TypeParam> plain(static_cast<std::size_t>(m * (k + 8)));
    FactorRoom room(m, k), turned_room(k, m), room_b(24, k), room_c(24, m);
    const Factor written = Factor::to_be_written({plain.data(), m, k, k + 8}, room.data());
    const FactorRows rows = written.rows();
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < k; ++j) {
        auto* const chunk =
            reinterpret_cast<TypeParam*>(rows.at(i) + j / kFactorChunk * rows.chunk);
        chunk[j % kFactorChunk] = a[static_cast<std::size_t>(i * k + j)];
      }
    }
    const std::int64_t n = 24;
    std::vector<TypeParam> b = values_of<TypeParam>("b", n * k),
                           c = values_of<TypeParam>("c", n * m);
    const Matrix ma(a.data(), m, k, k), mb(b.data(), k, n, n), mc(c.data(), m, n, n);
    const auto expect = [&](std::int64_t extent, const Factor& left, Transpose transpose,
                            const Matrix& right, FactorRoom& right_room) {
      std::vector<float> expected(static_cast<std::size_t>(extent * n)), found(expected);
      product(worker, ma, transpose, right, Transpose::kNo, {expected.data(), extent, n, n}, false);
      product(worker, left, Factor::right(right, Transpose::kNo, right_room.data()),
              {found.data(), extent, n, n}, false);
      const std::int64_t inner = right.rows;
      for (std::size_t i = 0; i < found.size(); ++i) {
        ASSERT_NEAR(found[i], expected[i], bound(2 * inner, static_cast<double>(4 * inner)));
      }
    };
    expect(m, written, Transpose::kNo, mb, room_b);
    expect(k, written.transposed(turned_room.data()), Transpose::kYes, mc, room_c);
  }
}

}  // namespace
}  // namespace tessera
