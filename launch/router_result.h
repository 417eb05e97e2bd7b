// What the routers of a step's experts did, over all ranks.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

// Of each layer with experts, in order.
struct RouterResult {
  std::vector<std::int64_t> layers;  // their numbers
  std::vector<std::vector<std::int64_t>>
      loads;                          // [N] choices of each expert, before any is dropped
  std::vector<std::int64_t> dropped;  // choices that capacity left out
  std::vector<double> entropy;        // mean over the tokens, nats
  double auxiliary = 0.0;  // mean over the sequences, summed over the layers; 1 a layer is balance
  double z = 0.0;          // mean over the tokens, summed over the layers
};

// The array of a checkpoint that holds a layer's selection bias [N].
inline std::string selection_bias_name(std::int64_t layer) {
  return "state/selection_bias/layers." + std::to_string(layer);
}

}  // namespace tessera
