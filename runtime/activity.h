// What a rank is doing right now, for its watchdog: the main thread writes it, another thread
// reads.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

// Thread-safe. Calls that other ranks take part in are recorded: all ranks make the same ones in
// the same order, so the rank that has made fewer is the one that others wait for.
class Activity {
 public:
  static constexpr std::uint64_t kCallsKept = 1024;
  struct State {
    std::int64_t step = 0;
    std::string operation = "start";  // "gather", "reduce", "compute", "write checkpoint", ...
    std::string unit;                 // "layers.3"; may be empty
    std::uint64_t changes = 0;        // of any of these
    std::uint64_t calls = 0;          // begun so far
  };

  void set_step(std::int64_t step);
  void set(std::string_view operation, std::string_view unit = {});
  // set(), for a call that other ranks take part in. Allocates nothing more than that.
  void begin_call(std::string_view operation, std::string_view unit);

  State state() const;
  // Of all calls so far and their order.
  std::uint64_t calls_digest() const;
  // The last calls, a line each: "2210 gather of layers.3".
  std::string last_calls(std::uint64_t most = kCallsKept) const;

 private:
  struct Call {
    std::size_t length = 0;
    std::array<char, 56> text{};  // what is longer is cut off
  };
  void change(std::string_view operation, std::string_view unit);

  mutable std::mutex mutex_;
  State state_;
  std::uint64_t calls_digest_ = 0;
  std::vector<Call> calls_ = std::vector<Call>(kCallsKept);
};

// The first call that isn't the same on all ranks, from each rank's last_calls() (a rank's may be
// empty): "call 2210 is \"gather of layers.3\" on rank 0, \"reduce of layers.3\" on rank 2". Empty
// when all agree as far as they overlap.
std::string first_different_call(std::span<const std::string> calls_of_ranks);

}  // namespace tessera
