#pragma once

#include <algorithm>
#include <numeric>

#include "tests/reference/array.h"
#include "tests/reference/model.h"
#include "tests/reference/rms_norm.h"

namespace reference {

// A mixture of experts token by token, and the router's own losses. Parameters: the layer's in its
// order, then the experts' three stacks.
struct Experts {
  std::int64_t width = 0, experts = 0, active = 0, inner = 0, shared = 0, latent = 0;
  bool norm = false, renormalise = true;
  double auxiliary = 0.0, z = 0.0;
  std::int64_t length = 1;          // positions of a sequence
  std::int64_t capacity = 0;        // 0: none is dropped
  std::int64_t step_sequences = 0;  // which the losses are averaged over; 0: there are none
  Array bias = {};

  struct Result {
    Array out;
    double losses = 0.0;  // auxiliary and z, with their coefficients
    double auxiliary = 0.0, z = 0.0, entropy = 0.0;
    std::vector<std::int64_t> loads;
    std::int64_t dropped = 0;
  };
  using Choices = std::vector<std::vector<std::int64_t>>;  // of each token, ascending

  std::int64_t row_width() const { return latent > 0 ? latent : width; }

  Array logits(const Array& x, const std::vector<Array>& p) const {
    return linear(x, p[0], width, experts);
  }
  Array softmax(const double* row, double* log_sum) const {
    const double most = *std::max_element(row, row + experts);
    Array e(at(experts));
    double sum = 0.0;
    for (std::int64_t i = 0; i < experts; ++i) sum += e[at(i)] = std::exp(row[i] - most);
    for (double& value : e) value /= sum;
    *log_sum = most + std::log(sum);
    return e;
  }
  Choices choose(const Array& x, const std::vector<Array>& p) const {
    const Array all = logits(x, p);
    Choices choices;
    for (std::size_t row = 0; row < all.size(); row += at(experts)) {
      double unused = 0.0;
      const Array probability = softmax(&all[row], &unused);
      std::vector<std::int64_t> order(at(experts));
      std::iota(order.begin(), order.end(), 0);
      std::stable_sort(order.begin(), order.end(), [&](std::int64_t a, std::int64_t b) {
        const auto score = [&](std::int64_t i) {
          return probability[at(i)] + (bias.empty() ? 0.0 : bias[at(i)]);
        };
        return score(a) > score(b);
      });
      order.resize(at(active));
      std::sort(order.begin(), order.end());
      choices.push_back(order);
    }
    return choices;
  }

  // With the choices held fixed.
  Result forward(const Array& x, const std::vector<Array>& p, const Choices& choices) const {
    const std::int64_t l = row_width();
    const std::size_t stacks = p.size() - 3;
    std::size_t next = 1;
    const Array z_rows = latent > 0 ? linear(x, p[next++], width, latent) : x;
    const Array all_logits = logits(x, p);
    const auto tokens = static_cast<std::int64_t>(choices.size());
    Result result;
    result.loads.assign(at(experts), 0);
    Array sum(at(tokens * l), 0.0);
    Array probabilities;
    for (std::int64_t sequence = 0; sequence < tokens / length; ++sequence) {
      std::vector<std::int64_t> loads(at(experts), 0);
      for (std::int64_t t = sequence * length; t < (sequence + 1) * length; ++t) {
        double log_sum = 0.0;
        const Array probability = softmax(&all_logits[at(t * experts)], &log_sum);
        probabilities.insert(probabilities.end(), probability.begin(), probability.end());
        result.z += log_sum * log_sum;
        for (const double value : probability) {
          if (value > 0.0) result.entropy -= value * std::log(value);
        }
        double divisor = 1.0;
        if (renormalise) {
          divisor = 0.0;
          for (const std::int64_t i : choices[at(t)]) divisor += probability[at(i)];
        }
        for (const std::int64_t i : choices[at(t)]) {
          if (++loads[at(i)] > capacity && capacity > 0) {
            ++result.dropped;
            continue;
          }
          const Array row(z_rows.begin() + t * l, z_rows.begin() + (t + 1) * l);
          const Array y = swiglu(row,
                                 {part(p[stacks], i, inner * l), part(p[stacks + 1], i, inner * l),
                                  part(p[stacks + 2], i, inner * l)},
                                 l, inner);
          const double weight = probability[at(i)] / divisor;
          for (std::int64_t c = 0; c < l; ++c) sum[at(t * l + c)] += weight * y[at(c)];
        }
      }
      for (std::int64_t i = 0; i < experts; ++i) {
        result.loads[at(i)] += loads[at(i)];
        double mean = 0.0;
        for (std::int64_t t = sequence * length; t < (sequence + 1) * length; ++t) {
          mean += probabilities[at(t * experts + i)] / static_cast<double>(length);
        }
        result.auxiliary += static_cast<double>(experts * loads[at(i)]) /
                            static_cast<double>(active * length) * mean;
      }
    }
    if (step_sequences > 0) {
      const auto sequences = static_cast<double>(step_sequences);
      result.losses = auxiliary * result.auxiliary / sequences +
                      z * result.z / (sequences * static_cast<double>(length));
    }
    if (latent > 0) {
      if (norm) sum = rms_norm(sum, p[next++], 1e-6);
      sum = linear(sum, p[next++], latent, width);
    }
    if (shared > 0) {
      sum = plus(std::move(sum), swiglu(x, {p[next], p[next + 1], p[next + 2]}, width, shared));
    }
    result.out = std::move(sum);
    return result;
  }

 private:
  static Array part(const Array& stack, std::int64_t i, std::int64_t count) {
    return {stack.begin() + i * count, stack.begin() + (i + 1) * count};
  }
};

}  // namespace reference
