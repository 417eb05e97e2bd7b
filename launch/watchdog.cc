#include "launch/watchdog.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>
#include <vector>

#include "runtime/error.h"

namespace tessera {
namespace {

std::string state_path(const std::string& folder, int rank) {
  return folder + "/rank-" + std::to_string(rank) + ".state";
}

std::string state_line(const Activity::State& state, int rank, const std::string& host) {
  std::string operation = state.operation + (state.unit.empty() ? "" : " of " + state.unit);
  std::replace(operation.begin(), operation.end(), '\n', ' ');
  return "rank " + std::to_string(rank) + " host " + host + " pid " + std::to_string(getpid()) +
         " step " + std::to_string(state.step) + " sequence " + std::to_string(state.sequence) +
         " doing " + operation;
}

// Of another rank's file; a rank that wrote none counts as furthest behind.
struct PeerState {
  int rank = 0;
  long long step = -1, sequence = -1;
  std::string line;
};

PeerState read_peer(const std::string& folder, int rank) {
  PeerState peer;
  peer.rank = rank;
  std::ifstream file(state_path(folder, rank));
  std::getline(file, peer.line);
  std::istringstream words(peer.line);
  std::string word;
  while (words >> word) {
    if (word == "step") words >> peer.step;
    if (word == "sequence") words >> peer.sequence;
    if (word == "doing") break;
  }
  return peer;
}

}  // namespace

std::string describe(const Activity::State& state, int rank, const std::string& host) {
  return "rank " + std::to_string(rank) + " (" + host + ") step " + std::to_string(state.step) +
         ", " + state.operation + (state.unit.empty() ? "" : " of " + state.unit);
}

Watchdog::Watchdog(const Activity& activity, std::string folder, int rank, int ranks,
                   const std::string& host, std::chrono::seconds limit)
    : activity_(activity),
      folder_(std::move(folder)),
      rank_(rank),
      ranks_(ranks),
      host_(host),
      limit_(limit) {
  const std::string path = state_path(folder_, rank);
  file_ = open(path.c_str(), O_CREAT | O_WRONLY | O_TRUNC | O_CLOEXEC, 0644);
  if (file_ < 0) {
    throw Error(ExitCode::kCheckpoint, path + ": can't be written: " + std::strerror(errno));
  }
  write_state(activity_.state());
  thread_ = std::thread([this] { watch(); });
}

Watchdog::~Watchdog() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  thread_.join();
  write_state(activity_.state());
  close(file_);
}

void Watchdog::watch() {
  std::uint64_t written = 0;
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, std::chrono::seconds(1), [&] { return stop_; })) {
    const Activity::State state = activity_.state();
    if (state.sequence != written) {
      write_state(state);
      written = state.sequence;
    }
    if (Activity::Clock::now() - state.since > limit_) end_job(state);
  }
}

// A full disk must not end a run over its state file: a short write is left as it is.
void Watchdog::write_state(const Activity::State& state) {
  std::string line = state_line(state, rank_, host_);
  line.resize(std::max<std::size_t>(line.size(), 200), ' ');  // covers any longer line before
  line += '\n';
  if (pwrite(file_, line.data(), line.size(), 0) < 0) return;
}

void Watchdog::end_job(const Activity::State& state) const {
  // Who holds the others up? The ranks whose sequence is the smallest.
  std::vector<PeerState> peers;
  peers.reserve(static_cast<std::size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) peers.push_back(read_peer(folder_, rank));
  const auto behind =
      std::min_element(peers.begin(), peers.end(),
                       [](const auto& a, const auto& b) { return a.sequence < b.sequence; });
  std::string lagging;
  for (const PeerState& peer : peers) {
    if (peer.sequence == behind->sequence) {
      lagging += (lagging.empty() ? "" : "; ") +
                 (peer.line.empty() ? "rank " + std::to_string(peer.rank) + " (no state)"
                                    : peer.line.substr(0, peer.line.find_last_not_of(' ') + 1));
    }
  }
  std::fprintf(stderr,
               "tessera: %s: nothing has moved for %lld s (execution.watchdog_seconds); furthest "
               "behind: %s; the job ends, the last checkpoint stands\n",
               describe(state, rank_, host_).c_str(), static_cast<long long>(limit_.count()),
               lagging.c_str());
  std::fflush(stderr);
  // The main thread may hold any lock: leave at once; the launcher then ends the other ranks.
  _exit(static_cast<int>(ExitCode::kCommunication));
}

}  // namespace tessera
