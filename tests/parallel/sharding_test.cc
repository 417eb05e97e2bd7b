#include "parallel/sharding.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace tessera {
namespace {

UnitLayout example() {
  return {"layers.0",
          {{"norm", DType::kF32, Shape{64}},
           {"q", DType::kF32, Shape{97, 53}},  // 5141
           {"granule", DType::kF32, Shape{1024}},
           {"up", DType::kF32, Shape{211, 31}},  // 6541
           {"one", DType::kF32, Shape{1}}}};
}

TEST(UnitLayout, ParametersStartAtGranules) {
  const UnitLayout layout = example();
  const std::vector<std::int64_t> expected{0, 1024, 7168, 8192, 15360};
  for (std::size_t i = 0; i < layout.size(); ++i) EXPECT_EQ(layout.offset(i), expected[i]);
  EXPECT_EQ(layout.count(), 16384);
}

TEST(UnitLayout, SlicesAreEvenAndTile) {
  const UnitLayout layout = example();
  for (int ranks = 1; ranks <= 40; ++ranks) {
    std::int64_t at = 0, smallest = layout.count(), largest = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Slice slice = layout.slice(rank, ranks);
      EXPECT_EQ(slice.begin, at);
      EXPECT_EQ(slice.begin % kGranule, 0);
      EXPECT_EQ(layout.bounds(ranks)[static_cast<std::size_t>(rank)], slice.begin);
      at = slice.end;
      smallest = std::min(smallest, slice.count());
      largest = std::max(largest, slice.count());
    }
    EXPECT_EQ(at, layout.count());
    EXPECT_LE(largest - smallest, kGranule);
    EXPECT_EQ(largest, layout.largest_slice(ranks));
  }
}

TEST(UnitLayout, PiecesCoverEveryElementOnceAndNoPadding) {
  const UnitLayout layout = example();
  for (const int ranks : {1, 2, 3, 4, 5, 8, 16, 17}) {
    std::vector<std::vector<int>> seen;
    for (std::size_t i = 0; i < layout.size(); ++i) {
      seen.emplace_back(layout.parameter(i).shape.count(), 0);
    }
    std::int64_t straddling = 0;
    for (int rank = 0; rank < ranks; ++rank) {
      const Slice slice = layout.slice(rank, ranks);
      const std::vector<Piece> pieces = layout.pieces(slice);
      if (pieces.size() > 1) ++straddling;
      for (const Piece& piece : pieces) {
        EXPECT_GE(piece.offset, 0);
        EXPECT_LE(piece.offset + piece.count(), slice.count());
        // The place in the buffer is the same by either way.
        EXPECT_EQ(slice.begin + piece.offset, layout.offset(piece.parameter) + piece.begin);
        for (std::int64_t i = piece.begin; i < piece.end; ++i) {
          ++seen[piece.parameter][static_cast<std::size_t>(i)];
        }
      }
    }
    for (const auto& of_parameter : seen) {
      EXPECT_TRUE(std::all_of(of_parameter.begin(), of_parameter.end(),
                              [](int count) { return count == 1; }));
    }
    // A slice that holds parts of several parameters is the case that matters.
    if (ranks <= 5) {
      EXPECT_GT(straddling, 0);
    }
  }
}

TEST(UnitLayout, ViewsLieInTheBuffer) {
  const UnitLayout layout = example();
  std::vector<float> whole(static_cast<std::size_t>(layout.count()));
  const std::vector<View> views = layout.views(View(whole.data(), Shape{layout.count()}));
  ASSERT_EQ(views.size(), layout.size());
  for (std::size_t i = 0; i < views.size(); ++i) {
    EXPECT_EQ(views[i].as<float>(), whole.data() + layout.offset(i));
    EXPECT_EQ(views[i].shape(), layout.parameter(i).shape);
  }
}

TEST(UnitLayout, GatheredBuffersHoldEachParameterInItsType) {
  const UnitLayout layout = {"layers.0",
                             {{"q", DType::kBF16, Shape{1500}},
                              {"rate", DType::kF32, Shape{3}},
                              {"o", DType::kBF16, Shape{1024}}}};
  EXPECT_EQ(layout.gathered_bytes(0), 0);
  EXPECT_EQ(layout.gathered_bytes(1024), 2048);
  EXPECT_EQ(layout.gathered_bytes(2048), 4096);
  EXPECT_EQ(layout.gathered_bytes(2050), 4096 + 8);
  EXPECT_EQ(layout.gathered_bytes(3072), 4096 + 4096);
  EXPECT_EQ(layout.gathered_bytes(layout.count()), 4096 + 4096 + 2048);
  EXPECT_EQ(layout.gathered_bounds(4, DType::kBF16),
            (std::vector<std::int64_t>{0, 1024, 2048, 4096, 5120}));
  std::vector<std::uint16_t> words(5120);
  const std::vector<View> views = layout.gathered_views({DType::kBF16, {5120}, words.data()});
  EXPECT_EQ(views[1].dtype(), DType::kF32);
  EXPECT_EQ(views[1].raw(), reinterpret_cast<std::byte*>(words.data() + 2048));
  EXPECT_EQ(views[2].raw(), reinterpret_cast<std::byte*>(words.data() + 4096));
  EXPECT_EQ(views[2].dtype(), DType::kBF16);
}

}  // namespace
}  // namespace tessera
