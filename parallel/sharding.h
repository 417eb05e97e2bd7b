// How a unit's parameters lie in its flat buffer, and how that is cut into the ranks' slices
// (fully sharded data parallel).
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/memory.h"
#include "runtime/view.h"

namespace tessera {

// Parameters start, and slices are cut, at multiples of this many elements.
constexpr std::int64_t kGranule = 1024;

// Elements [begin, end) of a unit's flat buffer; multiples of kGranule; may be empty.
struct Slice {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t count() const { return end - begin; }
  bool operator==(const Slice&) const = default;
};

// The part of one parameter that lies in a slice. Padding belongs to no piece.
struct Piece {
  std::size_t parameter = 0;  // index in the unit
  std::int64_t begin = 0;     // elements [begin, end) of the parameter, flat
  std::int64_t end = 0;
  std::int64_t offset = 0;  // of element `begin`, from the slice's start
  std::int64_t count() const { return end - begin; }
  bool operator==(const Piece&) const = default;
};

// The flat buffer [count()] f32 of a unit: each parameter at the next multiple of kGranule, the
// rest padding. What is gathered to compute with has the same order, each parameter and the padding
// behind it in the type that its BufferSpec says, f32 or bf16. Padding is zero in parameters,
// gradients and moments alike: whoever fills a buffer clears it first, and no one writes there.
class UnitLayout {
 public:
  UnitLayout(std::string name, std::vector<BufferSpec> parameters);

  const std::string& name() const { return name_; }
  std::size_t size() const { return parameters_.size(); }
  const BufferSpec& parameter(std::size_t i) const { return parameters_[i]; }
  std::int64_t offset(std::size_t i) const { return offsets_[i]; }
  std::int64_t count() const { return count_; }  // elements with padding

  // As even as granules allow: rank r has granules [r*G div W, (r+1)*G div W).
  Slice slice(int rank, int ranks) const;
  std::vector<std::int64_t> bounds(int ranks) const;  // ranks + 1 cuts
  std::int64_t largest_slice(int ranks) const;
  // In order of the buffer.
  std::vector<Piece> pieces(const Slice& slice) const;
  // Every parameter in a whole buffer [count()] f32.
  std::vector<View> views(const View& whole) const;

  // Bytes before an element of the flat buffer in what is gathered; gathered_bytes(count()) is all.
  std::int64_t gathered_bytes(std::int64_t element) const;
  // The cuts of bounds(), in elements of `word`: bf16, or f32 where every parameter is f32.
  std::vector<std::int64_t> gathered_bounds(int ranks, DType word) const;
  // Every parameter in a whole gathered buffer.
  std::vector<View> gathered_views(const View& whole) const;

 private:
  std::string name_;
  std::vector<BufferSpec> parameters_;
  std::vector<std::int64_t> offsets_;
  std::int64_t count_ = 0;
};

// Collective. mine: this rank's part, may be its place in whole, both of the words that `bounds` =
// layout.gathered_bounds(ranks, word) counts, which the caller keeps. In two parts, `whole` must be
// left alone until the transfer is finished.
void gather_unit(Communicator& communicator, const UnitLayout& layout,
                 std::span<const std::int64_t> bounds, const View& mine, const View& whole);

void start_gather_unit(Communicator& communicator, Communicator::Transfer& transfer,
                       const UnitLayout& layout, std::span<const std::int64_t> bounds,
                       const View& mine, const View& whole);

}  // namespace tessera
