#include "parallel/communicator.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <thread>

namespace tessera {

namespace {

// Peers of a transfer that are in flight at once.
constexpr int kPeersAtOnce = 16;
// Tags go round; MPI has at least 32,767 of them, and far fewer transfers are in flight.
constexpr std::int64_t kTags = 32000;
// In which all ranks of a job must have begun and found one another.
constexpr std::chrono::seconds kLongestMeeting{120};

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string mpi_reason(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

// Ends this rank, and with it the job, unless the ranks have met in time: one may be stopped before
// it is in MPI, or they try interfaces that lead nowhere, and would wait for one another without a
// word.
class Meeting {
 public:
  Meeting() : thread_([this] { wait(); }) {}
  ~Meeting() {
    {
      const std::lock_guard lock(mutex_);
      met_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  Meeting(const Meeting&) = delete;
  Meeting& operator=(const Meeting&) = delete;

 private:
  void wait() {
    std::unique_lock lock(mutex_);
    // Counts its own naps: of a job that is stopped as a whole no time passes.
    for (std::chrono::seconds waited{0}; waited < kLongestMeeting; ++waited) {
      if (changed_.wait_for(lock, std::chrono::seconds(1), [&] { return met_; })) return;
    }
    const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
    std::array<char, 256> host{};
    gethostname(host.data(), host.size() - 1);
    std::fprintf(
        stderr,
        "tessera: rank %s (%s): the ranks have not met within %lld s: a rank is stopped (ps shows "
        "T) "
        "or its host is lost, or over the network interfaces that MPI tries they can't reach one "
        "another; give mpirun or launch/run --mca btl_tcp_if_include INTERFACE "
        "(docs/cluster.md)\n",
        rank == nullptr ? "0" : rank, host.data(), static_cast<long long>(kLongestMeeting.count()));
    std::fflush(stderr);
    // The main thread is somewhere inside MPI, which may not be called from here.
    _exit(static_cast<int>(ExitCode::kCommunication));
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool met_ = false;
  std::thread thread_;  // last: it uses the others
};

MPI_Op operation_of(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return MPI_SUM;
    case Reduction::kMin:
      return MPI_MIN;
    case Reduction::kMax:
      return MPI_MAX;
  }
  return MPI_OP_NULL;
}

}  // namespace

MpiSession::MpiSession(int* argc, char*** argv) {
  const Meeting meeting;
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  if (provided < MPI_THREAD_FUNNELED) {
    throw Error(ExitCode::kCommunication,
                "MPI grants thread level " + std::to_string(provided) + ", but level " +
                    std::to_string(MPI_THREAD_FUNNELED) +
                    " (MPI_THREAD_FUNNELED) is needed: use an MPI built with thread support");
  }
  MPI_Barrier(MPI_COMM_WORLD);
}

MpiSession::~MpiSession() { MPI_Finalize(); }

void MpiSession::abort(ExitCode code) {
  MPI_Abort(MPI_COMM_WORLD, static_cast<int>(code));
  std::abort();  // not reached: MPI_Abort doesn't return
}

const char* name_of(Traffic traffic) {
  switch (traffic) {
    case Traffic::kGather:
      return "gather";
    case Traffic::kReduce:
      return "reduce";
    case Traffic::kExchange:
      return "exchange";
    case Traffic::kControl:
      return "control";
  }
  return "?";
}

// Tells the activity, and times what goes on.
class Communicator::Operation {
 public:
  Operation(Communicator& communicator, Traffic traffic, const char* name, std::string_view unit)
      : activity_(communicator.activity_),
        count_(communicator.count(traffic)),
        start_(Clock::now()) {
    if (activity_ == nullptr) return;
    before_ = activity_->state();
    activity_->begin_call(name, unit);
  }
  ~Operation() {
    count_.seconds += seconds_since(start_);
    if (activity_ != nullptr) activity_->set(before_.operation, before_.unit);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  TrafficCount& count() { return count_; }

 private:
  Activity* activity_;
  Activity::State before_;
  TrafficCount& count_;
  Clock::time_point start_;
};

Communicator::Communicator(MPI_Comm parent, Activity* activity, std::int64_t count_limit)
    : activity_(activity), count_limit_(count_limit) {
  TESSERA_CHECK(count_limit >= 1 && count_limit <= INT_MAX);
  // Whole pages, so that what follows the first part of a large transfer is aligned too.
  if (count_limit_ >= 65536) count_limit_ -= count_limit_ % 65536;
  MPI_Comm own = MPI_COMM_NULL;
  check(MPI_Comm_dup(parent, &own), "MPI_Comm_dup", "", -1);
  open(own);
}

Communicator::Communicator(const Communicator& parent, int color)
    : activity_(parent.activity_), count_limit_(parent.count_limit_) {
  MPI_Comm own = MPI_COMM_NULL;
  check(MPI_Comm_split(parent.comm_, color, parent.rank_, &own), "MPI_Comm_split", "", -1);
  open(own);
}

void Communicator::open(MPI_Comm own) {
  comm_ = own;
  check(MPI_Comm_set_errhandler(comm_, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler", "", -1);
  check(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank", "", -1);
  check(MPI_Comm_size(comm_, &size_), "MPI_Comm_size", "", -1);
  std::array<char, MPI_MAX_PROCESSOR_NAME> name{};
  int length = 0;
  check(MPI_Get_processor_name(name.data(), &length), "MPI_Get_processor_name", "", -1);
  hosts_ = all_gather_strings("host names", {name.data(), static_cast<std::size_t>(length)});
  reset_traffic();
}

Communicator::~Communicator() { MPI_Comm_free(&comm_); }

void Communicator::check(int code, const char* operation, std::string_view unit, int peer) const {
  if (code == MPI_SUCCESS) return;
  std::string message = "communication failed: " + std::string(operation);
  if (!unit.empty()) message += " of " + std::string(unit);
  if (peer >= 0) {
    message += " with rank " + std::to_string(peer);
    if (!hosts_.empty()) message += " on " + hosts_[static_cast<std::size_t>(peer)];
  }
  throw Error(ExitCode::kCommunication, message + ": " + mpi_reason(code));
}

void Communicator::check(int code, Transfer& transfer, int peer) {
  if (code == MPI_SUCCESS) return;
  transfer.forget();
  check(code, transfer.operation_, transfer.unit_, peer);
}

void Communicator::reset_traffic() {
  traffic_ = {};
  most_in_flight_ = in_flight_count_;
  advance_seconds_ = 0.0;
}

void Communicator::Transfer::reserve(std::size_t messages) {
  sends_.reserve(messages);
  receives_.reserve(messages);
  requests_.reserve(2 * messages);
  request_peers_.reserve(2 * messages);
}

void Communicator::Transfer::forget() {
  started_ = false;
  if (communicator_ == nullptr) return;
  Transfer** at = &communicator_->in_flight_;
  while (*at != this) at = &(*at)->next_;
  *at = next_;
  --communicator_->in_flight_count_;
  communicator_ = nullptr;
}

void Communicator::prepare(Transfer& transfer, Traffic traffic, const char* operation,
                           std::string_view unit) {
  TESSERA_CHECK(!transfer.started_);
  transfer.traffic_ = traffic;
  transfer.operation_ = operation;
  transfer.unit_ = unit;
  transfer.sends_.clear();
  transfer.receives_.clear();
}

void Communicator::start(Transfer& transfer) {
  transfer.tag_ = static_cast<int>(transfers_++ % kTags);
  transfer.next_shift_ = 1;
  transfer.requests_.clear();
  transfer.request_peers_.clear();
  transfer.complete_ = 0;
  transfer.started_ = true;
  ++count(transfer.traffic_).calls;
  if (size_ == 1) return;
  transfer.communicator_ = this;
  transfer.next_ = in_flight_;
  in_flight_ = &transfer;
  most_in_flight_ = std::max(most_in_flight_, ++in_flight_count_);
  for (const Message& message : transfer.sends_) {
    if (message.peer != rank_) count(transfer.traffic_).bytes_sent += message.bytes;
  }
  post_next_peers(transfer);
}

void Communicator::post(Transfer& transfer, const Message& message, bool send) {
  for (std::int64_t at = 0; at < message.bytes; at += count_limit_) {
    const int part = static_cast<int>(std::min(count_limit_, message.bytes - at));
    transfer.requests_.emplace_back();
    transfer.request_peers_.push_back(message.peer);
    check(send ? MPI_Isend(message.data + at, part, MPI_BYTE, message.peer, transfer.tag_, comm_,
                           &transfer.requests_.back())
               : MPI_Irecv(message.data + at, part, MPI_BYTE, message.peer, transfer.tag_, comm_,
                           &transfer.requests_.back()),
          transfer, message.peer);
  }
}

// Rank r sends to r+1, r+2, ... while it receives from r-1, r-2, ...: every group of shifts is
// complete in itself, and no rank is everybody's first target.
void Communicator::post_next_peers(Transfer& transfer) {
  const int first = transfer.next_shift_;
  transfer.next_shift_ = std::min(size_, first + kPeersAtOnce);
  const auto in_group = [&](int shift) { return first <= shift && shift < transfer.next_shift_; };
  transfer.requests_.clear();
  transfer.request_peers_.clear();
  transfer.complete_ = 0;
  for (const Message& message : transfer.receives_) {
    if (in_group((rank_ - message.peer + size_) % size_)) post(transfer, message, false);
  }
  for (const Message& message : transfer.sends_) {
    if (in_group((message.peer - rank_ + size_) % size_)) post(transfer, message, true);
  }
}

// Whether the transfer is complete. Requests are asked for one by one, in order: the first that
// isn't complete moves all of MPI on, and each error has its peer. (Open MPI 4.1's MPI_Waitall was
// seen to spin for ever once a request has failed.)
bool Communicator::move_on(Transfer& transfer) {
  if (transfer.communicator_ == nullptr) return true;
  while (true) {
    for (; transfer.complete_ < transfer.requests_.size(); ++transfer.complete_) {
      int done = 0;
      check(MPI_Test(&transfer.requests_[transfer.complete_], &done, MPI_STATUS_IGNORE), transfer,
            transfer.request_peers_[transfer.complete_]);
      if (done == 0) return false;
    }
    if (transfer.next_shift_ == size_) break;
    post_next_peers(transfer);
  }
  transfer.forget();
  transfer.started_ = true;  // until its finish
  return true;
}

void Communicator::wait_for(Transfer& transfer) {
  while (!move_on(transfer)) {
    check(MPI_Wait(&transfer.requests_[transfer.complete_], MPI_STATUS_IGNORE), transfer,
          transfer.request_peers_[transfer.complete_]);
    ++transfer.complete_;
    // MPI moves the others on, but for their next peers.
    if (size_ - 1 > kPeersAtOnce) advance();
  }
  transfer.started_ = false;
}

void Communicator::finish(Transfer& transfer) {
  TESSERA_CHECK(transfer.started_);
  const Operation operation(*this, transfer.traffic_, transfer.operation_, transfer.unit_);
  if (move_on(transfer)) ++count(transfer.traffic_).overlapped;
  wait_for(transfer);
}

void Communicator::advance() {
  if (in_flight_ == nullptr) return;
  const auto start = Clock::now();
  for (Transfer *transfer = in_flight_, *next; transfer != nullptr; transfer = next) {
    next = transfer->next_;  // those that complete leave the list
    move_on(*transfer);
  }
  advance_seconds_ += seconds_since(start);
}

void Communicator::prepare_gather(Transfer& transfer, Traffic traffic, std::string_view unit,
                                  std::span<const std::int64_t> bounds, const View& mine,
                                  const View& whole) {
  prepare(transfer, traffic, name_of(traffic), unit);
  const std::int64_t element = size_of(whole.dtype());
  const auto self = static_cast<std::size_t>(rank_);
  TESSERA_CHECK(bounds.size() == static_cast<std::size_t>(size_) + 1);
  TESSERA_CHECK(bounds.front() == 0 && bounds.back() == whole.count());
  TESSERA_CHECK(mine.dtype() == whole.dtype() && mine.count() == bounds[self + 1] - bounds[self]);
  std::byte* place = whole.raw() + bounds[self] * element;
  if (mine.bytes() > 0 && mine.raw() != place) {
    std::memcpy(place, mine.raw(), static_cast<std::size_t>(mine.bytes()));
  }
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto p = static_cast<std::size_t>(peer);
    transfer.sends_.push_back({peer, place, mine.bytes()});
    transfer.receives_.push_back(
        {peer, whole.raw() + bounds[p] * element, (bounds[p + 1] - bounds[p]) * element});
  }
}

void Communicator::all_gather_slices(Traffic traffic, std::string_view unit,
                                     std::span<const std::int64_t> bounds, const View& mine,
                                     const View& whole) {
  const Operation operation(*this, traffic, name_of(traffic), unit);
  prepare_gather(blocking_, traffic, unit, bounds, mine, whole);
  start(blocking_);
  wait_for(blocking_);
}

void Communicator::start_all_gather_slices(Transfer& transfer, Traffic traffic,
                                           std::string_view unit,
                                           std::span<const std::int64_t> bounds, const View& mine,
                                           const View& whole) {
  const Operation operation(*this, traffic, name_of(traffic), unit);
  prepare_gather(transfer, traffic, unit, bounds, mine, whole);
  start(transfer);
}

void Communicator::prepare_exchange(Transfer& transfer, Traffic traffic, std::string_view unit,
                                    std::span<const Message> sends,
                                    std::span<const Message> receives) {
  prepare(transfer, traffic, name_of(traffic), unit);
  // Messages to oneself match in order too.
  std::size_t at = 0;
  for (const Message& send : sends) {
    TESSERA_CHECK(0 <= send.peer && send.peer < size_);
    if (send.peer != rank_) continue;
    while (at < receives.size() && receives[at].peer != rank_) ++at;
    TESSERA_CHECK(at < receives.size() && receives[at].bytes == send.bytes);
    if (send.bytes > 0) {
      std::memcpy(receives[at].data, send.data, static_cast<std::size_t>(send.bytes));
    }
    ++at;
  }
  transfer.sends_.assign(sends.begin(), sends.end());
  transfer.receives_.assign(receives.begin(), receives.end());
}

void Communicator::exchange(Traffic traffic, std::string_view unit, std::span<const Message> sends,
                            std::span<const Message> receives) {
  const Operation operation(*this, traffic, name_of(traffic), unit);
  prepare_exchange(blocking_, traffic, unit, sends, receives);
  start(blocking_);
  wait_for(blocking_);
}

void Communicator::start_exchange(Transfer& transfer, Traffic traffic, std::string_view unit,
                                  std::span<const Message> sends,
                                  std::span<const Message> receives) {
  const Operation operation(*this, traffic, name_of(traffic), unit);
  prepare_exchange(transfer, traffic, unit, sends, receives);
  start(transfer);
}

void Communicator::all_reduce(std::string_view unit, Reduction reduction,
                              std::span<std::int64_t> values) {
  Operation operation(*this, Traffic::kControl, "all-reduce", unit);
  ++operation.count().calls;
  if (size_ == 1) return;
  const auto count = static_cast<std::int64_t>(values.size());
  for (std::int64_t at = 0; at < count; at += count_limit_) {
    const int part = static_cast<int>(std::min(count_limit_, count - at));
    check(MPI_Allreduce(MPI_IN_PLACE, values.data() + at, part, MPI_INT64_T,
                        operation_of(reduction), comm_),
          "all-reduce", unit, -1);
  }
  operation.count().bytes_sent += count * 8;
}

std::int64_t Communicator::all_reduce(std::string_view unit, Reduction reduction,
                                      std::int64_t value) {
  all_reduce(unit, reduction, std::span(&value, 1));
  return value;
}

std::vector<std::string> Communicator::all_gather_strings(std::string_view unit,
                                                          const std::string& mine) {
  const Operation operation(*this, Traffic::kControl, "all-gather", unit);
  std::vector<std::string> all(static_cast<std::size_t>(size_));
  all[static_cast<std::size_t>(rank_)] = mine;
  if (size_ == 1) {
    ++count(Traffic::kControl).calls;
    return all;
  }
  const auto bytes = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(size_));
  check(MPI_Allgather(&bytes, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, comm_), "all-gather",
        unit, -1);
  std::string copy = mine;
  prepare(blocking_, Traffic::kControl, "all-gather", unit);
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::string& text = all[static_cast<std::size_t>(peer)];
    text.resize(static_cast<std::size_t>(sizes[static_cast<std::size_t>(peer)]));
    blocking_.sends_.push_back({peer, reinterpret_cast<std::byte*>(copy.data()), bytes});
    blocking_.receives_.push_back(
        {peer, reinterpret_cast<std::byte*>(text.data()), static_cast<std::int64_t>(text.size())});
  }
  start(blocking_);
  wait_for(blocking_);
  return all;
}

void Communicator::broadcast(std::string_view unit, std::span<std::byte> bytes, int root) {
  Operation operation(*this, Traffic::kControl, "broadcast", unit);
  ++operation.count().calls;
  if (size_ == 1) return;
  const auto count = static_cast<std::int64_t>(bytes.size());
  for (std::int64_t at = 0; at < count; at += count_limit_) {
    const int part = static_cast<int>(std::min(count_limit_, count - at));
    check(MPI_Bcast(bytes.data() + at, part, MPI_BYTE, root, comm_), "broadcast", unit, root);
  }
  if (rank_ == root) operation.count().bytes_sent += count;
}

void Communicator::broadcast(std::string_view unit, std::string& text, int root) {
  std::int64_t size = static_cast<std::int64_t>(text.size());
  broadcast(unit, std::as_writable_bytes(std::span(&size, 1)), root);
  text.resize(static_cast<std::size_t>(size));
  broadcast(unit, std::as_writable_bytes(std::span(text.data(), text.size())), root);
}

void Communicator::barrier(std::string_view unit) {
  Operation operation(*this, Traffic::kControl, "barrier", unit);
  ++operation.count().calls;
  if (size_ > 1) check(MPI_Barrier(comm_), "barrier", unit, -1);
}

void Communicator::quiet_barrier(std::string_view unit) {
  const Operation operation(*this, Traffic::kControl, "barrier", unit);
  if (size_ == 1) return;
  MPI_Request request = MPI_REQUEST_NULL;
  check(MPI_Ibarrier(comm_, &request), "barrier", unit, -1);
  for (int done = 0; done == 0;) {
    check(MPI_Test(&request, &done, MPI_STATUS_IGNORE), "barrier", unit, -1);
    if (done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

Communicator::Meeting Communicator::meet(std::string_view unit, std::int64_t value) {
  if (activity_ == nullptr) return {all_reduce(unit, Reduction::kMax, value), ""};
  const auto calls = static_cast<std::int64_t>(activity_->calls_digest());
  std::array<std::int64_t, 3> values = {value, calls, ~calls};  // ~: the smallest, turned round
  all_reduce(unit, Reduction::kMax, values);
  Meeting meeting = {values[0], ""};
  if (values[1] != ~values[2]) {
    meeting.different_call =
        first_different_call(all_gather_strings(unit, activity_->last_calls()));
    if (meeting.different_call.empty()) {
      meeting.different_call = "before the last " + std::to_string(Activity::kCallsKept);
    }
  }
  return meeting;
}

void Communicator::agree(std::string_view unit, ExitCode code, const std::string& error) {
  // The code goes with its message: this rank's may be another.
  const std::string mine = error.empty() ? "" : static_cast<char>(code) + error;
  for (const std::string& of_rank : all_gather_strings(unit, mine)) {
    if (!of_rank.empty()) throw Error(static_cast<ExitCode>(of_rank[0]), of_rank.substr(1));
  }
}

}  // namespace tessera
