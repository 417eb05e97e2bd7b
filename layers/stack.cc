#include "layers/stack.h"

#include <utility>

#include "layers/configuration.h"

namespace tessera {
namespace {

std::vector<Block> make_blocks(const ModelConfig& config, DType compute) {
  validate(config);
  const std::size_t layers = schedule_types(config.schedule()).size();
  std::vector<Block> blocks;
  blocks.reserve(layers);
  for (std::size_t l = 0; l < layers; ++l)
    blocks.emplace_back(config, static_cast<std::int64_t>(l), compute);
  return blocks;
}

}  // namespace

Stack::Stack(const ModelConfig& config, DType compute)
    : compute_(compute),
      embedding_(config),
      blocks_(make_blocks(config, compute)),
      head_(config, compute) {}

std::vector<UnitSpec> Stack::units() const {
  std::vector<UnitSpec> units;
  units.push_back({UnitSpec::Kind::kEmbedding,
                   0,
                   "embedding",
                   with_prefix("model.embed_tokens.", embedding_.parameters()),
                   {}});
  for (std::size_t l = 0; l < blocks_.size(); ++l) {
    const std::string name = "layers." + std::to_string(l);
    units.push_back({UnitSpec::Kind::kBlock, static_cast<std::int64_t>(l), name,
                     with_prefix("model." + name + ".", blocks_[l].parameters()),
                     with_prefix("model." + name + ".", blocks_[l].expert_parameters())});
  }
  std::vector<ParameterSpec> head = head_.parameters();
  head[0].name = "model." + head[0].name;
  units.push_back({UnitSpec::Kind::kHead, 0, "head", std::move(head), {}});
  return units;
}

std::int64_t Stack::parameter_count() const {
  std::int64_t count = 0;
  for (const UnitSpec& unit : units()) {
    for (const ParameterSpec& parameter : unit.parameters) count += parameter.shape.count();
    for (const ParameterSpec& parameter : unit.experts) count += parameter.shape.count();
  }
  return count;
}

double Stack::flops_per_token(std::int64_t length) const {
  double flops = head_.flops_per_token();
  for (const Block& block : blocks_) flops += block.flops_per_token(length);
  return flops;
}

}  // namespace tessera
