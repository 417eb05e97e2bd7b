#pragma once

#include "tests/reference/differential.h"
#include "tests/reference/nsa.h"

namespace reference {

// nsa and differential side by side; heads times head width is the model's width.
struct Hybrid {
  Nsa nsa;
  Differential differential;

  // p: nsa's, differential's, W_h, W_o.
  Array forward(const Array& x, const std::vector<Array>& p) const {
    const std::int64_t width = differential.model_width, heads = differential.attention.heads;
    const auto split =
        p.end() - 2 - (differential.norm ? 9 : 7);  // differential's without its projection
    // nsa's own projection as the identity leaves what it mixed.
    Array identity(at(width * width), 0.0);
    for (std::int64_t i = 0; i < width; ++i) identity[at(i * width + i)] = 1.0;
    std::vector<Array> of_nsa(p.begin(), split);
    of_nsa.push_back(identity);
    const Array first = nsa.forward(x, of_nsa);
    const Array second = differential.mix(x, {split, p.end() - 2});
    const Array logits = linear(x, p[p.size() - 2], width, heads);
    Array mixed(first.size());
    for (std::size_t i = 0; i < mixed.size(); ++i) {
      const double gate = 1.0 / (1.0 + std::exp(-logits[i / at(width / heads)]));
      mixed[i] = gate * first[i] + (1.0 - gate) * second[i];
    }
    return linear(mixed, p.back(), width, width);
  }
};

}  // namespace reference
