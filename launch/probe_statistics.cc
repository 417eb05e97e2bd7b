#include "launch/probe_statistics.h"

#include <Eigen/Eigenvalues>
#include <Eigen/QR>
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <string>
#include <utility>

#include "runtime/error.h"
#include "runtime/random.h"

namespace tessera {
namespace {

using RowMajor = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

Eigen::MatrixXd in_double(const View& matrix) {
  return Eigen::Map<const RowMajor>(matrix.as<float>(), matrix.extent(0), matrix.extent(1))
      .cast<double>();
}

// Row numbers of the points that equal no earlier one, ascending.
std::vector<std::int64_t> distinct_rows(const float* points, std::int64_t count,
                                        std::int64_t width) {
  std::vector<std::int64_t> rows(static_cast<std::size_t>(count));
  std::iota(rows.begin(), rows.end(), std::int64_t{0});
  const auto row = [&](std::int64_t i) {
    return std::span(points + i * width, points + (i + 1) * width);
  };
  std::sort(rows.begin(), rows.end(), [&](std::int64_t i, std::int64_t j) {
    const auto a = row(i), b = row(j);
    const auto [at, other] = std::mismatch(a.begin(), a.end(), b.begin());
    return at == a.end() ? i < j : *at < *other;
  });
  rows.erase(std::unique(rows.begin(), rows.end(),
                         [&](std::int64_t i, std::int64_t j) {
                           return std::equal(row(i).begin(), row(i).end(), row(j).begin());
                         }),
             rows.end());
  std::sort(rows.begin(), rows.end());
  return rows;
}

// Differences are taken before squares are summed: a small distance keeps its digits.
double squared_distance(const double* a, const double* b, std::int64_t width) {
  constexpr std::int64_t kLanes = 4;
  std::array<double, kLanes> sums = {};
  std::int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    for (std::int64_t lane = 0; lane < kLanes; ++lane) {
      const double difference = a[i + lane] - b[i + lane];
      sums[static_cast<std::size_t>(lane)] += difference * difference;
    }
  }
  double sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  for (; i < width; ++i) sum += (a[i] - b[i]) * (a[i] - b[i]);
  return sum;
}

// ln(r2 / r1) of each point; 0 where they are equal, infinite where r1 alone is 0.
std::vector<double> log_ratios(Queue& queue, const std::vector<double>& points,
                               std::int64_t width) {
  const std::int64_t count = static_cast<std::int64_t>(points.size()) / width;
  constexpr std::int64_t kRows = 16;
  std::vector<double> ratios(static_cast<std::size_t>(count));
  queue.parallel_for((count + kRows - 1) / kRows, [&](std::int64_t piece, Worker&) {
    const std::int64_t begin = piece * kRows, end = std::min(begin + kRows, count);
    std::array<double, kRows> nearest, second;
    nearest.fill(std::numeric_limits<double>::infinity());
    second = nearest;
    for (std::int64_t j = 0; j < count; ++j) {
      for (std::int64_t i = begin; i < end; ++i) {
        if (i == j) continue;
        const double squared =
            squared_distance(points.data() + i * width, points.data() + j * width, width);
        double& first = nearest[static_cast<std::size_t>(i - begin)];
        double& next = second[static_cast<std::size_t>(i - begin)];
        if (squared < first) {
          next = std::exchange(first, squared);
        } else if (squared < next) {
          next = squared;
        }
      }
    }
    for (std::int64_t i = begin; i < end; ++i) {
      const double first = nearest[static_cast<std::size_t>(i - begin)];
      const double next = second[static_cast<std::size_t>(i - begin)];
      ratios[static_cast<std::size_t>(i)] = next == first ? 0.0 : 0.5 * std::log(next / first);
    }
  });
  return ratios;
}

double line_through_origin(const std::vector<double>& ascending) {
  const std::size_t kept = ascending.size() * 9 / 10;
  const auto n = static_cast<double>(ascending.size());
  double products = 0.0, squares = 0.0;
  for (std::size_t i = 0; i < kept; ++i) {
    const double x = ascending[i];
    products -= x * std::log1p(-static_cast<double>(i + 1) / n);
    squares += x * x;
  }
  return products / squares;
}

double sigmoid(double x) { return 1.0 / (1.0 + std::exp(-x)); }

Eigen::MatrixXd random_orthonormal(std::int64_t rows, std::int64_t columns,
                                   const RandomStream& random) {
  Eigen::MatrixXd gaussian(rows, columns);
  for (std::int64_t j = 0; j < columns; ++j) {
    for (std::int64_t i = 0; i < rows; ++i) {
      gaussian(i, j) = random.normal(static_cast<std::uint64_t>(j * rows + i));
    }
  }
  const Eigen::HouseholderQR<Eigen::MatrixXd> decomposed(gaussian);
  return decomposed.householderQ() * Eigen::MatrixXd::Identity(rows, columns);
}

Eigen::MatrixXd known_rank_matrix(const RankControl::Case& made, std::uint64_t seed) {
  constexpr double kSmallest = 1e-2;
  const std::string name = std::to_string(made.rows) + " x " + std::to_string(made.columns) +
                           " of rank " + std::to_string(made.rank);
  Eigen::VectorXd values(made.rank);
  for (std::int64_t i = 0; i < made.rank; ++i) {
    values[i] = std::pow(kSmallest, static_cast<double>(i) / static_cast<double>(made.rank - 1));
  }
  Eigen::MatrixXd matrix =
      random_orthonormal(made.rows, made.rank, RandomStream(seed, name + " left")) *
      values.asDiagonal() *
      random_orthonormal(made.columns, made.rank, RandomStream(seed, name + " right")).transpose();
  for (double& value : matrix.reshaped()) {
    value = static_cast<double>(to_float(to_bfloat16(static_cast<float>(value))));
  }
  return matrix;
}

}  // namespace

IntrinsicDimension dimension_of_ratios(std::vector<double> log_ratios) {
  TESSERA_CHECK(log_ratios.size() >= kLeastPoints);
  std::sort(log_ratios.begin(), log_ratios.end());
  IntrinsicDimension result;
  result.used = static_cast<std::int64_t>(log_ratios.size());
  const auto n = static_cast<double>(result.used);
  result.likelihood = (n - 1.0) / std::accumulate(log_ratios.begin(), log_ratios.end(), 0.0);
  result.line = line_through_origin(log_ratios);
  result.standard_error = result.likelihood / std::sqrt(n);
  return result;
}

IntrinsicDimension intrinsic_dimension(Queue& queue, const View& points) {
  const auto* const values = points.as<float>();
  const std::int64_t count = points.extent(0), width = points.extent(1);
  if (!std::all_of(values, values + points.count(), [](float x) { return std::isfinite(x); })) {
    throw Error(ExitCode::kNumerics, "a point isn't finite: it has no neighbours");
  }
  const std::vector<std::int64_t> rows = distinct_rows(values, count, width);
  std::vector<double> distinct;
  distinct.reserve(rows.size() * static_cast<std::size_t>(width));
  for (const std::int64_t row : rows) {
    distinct.insert(distinct.end(), values + row * width, values + (row + 1) * width);
  }
  std::vector<double> ratios;
  if (rows.size() > 2) ratios = log_ratios(queue, distinct, width);
  std::erase_if(ratios, [](double ratio) { return ratio == 0.0 || !std::isfinite(ratio); });
  const auto used = static_cast<std::int64_t>(ratios.size());
  if (used < kLeastPoints) {
    throw Error(ExitCode::kUsage,
                "an intrinsic dimension needs at least " + std::to_string(kLeastPoints) +
                    " points with two neighbours at different distances; of " +
                    std::to_string(count) + " points " + std::to_string(used) + " have them");
  }
  IntrinsicDimension result = dimension_of_ratios(std::move(ratios));
  result.points = count;
  result.duplicates = count - static_cast<std::int64_t>(rows.size());
  result.ties = static_cast<std::int64_t>(rows.size()) - used;
  return result;
}

Eigen::MatrixXd expert_jacobian(const ExpertWeights& expert, const Eigen::VectorXd& z) {
  const Eigen::MatrixXd gate = in_double(expert.gate), up = in_double(expert.up);
  const Eigen::VectorXd a = gate * z, b = up * z;
  const Eigen::VectorXd s = a.unaryExpr(&sigmoid);
  const Eigen::VectorXd silu = a.array() * s.array();
  // silu'(a) = s (1 + a (1 - s))
  const Eigen::VectorXd slope = b.array() * s.array() * (1.0 + a.array() * (1.0 - s.array()));
  return in_double(expert.down) * (slope.asDiagonal() * gate + silu.asDiagonal() * up);
}

std::int64_t numerical_rank(const Eigen::MatrixXd& matrix, double threshold) {
  if (!matrix.allFinite()) {
    throw Error(ExitCode::kNumerics, "a Jacobian isn't finite: it has no rank");
  }
  // The squares of the singular values; in double they are exact to 1e-16 of the largest, far below
  // any threshold's square, and compile in a fifth of the time of a decomposition.
  Eigen::MatrixXd gram;
  if (matrix.rows() < matrix.cols()) {
    gram.noalias() = matrix * matrix.transpose();
  } else {
    gram.noalias() = matrix.transpose() * matrix;
  }
  const Eigen::VectorXd squares =
      Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(gram, Eigen::EigenvaluesOnly).eigenvalues();
  return (squares.array() > threshold * threshold * squares.maxCoeff()).count();
}

std::int64_t RankControl::recovered() const {
  return std::count_if(cases.begin(), cases.end(),
                       [](const Case& one) { return one.found == one.rank; });
}

RankControl rank_control(Queue& queue, std::uint64_t seed) {
  // The reconstructed models' experts, the small ones', square ones and long ones.
  constexpr std::array<std::pair<std::int64_t, std::int64_t>, 11> kShapes = {{{320, 448},
                                                                              {512, 440},
                                                                              {352, 512},
                                                                              {640, 512},
                                                                              {40, 56},
                                                                              {64, 55},
                                                                              {32, 32},
                                                                              {128, 128},
                                                                              {256, 256},
                                                                              {48, 192},
                                                                              {192, 96}}};
  RankControl control;
  for (const auto& [l, m] : kShapes) {
    for (const double share : {0.25, 0.5, 0.9}) {
      const auto q = static_cast<double>(std::min(l, m));
      control.cases.push_back({l, m, std::llround(share * q), 0});
    }
  }
  queue.parallel_for(static_cast<std::int64_t>(control.cases.size()),
                     [&](std::int64_t piece, Worker&) {
                       RankControl::Case& one = control.cases[static_cast<std::size_t>(piece)];
                       one.found = numerical_rank(known_rank_matrix(one, seed));
                     });
  return control;
}

}  // namespace tessera
