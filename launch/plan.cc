#include "launch/plan.h"

#include <algorithm>

#include "launch/engine.h"
#include "launch/trainer.h"
#include "layers/experts/experts.h"

namespace tessera {
namespace {

std::int64_t count(const std::vector<ParameterSpec>& parameters) {
  std::int64_t sum = 0;
  for (const ParameterSpec& parameter : parameters) sum += parameter.shape.count();
  return sum;
}

// Within what the plan books: kept by every block, or by one with recomputation.
std::int64_t expert_row_bytes(const Stack& stack, const EngineOptions& options) {
  std::int64_t saved = 0, scratch = 0;
  for (const Block& block : stack.blocks()) {
    if (block.experts() == nullptr) continue;
    const MixtureOfExperts::RowBytes bytes = block.experts()->row_bytes(options.quantum);
    saved = options.recompute ? std::max(saved, bytes.saved) : saved + bytes.saved;
    scratch = std::max(scratch, bytes.scratch);
  }
  return saved + scratch;
}

// All of them. Of many that share gradients out at once, both ends and the last of the first group:
// the last of a group holds as many experts as any, the first ranks have as many quanta as any, and
// beyond that ranks differ by a slice's granule a unit. (Ranks that sum their own runs first differ
// by whole sums.)
std::vector<int> ranks_to_plan(int ranks, const EngineOptions& options) {
  constexpr int kAll = 512, kEnd = 64;
  const bool all = ranks <= kAll || options.accumulate == Accumulate::kLocal;
  std::vector<int> list;
  for (int rank = 0; rank < ranks; ++rank) {
    if (all || rank < kEnd || rank >= ranks - kEnd || rank == options.expert_ranks - 1) {
      list.push_back(rank);
    }
  }
  return list;
}

}  // namespace

RunSummary summarise(const Stack& stack, const Config& config, std::int64_t sequence_length,
                     int ranks) {
  RunSummary summary;
  summary.total_parameters = stack.parameter_count();
  summary.embedding_parameters = count(stack.embedding().parameters());
  summary.head_parameters = count(stack.head().parameters());
  for (const Block& block : stack.blocks()) {
    LayerSummary layer;
    layer.mixer = block.mixer_type();
    layer.mixer_parameters = count(block.mixer().parameters());
    layer.feed_forward_parameters = count(block.feed_forward().parameters());
    layer.norm_parameters =
        count(block.parameters()) - layer.mixer_parameters - layer.feed_forward_parameters;
    layer.active_parameters = count(block.parameters());
    if (block.experts() != nullptr) {
      const ExpertsShape& shape = block.experts()->shape();
      const std::int64_t experts = count(block.expert_parameters());
      layer.feed_forward_parameters += experts;
      layer.active_parameters += experts / shape.experts * shape.active;
    }
    summary.active_parameters += layer.active_parameters;
    layer.mixer_flops_per_token = block.mixer().flops_per_token(sequence_length);
    layer.feed_forward_flops_per_token = block.feed_forward().flops_per_token(sequence_length);
    summary.layers.push_back(layer);
  }
  summary.active_parameters += summary.embedding_parameters + summary.head_parameters;
  summary.forward_flops_per_token = stack.flops_per_token(sequence_length);
  summary.train_flops_per_token = 3 * summary.forward_flops_per_token;
  for (const int rank : ranks_to_plan(ranks, engine_options(config, sequence_length, 0, ranks))) {
    const EnginePlan plan(stack, engine_options(config, sequence_length, rank, ranks));
    if (plan.memory().bytes() > summary.bytes_per_rank) {
      summary.bytes_per_rank = plan.memory().bytes();
      summary.memory = plan.memory().categories();
      summary.expert_row_bytes = expert_row_bytes(stack, plan.options());
    }
    const EnginePlan::Communication communication = plan.communication();
    summary.gather_bytes_per_step =
        std::max(summary.gather_bytes_per_step, communication.gather_bytes);
    summary.reduce_bytes_per_step =
        std::max(summary.reduce_bytes_per_step, communication.reduce_bytes);
    summary.exchange_bytes_per_step =
        std::max(summary.exchange_bytes_per_step, communication.exchange_bytes);
  }
  summary.memory.emplace_back("program and libraries", kLibraryBytes);
  summary.bytes_per_rank += kLibraryBytes;
  return summary;
}

void check_memory(const RunSummary& summary, std::int64_t limit, const std::string& whose) {
  if (limit == 0 || summary.bytes_per_rank <= limit) return;
  const auto largest =
      std::max_element(summary.memory.begin(), summary.memory.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  throw Error(ExitCode::kUsage,
              "the run needs " + std::to_string(summary.bytes_per_rank) +
                  " bytes a rank, more than " + whose + std::to_string(limit) +
                  "; the largest part is " + largest->first + " with " +
                  std::to_string(largest->second) +
                  " bytes: use more ranks, execution.recompute or a smaller train.micro_batch");
}

}  // namespace tessera
