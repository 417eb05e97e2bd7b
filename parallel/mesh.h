// The ranks as a grid of groups by experts: rank r is member r mod E of group r div E. The E ranks
// of a group hold all experts between them; the W/E ranks that stand at one place in their groups
// hold the same ones, and share their parameters.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "parallel/communicator.h"
#include "runtime/device.h"
#include "runtime/expert_exchange.h"

namespace tessera {

class Mesh final : public BackgroundWork {
 public:
  // Collective. expert_ranks: E, must divide the world's size (throws Error(kUsage)). The world
  // outlives the mesh.
  explicit Mesh(Communicator& world, int expert_ranks = 1);

  Communicator& world() { return world_; }
  // This rank's group, in which tokens travel to their experts; only where E > 1.
  Communicator& expert_group() { return *expert_group_; }
  // The ranks that hold the same experts; the world where E is 1.
  Communicator& shard_group() { return shard_group_ ? *shard_group_ : world_; }
  ExpertPlacement placement() const { return placement_; }

  // Moves the transfers of all its communicators on.
  void advance() override;
  // Of all its communicators together.
  TrafficCount traffic(Traffic kind) const;
  std::int64_t most_in_flight() const;
  double advance_seconds() const;
  void reset_traffic();

 private:
  template <class Visit>
  void for_each(const Visit& visit) const;

  Communicator& world_;
  ExpertPlacement placement_;
  std::optional<Communicator> expert_group_, shard_group_;
};

// Says why E can't be with so many ranks: Error(kUsage).
void check_expert_ranks(int expert_ranks, int ranks);

// The exchange of one group over its communicator, which outlives it.
class GroupExchange : public ExpertExchange {
 public:
  // messages: the most of one exchange, each way.
  GroupExchange(Communicator& group, std::size_t messages);
  int ranks() const override { return group_.size(); }
  int rank() const override { return group_.rank(); }
  void send(int peer, std::byte* data, std::int64_t bytes) override;
  void receive(int peer, std::byte* data, std::int64_t bytes) override;
  void start(std::string_view phase) override;
  void finish() override;
  // Whose exchanges come: stands before their phases in errors and for the watchdog.
  void set_unit(std::string_view unit) { unit_ = unit; }

 private:
  Communicator& group_;
  std::string unit_, name_;
  std::vector<Communicator::Message> sends_, receives_;
  Communicator::Transfer transfer_;
};

}  // namespace tessera
