// Memory is booked while a run is planned, and granted once: one arena, huge pages, touched at
// start-up, reused in every step. The table of bookings is also the memory report.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// One named array that a layer or the trainer needs.
struct BufferSpec {
  std::string name;
  DType dtype = DType::kF32;
  Shape shape;
  std::int64_t bytes() const { return shape.count() * size_of(dtype); }
};

// Every block of memory starts at a multiple of this many bytes.
constexpr std::int64_t kAlignment = 256;
std::int64_t aligned(std::int64_t bytes);

// Places a list of buffers one after another in a block; views come from the block's base.
class Layout {
 public:
  Layout() = default;
  explicit Layout(std::vector<BufferSpec> buffers);
  std::int64_t bytes() const { return bytes_; }
  std::size_t size() const { return buffers_.size(); }
  const BufferSpec& spec(std::size_t i) const { return buffers_[i]; }
  View view(std::byte* base, std::size_t i) const;
  std::vector<View> views(std::byte* base) const;

 private:
  std::vector<BufferSpec> buffers_;
  std::vector<std::int64_t> offsets_;
  std::int64_t bytes_ = 0;
};

// What a run will hold, by category ("parameters", "activations", ...) and name.
class MemoryPlan {
 public:
  struct Booking {
    std::string category;
    std::string name;
    std::int64_t bytes = 0;
    std::int64_t offset = 0;
  };
  // Returns the booking's number, to be redeemed at the arena.
  std::size_t book(const std::string& category, const std::string& name, std::int64_t bytes);
  const std::vector<Booking>& bookings() const { return bookings_; }
  std::int64_t bytes() const { return bytes_; }
  // Sums by category, in the order of first booking.
  std::vector<std::pair<std::string, std::int64_t>> categories() const;

 private:
  std::vector<Booking> bookings_;
  std::int64_t bytes_ = 0;
};

// The plan's memory on a device; zeroed. Owns it until it is destroyed.
class Arena {
 public:
  Arena(Device& device, const MemoryPlan& plan);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  std::byte* at(std::size_t booking) const;
  // A booking as one flat array of `count` elements; throws kInternal when it doesn't fit.
  View view(std::size_t booking, DType dtype, Shape shape) const;

 private:
  Device& device_;
  std::vector<MemoryPlan::Booking> bookings_;
  std::byte* base_ = nullptr;
  std::int64_t bytes_ = 0;
};

}  // namespace tessera
