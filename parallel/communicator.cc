#include "parallel/communicator.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>

namespace tessera {

namespace {

// Peers of a transfer that are in flight at once.
constexpr int kPeersAtOnce = 16;
constexpr int kTag = 1;

std::string mpi_reason(int code) {
  std::array<char, MPI_MAX_ERROR_STRING> text{};
  int length = 0;
  MPI_Error_string(code, text.data(), &length);
  return {text.data(), static_cast<std::size_t>(length)};
}

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
  int provided = MPI_THREAD_SINGLE;
  MPI_Init_thread(argc, argv, MPI_THREAD_FUNNELED, &provided);
  if (provided < MPI_THREAD_FUNNELED) {
    throw Error(ExitCode::kCommunication,
                "MPI grants thread level " + std::to_string(provided) + ", but level " +
                    std::to_string(MPI_THREAD_FUNNELED) +
                    " (MPI_THREAD_FUNNELED) is needed: use an MPI built with thread support");
  }
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
    case Traffic::kControl:
      return "control";
  }
  return "?";
}

// Tells the activity, counts the call and times it.
class Communicator::Operation {
 public:
  Operation(Communicator& communicator, Traffic traffic, const char* name, std::string_view unit)
      : activity_(communicator.activity_),
        count_(communicator.traffic_[static_cast<std::size_t>(traffic)]),
        start_(Activity::Clock::now()) {
    ++count_.calls;
    if (activity_ == nullptr) return;
    before_ = activity_->state();
    activity_->set(name, unit);
  }
  ~Operation() {
    count_.seconds += std::chrono::duration<double>(Activity::Clock::now() - start_).count();
    if (activity_ != nullptr) activity_->set(before_.operation, before_.unit);
  }
  Operation(const Operation&) = delete;
  Operation& operator=(const Operation&) = delete;
  TrafficCount& count() { return count_; }

 private:
  Activity* activity_;
  Activity::State before_;
  TrafficCount& count_;
  Activity::Clock::time_point start_;
};

Communicator::Communicator(MPI_Comm parent, Activity* activity, std::int64_t count_limit)
    : activity_(activity), count_limit_(count_limit) {
  TESSERA_CHECK(count_limit >= 1 && count_limit <= INT_MAX);
  // Whole pages, so that what follows the first part of a large transfer is aligned too.
  if (count_limit_ >= 65536) count_limit_ -= count_limit_ % 65536;
  check(MPI_Comm_dup(parent, &comm_), "MPI_Comm_dup", "", -1);
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

void Communicator::transfer(const char* operation, std::string_view unit,
                            std::span<const Message> sends, std::span<const Message> receives,
                            TrafficCount& count) {
  const auto post = [&](const Message& message, bool send) {
    for (std::int64_t at = 0; at < message.bytes; at += count_limit_) {
      const int part = static_cast<int>(std::min(count_limit_, message.bytes - at));
      requests_.emplace_back();
      request_peers_.push_back(message.peer);
      check(send ? MPI_Isend(message.data + at, part, MPI_BYTE, message.peer, kTag, comm_,
                             &requests_.back())
                 : MPI_Irecv(message.data + at, part, MPI_BYTE, message.peer, kTag, comm_,
                             &requests_.back()),
            operation, unit, message.peer);
    }
  };
  // Rank r sends to r+1, r+2, ... while it receives from r-1, r-2, ...: every group of shifts is
  // complete in itself, and no rank is everybody's first target.
  for (int first = 1; first < size_; first += kPeersAtOnce) {
    const int last = std::min(size_, first + kPeersAtOnce) - 1;
    const auto in_group = [&](int shift) { return first <= shift && shift <= last; };
    requests_.clear();
    request_peers_.clear();
    for (const Message& message : receives) {
      if (in_group((rank_ - message.peer + size_) % size_)) post(message, false);
    }
    for (const Message& message : sends) {
      if (!in_group((message.peer - rank_ + size_) % size_)) continue;
      post(message, true);
      count.bytes_sent += message.bytes;
    }
    // One by one: Open MPI 4.1's MPI_Waitall was seen to spin for ever once a request has failed.
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      check(MPI_Wait(&requests_[i], MPI_STATUS_IGNORE), operation, unit, request_peers_[i]);
    }
  }
}

void Communicator::all_gather_slices(Traffic traffic, std::string_view unit,
                                     std::span<const std::int64_t> bounds, const View& mine,
                                     const View& whole) {
  Operation operation(*this, traffic, name_of(traffic), unit);
  const std::int64_t element = size_of(whole.dtype());
  const auto self = static_cast<std::size_t>(rank_);
  TESSERA_CHECK(bounds.size() == static_cast<std::size_t>(size_) + 1);
  TESSERA_CHECK(bounds.front() == 0 && bounds.back() == whole.count());
  TESSERA_CHECK(mine.dtype() == whole.dtype() && mine.count() == bounds[self + 1] - bounds[self]);
  std::byte* place = whole.raw() + bounds[self] * element;
  if (mine.bytes() > 0 && mine.raw() != place) {
    std::memcpy(place, mine.raw(), static_cast<std::size_t>(mine.bytes()));
  }
  sends_.clear();
  receives_.clear();
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    const auto p = static_cast<std::size_t>(peer);
    sends_.push_back({peer, place, mine.bytes()});
    receives_.push_back(
        {peer, whole.raw() + bounds[p] * element, (bounds[p + 1] - bounds[p]) * element});
  }
  transfer(name_of(traffic), unit, sends_, receives_, operation.count());
}

void Communicator::exchange(Traffic traffic, std::string_view unit, std::span<const Message> sends,
                            std::span<const Message> receives) {
  Operation operation(*this, traffic, name_of(traffic), unit);
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
  transfer(name_of(traffic), unit, sends, receives, operation.count());
}

void Communicator::all_reduce(std::string_view unit, Reduction reduction,
                              std::span<std::int64_t> values) {
  Operation operation(*this, Traffic::kControl, "all-reduce", unit);
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
  Operation operation(*this, Traffic::kControl, "all-gather", unit);
  std::vector<std::string> all(static_cast<std::size_t>(size_));
  all[static_cast<std::size_t>(rank_)] = mine;
  if (size_ == 1) return all;
  const auto bytes = static_cast<std::int64_t>(mine.size());
  std::vector<std::int64_t> sizes(static_cast<std::size_t>(size_));
  check(MPI_Allgather(&bytes, 1, MPI_INT64_T, sizes.data(), 1, MPI_INT64_T, comm_), "all-gather",
        unit, -1);
  std::string copy = mine;
  std::vector<Message> sends, receives;
  for (int peer = 0; peer < size_; ++peer) {
    if (peer == rank_) continue;
    std::string& text = all[static_cast<std::size_t>(peer)];
    text.resize(static_cast<std::size_t>(sizes[static_cast<std::size_t>(peer)]));
    sends.push_back({peer, reinterpret_cast<std::byte*>(copy.data()), bytes});
    receives.push_back(
        {peer, reinterpret_cast<std::byte*>(text.data()), static_cast<std::int64_t>(text.size())});
  }
  transfer("all-gather", unit, sends, receives, operation.count());
  return all;
}

void Communicator::broadcast(std::string_view unit, std::span<std::byte> bytes, int root) {
  Operation operation(*this, Traffic::kControl, "broadcast", unit);
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
  const Operation operation(*this, Traffic::kControl, "barrier", unit);
  if (size_ > 1) check(MPI_Barrier(comm_), "barrier", unit, -1);
}

void Communicator::agree(std::string_view unit, ExitCode code, const std::string& error) {
  for (const std::string& of_rank : all_gather_strings(unit, error)) {
    if (!of_rank.empty()) throw Error(code, of_rank);
  }
}

}  // namespace tessera
