// A worker's prepared matrix products. Private to runtime/.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "runtime/view.h"

namespace tessera {

struct PreparedProduct;

struct ProductKey {
  std::int64_t m, n, k;
  std::int64_t stride_a, stride_b, stride_c;
  bool transpose_a, transpose_b, accumulate;
  DType operands, result;
  bool operator==(const ProductKey&) const = default;
};

// Open addressing by a hash of the key: a lookup allocates nothing.
class ProductCache {
 public:
  ProductCache();
  ~ProductCache();
  PreparedProduct& find_or_prepare(const ProductKey& key);
  // Room for so many bytes; kept, so that a size is allocated once. Three are enough: operands
  // and a result of this worker's piece, and an operand that all workers share.
  std::byte* scratch(std::size_t which, std::int64_t bytes);

 private:
  void grow();
  struct Slot {
    ProductKey key{};
    std::unique_ptr<PreparedProduct> product;
  };
  std::vector<Slot> slots_;
  std::size_t used_ = 0;
  struct Room {
    std::byte* memory = nullptr;
    std::int64_t bytes = 0;
  };
  std::array<Room, 3> scratch_;
};

}  // namespace tessera
