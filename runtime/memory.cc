#include "runtime/memory.h"

#include <algorithm>

namespace tessera {

std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

Layout::Layout(std::vector<BufferSpec> buffers) : buffers_(std::move(buffers)) {
  offsets_.reserve(buffers_.size());
  for (const BufferSpec& buffer : buffers_) {
    offsets_.push_back(bytes_);
    bytes_ += aligned(buffer.bytes());
  }
}

View Layout::view(std::byte* base, std::size_t i) const {
  return {buffers_[i].dtype, buffers_[i].shape, base + offsets_[i]};
}

std::vector<View> Layout::views(std::byte* base) const {
  std::vector<View> views;
  views.reserve(buffers_.size());
  for (std::size_t i = 0; i < buffers_.size(); ++i) views.push_back(view(base, i));
  return views;
}

std::size_t MemoryPlan::book(const std::string& category, const std::string& name,
                             std::int64_t bytes) {
  TESSERA_CHECK(bytes >= 0);
  bookings_.push_back({category, name, bytes, bytes_});
  bytes_ += aligned(bytes);
  return bookings_.size() - 1;
}

std::vector<std::pair<std::string, std::int64_t>> MemoryPlan::categories() const {
  std::vector<std::pair<std::string, std::int64_t>> sums;
  for (const Booking& booking : bookings_) {
    const auto found = std::find_if(sums.begin(), sums.end(),
                                    [&](const auto& sum) { return sum.first == booking.category; });
    if (found == sums.end()) {
      sums.emplace_back(booking.category, aligned(booking.bytes));
    } else {
      found->second += aligned(booking.bytes);
    }
  }
  return sums;
}

Arena::Arena(Device& device, const MemoryPlan& plan)
    : device_(device),
      bookings_(plan.bookings()),
      base_(device.allocate(plan.bytes())),
      bytes_(plan.bytes()) {}

Arena::~Arena() { device_.release(base_, bytes_); }

std::byte* Arena::at(std::size_t booking) const {
  TESSERA_CHECK(booking < bookings_.size());
  return base_ + bookings_[booking].offset;
}

View Arena::view(std::size_t booking, DType dtype, Shape shape) const {
  const View view(dtype, shape, at(booking));
  TESSERA_CHECK(view.bytes() <= bookings_[booking].bytes);
  return view;
}

}  // namespace tessera
