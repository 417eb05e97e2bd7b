#include "parallel/sharding.h"

#include <algorithm>
#include <utility>

namespace tessera {

UnitLayout::UnitLayout(std::string name, std::vector<BufferSpec> parameters)
    : name_(std::move(name)), parameters_(std::move(parameters)) {
  for (const BufferSpec& parameter : parameters_) {
    TESSERA_CHECK(parameter.dtype == DType::kF32 || parameter.dtype == DType::kBF16);
    offsets_.push_back(count_);
    count_ += (parameter.shape.count() + kGranule - 1) / kGranule * kGranule;
  }
}

Slice UnitLayout::slice(int rank, int ranks) const {
  TESSERA_CHECK(0 <= rank && rank < ranks);
  const std::int64_t granules = count_ / kGranule;
  return {rank * granules / ranks * kGranule, (rank + 1) * granules / ranks * kGranule};
}

std::vector<std::int64_t> UnitLayout::bounds(int ranks) const {
  std::vector<std::int64_t> cuts{0};
  for (int rank = 0; rank < ranks; ++rank) cuts.push_back(slice(rank, ranks).end);
  return cuts;
}

std::int64_t UnitLayout::largest_slice(int ranks) const {
  const std::int64_t granules = count_ / kGranule;
  return (granules + ranks - 1) / ranks * kGranule;
}

std::vector<Piece> UnitLayout::pieces(const Slice& slice) const {
  std::vector<Piece> pieces;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const std::int64_t begin = std::max(slice.begin, offsets_[i]);
    const std::int64_t end = std::min(slice.end, offsets_[i] + parameters_[i].shape.count());
    if (begin >= end) continue;
    pieces.push_back({i, begin - offsets_[i], end - offsets_[i], begin - slice.begin});
  }
  return pieces;
}

std::vector<View> UnitLayout::views(const View& whole) const {
  TESSERA_CHECK(whole.count() == count_ && whole.dtype() == DType::kF32);
  std::vector<View> views;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    views.emplace_back(whole.dtype(), parameters_[i].shape,
                       whole.raw() + offsets_[i] * size_of(whole.dtype()));
  }
  return views;
}

std::int64_t UnitLayout::gathered_bytes(std::int64_t element) const {
  TESSERA_CHECK(0 <= element && element <= count_);
  std::int64_t bytes = 0;
  for (std::size_t i = 0; i < parameters_.size() && offsets_[i] < element; ++i) {
    const std::int64_t end = i + 1 < parameters_.size() ? offsets_[i + 1] : count_;
    bytes += (std::min(element, end) - offsets_[i]) * size_of(parameters_[i].dtype);
  }
  return bytes;
}

std::vector<std::int64_t> UnitLayout::gathered_bounds(int ranks, DType word) const {
  std::vector<std::int64_t> cuts = bounds(ranks);
  for (std::int64_t& cut : cuts) cut = gathered_bytes(cut) / size_of(word);
  return cuts;
}

std::vector<View> UnitLayout::gathered_views(const View& whole) const {
  TESSERA_CHECK(whole.bytes() == gathered_bytes(count_));
  std::vector<View> views;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    views.emplace_back(parameters_[i].dtype, parameters_[i].shape,
                       whole.raw() + gathered_bytes(offsets_[i]));
  }
  return views;
}

void gather_unit(Communicator& communicator, const UnitLayout& layout,
                 std::span<const std::int64_t> bounds, const View& mine, const View& whole) {
  communicator.all_gather_slices(Traffic::kGather, layout.name(), bounds, mine, whole);
}

void start_gather_unit(Communicator& communicator, Communicator::Transfer& transfer,
                       const UnitLayout& layout, std::span<const std::int64_t> bounds,
                       const View& mine, const View& whole) {
  communicator.start_all_gather_slices(transfer, Traffic::kGather, layout.name(), bounds, mine,
                                       whole);
}

}  // namespace tessera
