// Reads a rank's quanta ahead of the training step, on a thread of its own.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "data/stream.h"
#include "runtime/view.h"

namespace tessera {

class Loader {
 public:
  // The n-th quantum (n = first, first + 1, ...) is the global quantum q = quantum_of(n): samples
  // [q*m, (q+1)*m) with m = quantum_samples; a negative q is the end. quantum_of is called on the
  // loader's thread, in order of n. At most `slots` quanta are in memory, all allocated here. The
  // stream must outlive the loader.
  Loader(const TokenStream& stream, std::int64_t quantum_samples,
         std::function<std::int64_t(std::int64_t n)> quantum_of, std::int64_t slots,
         std::int64_t first);
  ~Loader();  // returns once the read in progress is done
  Loader(const Loader&) = delete;
  Loader& operator=(const Loader&) = delete;

  // The next quantum, [m, L+1] u32, valid until it is released; an empty view at the end. Several
  // may be held, up to `slots`. Throws here, in place of the quantum and of all after it, what
  // reading or quantum_of threw. Allocates nothing.
  View acquire();
  // Gives the oldest held quantum back.
  void release();
  // Seconds that acquire() has waited, since the start.
  double seconds_waited() const;

 private:
  void read_ahead(std::int64_t first);

  const TokenStream& stream_;
  const std::int64_t quantum_samples_;
  const std::int64_t window_;  // L + 1
  const std::int64_t slots_;
  const std::function<std::int64_t(std::int64_t)> quantum_of_;
  std::vector<std::uint32_t> memory_;  // [slots, m, L+1]

  mutable std::mutex mutex_;
  std::condition_variable filled_changed_;
  std::condition_variable released_changed_;
  std::int64_t filled_ = 0;  // quanta read, handed out and given back since the start
  std::int64_t acquired_ = 0;
  std::int64_t released_ = 0;
  bool finished_ = false;  // nothing follows filled_
  bool stop_ = false;
  std::exception_ptr failure_;
  double waited_ = 0.0;
  std::thread thread_;
};

// windows [m, L+1] u32 into tokens [m, L] u32 and labels [m, L] i32, label i being token i + 1.
// Overwrites both. Throws Error(kData) for an id above 2^31 - 1.
void split_windows(const View& windows, const View& tokens, const View& labels);

// segments [m, L] i32, overwritten: the position in the window at which each position's document
// starts: 0, or the position after the last end of sequence before it. All 0 without masking.
void fill_segments(const View& windows, std::int64_t end_of_sequence, bool masking,
                   const View& segments);

}  // namespace tessera
