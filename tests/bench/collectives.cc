// Gathers and canonical sums against MPI's own collectives. Run under mpirun.
#include <mpi.h>

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "parallel/canonical_sum.h"
#include "parallel/communicator.h"
#include "parallel/sharding.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

// All ranks make the same calls: as many rounds, one call in each.
constexpr int kRounds = 15;

// A rank's slice of an array cut evenly, as MPI wants it told.
struct Counts {
  std::vector<int> counts, offsets;
  explicit Counts(const std::vector<std::int64_t>& bounds) {
    for (std::size_t r = 0; r + 1 < bounds.size(); ++r) {
      counts.push_back(static_cast<int>(bounds[r + 1] - bounds[r]));
      offsets.push_back(static_cast<int>(bounds[r]));
    }
  }
};

void measure(Device& device, Communicator& communicator, std::int64_t count, const Table* table) {
  const int rank = communicator.rank(), ranks = communicator.size();
  const UnitLayout layout("unit", {{"weight", DType::kF32, Shape{count}}});
  const std::vector<std::int64_t> bounds = layout.bounds(ranks);
  const Counts cut(bounds);
  const Slice slice = layout.slice(rank, ranks);
  const Memory whole(device, DType::kF32, {layout.count()});
  const Memory mine(device, DType::kF32, {std::max<std::int64_t>(1, slice.count())});

  const QuantumShare share(Accumulate::kSharded, ranks, ranks);
  const Layout buffers(CanonicalSum::buffers(layout, share, rank));
  const Layout workspace({CanonicalSum::workspace(layout, share, rank)});
  const Memory room(device, DType::kF32, {buffers.bytes() / 4 + 1});
  const Memory work_room(device, DType::kF32, {workspace.bytes() / 4 + 1});
  CanonicalSum sum(layout, share, communicator, device.queue(), buffers.views(room.view().raw()),
                   workspace.view(work_room.view().raw(), 0));

  const auto in_step = [&](const std::function<void()>& body) -> std::function<void()> {
    return [&communicator, body] {
      communicator.barrier("bench");
      body();
      communicator.barrier("bench");
    };
  };
  const View own(DType::kF32, {slice.count()}, mine.view().raw());
  const std::vector<double> seconds = alternate(
      {in_step([&] {
         communicator.all_gather_slices(Traffic::kGather, "unit", bounds, own, whole.view());
       }),
       in_step([&] {
         MPI_Allgatherv(mine.view().raw(), cut.counts[static_cast<std::size_t>(rank)], MPI_FLOAT,
                        whole.view().raw(), cut.counts.data(), cut.offsets.data(), MPI_FLOAT,
                        communicator.handle());
       }),
       in_step([&] {
         sum.push(whole.view());
         sum.finish();
       }),
       in_step([&] {
         MPI_Reduce_scatter(whole.view().raw(), mine.view().raw(), cut.counts.data(), MPI_FLOAT,
                            MPI_SUM, communicator.handle());
       })},
      kRounds, 0);
  if (table == nullptr) return;
  const double gigabytes = 4e-9 * static_cast<double>(count);
  table->row({number(4e-6 * static_cast<double>(count)), number(gigabytes / seconds[0], 2),
              number(gigabytes / seconds[1], 2), number(seconds[1] / seconds[0], 2),
              number(gigabytes / seconds[2], 2), number(gigabytes / seconds[3], 2),
              number(seconds[3] / seconds[2], 2)});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  keep_large_allocations();
  MpiSession session(&argc, &argv);
  CLI::App app(
      "Gathers and canonical sums against MPI_Allgatherv and MPI_Reduce_scatter; "
      "run with mpirun -n RANKS");
  int threads = 1;
  app.add_option("--threads", threads, "threads of a rank")->check(CLI::Range(1, 4096));
  CLI11_PARSE(app, argc, argv);
  Communicator communicator(MPI_COMM_WORLD);
  Device device(threads);
  std::optional<bench::Table> table;
  if (communicator.rank() == 0) {
    bench::print_machine(threads);
    table.emplace(std::to_string(communicator.size()) +
                      " ranks; GB of the whole array a second, one quantum a rank",
                  std::vector<std::string>{"MB", "gather", "MPI_Allgatherv", "ours/MPI", "sum",
                                           "MPI_Reduce_scatter", "ours/MPI"});
  }
  for (const std::int64_t count : {1 << 16, 1 << 20, 1 << 22, 1 << 24}) {
    bench::measure(device, communicator, count, table ? &*table : nullptr);
  }
  return 0;
}
