// A thread that writes what its rank is doing to logs/rank-N.state and ends the job when nothing
// has moved for too long (a dead peer, a stuck collective, a stopped process), or when the launcher
// is gone.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>

#include "runtime/activity.h"

namespace tessera {

class Watchdog {
 public:
  // `folder` (logs/) exists; `activity` outlives this. A state file's first line:
  // "rank 2 host node7 pid 4711 step 17 calls 2210 doing reduce of layers.3"; then the last calls.
  // It is written every second, so that an old one tells of a process that is stopped or gone.
  // Throws Error(kCheckpoint) naming the file when it can't be written.
  Watchdog(const Activity& activity, std::string folder, int rank, int ranks,
           const std::string& host, std::chrono::seconds limit);
  ~Watchdog();
  Watchdog(const Watchdog&) = delete;
  Watchdog& operator=(const Watchdog&) = delete;

 private:
  void watch();
  void write_state(const Activity::State& state);
  std::string states_of_others() const;
  [[noreturn]] void end_job(const Activity::State& state) const;

  const Activity& activity_;
  const std::string folder_;
  const int rank_, ranks_;
  const std::string host_;
  const std::chrono::seconds limit_;
  int file_ = -1;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread thread_;
};

// "rank 2 (node7) step 17, reduce of layers.3".
std::string describe(const Activity::State& state, int rank, const std::string& host);

}  // namespace tessera
