// The geometry probe: what reaches the experts of a trained model on real text, and what they can
// do with it. Formulas, what is chosen and how to read the results: docs/probe.md.
//
// The blocks are walked one after another with all windows, in f32: the probe holds the residuals
// of the windows and the parameters of one block.
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "data/stream.h"
#include "launch/probe_statistics.h"
#include "layers/experts/experts.h"
#include "layers/stack.h"
#include "runtime/device.h"

namespace tessera {

// Windows of the data and the positions in them at which the probe looks.
struct ProbeText {
  std::string source;  // "held-out windows", or "the training stream" where none are held out
  std::vector<std::vector<std::uint32_t>> windows;   // L + 1 ids each
  std::vector<std::vector<std::int64_t>> positions;  // of each window, ascending, below L
  std::int64_t tokens() const;
};
constexpr std::int64_t kProbePositions = 8;  // of a window, unless there are too few windows

// `tokens` positions, or as many as there are; windows and positions drawn without repeats by
// `seed`, at most kProbePositions of a window as long as there are windows.
ProbeText choose_text(const TokenStream& stream, std::int64_t tokens, std::uint64_t seed);

struct ProbeSubject {
  ModelConfig model;
  std::int64_t end_of_sequence = -1;
  bool document_masking = false;
  // Fills parameters (full names, f32).
  std::function<void(std::span<const ParameterSpec> parameters, std::span<const View> values)>
      parameters;
  // Fills [N] f32: what is added to a layer's probabilities; asked where the config says so.
  std::function<void(std::int64_t layer, const View& bias)> selection_bias;
};

// A block's experts, what enters them and where it goes; valid during the visit.
struct ProbedExperts {
  std::int64_t layer = 0;
  ExpertsShape shape;
  View x;               // [tokens, d] f32: the normalised rows, in the order of the text
  View choices;         // [tokens, K] i32: T; -1 for one that capacity left out
  View weights;         // [tokens, K] f32: of the chosen experts' results
  View latent_down;     // [l, d] f32; empty without a latent space
  View gate, up, down;  // [N, m, l], [N, m, l], [N, l, m] f32
  ExpertWeights expert(std::int64_t i) const;
};

// Visits each block with experts, in order of the layers; `progress` (may be empty) hears of every
// layer before it is computed. Throws Error(kUsage) when no block has experts.
void walk_experts(const ProbeSubject& subject, const ProbeText& text, Device& device,
                  const std::function<void(const ProbedExperts&)>& visit,
                  const std::function<void(std::int64_t layer)>& progress = {});

struct BlockDimension {
  std::int64_t layer = 0;
  IntrinsicDimension dimension;
};
BlockDimension probe_dimension(Queue& queue, const ProbedExperts& block);

struct RankSpread {
  double mean = 0.0, least = 0.0, most = 0.0;
};
struct BlockRanks {
  std::int64_t layer = 0;
  std::int64_t experts = 0, active = 0, latent = 0, inner = 0, capacity = 0;  // N, K, l, m, q
  std::int64_t tokens = 0;
  std::int64_t pairs = 0;  // of a token and an expert that it is routed to
  RankSpread local;        // of J, as shares of q
  RankSpread mixture;      // of sum over T of p_i J_i, as shares of l
};
BlockRanks probe_ranks(Queue& queue, const ProbedExperts& block);

// The published ranges, which ours are set beside.
constexpr double kPublishedLocal[2] = {0.909, 1.000};
constexpr double kPublishedMixture[2] = {0.931, 0.994};

// What a probe's results are about, beside the blocks.
struct ProbeContext {
  std::string config, checkpoint;
  std::int64_t step = 0, width = 0, length = 0, windows = 0, tokens = 0;
  std::uint64_t seed = 0;
  std::string source;
};

std::string dimension_table(const ProbeContext& context, const std::vector<BlockDimension>& blocks);
nlohmann::ordered_json dimension_json(const ProbeContext& context,
                                      const std::vector<BlockDimension>& blocks);
// Both estimates over the blocks, the likelihood's with two standard errors.
std::string dimension_svg(const ProbeContext& context, const std::vector<BlockDimension>& blocks);

std::string rank_table(const ProbeContext& context, const std::vector<BlockRanks>& blocks,
                       const RankControl& control);
nlohmann::ordered_json rank_json(const ProbeContext& context, const std::vector<BlockRanks>& blocks,
                                 const RankControl& control);
// Means over the blocks with the least and the most, in front of the published ranges.
std::string rank_svg(const ProbeContext& context, const std::vector<BlockRanks>& blocks);

}  // namespace tessera
