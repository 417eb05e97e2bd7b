#include "runtime/activity.h"

#include <algorithm>
#include <map>
#include <sstream>

namespace tessera {

void Activity::change(std::string_view operation, std::string_view unit) {
  state_.operation = operation;
  state_.unit = unit;
  ++state_.changes;
}

void Activity::set_step(std::int64_t step) {
  const std::lock_guard lock(mutex_);
  state_.step = step;
  ++state_.changes;
}

void Activity::set(std::string_view operation, std::string_view unit) {
  const std::lock_guard lock(mutex_);
  change(operation, unit);
}

void Activity::begin_call(std::string_view operation, std::string_view unit) {
  const std::lock_guard lock(mutex_);
  change(operation, unit);
  Call& call = calls_[state_.calls++ % kCallsKept];
  call.length = 0;
  for (const std::string_view part : {operation, std::string_view(" of "), unit}) {
    for (const char letter : part) {  // FNV-1a
      calls_digest_ = (calls_digest_ ^ static_cast<unsigned char>(letter)) * 0x100000001b3;
    }
    const std::size_t kept = std::min(part.size(), call.text.size() - call.length);
    std::copy_n(part.data(), kept, call.text.data() + call.length);
    call.length += kept;
  }
  ++calls_digest_;  // so that one call's end isn't another's beginning
}

Activity::State Activity::state() const {
  const std::lock_guard lock(mutex_);
  return state_;
}

std::uint64_t Activity::calls_digest() const {
  const std::lock_guard lock(mutex_);
  return calls_digest_;
}

std::string Activity::last_calls(std::uint64_t most) const {
  const std::lock_guard lock(mutex_);
  std::string lines;
  const std::uint64_t kept = std::min({most, state_.calls, kCallsKept});
  for (std::uint64_t n = state_.calls - kept; n < state_.calls; ++n) {
    const Call& call = calls_[n % kCallsKept];
    lines += std::to_string(n) + ' ';
    lines.append(call.text.data(), call.length);
    lines += '\n';
  }
  return lines;
}

std::string first_different_call(std::span<const std::string> calls_of_ranks) {
  struct First {
    std::string call;
    std::size_t rank;
  };
  std::map<std::uint64_t, First> first;
  std::map<std::uint64_t, std::string> different;  // one line for each call that isn't the same
  for (std::size_t rank = 0; rank < calls_of_ranks.size(); ++rank) {
    std::istringstream lines(calls_of_ranks[rank]);
    std::uint64_t number = 0;
    for (std::string call; lines >> number && std::getline(lines >> std::ws, call);) {
      const auto [entry, added] = first.try_emplace(number, First{call, rank});
      if (added || entry->second.call == call) continue;
      different.try_emplace(number, "call " + std::to_string(number) + " is \"" +
                                        entry->second.call + "\" on rank " +
                                        std::to_string(entry->second.rank) + ", \"" + call +
                                        "\" on rank " + std::to_string(rank));
    }
  }
  return different.empty() ? "" : different.begin()->second;
}

}  // namespace tessera
