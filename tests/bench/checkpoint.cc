// Writing and reading checkpoints against plain large writes and reads of as many bytes on the same
// file system. Run under mpirun or alone.
#include "parallel/checkpoint.h"

#include <fcntl.h>
#include <mpi.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

constexpr std::size_t kBlock = std::size_t{64} << 20;

// As a checkpoint does it: written, synced, renamed.
void write_plain(const std::string& path, const View& data) {
  const std::string partial = path + ".partial";
  const int file = open(partial.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0644);
  TESSERA_CHECK(file >= 0);
  const auto bytes = static_cast<std::size_t>(data.bytes());
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t wrote = write(file, data.raw() + done, std::min(kBlock, bytes - done));
    TESSERA_CHECK(wrote > 0);
    done += static_cast<std::size_t>(wrote);
  }
  TESSERA_CHECK(fsync(file) == 0 && close(file) == 0);
  std::filesystem::rename(partial, path);
}

void read_plain(const std::string& path, const View& data) {
  const int file = open(path.c_str(), O_RDONLY);
  TESSERA_CHECK(file >= 0);
  const auto bytes = static_cast<std::size_t>(data.bytes());
  for (std::size_t done = 0; done < bytes;) {
    const ssize_t got = read(file, data.raw() + done, std::min(kBlock, bytes - done));
    TESSERA_CHECK(got > 0);
    done += static_cast<std::size_t>(got);
  }
  close(file);
}

// So that what is read comes from the disk, as after a restart.
void forget(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY);
  if (file < 0) return;
  posix_fadvise(file, 0, 0, POSIX_FADV_DONTNEED);
  close(file);
}

// Weights and two moments of layers of 4096 x 1024, cut evenly between the ranks.
std::vector<CheckpointArray> arrays_of(const Communicator& communicator, const View& mine,
                                       std::int64_t layers) {
  constexpr std::int64_t kRows = 4096, kColumns = 1024, kCount = kRows * kColumns;
  const std::int64_t begin = kCount * communicator.rank() / communicator.size();
  const std::int64_t end = kCount * (communicator.rank() + 1) / communicator.size();
  std::vector<CheckpointArray> arrays;
  float* data = mine.as<float>();
  for (const std::string group : {"params/", "adamw/m/", "adamw/v/"}) {
    for (std::int64_t layer = 0; layer < layers; ++layer) {
      arrays.push_back({group + "model.layers." + std::to_string(layer) + ".weight",
                        Shape{kRows, kColumns},
                        {{begin, end, data}}});
      data += end - begin;
    }
  }
  return arrays;
}

void measure(Device& device, Communicator& communicator, const std::string& root,
             std::int64_t layers, bool cold, const Table* table) {
  const std::int64_t most = std::int64_t{4096} * 1024 * 3 * layers;
  const std::int64_t count = most * (communicator.rank() + 1) / communicator.size() -
                             most * communicator.rank() / communicator.size();
  const Memory mine(device, DType::kF32, {count + 3 * layers});
  const std::vector<CheckpointArray> arrays = arrays_of(communicator, mine.view(), layers);
  const View flat(DType::kF32, {count}, mine.view().raw());
  const std::string folder = root + "/checkpoints";
  const std::string plain = root + "/plain-" + std::to_string(communicator.rank());
  CheckpointMeta meta;
  meta.step = 1;
  const std::string path = folder + "/" + checkpoint_name(1);
  const auto alone = [&](const std::function<void()>& body) {
    communicator.barrier("bench");
    if (communicator.rank() == 0) body();
    communicator.barrier("bench");
  };
  // Old files go, and caches are emptied, outside of what is timed.
  std::vector<std::vector<double>> seconds(4);
  const auto timed = [&](std::size_t what, const std::function<void()>& body) {
    communicator.barrier("bench");
    seconds[what].push_back(seconds_of([&] {
      body();
      communicator.barrier("bench");
    }));
  };
  constexpr int kRounds = 5;
  for (int round = 0; round <= kRounds; ++round) {
    alone([&] { std::filesystem::remove_all(folder); });
    timed(0, [&] { write_checkpoint(communicator, folder, meta, arrays); });
    std::filesystem::remove(plain);
    timed(1, [&] { write_plain(plain, flat); });
    if (cold) {
      alone([&] { forget(path); });
      forget(plain);
    }
    timed(2, [&] { read_checkpoint(communicator, path, arrays); });
    timed(3, [&] { read_plain(plain, flat); });
    if (round == 0) seconds.assign(4, {});  // warm-up
  }
  std::filesystem::remove(plain);
  alone([&] { std::filesystem::remove_all(folder); });
  if (table == nullptr) return;
  const double gigabytes = 4e-9 * static_cast<double>(most);
  const double write = median(seconds[0]), plain_write = median(seconds[1]);
  const double read = median(seconds[2]), plain_read = median(seconds[3]);
  table->row({number(gigabytes * 1e3, 0) + " MB" + (cold ? ", cold reads" : ", cached reads"),
              number(gigabytes / write, 2), number(gigabytes / plain_write, 2),
              percent(plain_write / write), number(gigabytes / read, 2),
              number(gigabytes / plain_read, 2), percent(plain_read / read)});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  keep_large_allocations();
  MpiSession session(&argc, &argv);
  CLI::App app("Checkpoints against plain large writes and reads; alone or with mpirun -n RANKS");
  std::string root = "bench-checkpoint";
  std::vector<std::int64_t> layers = {2, 10};
  app.add_option("--folder", root, "a folder to make and remove, on the file system that counts");
  app.add_option("--layers", layers, "sizes, in layers of 50 MB");
  CLI11_PARSE(app, argc, argv);
  Communicator communicator(MPI_COMM_WORLD);
  Device device(1);
  std::optional<bench::Table> table;
  if (communicator.rank() == 0) {
    std::filesystem::create_directories(root);
    bench::print_machine(1);
    table.emplace(
        "GB/s, " + std::to_string(communicator.size()) + " ranks, written and synced to " + root,
        std::vector<std::string>{"bytes", "write", "plain write", "share", "read", "plain read",
                                 "share"});
  }
  communicator.barrier("folder");
  for (const std::int64_t size : layers) {
    for (const bool cold : {true, false}) {
      bench::measure(device, communicator, root, size, cold, table ? &*table : nullptr);
    }
  }
  if (communicator.rank() == 0) std::filesystem::remove_all(root);
  return 0;
}
