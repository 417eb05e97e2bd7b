// A View is a shape and a pointer to row-major elements of one type. It owns nothing.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <vector>

#include "runtime/error.h"

namespace tessera {

enum class DType : std::uint8_t { kF32, kBF16, kF64, kI32, kU32, kI64 };

// The upper half of an f32: 8 bits of exponent, 8 of significand with the hidden one.
struct BFloat16 {
  std::uint16_t bits = 0;
  bool operator==(const BFloat16&) const = default;
};

// To the nearest, ties to even; too large becomes infinity, NaN stays NaN.
inline BFloat16 to_bfloat16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7FFFFFFFU) > 0x7F800000U) {
    return {static_cast<std::uint16_t>(bits >> 16U | 0x40U)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7FFFU + (bits >> 16U & 1U)) >> 16U)};
}
inline float to_float(BFloat16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16U);
}

constexpr std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kBF16:
      return 2;
    case DType::kF32:
    case DType::kI32:
    case DType::kU32:
      return 4;
    case DType::kF64:
    case DType::kI64:
      return 8;
  }
  return 0;
}
const char* name_of(DType dtype);

template <class T>
DType dtype_of();
template <>
inline DType dtype_of<float>() {
  return DType::kF32;
}
template <>
inline DType dtype_of<BFloat16>() {
  return DType::kBF16;
}
template <>
inline DType dtype_of<double>() {
  return DType::kF64;
}
template <>
inline DType dtype_of<std::int32_t>() {
  return DType::kI32;
}
template <>
inline DType dtype_of<std::uint32_t>() {
  return DType::kU32;
}
template <>
inline DType dtype_of<std::int64_t>() {
  return DType::kI64;
}

// Up to four extents; no heap, so that views can be made inside a step.
class Shape {
 public:
  static constexpr int kMaxRank = 4;
  Shape() = default;
  Shape(std::initializer_list<std::int64_t> extents);
  explicit Shape(const std::vector<std::int64_t>& extents);
  int rank() const { return rank_; }
  std::int64_t operator[](int axis) const { return extents_[static_cast<std::size_t>(axis)]; }
  std::int64_t count() const;  // elements; 1 for rank 0
  bool operator==(const Shape& other) const = default;
  std::string to_string() const;  // "[4, 512]"

 private:
  int rank_ = 0;
  std::array<std::int64_t, kMaxRank> extents_{};
};

class View {
 public:
  View() = default;
  View(DType dtype, Shape shape, void* data) : dtype_(dtype), shape_(shape), data_(data) {}
  template <class T>
  View(T* data, Shape shape) : dtype_(dtype_of<T>()), shape_(shape), data_(data) {}

  DType dtype() const { return dtype_; }
  const Shape& shape() const { return shape_; }
  std::int64_t extent(int axis) const { return shape_[axis]; }
  std::int64_t count() const { return shape_.count(); }
  std::int64_t bytes() const { return count() * size_of(dtype_); }
  bool empty() const { return data_ == nullptr; }
  std::byte* raw() const { return static_cast<std::byte*>(data_); }

  // The elements; throws kInternal when T isn't the view's type.
  template <class T>
  T* as() const {
    TESSERA_CHECK(dtype_ == dtype_of<T>());
    return static_cast<T*>(data_);
  }
  // The same elements under another shape of the same count.
  View reshaped(Shape shape) const;
  // Elements [begin, end) of the first axis.
  View slice(std::int64_t begin, std::int64_t end) const;

 private:
  DType dtype_ = DType::kF32;
  Shape shape_;
  void* data_ = nullptr;
};

}  // namespace tessera
