#include "parallel/sharding.h"

#include <algorithm>
#include <utility>

namespace tessera {

UnitLayout::UnitLayout(std::string name, std::vector<BufferSpec> parameters)
    : name_(std::move(name)), parameters_(std::move(parameters)) {
  for (const BufferSpec& parameter : parameters_) {
    TESSERA_CHECK(parameter.dtype == DType::kF32);
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
  TESSERA_CHECK(whole.count() == count_);
  std::vector<View> views;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    views.emplace_back(whole.dtype(), parameters_[i].shape,
                       whole.raw() + offsets_[i] * size_of(whole.dtype()));
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
