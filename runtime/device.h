// A device holds memory and runs work that is put on its queue. There is one kind today, the CPU,
// whose queue runs work at once on its threads; the signatures are those that a GPU needs too.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "runtime/view.h"

namespace tessera {

class ProductCache;  // runtime/products.h: a worker's own prepared matrix products

// One thread of a queue; what it owns is touched by nobody else while a piece runs.
class Worker {
 public:
  explicit Worker(int index);
  ~Worker();
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  int index() const { return index_; }  // in [0, threads)
  ProductCache& products() { return *products_; }

 private:
  int index_;
  std::unique_ptr<ProductCache> products_;
};

// A point in a queue's work. On the CPU everything before it has already run.
struct Event {
  std::uint64_t sequence = 0;
};

// Work that goes on beside a queue's and needs a thread's attention now and then, as transfers
// between ranks do. Every call returns soon.
class BackgroundWork {
 public:
  virtual void advance() = 0;

 protected:
  ~BackgroundWork() = default;
};

// Runs pieces of work in order of submission. Not thread-safe: one thread submits.
class Queue {
 public:
  explicit Queue(int threads);
  ~Queue();
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int threads() const { return static_cast<int>(workers_.size()); }
  Worker& worker(int index) { return *workers_[static_cast<std::size_t>(index)]; }

  // Calls body(piece, worker) for each piece in [0, pieces) and returns when all are done: worker i
  // of n has the pieces i, i + n, ..., so that after a first pass each has met every shape that it
  // will. Pieces are cut by shape, never by the number of threads, and write disjoint memory, so
  // that results don't depend on it. A piece's exception is rethrown here. Allocates nothing.
  // On x86-64 pieces run with numbers below the smallest normal f32 taken for zeros.
  template <class Body>
  void parallel_for(std::int64_t pieces, const Body& body) {
    run(
        pieces,
        [](const void* context, std::int64_t piece, Worker& worker) {
          (*static_cast<const Body*>(context))(piece, worker);
        },
        &body);
  }

  // `work`, which outlives its use here (null: none), is advanced by the submitting thread between
  // its pieces, at most once in kAdvanceInterval. What it throws comes out as a piece's exception
  // does.
  static constexpr std::chrono::microseconds kAdvanceInterval{100};
  void set_background(BackgroundWork* work) { background_ = work; }

  // Bytes of equal views; the source may lie on another device when there is one.
  void copy(const View& to, const View& from);
  void fill_zero(const View& view);
  Event record();
  void wait(Event event);  // later work of this queue starts after the event
  void synchronize();      // returns when all submitted work is done

 private:
  using Piece = void (*)(const void* context, std::int64_t piece, Worker& worker);
  void run(std::int64_t pieces, Piece call, const void* context);
  void work(int index);
  void take_pieces(Worker& worker);
  template <class Condition>
  static bool comes_soon(const Condition& condition);
  void advance_background();

  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable start_, done_;
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<int> active_{0};    // threads still at this generation's pieces
  std::atomic<int> sleepers_{0};  // threads that wait for start_
  std::atomic<bool> caller_sleeps_{false};
  std::atomic<bool> stop_{false};
  Piece call_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t pieces_ = 0;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
  std::uint64_t sequence_ = 0;
  BackgroundWork* background_ = nullptr;
  std::chrono::steady_clock::time_point last_advance_;
};

class Device {
 public:
  // threads >= 1; the calling thread is one of them. memory_limit: bytes that may be held at one
  // time, `held` of them by others already; 0 for as many as there are.
  explicit Device(int threads, std::int64_t memory_limit = 0, std::int64_t held = 0);
  Queue& queue() { return queue_; }
  // Zeroed memory that has been touched; on the CPU in huge pages where the system grants them.
  // Throws kUsage, naming the amount, when there isn't that much or the limit is passed.
  std::byte* allocate(std::int64_t bytes);
  void release(std::byte* memory, std::int64_t bytes);
  std::string description() const;  // "CPU, 2 threads, AVX-512"

 private:
  Queue queue_;
  std::int64_t memory_limit_;
  std::int64_t held_;
};

// Zeroed memory of the process, not yet touched, in huge pages where the system grants them. Throws
// kUsage, naming the amount, when there isn't that much.
std::byte* map_memory(std::int64_t bytes);
void unmap_memory(std::byte* memory, std::int64_t bytes);

// Must be called before MPI_Init: tells malloc to keep large blocks, so that the libraries' own
// buffers are touched once and not at every call.
void keep_large_allocations();

// The instruction set that kernels run with, as the log states it.
std::string instruction_set();

}  // namespace tessera
