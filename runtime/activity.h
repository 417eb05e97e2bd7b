// What a rank is doing right now, for its watchdog: the main thread writes it, another thread
// reads.
#pragma once

#include <chrono>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>

namespace tessera {

// Thread-safe. Every change raises `sequence`, so that a rank that lags can be told from one that
// waits: the one that others wait for has the smaller number.
class Activity {
 public:
  using Clock = std::chrono::steady_clock;
  struct State {
    std::int64_t step = 0;
    std::string operation = "start";  // "gather", "reduce", "compute", "write checkpoint", ...
    std::string unit;                 // "layers.3"; may be empty
    std::uint64_t sequence = 0;
    Clock::time_point since = Clock::now();  // time of the last change
  };

  void set_step(std::int64_t step) {
    const std::lock_guard lock(mutex_);
    state_.step = step;
    touch();
  }
  void set(std::string_view operation, std::string_view unit = {}) {
    const std::lock_guard lock(mutex_);
    state_.operation = operation;
    state_.unit = unit;
    touch();
  }
  State state() const {
    const std::lock_guard lock(mutex_);
    return state_;
  }

 private:
  void touch() {
    ++state_.sequence;
    state_.since = Clock::now();
  }

  mutable std::mutex mutex_;
  State state_;
};

}  // namespace tessera
