#include "runtime/view.h"

namespace tessera {

const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF64:
      return "f64";
    case DType::kI32:
      return "i32";
    case DType::kU32:
      return "u32";
    case DType::kI64:
      return "i64";
  }
  return "?";
}

Shape::Shape(std::initializer_list<std::int64_t> extents) {
  TESSERA_CHECK(extents.size() <= kMaxRank);
  for (const std::int64_t extent : extents) {
    TESSERA_CHECK(extent >= 0);
    extents_[static_cast<std::size_t>(rank_++)] = extent;
  }
}

Shape::Shape(const std::vector<std::int64_t>& extents) {
  TESSERA_CHECK(extents.size() <= kMaxRank);
  for (const std::int64_t extent : extents) {
    TESSERA_CHECK(extent >= 0);
    extents_[static_cast<std::size_t>(rank_++)] = extent;
  }
}

std::int64_t Shape::count() const {
  std::int64_t product = 1;
  for (int axis = 0; axis < rank_; ++axis) product *= extents_[static_cast<std::size_t>(axis)];
  return product;
}

std::string Shape::to_string() const {
  std::string text = "[";
  for (int axis = 0; axis < rank_; ++axis) {
    if (axis > 0) text += ", ";
    text += std::to_string(extents_[static_cast<std::size_t>(axis)]);
  }
  return text + "]";
}

View View::reshaped(Shape shape) const {
  TESSERA_CHECK(shape.count() == count());
  return {dtype_, shape, data_};
}

View View::slice(std::int64_t begin, std::int64_t end) const {
  TESSERA_CHECK(shape_.rank() >= 1 && 0 <= begin && begin <= end && end <= shape_[0]);
  const std::int64_t row = shape_[0] == 0 ? 0 : count() / shape_[0];
  View part = *this;
  Shape shape;
  switch (shape_.rank()) {
    case 1:
      shape = {end - begin};
      break;
    case 2:
      shape = {end - begin, shape_[1]};
      break;
    case 3:
      shape = {end - begin, shape_[1], shape_[2]};
      break;
    default:
      shape = {end - begin, shape_[1], shape_[2], shape_[3]};
      break;
  }
  part.shape_ = shape;
  part.data_ = raw() + begin * row * size_of(dtype_);
  return part;
}

}  // namespace tessera
