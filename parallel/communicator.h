// Transport between ranks: MPI on host memory. All sizes are 64-bit; what is larger than MPI's
// counts allow is cut. Every rank of a communicator makes the same calls in the same order.
#pragma once

#include <mpi.h>

#include <array>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "runtime/activity.h"
#include "runtime/device.h"
#include "runtime/error.h"
#include "runtime/view.h"

namespace tessera {

// MPI's lifetime. keep_large_allocations() (runtime/device.h) comes first, in main.
class MpiSession {
 public:
  // MPI_THREAD_FUNNELED, since only the thread that makes the session calls MPI; throws
  // Error(kCommunication) when MPI grants less. Collective: when the ranks don't meet within two
  // minutes, the job ends with a line that says so.
  MpiSession(int* argc, char*** argv);
  ~MpiSession();
  MpiSession(const MpiSession&) = delete;
  MpiSession& operator=(const MpiSession&) = delete;

  // Ends all ranks of the job at once, whatever they are doing.
  [[noreturn]] static void abort(ExitCode code);
};

// What a transfer is counted as.
enum class Traffic : std::uint8_t { kGather, kReduce, kExchange, kControl };
constexpr std::size_t kTrafficKinds = 4;
const char* name_of(Traffic traffic);  // "gather", "reduce", "exchange", "control"

struct TrafficCount {
  std::int64_t calls = 0;
  std::int64_t bytes_sent = 0;  // to other ranks
  // Inside the calls: of one that blocks, transfer and waiting for peers; of one in two parts, its
  // start and what was still to be waited for at its finish.
  double seconds = 0.0;
  std::int64_t overlapped = 0;  // calls in two parts that their finish found complete
};

enum class Reduction : std::uint8_t { kSum, kMin, kMax };

// Owns a duplicate of an MPI communicator. Not thread-safe. A failed operation throws
// Error(kCommunication) naming the operation, the unit and, where MPI tells, the peer; the job can
// then only be aborted. `unit` names what is moved, for messages and the watchdog.
//
// Transfers in two parts (start_..., then finish) go on while the caller computes, if advance() is
// called now and then: MPI moves data only inside its calls. Every rank starts and finishes the
// same transfers in the same order; each has a tag of its own, so those in flight can't be mixed
// up. The communicator outlives them.
class Communicator final : public BackgroundWork {
 public:
  // Collective over `parent`. `activity`, if given, outlives this and is told of every operation
  // before and after. `count_limit` is the largest count that an MPI call is given.
  explicit Communicator(MPI_Comm parent, Activity* activity = nullptr,
                        std::int64_t count_limit = INT_MAX);
  // Collective over `parent`: its ranks of the same color, in their order.
  Communicator(const Communicator& parent, int color);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& host() const { return hosts_[static_cast<std::size_t>(rank_)]; }
  const std::vector<std::string>& hosts() const { return hosts_; }  // by rank
  MPI_Comm handle() const { return comm_; }
  Activity* activity() const { return activity_; }  // may be null

  // One message of an exchange. Both sides know its size; an empty one isn't sent.
  struct Message {
    int peer = 0;
    std::byte* data = nullptr;
    std::int64_t bytes = 0;
  };

  // What a transfer needs from its start to its finish, kept by its caller and used again and
  // again: once warm, it allocates nothing.
  class Transfer {
   public:
    Transfer() = default;
    ~Transfer() { forget(); }
    // Room for exchanges of so many messages each way, so that no later one allocates.
    void reserve(std::size_t messages);
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;
    bool started() const { return started_; }                    // and not finished
    bool in_flight() const { return communicator_ != nullptr; }  // as far as advance() has seen

   private:
    friend class Communicator;
    void forget();

    Communicator* communicator_ = nullptr;  // while in flight
    Transfer* next_ = nullptr;              // in its list of those in flight
    bool started_ = false;
    Traffic traffic_ = Traffic::kControl;
    const char* operation_ = "";
    std::string unit_;
    int tag_ = 0;
    std::vector<Message> sends_, receives_;
    int next_shift_ = 1;  // of the peers that come next
    std::vector<MPI_Request> requests_;
    std::vector<int> request_peers_;
    std::size_t complete_ = 0;  // requests that are
  };

  // A flat array in `size()` slices, rank r's being elements [bounds[r], bounds[r + 1]) of `whole`
  // (any of them may be empty): every rank's slice to all. `mine` is this rank's slice and may be
  // its place in `whole`. In two parts, `whole` must be left alone until the finish; `mine` is free
  // once started.
  void all_gather_slices(Traffic traffic, std::string_view unit,
                         std::span<const std::int64_t> bounds, const View& mine, const View& whole);
  void start_all_gather_slices(Transfer& transfer, Traffic traffic, std::string_view unit,
                               std::span<const std::int64_t> bounds, const View& mine,
                               const View& whole);

  // Sends and receives all messages; between two ranks they match in order. Messages to oneself are
  // copied. In two parts, all data must be left alone until the finish.
  void exchange(Traffic traffic, std::string_view unit, std::span<const Message> sends,
                std::span<const Message> receives);
  void start_exchange(Transfer& transfer, Traffic traffic, std::string_view unit,
                      std::span<const Message> sends, std::span<const Message> receives);

  // Returns when the transfer, which was started, is complete on this rank.
  void finish(Transfer& transfer);
  // Moves the transfers in flight on, without waiting.
  void advance() override;

  // In place, element by element.
  void all_reduce(std::string_view unit, Reduction reduction, std::span<std::int64_t> values);
  std::int64_t all_reduce(std::string_view unit, Reduction reduction, std::int64_t value);
  // Every rank's text, by rank.
  std::vector<std::string> all_gather_strings(std::string_view unit, const std::string& mine);
  // Overwrites `bytes` (same size everywhere) or `text` on all ranks but `root`.
  void broadcast(std::string_view unit, std::span<std::byte> bytes, int root);
  void broadcast(std::string_view unit, std::string& text, int root);
  void barrier(std::string_view unit);
  // A barrier in which who waits sleeps, and leaves the cores to the others.
  void quiet_barrier(std::string_view unit);
  struct Meeting {
    std::int64_t largest = 0;    // of the ranks' values
    std::string different_call;  // the first that isn't the same on all ranks; "": all are
  };
  // Of all ranks of the job. Compares what their activities have recorded of their calls so far.
  Meeting meet(std::string_view unit, std::int64_t value);
  // Throws the first rank's error on all ranks, if any rank has one ("": none).
  void agree(std::string_view unit, ExitCode code, const std::string& error);

  const TrafficCount& traffic(Traffic kind) const {
    return traffic_[static_cast<std::size_t>(kind)];
  }
  // Since the last reset: transfers in flight at once at most, and seconds inside advance().
  std::int64_t most_in_flight() const { return most_in_flight_; }
  double advance_seconds() const { return advance_seconds_; }
  void reset_traffic();

 private:
  class Operation;
  void open(MPI_Comm own);
  void check(int code, const char* operation, std::string_view unit, int peer) const;
  void check(int code, Transfer& transfer, int peer);
  TrafficCount& count(Traffic traffic) { return traffic_[static_cast<std::size_t>(traffic)]; }
  void prepare(Transfer& transfer, Traffic traffic, const char* operation, std::string_view unit);
  void prepare_gather(Transfer& transfer, Traffic traffic, std::string_view unit,
                      std::span<const std::int64_t> bounds, const View& mine, const View& whole);
  void prepare_exchange(Transfer& transfer, Traffic traffic, std::string_view unit,
                        std::span<const Message> sends, std::span<const Message> receives);
  void start(Transfer& transfer);
  void post(Transfer& transfer, const Message& message, bool send);
  void post_next_peers(Transfer& transfer);
  bool move_on(Transfer& transfer);
  void wait_for(Transfer& transfer);

  MPI_Comm comm_ = MPI_COMM_NULL;
  Activity* activity_ = nullptr;
  std::int64_t count_limit_;
  int rank_ = 0;
  int size_ = 1;
  std::vector<std::string> hosts_;
  std::array<TrafficCount, kTrafficKinds> traffic_{};
  std::int64_t most_in_flight_ = 0;
  double advance_seconds_ = 0.0;
  std::int64_t transfers_ = 0;  // ever started: the same number on all ranks
  // A list through the transfers themselves: how many are in flight at once is a matter of time,
  // and no step may allocate.
  Transfer* in_flight_ = nullptr;
  std::int64_t in_flight_count_ = 0;
  Transfer blocking_;  // of the calls in one part
};

}  // namespace tessera
