// Our own products, in vectors of every instruction set that this machine has and on tiles, which
// are emulated where it has none: against double precision over shapes with every kind of tail, and
// the bits of an element.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

#include "runtime/amx.h"
#include "runtime/random.h"
#include "runtime/vector_products.h"
#include "tests/runtime/emulated_amx.h"
#include "tests/targets.h"

namespace tessera {
namespace {

// Calls body(kernels) for each of them.
template <class Body>
void for_kernels(const Body& body) {
  testing::for_targets([&](const std::string& target) {
    SCOPED_TRACE("vectors, " + target);
    body(vector_kernels());
  });
  if (amx_granted()) {
    SCOPED_TRACE("tiles");
    body(amx_kernels());
  }
#if defined(__x86_64__)
  SCOPED_TRACE("emulated tiles");
  body(emulated_amx_kernels());
#endif
}

template <class T>
std::vector<T> values(const char* name, std::int64_t count) {
  const RandomStream stream(7, name);
  std::vector<T> result(static_cast<std::size_t>(count));
  for (std::int64_t i = 0; i < count; ++i) {
    const auto value = static_cast<float>(stream.normal(static_cast<std::uint64_t>(i)));
    if constexpr (std::is_same_v<T, float>) {
      result[static_cast<std::size_t>(i)] = value;
    } else {
      result[static_cast<std::size_t>(i)] = to_bfloat16(value);
    }
  }
  return result;
}

double wide(float value) { return value; }
double wide(BFloat16 value) { return to_float(value); }

// Filled with NaN, at a multiple of 64.
class Room {
 public:
  explicit Room(std::int64_t bytes)
      : bytes_(static_cast<std::size_t>(bytes) + 64, std::byte{0xFF}) {}
  std::byte* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(bytes_.data());
    return bytes_.data() + (64 - address % 64) % 64;
  }

 private:
  std::vector<std::byte> bytes_;
};

constexpr std::int64_t kMargin = 5;  // before each row and after, so that strides are odd too

// op(A) [m, k] and op(B) [k, n] as they lie and as they were packed.
template <class T>
struct Operands {
  Operands(const PackedKernels& kernels, std::int64_t m, std::int64_t n, std::int64_t k,
           bool turned_a, bool turned_b)
      : kernels(kernels),
        k(k),
        turned_a(turned_a),
        turned_b(turned_b),
        stride_a((turned_a ? m : k) + 2 * kMargin),
        stride_b((turned_b ? k : n) + 2 * kMargin),
        a(values<T>("a", (turned_a ? k : m) * stride_a)),
        b(values<T>("b", (turned_b ? n : k) * stride_b)),
        room_a(packed_bytes(m, k, kernels.element_bytes())),
        room_b(packed_bytes(n, k, kernels.element_bytes())),
        room(packed_room(m, n)) {
    kernels.pack_rows(operand(a, stride_a, turned_a), m, k, room_a.data());
    kernels.pack_columns(operand(b, stride_b, turned_b), n, k, room_b.data());
  }
  static PackOperand operand(const std::vector<T>& of, std::int64_t stride, bool turned) {
    return {reinterpret_cast<const std::byte*>(of.data() + kMargin), turned ? 1 : stride,
            turned ? stride : 1, dtype_of<T>()};
  }
  double left(std::int64_t row, std::int64_t term) const {
    const std::int64_t at = turned_a ? term * stride_a + row : row * stride_a + term;
    return wide(a[static_cast<std::size_t>(kMargin + at)]);
  }
  double right(std::int64_t term, std::int64_t column) const {
    const std::int64_t at = turned_b ? column * stride_b + term : term * stride_b + column;
    return wide(b[static_cast<std::size_t>(kMargin + at)]);
  }
  void multiply(std::int64_t rows, std::int64_t columns, PackedResult c, bool accumulate) {
    kernels.multiply(rows, columns, k, packed_rows(room_a.data(), k, kernels.element_bytes()),
                     {room_b.data(), k}, c, accumulate, room.data());
  }

  const PackedKernels& kernels;
  std::int64_t k;
  bool turned_a, turned_b;
  std::int64_t stride_a, stride_b;
  std::vector<T> a, b;
  Room room_a, room_b, room;
};

// |computed - exact| <= (k + 1) eps |a||b|, and of a bf16 result half a step of it.
template <class T, class C>
void expect_product(const PackedKernels& kernels, std::int64_t m, std::int64_t n, std::int64_t k,
                    bool turned_a, bool turned_b, bool accumulate) {
  Operands<T> o(kernels, m, n, k, turned_a, turned_b);
  const std::int64_t stride = n + 2 * kMargin;
  std::vector<C> c = values<C>("c", m * stride);
  const std::vector<C> before = c;
  o.multiply(m, n, {reinterpret_cast<std::byte*>(c.data() + kMargin), stride, dtype_of<C>()},
             accumulate);
  constexpr double kEps = std::numeric_limits<float>::epsilon() / 2.0;
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = -kMargin; j < n + kMargin; ++j) {
      const auto at = static_cast<std::size_t>(i * stride + kMargin + j);
      if (j < 0 || j >= n) {
        ASSERT_EQ(wide(c[at]), wide(before[at])) << "outside of the result";
        continue;
      }
      double sum = accumulate ? wide(before[at]) : 0.0, magnitude = std::abs(sum);
      for (std::int64_t term = 0; term < k; ++term) {
        const double product = o.left(i, term) * o.right(term, j);
        sum += product;
        magnitude += std::abs(product);
      }
      double bound = static_cast<double>(k + 1) * kEps * magnitude;
      if constexpr (!std::is_same_v<C, float>) bound += 0x1p-8 * std::abs(sum);
      ASSERT_NEAR(wide(c[at]), sum, bound)
          << m << " x " << n << " x " << k << " turned " << turned_a << turned_b << " add "
          << accumulate << " at " << i << ", " << j;
    }
  }
}

TEST(PackedProducts, AgreeWithDoublePrecision) {
  for_kernels([](const PackedKernels& kernels) {
    for (const auto& [m, n, k] : std::vector<std::array<std::int64_t, 3>>{{1, 1, 1},
                                                                          {3, 32, 32},
                                                                          {2, 31, 33},
                                                                          {7, 33, 129},
                                                                          {32, 64, 256},
                                                                          {65, 5, 300},
                                                                          {37, 300, 70},
                                                                          {113, 40, 1300}}) {
      for (const bool turned_a : {false, true}) {
        for (const bool turned_b : {false, true}) {
          for (const bool accumulate : {false, true}) {
            if (kernels.element == DType::kF32) {
              expect_product<float, float>(kernels, m, n, k, turned_a, turned_b, accumulate);
            }
            expect_product<BFloat16, float>(kernels, m, n, k, turned_a, turned_b, accumulate);
          }
          expect_product<BFloat16, BFloat16>(kernels, m, n, k, turned_a, turned_b, false);
        }
      }
    }
  });
}

// Of few rows or columns, from anywhere; of terms in parts.
template <class T>
void expect_bits_of_row_and_column(const PackedKernels& kernels) {
  constexpr std::int64_t kM = 70, kN = 290, kK = 1100;
  const std::int64_t element = kernels.element_bytes();
  Operands<T> o(kernels, kM, kN, kK, false, true);
  std::vector<float> whole(kM * kN);
  const auto result = [](std::vector<float>& c, std::int64_t stride) {
    return PackedResult{reinterpret_cast<std::byte*>(c.data()), stride, DType::kF32};
  };
  o.multiply(kM, kN, result(whole, kN), false);
  for (const std::int64_t m : {1, 2, 3, 4, 5, 31, 32, 33, 69}) {
    for (const std::int64_t n : {1, 7, 8, 31, 32, 33, 255, 257}) {
      std::vector<float> part(static_cast<std::size_t>(m * n));
      o.multiply(m, n, result(part, n), false);
      for (std::int64_t i = 0; i < m; ++i) {
        ASSERT_EQ(
            std::memcmp(&part[static_cast<std::size_t>(i * n)],
                        &whole[static_cast<std::size_t>(i * kN)], static_cast<std::size_t>(n) * 4),
            0)
            << m << " x " << n << ", row " << i;
      }
    }
  }
  // The last rows as first ones, of an operand of their own.
  const std::int64_t rows = kM - 33;
  Room room(packed_bytes(rows, kK, element));
  const auto* const from =
      reinterpret_cast<const std::byte*>(o.a.data() + kMargin + 33 * o.stride_a);
  kernels.pack_rows({from, o.stride_a, 1, dtype_of<T>()}, rows, kK, room.data());
  std::vector<float> last(static_cast<std::size_t>(rows * kN));
  kernels.multiply(rows, kN, kK, packed_rows(room.data(), kK, element), {o.room_b.data(), kK},
                   result(last, kN), false, o.room.data());
  EXPECT_EQ(std::memcmp(last.data(), &whole[33 * kN], last.size() * 4), 0);

  std::vector<float> parts(whole.size());
  for (std::int64_t first = 0; first < kK; first += kPackedDepth) {
    const std::int64_t before = first * kPackGroup * element;
    FactorRows left = packed_rows(o.room_a.data(), kK, element);
    left.data += before;
    kernels.multiply(kM, kN, std::min(kPackedDepth, kK - first), left,
                     {o.room_b.data() + before, kK}, result(parts, kN), first > 0, o.room.data());
  }
  EXPECT_EQ(std::memcmp(parts.data(), whole.data(), whole.size() * 4), 0);

  // Rows of the kernels' own type where they lie, behind the last term of which there is no number.
  if constexpr (std::is_same_v<T, float>) {
    for (std::int64_t row = 0; row < kM; ++row) {
      const auto end = o.a.begin() + row * o.stride_a + kMargin + kK;
      std::fill(end, end + kMargin, std::numeric_limits<float>::quiet_NaN());
    }
    std::vector<float> plain(whole.size());
    auto* const lying = reinterpret_cast<std::byte*>(o.a.data() + kMargin);
    const std::int64_t row_bytes = o.stride_a * 4;
    kernels.multiply(kM, kN, kK, {lying, row_bytes, kPackGroup * row_bytes, kPackChunk * 4},
                     {o.room_b.data(), kK}, result(plain, kN), false, o.room.data());
    EXPECT_EQ(std::memcmp(plain.data(), whole.data(), whole.size() * 4), 0);
  }
}

TEST(PackedProducts, AnElementsBitsDependOnItsRowAndColumnAlone) {
  for_kernels([](const PackedKernels& kernels) {
    if (kernels.element == DType::kF32) expect_bits_of_row_and_column<float>(kernels);
    if (kernels.element == DType::kBF16) expect_bits_of_row_and_column<BFloat16>(kernels);
  });
}

template <class T>
void expect_turned(const PackedKernels& kernels, T nan) {
  const std::int64_t element = kernels.element_bytes();
  for (const auto& [m, k] : std::vector<std::array<std::int64_t, 2>>{{1, 1}, {32, 64}, {40, 70}}) {
    Operands<T> o(kernels, m, 1, k, false, false);
    // What lies behind the last row may be anything.
    const FactorRows rows = packed_rows(o.room_a.data(), k, element);
    for (std::int64_t row = m; row < rounded_up(m, kPackGroup); ++row) {
      for (std::int64_t term = 0; term < k; term += kPackChunk) {
        std::memcpy(rows.at(row) + term / kPackChunk * rows.chunk, &nan, sizeof nan);
      }
    }
    Room turned(packed_bytes(k, m, element)), expected(packed_bytes(k, m, element));
    kernels.turn_rows(o.room_a.data(), m, k, turned.data());
    kernels.pack_rows(Operands<T>::operand(o.a, o.stride_a, true), k, m, expected.data());
    const auto bytes = static_cast<std::size_t>(packed_bytes(k, m, element));
    EXPECT_EQ(std::memcmp(turned.data(), expected.data(), bytes), 0) << m << " x " << k;
  }
}

TEST(PackedProducts, RowsAreTurned) {
  for_kernels([](const PackedKernels& kernels) {
    const float nan = std::numeric_limits<float>::quiet_NaN();
    if (kernels.element == DType::kF32) expect_turned(kernels, nan);
    if (kernels.element == DType::kBF16) expect_turned(kernels, to_bfloat16(nan));
  });
}

}  // namespace
}  // namespace tessera
