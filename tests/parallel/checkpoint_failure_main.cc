// Runs out of space in the middle of a save, though space was reserved. The job has to end with
// code 4 and one line, the checkpoint before intact. Run by checkpoint_failure.sh.
#include <sys/resource.h>

#include <csignal>
#include <cstdio>
#include <thread>

#include "runtime/device.h"
#include "tests/parallel/checkpoint_fixture.h"

int main(int argc, char** argv) {
  using namespace tessera;
  keep_large_allocations();
  const MpiSession session(&argc, &argv);
  Communicator communicator(MPI_COMM_WORLD);
  const std::string folder = argv[1];
  ShardedState state(communicator, true);
  write_checkpoint(communicator, folder, checkpoint_meta(1), state.arrays());

  std::signal(SIGXFSZ, SIG_IGN);  // so that writing fails as on a full disk
  CheckpointOptions options;
  options.pause = std::chrono::milliseconds(1000);
  // "data": on rank 0, once the space is reserved; "metadata": everywhere, once the arrays are
  // written.
  const bool metadata = std::string(argv[2]) == "metadata";
  std::thread limiter([&] {
    if (communicator.rank() != 0 && !metadata) return;
    const std::string partial = folder + "/step-00000002.h5.partial";
    std::error_code absent;
    while (!std::filesystem::exists(partial) ||
           (metadata && std::filesystem::file_size(partial, absent) < 16000000)) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const rlimit small = {metadata ? rlim_t{1} : rlim_t{100000}, RLIM_INFINITY};
    setrlimit(RLIMIT_FSIZE, &small);
  });
  write_checkpoint(communicator, folder, checkpoint_meta(2), state.arrays(), options);
  limiter.join();
  std::printf("the save went through\n");
  return 0;
}
