// The mathematics of the geometry probe: the intrinsic dimension of a set of points, the local
// Jacobian of an expert and its numerical rank. Sources and what is chosen: docs/probe.md.
#pragma once

#include <Eigen/Core>
#include <cstdint>
#include <span>
#include <vector>

#include "runtime/device.h"
#include "runtime/view.h"

namespace tessera {

// TwoNN (Facco et al. 2017, "Estimating the intrinsic dimension of datasets by a minimal
// neighborhood information"): mu = r2 / r1, the distances from a point to its second and to its
// nearest neighbour, has the distribution F(mu) = 1 - mu^-ID.
struct IntrinsicDimension {
  std::int64_t points = 0;      // given
  std::int64_t duplicates = 0;  // equal to an earlier one, left out before anything is measured
  std::int64_t ties = 0;        // left out: r1 = r2, or r1 = 0
  std::int64_t used = 0;        // n
  double likelihood = 0.0;      // (n - 1) / sum ln mu
  double line = 0.0;  // slope of -ln(1 - F) on ln mu through the origin, without the largest tenth
  // Of the first, were the mu independent: likelihood / sqrt(n).
  double standard_error = 0.0;
};
constexpr std::int64_t kLeastPoints = 10;
// The line's standard error as a multiple of the likelihood's, from simulated mu.
constexpr double kLineError = 1.1;

// The two estimates from ln mu of n points, all above 0, n at least kLeastPoints.
IntrinsicDimension dimension_of_ratios(std::vector<double> log_ratios);

// points: [n, d] f32. The same bits on any number of threads. Throws Error(kUsage) when fewer than
// kLeastPoints are left, Error(kNumerics) when one isn't finite.
IntrinsicDimension intrinsic_dimension(Queue& queue, const View& points);

// An expert's three matrices, f32, where they lie: gate and up [m, l], down [l, m].
struct ExpertWeights {
  View gate, up, down;
};

// J = W_d [diag(b * silu'(a)) W_g + diag(silu(a)) W_u] with a = W_g z and b = W_u z, in double:
// the derivative [l, l] of E(z) = W_d (silu(a) * b) at z [l].
Eigen::MatrixXd expert_jacobian(const ExpertWeights& expert, const Eigen::VectorXd& z);

// The number of singular values above `threshold` times the largest; 0 of a zero matrix. Throws
// Error(kNumerics) when an element isn't finite.
constexpr double kRankThreshold = 1e-3;
std::int64_t numerical_rank(const Eigen::MatrixXd& matrix, double threshold = kRankThreshold);

// Whether the estimator tells ranks apart that are known: matrices [l, m] of 11 shapes with rank
// 0.25, 0.5 and 0.9 times min(l, m), random singular vectors and singular values in geometric
// progression from 1 to 1e-2, rounded to bf16 as trained weights are.
struct RankControl {
  struct Case {
    std::int64_t rows = 0, columns = 0, rank = 0, found = 0;
  };
  std::vector<Case> cases;
  std::int64_t recovered() const;
};
RankControl rank_control(Queue& queue, std::uint64_t seed);

}  // namespace tessera
