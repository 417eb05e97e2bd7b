#include "parallel/mesh.h"

#include <algorithm>
#include <string>

namespace tessera {

void check_expert_ranks(int expert_ranks, int ranks) {
  if (expert_ranks >= 1 && ranks % expert_ranks == 0) return;
  throw Error(ExitCode::kUsage, "parallel.expert_ranks: must divide the number of ranks, " +
                                    std::to_string(ranks) + ", is " + std::to_string(expert_ranks));
}

Mesh::Mesh(Communicator& world, int expert_ranks) : world_(world) {
  check_expert_ranks(expert_ranks, world.size());
  placement_ = {expert_ranks, world.rank() % expert_ranks};
  if (expert_ranks == 1) return;
  expert_group_.emplace(world, world.rank() / expert_ranks);
  shard_group_.emplace(world, placement_.rank);
}

template <class Visit>
void Mesh::for_each(const Visit& visit) const {
  visit(world_);
  if (expert_group_) visit(*expert_group_);
  if (shard_group_) visit(*shard_group_);
}

void Mesh::advance() {
  world_.advance();
  if (expert_group_) expert_group_->advance();
  if (shard_group_) shard_group_->advance();
}

TrafficCount Mesh::traffic(Traffic kind) const {
  TrafficCount sum;
  for_each([&](const Communicator& communicator) {
    const TrafficCount& count = communicator.traffic(kind);
    sum.calls += count.calls;
    sum.bytes_sent += count.bytes_sent;
    sum.seconds += count.seconds;
    sum.overlapped += count.overlapped;
  });
  return sum;
}

std::int64_t Mesh::most_in_flight() const {
  std::int64_t most = 0;
  for_each([&](const Communicator& c) { most = std::max(most, c.most_in_flight()); });
  return most;
}

double Mesh::advance_seconds() const {
  double seconds = 0.0;
  for_each([&](const Communicator& c) { seconds += c.advance_seconds(); });
  return seconds;
}

void Mesh::reset_traffic() {
  world_.reset_traffic();
  if (expert_group_) expert_group_->reset_traffic();
  if (shard_group_) shard_group_->reset_traffic();
}

GroupExchange::GroupExchange(Communicator& group, std::size_t messages) : group_(group) {
  sends_.reserve(messages);
  receives_.reserve(messages);
  transfer_.reserve(messages);
}

void GroupExchange::send(int peer, std::byte* data, std::int64_t bytes) {
  if (bytes > 0) sends_.push_back({peer, data, bytes});
}

void GroupExchange::receive(int peer, std::byte* data, std::int64_t bytes) {
  if (bytes > 0) receives_.push_back({peer, data, bytes});
}

void GroupExchange::start(std::string_view phase) {
  name_ = unit_;
  name_ += ' ';
  name_ += phase;
  group_.start_exchange(transfer_, Traffic::kExchange, name_, sends_, receives_);
  sends_.clear();
  receives_.clear();
}

void GroupExchange::finish() { group_.finish(transfer_); }

}  // namespace tessera
