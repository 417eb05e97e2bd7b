#include "launch/watchdog.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <fstream>
#include <sstream>
#include <vector>

#include "runtime/error.h"

namespace tessera {
namespace {

constexpr std::chrono::seconds kBeat{1};
constexpr std::uint64_t kCallsInState = 16;

std::string state_path(const std::string& folder, int rank) {
  return folder + "/rank-" + std::to_string(rank) + ".state";
}

std::string on_one_line(std::string text) {
  std::replace(text.begin(), text.end(), '\n', ' ');
  return text;
}

std::string state_line(const Activity::State& state, int rank, const std::string& host) {
  return "rank " + std::to_string(rank) + " host " + host + " pid " + std::to_string(getpid()) +
         " step " + std::to_string(state.step) + " calls " + std::to_string(state.calls) +
         " doing " + on_one_line(state.operation + (state.unit.empty() ? "" : " of " + state.unit));
}

// Of another rank's file; a rank that wrote none counts as furthest behind.
struct PeerState {
  int rank = 0;
  long long calls = -1;
  std::time_t written = 0;
  std::string line;
  std::string last_calls;
};

PeerState read_peer(const std::string& folder, int rank) {
  PeerState peer;
  peer.rank = rank;
  const std::string path = state_path(folder, rank);
  std::ifstream file(path);
  std::getline(file, peer.line);
  std::istringstream words(peer.line);
  std::string word;
  while (words >> word && word != "doing") {
    if (word == "calls") words >> peer.calls;
  }
  std::getline(file, peer.last_calls, '\0');
  struct stat status = {};
  if (stat(path.c_str(), &status) == 0) peer.written = status.st_mtime;
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

// Counts its own seconds: of a job that is stopped as a whole, and goes on later, none pass. A rank
// that waits for another that moves, however slowly (a save on a slow disk), isn't stuck.
void Watchdog::watch() {
  std::uint64_t seen = 0;
  std::string others;  // as they were after half of the time
  std::chrono::seconds quiet{0};
  std::unique_lock lock(mutex_);
  while (!wake_.wait_for(lock, kBeat, [&] { return stop_; })) {
    const Activity::State state = activity_.state();
    write_state(state);
    quiet = state.changes == seen ? quiet + kBeat : std::chrono::seconds(0);
    seen = state.changes;
    if (quiet > limit_) {
      if (states_of_others() == others) end_job(state);
      quiet = limit_ / 2;
    }
    if (quiet == limit_ / 2) others = states_of_others();
  }
}

std::string Watchdog::states_of_others() const {
  std::string lines;
  for (int rank = 0; rank < ranks_; ++rank) {
    if (rank != rank_) lines += read_peer(folder_, rank).line + '\n';
  }
  return lines;
}

// A full disk must not end a run over its state file: a short write is left as it is.
void Watchdog::write_state(const Activity::State& state) {
  const std::string text =
      state_line(state, rank_, host_) + '\n' + activity_.last_calls(kCallsInState);
  if (pwrite(file_, text.data(), text.size(), 0) < 0) return;
  if (ftruncate(file_, static_cast<off_t>(text.size())) != 0) return;
}

void Watchdog::end_job(const Activity::State& state) const {
  std::vector<PeerState> peers;
  peers.reserve(static_cast<std::size_t>(ranks_));
  for (int rank = 0; rank < ranks_; ++rank) peers.push_back(read_peer(folder_, rank));
  // Who holds the others up? Who doesn't even write its state; else who has made the fewest calls.
  const std::time_t now = peers[static_cast<std::size_t>(rank_)].written;
  const auto seconds_old = [&](const PeerState& peer) { return now - peer.written; };
  const auto silent = [&](const PeerState& peer) {
    return peer.line.empty() ||
           std::chrono::seconds(seconds_old(peer)) > std::max(limit_ / 2, 3 * kBeat);
  };
  const bool any_silent = std::any_of(peers.begin(), peers.end(), silent);
  const auto fewest = std::min_element(
      peers.begin(), peers.end(), [](const auto& a, const auto& b) { return a.calls < b.calls; });
  std::string lagging;
  std::vector<std::string> last_calls;
  for (const PeerState& peer : peers) {
    last_calls.push_back(peer.last_calls);
    if (any_silent ? !silent(peer) : peer.calls != fewest->calls) continue;
    lagging +=
        (lagging.empty() ? "" : "; ") +
        (peer.line.empty() ? "rank " + std::to_string(peer.rank) + " (no state)" : peer.line);
    if (!peer.line.empty() && silent(peer)) {
      lagging += " (silent for " + std::to_string(seconds_old(peer)) +
                 " s: it is stopped or its host is lost)";
    }
  }
  const std::string different = first_different_call(last_calls);
  std::fprintf(stderr,
               "tessera: %s: nothing has moved for %lld s (execution.watchdog_seconds); furthest "
               "behind: %s; %s%sthe job ends, the last checkpoint stands\n",
               describe(state, rank_, host_).c_str(), static_cast<long long>(limit_.count()),
               lagging.c_str(), different.c_str(), different.empty() ? "" : "; ");
  std::fflush(stderr);
  // The main thread may hold any lock: leave at once; the launcher then ends the other ranks.
  _exit(static_cast<int>(ExitCode::kCommunication));
}

}  // namespace tessera
