#include "data/loader.h"

#include <chrono>
#include <limits>

namespace tessera {

Loader::Loader(const TokenStream& stream, std::int64_t quantum_samples,
               std::function<std::int64_t(std::int64_t n)> quantum_of, std::int64_t slots,
               std::int64_t first)
    : stream_(stream),
      quantum_samples_(quantum_samples),
      window_(stream.sequence_length() + 1),
      slots_(slots),
      quantum_of_(std::move(quantum_of)) {
  TESSERA_CHECK(quantum_samples >= 1 && slots >= 1 && first >= 0);
  memory_.resize(static_cast<std::size_t>(slots_ * quantum_samples_ * window_));
  thread_ = std::thread([this, first] { read_ahead(first); });
}

Loader::~Loader() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  released_changed_.notify_all();
  thread_.join();
}

void Loader::read_ahead(std::int64_t first) {
  std::exception_ptr failure;
  try {
    for (std::int64_t n = first;; ++n) {
      const std::int64_t quantum = quantum_of_(n);
      if (quantum < 0) break;
      std::int64_t slot = 0;
      {
        std::unique_lock lock(mutex_);
        released_changed_.wait(lock, [&] { return stop_ || filled_ - released_ < slots_; });
        if (stop_) return;
        slot = filled_ % slots_;
      }
      if (quantum > std::numeric_limits<std::int64_t>::max() / quantum_samples_ - 1) {
        throw Error(ExitCode::kUsage, "quantum " + std::to_string(quantum) + " is out of range");
      }
      for (std::int64_t s = 0; s < quantum_samples_; ++s) {
        stream_.read(quantum * quantum_samples_ + s,
                     memory_.data() + (slot * quantum_samples_ + s) * window_);
        const std::lock_guard lock(mutex_);
        if (stop_) return;
      }
      {
        const std::lock_guard lock(mutex_);
        ++filled_;
      }
      filled_changed_.notify_one();
    }
  } catch (...) {
    failure = std::current_exception();
  }
  {
    const std::lock_guard lock(mutex_);
    failure_ = failure;
    finished_ = true;
  }
  filled_changed_.notify_one();
}

View Loader::acquire() {
  std::unique_lock lock(mutex_);
  TESSERA_CHECK(acquired_ - released_ < slots_);
  if (filled_ == acquired_ && !finished_) {
    const auto start = std::chrono::steady_clock::now();
    filled_changed_.wait(lock, [&] { return filled_ > acquired_ || finished_; });
    waited_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }
  if (filled_ == acquired_) {
    if (failure_) std::rethrow_exception(failure_);
    return {};
  }
  const std::int64_t slot = acquired_++ % slots_;
  return View(memory_.data() + slot * quantum_samples_ * window_,
              Shape({quantum_samples_, window_}));
}

void Loader::release() {
  {
    const std::lock_guard lock(mutex_);
    TESSERA_CHECK(released_ < acquired_);
    ++released_;
  }
  released_changed_.notify_one();
}

double Loader::seconds_waited() const {
  const std::lock_guard lock(mutex_);
  return waited_;
}

void split_windows(const View& windows, const View& tokens, const View& labels) {
  const std::int64_t length = tokens.extent(1);
  TESSERA_CHECK(windows.shape() == Shape({tokens.extent(0), length + 1}));
  TESSERA_CHECK(labels.shape() == tokens.shape());
  for (std::int64_t s = 0; s < tokens.extent(0); ++s) {
    const std::uint32_t* window = windows.as<std::uint32_t>() + s * (length + 1);
    std::uint32_t* token = tokens.as<std::uint32_t>() + s * length;
    std::int32_t* label = labels.as<std::int32_t>() + s * length;
    for (std::int64_t i = 0; i < length; ++i) {
      token[i] = window[i];
      if (window[i + 1] > static_cast<std::uint32_t>(std::numeric_limits<std::int32_t>::max())) {
        throw Error(ExitCode::kData, "token id " + std::to_string(window[i + 1]) +
                                         " in the training stream is above 2^31 - 1");
      }
      label[i] = static_cast<std::int32_t>(window[i + 1]);
    }
  }
}

void fill_segments(const View& windows, std::int64_t end_of_sequence, bool masking,
                   const View& segments) {
  const std::int64_t length = segments.extent(1);
  TESSERA_CHECK(windows.shape() == Shape({segments.extent(0), length + 1}));
  for (std::int64_t s = 0; s < segments.extent(0); ++s) {
    const std::uint32_t* window = windows.as<std::uint32_t>() + s * (length + 1);
    std::int32_t* segment = segments.as<std::int32_t>() + s * length;
    std::int32_t start = 0;
    for (std::int64_t i = 0; i < length; ++i) {
      segment[i] = start;
      if (masking && window[i] == end_of_sequence) start = static_cast<std::int32_t>(i + 1);
    }
  }
}

}  // namespace tessera
