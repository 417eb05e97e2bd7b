#include "runtime/device.h"

#include <malloc.h>
#include <omp.h>
#include <sys/mman.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "runtime/products_cache.h"

namespace tessera {
namespace {

// The register that says how this thread's vector arithmetic treats denormals; elsewhere than on
// x86-64 nothing is changed.
#if defined(__x86_64__)
unsigned arithmetic_mode() { return _mm_getcsr(); }
void set_arithmetic_mode(unsigned mode) { _mm_setcsr(mode); }
#else
unsigned arithmetic_mode() { return 0; }
void set_arithmetic_mode(unsigned) {}
#endif

// While it lives this thread takes numbers below the smallest normal f32 for zeros, as operands and
// as results: a decaying state is full of them, and each costs a hundred times an operation's time.
class DenormalsAreZero {
 public:
  DenormalsAreZero() : before_(arithmetic_mode()) {
    constexpr unsigned kZeroResults = 1U << 15U, kZeroOperands = 1U << 6U;
    set_arithmetic_mode(before_ | kZeroResults | kZeroOperands);
  }
  ~DenormalsAreZero() { set_arithmetic_mode(before_); }
  DenormalsAreZero(const DenormalsAreZero&) = delete;
  DenormalsAreZero& operator=(const DenormalsAreZero&) = delete;

 private:
  unsigned before_;
};

}  // namespace

Worker::Worker(int index) : index_(index), products_(std::make_unique<ProductCache>()) {}
Worker::~Worker() = default;

Queue::Queue(int threads) {
  TESSERA_CHECK(threads >= 1);
  for (int i = 0; i < threads; ++i) workers_.push_back(std::make_unique<Worker>(i));
  for (int i = 1; i < threads; ++i) threads_.emplace_back([this, i] { work(i); });
}

Queue::~Queue() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  start_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Queue::take_pieces(Worker& worker) {
  try {
    for (std::int64_t piece = worker.index(); piece < pieces_ && !failed_; piece += threads()) {
      call_(context_, piece, worker);
      if (worker.index() == 0) advance_background();
    }
  } catch (...) {
    const std::lock_guard lock(mutex_);
    if (!failure_) failure_ = std::current_exception();
    failed_ = true;
  }
}

void Queue::advance_background() {
  if (background_ == nullptr) return;
  const auto now = std::chrono::steady_clock::now();
  if (now - last_advance_ < kAdvanceInterval) return;
  background_->advance();
  last_advance_ = std::chrono::steady_clock::now();
}

// Steps are a thousand short pieces of work in a row: a thread that sleeps between them would wake
// too late for most. So it looks for a while first, leaving the core to whoever wants it.
template <class Condition>
bool Queue::comes_soon(const Condition& condition) {
  constexpr int kLooks = 200;
  for (int i = 0; i < kLooks; ++i) {
    if (condition()) return true;
    std::this_thread::yield();
  }
  return condition();
}

void Queue::work(int index) {
  omp_set_num_threads(1);
  const DenormalsAreZero mode;
  std::uint64_t seen = 0;
  const auto called = [&] { return stop_ || generation_ != seen; };
  while (true) {
    if (!comes_soon(called)) {
      std::unique_lock lock(mutex_);
      ++sleepers_;
      start_.wait(lock, called);
      --sleepers_;
    }
    if (stop_) return;
    seen = generation_;
    take_pieces(worker(index));
    if (--active_ == 0 && caller_sleeps_) {
      const std::lock_guard lock(mutex_);
      done_.notify_one();
    }
  }
}

void Queue::run(std::int64_t pieces, Piece call, const void* context) {
  ++sequence_;
  omp_set_num_threads(1);  // of this thread: a library call stays on the thread that makes it
  const DenormalsAreZero mode;
  if (threads_.empty() || pieces <= 1) {
    for (std::int64_t piece = 0; piece < pieces; ++piece) {
      call(context, piece, worker(0));
      advance_background();
    }
    return;
  }
  call_ = call;
  context_ = context;
  pieces_ = pieces;
  failed_ = false;
  failure_ = nullptr;
  active_ = static_cast<int>(threads_.size());
  ++generation_;  // publishes all of the above
  // A thread counts itself among the sleepers before it looks at the generation a last time.
  if (sleepers_ > 0) {
    { const std::lock_guard lock(mutex_); }
    start_.notify_all();
  }
  take_pieces(worker(0));
  const auto all_done = [&] { return active_ == 0; };
  if (!comes_soon(all_done)) {
    std::unique_lock lock(mutex_);
    caller_sleeps_ = true;
    done_.wait(lock, all_done);
    caller_sleeps_ = false;
  }
  if (failure_) std::rethrow_exception(failure_);
}

namespace {
constexpr std::int64_t kCopyPiece = std::int64_t{1} << 20;
}

void Queue::copy(const View& to, const View& from) {
  TESSERA_CHECK(to.dtype() == from.dtype() && to.count() == from.count());
  const std::int64_t bytes = to.bytes();
  parallel_for((bytes + kCopyPiece - 1) / kCopyPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kCopyPiece;
    std::memcpy(to.raw() + begin, from.raw() + begin,
                static_cast<std::size_t>(std::min(kCopyPiece, bytes - begin)));
  });
}

void Queue::fill_zero(const View& view) {
  const std::int64_t bytes = view.bytes();
  parallel_for((bytes + kCopyPiece - 1) / kCopyPiece, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kCopyPiece;
    std::memset(view.raw() + begin, 0,
                static_cast<std::size_t>(std::min(kCopyPiece, bytes - begin)));
  });
}

// On the CPU work has run when its submission returns.
Event Queue::record() { return {sequence_}; }
void Queue::wait(Event event) { TESSERA_CHECK(event.sequence <= sequence_); }
void Queue::synchronize() {}

Device::Device(int threads, std::int64_t memory_limit, std::int64_t held)
    : queue_(threads), memory_limit_(memory_limit), held_(held) {}

std::byte* map_memory(std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) {
    throw Error(ExitCode::kUsage, "out of memory: the system refused " + std::to_string(bytes) +
                                      " bytes (" + std::strerror(errno) + ")");
  }
  madvise(memory, size, MADV_HUGEPAGE);
  return static_cast<std::byte*>(memory);
}

void unmap_memory(std::byte* memory, std::int64_t bytes) {
  munmap(memory, static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1)));
}

std::byte* Device::allocate(std::int64_t bytes) {
  if (memory_limit_ > 0 && bytes > memory_limit_ - held_) {
    throw Error(ExitCode::kUsage, "execution.memory_limit_bytes: " + std::to_string(held_ + bytes) +
                                      " bytes are needed, the limit is " +
                                      std::to_string(memory_limit_));
  }
  std::byte* const memory = map_memory(bytes);
  held_ += bytes;
  // Touched here, in pieces shared over the threads, so that no step pays for it.
  queue_.fill_zero(View(DType::kF32, {bytes / 4}, memory));
  return memory;
}

void Device::release(std::byte* memory, std::int64_t bytes) {
  unmap_memory(memory, bytes);
  held_ -= bytes;
}

std::string Device::description() const {
  const int threads = queue_.threads();
  return "CPU, " + std::to_string(threads) + (threads == 1 ? " thread, " : " threads, ") +
         instruction_set();
}

void keep_large_allocations() {
  constexpr int kMegabyte = 1 << 20;
  // glibc refuses an M_MMAP_THRESHOLD above 32 MiB, so mmap is turned off altogether.
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, 2047 * kMegabyte);
  mallopt(M_TOP_PAD, 64 * kMegabyte);
}

std::string instruction_set() {
  if (__builtin_cpu_supports("avx512bf16")) return "AVX-512 with bf16";
  if (__builtin_cpu_supports("avx512f")) return "AVX-512";
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "AVX2";
  return "x86-64";
}

}  // namespace tessera
