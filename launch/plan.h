// What a config amounts to: parameters, FLOPs, memory and communication per rank.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "launch/config.h"
#include "layers/stack.h"

namespace tessera {

// What the program and its libraries (MPI, HDF5, protobuf, oneDNN with its packed operands) hold
// besides the plan, as measured: docs/benchmarks.md.
constexpr std::int64_t kLibraryBytes = std::int64_t{100} << 20;

struct LayerSummary {
  std::string mixer;
  std::int64_t mixer_parameters = 0;
  std::int64_t feed_forward_parameters = 0;
  std::int64_t active_parameters = 0;  // of mixer, feed-forward and norms, in one token's pass
  std::int64_t norm_parameters = 0;
  double mixer_flops_per_token = 0.0;  // forward
  double feed_forward_flops_per_token = 0.0;
};

struct RunSummary {
  std::int64_t total_parameters = 0;
  std::int64_t active_parameters = 0;  // that take part in one token's forward pass
  std::int64_t embedding_parameters = 0;
  std::int64_t head_parameters = 0;  // with the final norm
  std::vector<LayerSummary> layers;
  double forward_flops_per_token = 0.0;
  double train_flops_per_token = 0.0;  // forward and backward; recomputation isn't counted
  // Of the rank that needs most; of more than 512 ranks some are looked at.
  std::vector<std::pair<std::string, std::int64_t>> memory;  // by category; the last: libraries
  std::int64_t bytes_per_rank = 0;
  // Within activations and scratch: rows of experts, if all tokens choose this rank's.
  std::int64_t expert_row_bytes = 0;
  std::int64_t gather_bytes_per_step = 0;  // sent by one rank at most
  std::int64_t reduce_bytes_per_step = 0;
  std::int64_t exchange_bytes_per_step = 0;  // when every expert is chosen equally often
};

// `config` is resolved as far as `sequence_length` goes (recipe's). Throws Error(kUsage).
RunSummary summarise(const Stack& stack, const Config& config, std::int64_t sequence_length,
                     int ranks);

// Throws Error(kUsage), naming the largest line, when a rank needs more than `limit` bytes; 0 is
// no limit. `whose` begins the words about it: "the limit of ".
void check_memory(const RunSummary& summary, std::int64_t limit,
                  const std::string& whose = "the limit of ");

}  // namespace tessera
