// The probe's mathematics against what is known: dimensions, ranks, derivatives, budgets.
#include "launch/probe.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include <Eigen/QR>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <string>
#include <vector>

#include "launch/allocation.h"
#include "launch/probe_statistics.h"
#include "runtime/error.h"
#include "runtime/random.h"
#include "tests/layers/testing.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr double kDeviations = 4.0;  // of an estimate, that a test allows

struct Points {
  std::int64_t count, width;
  std::vector<float> values;
  View view() { return {values.data(), {count, width}}; }
};

// Uniform in the unit cube of `dimension`, turned into `width` dimensions; bent: every coordinate
// goes once around a circle of circumference 1 first, so that there is no boundary.
Points cube(std::int64_t dimension, std::int64_t count, std::int64_t width, bool bent = false) {
  const RandomStream random(3, "cube " + std::to_string(dimension));
  const std::int64_t flat = bent ? 2 * dimension : dimension;
  Eigen::MatrixXd x(count, flat);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t j = 0; j < dimension; ++j) {
      const double u = random.uniform(static_cast<std::uint64_t>(i * dimension + j));
      if (bent) {
        x(i, 2 * j) = std::cos(2 * M_PI * u) / (2 * M_PI);
        x(i, 2 * j + 1) = std::sin(2 * M_PI * u) / (2 * M_PI);
      } else {
        x(i, j) = u;
      }
    }
  }
  Eigen::MatrixXd gaussian(width, flat);
  const RandomStream turn(5, "turn");
  for (std::int64_t k = 0; k < gaussian.size(); ++k) {
    gaussian.data()[k] = turn.normal(static_cast<std::uint64_t>(k));
  }
  const Eigen::HouseholderQR<Eigen::MatrixXd> decomposed(gaussian);
  const Eigen::MatrixXd turned =
      x * (decomposed.householderQ() * Eigen::MatrixXd::Identity(width, flat)).transpose();
  Points points = {count, width, {}};
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t j = 0; j < width; ++j) {
      points.values.push_back(static_cast<float>(turned(i, j)));
    }
  }
  return points;
}

// mu drawn from the very distribution that both estimators assume.
TEST(IntrinsicDimension, OfPerfectRatios) {
  for (const double dimension : {1.0, 2.0, 5.0, 10.0, 40.0}) {
    for (const std::size_t count : {500U, 4000U}) {
      const RandomStream random(11, "ratios");
      std::vector<double> log_ratios;
      for (std::size_t i = 0; i < count; ++i) {
        log_ratios.push_back(-std::log(1.0 - random.uniform(i)) / dimension);
      }
      const IntrinsicDimension found = dimension_of_ratios(log_ratios);
      const double deviation = dimension / std::sqrt(static_cast<double>(count));
      EXPECT_NEAR(found.likelihood, dimension, kDeviations * deviation);
      EXPECT_NEAR(found.line, dimension, kDeviations * kLineError * deviation);
      EXPECT_NEAR(found.standard_error, deviation, 0.2 * deviation);
    }
  }
}

// Ten ln mu whose sums are easy: 0.1 .. 1.0.
TEST(IntrinsicDimension, ByHand) {
  std::vector<double> log_ratios;
  double xy = 0.0, xx = 0.0;
  for (int i = 10; i >= 1; --i) {
    const double x = i / 10.0;
    log_ratios.push_back(x);
    if (i == 10) continue;  // the largest tenth
    xy += x * -std::log(1.0 - i / 10.0);
    xx += x * x;
  }
  const IntrinsicDimension found = dimension_of_ratios(log_ratios);
  EXPECT_NEAR(found.likelihood, 9.0 / 5.5, 1e-14);
  EXPECT_NEAR(found.line, xy / xx, 1e-14);
}

TEST(IntrinsicDimension, OfCubes) {
  Queue queue(2);
  for (const std::int64_t dimension : {1, 2, 5, 10}) {
    const std::int64_t count = 2000;
    const auto known = static_cast<double>(dimension);
    const double deviation = known / std::sqrt(static_cast<double>(count));
    // Points near the boundary miss neighbours beyond it, which makes the dimension look smaller:
    // in one and two dimensions few are near it, in ten nearly all.
    const double boundary = dimension <= 2 ? 0.0 : 0.02 * known * known;
    Points points = cube(dimension, count, 24);
    const IntrinsicDimension found = intrinsic_dimension(queue, points.view());
    EXPECT_EQ(found.duplicates + found.ties, 0);
    EXPECT_EQ(found.used, count);
    EXPECT_GT(found.likelihood, known - boundary - kDeviations * deviation) << dimension;
    EXPECT_LT(found.likelihood, known + kDeviations * deviation) << dimension;
    EXPECT_GT(found.line, known - boundary - kDeviations * kLineError * deviation) << dimension;
    EXPECT_LT(found.line, known + kDeviations * kLineError * deviation) << dimension;
  }
}

TEST(IntrinsicDimension, OfBentCubesWithoutABoundary) {
  Queue queue(1);
  for (const std::int64_t dimension : {1, 2, 5}) {
    const auto known = static_cast<double>(dimension);
    Points points = cube(dimension, 2000, 24, true);
    const IntrinsicDimension found = intrinsic_dimension(queue, points.view());
    const double deviation = known / std::sqrt(2000.0);
    EXPECT_NEAR(found.likelihood, known, kDeviations * deviation);
    EXPECT_NEAR(found.line, known, kDeviations * kLineError * deviation);
  }
}

// Neither scale nor threads change a bit, nor do more points than one piece of work holds.
TEST(IntrinsicDimension, IsTheSameOnAnyNumberOfThreads) {
  Queue one(1), three(3);
  Points points = cube(3, 203, 7);
  const IntrinsicDimension a = intrinsic_dimension(one, points.view());
  const IntrinsicDimension b = intrinsic_dimension(three, points.view());
  EXPECT_EQ(a.likelihood, b.likelihood);
  EXPECT_EQ(a.line, b.line);
  for (float& value : points.values) value *= 1024.0F;
  EXPECT_EQ(intrinsic_dimension(one, points.view()).likelihood, a.likelihood);
}

TEST(IntrinsicDimension, DuplicatesAreCountedAndChangeNothing) {
  Queue queue(1);
  Points points = cube(2, 300, 5);
  const IntrinsicDimension before = intrinsic_dimension(queue, points.view());
  for (const std::int64_t row : {0, 17, 17, 299}) {
    const std::vector<float> copy(points.values.begin() + row * 5,
                                  points.values.begin() + (row + 1) * 5);
    points.values.insert(points.values.begin() + std::ptrdiff_t{40} * 5, copy.begin(), copy.end());
    ++points.count;
  }
  const IntrinsicDimension after = intrinsic_dimension(queue, points.view());
  EXPECT_EQ(after.points, 304);
  EXPECT_EQ(after.duplicates, 4);
  EXPECT_EQ(after.used, 300);
  EXPECT_NEAR(after.likelihood, before.likelihood, 1e-12);
}

// On a line at equal steps each inner point's two neighbours are equally far.
TEST(IntrinsicDimension, TiesAreCounted) {
  Queue queue(1);
  Points points = cube(1, 400, 3);
  for (int i = 0; i < 12; ++i) {
    for (const float value : {1000.0F + static_cast<float>(i), 0.0F, 0.0F}) {
      points.values.push_back(value);
    }
    ++points.count;
  }
  const IntrinsicDimension found = intrinsic_dimension(queue, points.view());
  EXPECT_EQ(found.ties, 10);
  EXPECT_EQ(found.used, 402);
}

TEST(IntrinsicDimension, WhatHasNoneIsRefused) {
  Queue queue(1);
  const auto refusal = [&](Points points) -> std::string {
    try {
      intrinsic_dimension(queue, points.view());
    } catch (const Error& error) {
      return error.what();
    }
    return "";
  };
  EXPECT_THAT(refusal(cube(2, 9, 3)), HasSubstr("of 9 points 9 have them"));
  EXPECT_EQ(refusal(cube(2, 10, 3)), "");
  EXPECT_THAT(refusal(cube(2, 1, 3)), HasSubstr("of 1 points 0 have them"));
  EXPECT_THAT(refusal({50, 2, std::vector<float>(100, 1.5F)}), HasSubstr("of 50 points 0 have"));
  Points bad = cube(2, 50, 3);
  bad.values[70] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_THAT(refusal(bad), HasSubstr("isn't finite"));
}

TEST(Rank, TheEstimatorFindsKnownRanks) {
  Queue queue(2);
  const RankControl control = rank_control(queue, 0);
  ASSERT_EQ(control.cases.size(), 33U);
  for (const RankControl::Case& one : control.cases) {
    EXPECT_EQ(one.found, one.rank) << one.rows << " x " << one.columns;
  }
  EXPECT_EQ(control.recovered(), 33);
  // 0.25, 0.5 and 0.9 of the shorter side.
  EXPECT_EQ(control.cases[0].rank, 80);
  EXPECT_EQ(control.cases[4].rank, 220);
  EXPECT_EQ(control.cases[11].rank, 461);
  RankControl worse = control;
  worse.cases[3].found += 1;
  EXPECT_EQ(worse.recovered(), 32);
}

TEST(Rank, CountsWhatIsAboveTheThreshold) {
  Eigen::MatrixXd matrix = Eigen::MatrixXd::Zero(3, 5);
  EXPECT_EQ(numerical_rank(matrix), 0);
  matrix(0, 4) = -8.0;
  matrix(1, 0) = 8.0 * 1.01e-3;
  matrix(2, 2) = 8.0 * 0.99e-3;
  EXPECT_EQ(numerical_rank(matrix), 2);
  EXPECT_EQ(numerical_rank(matrix * 1e-30), 2);
  EXPECT_EQ(numerical_rank(matrix, 1e-4), 3);
  matrix(2, 2) = std::numeric_limits<double>::quiet_NaN();
  EXPECT_THROW(numerical_rank(matrix), Error);
}

struct Expert {
  std::int64_t l, m;
  std::vector<float> gate, up, down;
  ExpertWeights weights() {
    return {View(gate.data(), {m, l}), View(up.data(), {m, l}), View(down.data(), {l, m})};
  }
  // E(z), from the formula alone.
  Eigen::VectorXd value(const Eigen::VectorXd& z) const {
    Eigen::VectorXd out = Eigen::VectorXd::Zero(l);
    for (std::int64_t k = 0; k < m; ++k) {
      double a = 0.0, b = 0.0;
      for (std::int64_t j = 0; j < l; ++j) {
        a += static_cast<double>(gate[static_cast<std::size_t>(k * l + j)]) * z[j];
        b += static_cast<double>(up[static_cast<std::size_t>(k * l + j)]) * z[j];
      }
      const double hidden = a / (1.0 + std::exp(-a)) * b;
      for (std::int64_t i = 0; i < l; ++i) {
        out[i] += static_cast<double>(down[static_cast<std::size_t>(i * m + k)]) * hidden;
      }
    }
    return out;
  }
};

Expert make_expert(std::int64_t l, std::int64_t m) {
  Expert expert = {l, m, {}, {}, {}};
  for (std::vector<float>* const matrix : {&expert.gate, &expert.up, &expert.down}) {
    const RandomStream random(matrix == &expert.gate ? 1 : matrix == &expert.up ? 2 : 3, "expert");
    for (std::int64_t i = 0; i < l * m; ++i) {
      matrix->push_back(static_cast<float>(random.normal(static_cast<std::uint64_t>(i))));
    }
  }
  return expert;
}

Eigen::VectorXd make_point(std::int64_t l) {
  const RandomStream random(4, "point");
  Eigen::VectorXd z(l);
  for (std::int64_t i = 0; i < l; ++i) z[i] = random.normal(static_cast<std::uint64_t>(i));
  return z;
}

TEST(Jacobian, IsTheDerivative) {
  for (const auto& [l, m] : {std::pair<std::int64_t, std::int64_t>{5, 9}, {8, 3}, {1, 1}}) {
    Expert expert = make_expert(l, m);
    const Eigen::VectorXd z = make_point(l);
    const Eigen::MatrixXd found = expert_jacobian(expert.weights(), z);
    ASSERT_EQ(found.rows(), l);
    ASSERT_EQ(found.cols(), l);
    // Central differences of step h: h^2 of the third derivative, and 1e-16 / h of rounding, times
    // values of about |W|^3.
    const double h = 1e-5, tolerance = 1e-7 * std::max(1.0, found.cwiseAbs().maxCoeff());
    for (std::int64_t j = 0; j < l; ++j) {
      Eigen::VectorXd more = z, less = z;
      more[j] += h;
      less[j] -= h;
      const Eigen::VectorXd slope = (expert.value(more) - expert.value(less)) / (2 * h);
      for (std::int64_t i = 0; i < l; ++i) EXPECT_NEAR(found(i, j), slope[i], tolerance);
    }
  }
}

// No wider than the narrower of its two widths.
TEST(Jacobian, RankIsAtMostTheCapacity) {
  for (const auto& [l, m] : {std::pair<std::int64_t, std::int64_t>{40, 24}, {24, 40}, {32, 32}}) {
    Expert expert = make_expert(l, m);
    const std::int64_t rank = numerical_rank(expert_jacobian(expert.weights(), make_point(l)));
    EXPECT_LE(rank, std::min(l, m));
    EXPECT_GE(rank, std::min(l, m) * 3 / 4);
  }
  // Half of the hidden units cut off.
  Expert expert = make_expert(32, 32);
  for (std::int64_t i = 0; i < 32; ++i) {
    for (std::int64_t k = 0; k < 16; ++k) expert.down[static_cast<std::size_t>(i * 32 + k)] = 0.0F;
  }
  EXPECT_LE(numerical_rank(expert_jacobian(expert.weights(), make_point(32))), 16);
}

// Experts of rank 2 each, whose results lie in directions of their own: a token's mixture has the
// ranks of its experts together, and a choice that was left out adds none.
TEST(Ranks, OfLocalAndMixedJacobiansByHand) {
  constexpr std::int64_t kExperts = 3, kL = 8, kM = 3, kWidth = 5, kTokens = 3;
  std::vector<float> gate, up, down(kExperts * kL * kM, 0.0F), x, latent_down;
  for (auto* const values : {&gate, &up}) {
    const RandomStream random(values == &gate ? 1 : 2, "ranks");
    for (std::int64_t i = 0; i < kExperts * kM * kL; ++i) {
      // Small, so that no unit's gate is all but closed.
      values->push_back(static_cast<float>(0.1 * random.normal(static_cast<std::uint64_t>(i))));
    }
  }
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    for (std::int64_t k = 0; k < 2; ++k) {  // the third hidden unit leads nowhere
      down[static_cast<std::size_t>((expert * kL + 2 * expert + k) * kM + k)] = 1.0F;
    }
  }
  const RandomStream random(3, "ranks");
  for (std::uint64_t i = 0; i < kTokens * kWidth; ++i) {
    x.push_back(static_cast<float>(random.normal(i)));
  }
  for (std::uint64_t i = 0; i < kL * kWidth; ++i) {
    latent_down.push_back(static_cast<float>(random.normal(100 + i)));
  }
  std::vector<std::int32_t> choices = {0, 2, 1, -1, -1, -1};
  std::vector<float> weights = {0.5F, 0.25F, 0.5F, 0.25F, 0.5F, 0.25F};
  ProbedExperts block;
  block.layer = 4;
  block.shape.width = kWidth;
  block.shape.experts = kExperts;
  block.shape.active = 2;
  block.shape.inner = kM;
  block.shape.latent = kL;
  block.x = View(x.data(), {kTokens, kWidth});
  block.choices = View(choices.data(), {kTokens, 2});
  block.weights = View(weights.data(), {kTokens, 2});
  block.latent_down = View(latent_down.data(), {kL, kWidth});
  block.gate = View(gate.data(), {kExperts, kM, kL});
  block.up = View(up.data(), {kExperts, kM, kL});
  block.down = View(down.data(), {kExperts, kL, kM});
  Queue queue(2);
  const BlockRanks ranks = probe_ranks(queue, block);
  EXPECT_EQ(ranks.layer, 4);
  EXPECT_EQ(ranks.capacity, 3);
  EXPECT_EQ(ranks.tokens, 2);  // the third token was left out altogether
  EXPECT_EQ(ranks.pairs, 3);
  for (const double share : {ranks.local.mean, ranks.local.least, ranks.local.most}) {
    EXPECT_NEAR(share, 2.0 / 3.0, 1e-15);
  }
  EXPECT_NEAR(ranks.mixture.most, 4.0 / 8.0, 1e-15);
  EXPECT_NEAR(ranks.mixture.least, 2.0 / 8.0, 1e-15);
  EXPECT_NEAR(ranks.mixture.mean, 3.0 / 8.0, 1e-15);
  std::fill(choices.begin(), choices.end(), -1);
  EXPECT_THROW(probe_ranks(queue, block), Error);
}

ModelConfig small_model(bool latent) {
  ModelConfig model;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      R"(width: 12 vocabulary: 40 length: 9 init_deviation: 0.4
         mixer { full { heads: 2 key_value_heads: 1 head_width: 6 } }
         schedule { homogeneous { type: "full" layers: 4 } }
         feed_forward { width: 10 }
         feed_forward_range { first: 1 last: 2 feed_forward {
           experts { experts: 6 active: 2 width: 7 shared_width: 3 selection_bias: true } } })",
      &model));
  if (latent) {
    model.mutable_feed_forward_range(0)
        ->mutable_feed_forward()
        ->mutable_experts()
        ->mutable_latent()
        ->set_width(5);
  }
  return model;
}

ProbeText small_text() {
  ProbeText text;
  const RandomStream random(8, "text");
  for (std::uint64_t w = 0; w < 6; ++w) {  // more than are computed at once
    text.windows.emplace_back();
    for (std::uint64_t t = 0; t < 10; ++t) {
      text.windows.back().push_back(static_cast<std::uint32_t>(random.uniform(w * 10 + t) * 40));
    }
  }
  text.positions = {{0}, {1, 8}, {2, 3, 4}, {}, {5}, {0, 7}};
  return text;
}

// What the probe sees of each block against the block computed on its own, window by window, and
// the routing against its formula in double.
TEST(Walk, SeesWhatEntersTheExpertsAndWhereItGoes) {
  for (const bool latent : {true, false}) {
    const ModelConfig model = small_model(latent);
    const ProbeText text = small_text();
    EXPECT_EQ(text.tokens(), 9);
    ProbeSubject subject;
    subject.model = model;
    subject.end_of_sequence = 1;
    subject.document_masking = true;
    subject.parameters = [](std::span<const ParameterSpec> parameters,
                            std::span<const View> values) {
      for (std::size_t i = 0; i < parameters.size(); ++i) {
        initialise(parameters[i], 5, 0, values[i]);
      }
    };
    const auto bias_of = [](std::int64_t layer, std::int64_t expert) {
      return 0.03F * static_cast<float>((expert * (layer + 2)) % 5);
    };
    subject.selection_bias = [&](std::int64_t layer, const View& bias) {
      for (std::int64_t i = 0; i < bias.count(); ++i) bias.as<float>()[i] = bias_of(layer, i);
    };

    // The residual after each layer, by one window at a time.
    Device device(1);
    const auto with_prefix = [](const std::string& prefix, std::vector<ParameterSpec> list) {
      for (ParameterSpec& parameter : list) parameter.name = prefix + parameter.name;
      return list;
    };
    std::vector<std::int64_t> seen;
    std::map<std::int64_t, std::vector<std::vector<float>>> expected;  // of each layer: rows
    const Embedding embedding(model);
    for (std::size_t w = 0; w < text.windows.size(); ++w) {
      std::vector<std::uint32_t> tokens(text.windows[w].begin(), text.windows[w].end() - 1);
      std::vector<std::int32_t> labels(9, 0), segments;
      for (std::int32_t t = 0; t < 9; ++t) {
        const bool starts = t > 0 && tokens[static_cast<std::size_t>(t - 1)] == 1;
        segments.push_back(t == 0 ? 0 : starts ? t : segments.back());
      }
      const Batch batch = {{1, 9, 1},
                           View(tokens.data(), {1, 9}),
                           View(labels.data(), {1, 9}),
                           View(segments.data(), {1, 9})};
      std::vector<float> x(std::size_t{9} * 12), out(std::size_t{9} * 12);
      const View in(x.data(), {9, 12}), to(out.data(), {9, 12});
      const auto embedded = with_prefix("model.embed_tokens.", embedding.parameters());
      const testing::Buffers table(embedded);
      subject.parameters(embedded, table.views());
      embedding.forward(device.queue(), batch, table.views(), in);
      for (std::int64_t layer = 0; layer < 3; ++layer) {
        const Block block(model, layer);
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        const auto own = with_prefix(prefix, block.parameters());
        const auto stacked = with_prefix(prefix, block.expert_parameters());
        const testing::Buffers parameters(own), experts(stacked);
        subject.parameters(own, parameters.views());
        subject.parameters(stacked, experts.views());
        const testing::Buffers saved(block.saved(batch.shape)), scratch(block.scratch(batch.shape));
        const std::vector<View> matrices = expert_matrices(experts.views());
        std::vector<float> bias(6);
        LayerMemory memory = {parameters.views(), saved.views(), scratch.views(), matrices};
        if (layer > 0) {
          memory.selection_bias = View(bias.data(), {6});
          subject.selection_bias(layer, memory.selection_bias);
        }
        block.forward(device.queue(), batch, in, to, memory);
        const auto* const middle = saved[1].as<float>();
        for (const std::int64_t t : text.positions[w]) {
          double squares = 0.0;
          for (std::int64_t j = 0; j < 12; ++j) squares += std::pow(double{middle[t * 12 + j]}, 2);
          std::vector<float> row;
          for (std::int64_t j = 0; j < 12; ++j) {
            row.push_back(static_cast<float>(double{middle[t * 12 + j]} /
                                             std::sqrt(squares / 12 + model.norm_epsilon())));
          }
          expected[layer].push_back(row);
        }
        x = out;
      }
    }

    walk_experts(subject, text, device, [&](const ProbedExperts& block) {
      seen.push_back(block.layer);
      EXPECT_EQ(block.latent_down.empty(), !latent);
      const std::string prefix = "model.layers." + std::to_string(block.layer) + ".feed_forward.";
      const ParameterSpec router = {prefix + "router.weight", {6, 12}, {Init::Kind::kNormal, 0.4}};
      const testing::Buffers weights(std::vector<ParameterSpec>{router});
      subject.parameters(std::span(&router, 1), weights.views());
      for (std::int64_t row = 0; row < 9; ++row) {
        const std::vector<float>& want = expected.at(block.layer)[static_cast<std::size_t>(row)];
        std::vector<double> p(6);
        double sum = 0.0;
        for (std::int64_t j = 0; j < 12; ++j) {
          // A norm of 12 elements in f32, of a value below sqrt(12).
          EXPECT_NEAR(block.x.as<float>()[row * 12 + j], want[static_cast<std::size_t>(j)],
                      16 * testing::kEpsilon * std::sqrt(12.0));
        }
        for (std::int64_t i = 0; i < 6; ++i) {
          double score = 0.0;
          for (std::int64_t j = 0; j < 12; ++j) {
            score += double{weights[0].as<float>()[i * 12 + j]} *
                     double{want[static_cast<std::size_t>(j)]};
          }
          p[static_cast<std::size_t>(i)] = std::exp(score);
          sum += p[static_cast<std::size_t>(i)];
        }
        std::vector<std::pair<double, std::int32_t>> order;
        for (std::int32_t i = 0; i < 6; ++i) {
          double& one = p[static_cast<std::size_t>(i)];
          one /= sum;
          order.emplace_back(-(one + double{bias_of(block.layer, i)}), i);
        }
        std::sort(order.begin(), order.end());
        std::array<std::int32_t, 2> chosen = {order[0].second, order[1].second};
        std::sort(chosen.begin(), chosen.end());
        const double whole = latent ? 1.0  // renormalised without a latent space only
                                    : p[static_cast<std::size_t>(chosen[0])] +
                                          p[static_cast<std::size_t>(chosen[1])];
        for (std::int64_t k = 0; k < 2; ++k) {
          const std::int32_t expert = chosen[static_cast<std::size_t>(k)];
          EXPECT_EQ(block.choices.as<std::int32_t>()[row * 2 + k], expert);
          EXPECT_NEAR(block.weights.as<float>()[row * 2 + k],
                      p[static_cast<std::size_t>(expert)] / whole, 1e-5);
        }
      }
    });
    EXPECT_EQ(seen, (std::vector<std::int64_t>{1, 2}));
  }
}

TEST(Walk, AModelWithoutExpertsIsRefused) {
  ProbeSubject subject;
  subject.model = small_model(false);
  subject.model.clear_feed_forward_range();
  Device device(1);
  EXPECT_THROW(walk_experts(subject, small_text(), device, [](const ProbedExperts&) {}), Error);
}

// The published reconstructions, worked out by hand.
const Regime kNarrow3B = {22, 704, 320, 448, 2560}, kWide3B = {14, 448, 512, 440, 2517};
const Regime kNarrow8B = {29, 928, 352, 512, 3584}, kWide8B = {16, 512, 640, 512, 3531};

TEST(Allocation, BudgetsOfTheReconstructed3B) {
  const Budgets narrow = budgets(kNarrow3B, 1024), wide = budgets(kWide3B, 1024);
  EXPECT_EQ(narrow.pool, 302'776'320);
  EXPECT_EQ(wide.pool, 302'776'320);
  EXPECT_EQ(narrow.products, 9'461'760);
  EXPECT_EQ(wide.products, 9'461'760);
  EXPECT_EQ(narrow.dispatch, 7'040);
  EXPECT_EQ(wide.dispatch, 7'168);
  EXPECT_EQ(narrow.rest, 9'240'576);
  EXPECT_EQ(wide.rest, 9'239'552);
  EXPECT_EQ(matching_shared(kWide3B, 1024, narrow.rest), 2517);
  const RegimeMatch match = match_regimes(kNarrow3B, kWide3B, 1024);
  EXPECT_EQ(match.pool, 0.0);
  EXPECT_EQ(match.products, 0.0);
  EXPECT_EQ(match.residual, -1024);
  EXPECT_NEAR(match.dispatch, 128.0 / 7040.0, 1e-15);
  EXPECT_LE(128.0 / 7168.0, 0.018);  // as the published share is
  EXPECT_TRUE(match.matched());
  EXPECT_EQ(kNarrow3B.capacity(), 320);
  EXPECT_EQ(kWide3B.capacity(), 440);
}

TEST(Allocation, BudgetsOfTheReconstructed8B) {
  const Budgets narrow = budgets(kNarrow8B, 1280), wide = budgets(kWide8B, 1280);
  EXPECT_EQ(narrow.pool, 501'743'616);
  EXPECT_EQ(wide.pool, 503'316'480);
  EXPECT_EQ(narrow.products, 15'679'488);
  EXPECT_EQ(wide.products, 15'728'640);
  EXPECT_EQ(narrow.dispatch, 10'208);
  EXPECT_EQ(wide.dispatch, 10'240);
  EXPECT_EQ(narrow.rest, 15'851'520);
  EXPECT_EQ(wide.rest, 15'852'800);
  EXPECT_EQ(matching_shared(kWide8B, 1280, narrow.rest), 3531);
  const RegimeMatch match = match_regimes(kNarrow8B, kWide8B, 1280);
  for (const double off : {match.pool, match.rest, match.products, match.dispatch}) {
    EXPECT_GE(off, 0.0);
    EXPECT_LE(off, 0.0032);
  }
  EXPECT_EQ(match.residual, 1280);
}

TEST(Allocation, TheSharedExpertTakesUpTheRest) {
  // d (2 l + N + 3 m_s) with d 8, l 4, N 10: 8 (18 + 3 m_s).
  const Regime regime = {2, 10, 4, 4, 0};
  EXPECT_EQ(matching_shared(regime, 8, std::int64_t{8} * 18), 0);
  EXPECT_EQ(matching_shared(regime, 8, std::int64_t{8} * (18 + 3 * 5)), 5);
  EXPECT_EQ(matching_shared(regime, 8, std::int64_t{8} * (18 + 3 * 5 + 1)), 5);
  EXPECT_EQ(matching_shared(regime, 8, std::int64_t{8} * (18 + 3 * 5 + 2)), 6);
  for (std::int64_t rest = std::int64_t{8} * 18; rest < std::int64_t{8} * 60; ++rest) {
    Regime matched = regime;
    matched.shared = matching_shared(regime, 8, rest);
    EXPECT_LE(std::abs(budgets(matched, 8).rest - rest), 12) << rest;
  }
  EXPECT_THROW(matching_shared(regime, 8, 8 * 18 - 1), Error);
}

TEST(Allocation, NearSquareIsExactAtTheLimit) {
  const auto near_square = [](std::int64_t l, std::int64_t m) {
    return Regime{1, 1, l, m, 0}.near_square();
  };
  EXPECT_TRUE(near_square(14, 10));
  EXPECT_FALSE(near_square(15, 10));
  EXPECT_TRUE(near_square(6, 10));
  EXPECT_FALSE(near_square(5, 10));
  EXPECT_TRUE(kNarrow3B.near_square() && kWide3B.near_square());
  EXPECT_TRUE(kNarrow8B.near_square() && kWide8B.near_square());
}

TEST(Allocation, TheSplitIsWhereAllBelowIsBelowAllAbove) {
  const auto split = [](std::vector<double> dimensions) { return find_split(dimensions); };
  EXPECT_FALSE(split({}));
  EXPECT_FALSE(split({3}));
  EXPECT_FALSE(split({4, 3, 2}));
  EXPECT_FALSE(split({3, 3}));
  EXPECT_FALSE(split({5, 9, 9, 5}));
  const auto found = split({4, 6, 5, 9, 8, 12});
  ASSERT_TRUE(found);
  EXPECT_EQ(found->prefix, 3);
  EXPECT_EQ(found->below, 1U);
  EXPECT_EQ(found->above, 4U);
  EXPECT_EQ(split({1, 2, 5, 6})->prefix, 2);  // the widest of three gaps
  EXPECT_EQ(split({1, 3, 5, 7})->prefix, 1);  // the first of two
  EXPECT_EQ(split({1, 2, 3, 9})->prefix, 1);  // a prefix of three wouldn't be shallow
}

std::string letters(const AllocationArm& arm) {
  std::string text;
  for (const bool wide : arm.wide) text += wide ? 'w' : 'n';
  return arm.name + " " + text;
}

TEST(Allocation, ArmsAndTheirControls) {
  const auto all = [](std::int64_t blocks, std::int64_t narrow) {
    std::vector<std::string> texts;
    for (const AllocationArm& arm : allocation_arms(blocks, narrow)) texts.push_back(letters(arm));
    return texts;
  };
  EXPECT_THAT(all(7, 3), ElementsAre("two_regime nnnwwww", "uniform_narrow nnnnnnn",
                                     "uniform_wide wwwwwww", "fixed_split_exchange wwwnnnn",
                                     "matched_count_exchange wwwwnnn", "boundary_earlier nnwwwww",
                                     "boundary_later nnnnwww", "last_block_narrow nnnwwwn"));
  EXPECT_THAT(all(2, 1), ElementsAre("two_regime nw", "uniform_narrow nn", "uniform_wide ww",
                                     "fixed_split_exchange wn"));
  EXPECT_THAT(all(3, 0), ElementsAre("uniform_narrow nnn", "uniform_wide www"));
}

TEST(Allocation, AStackCostsWhatItsBlocksCost) {
  const AllocationArm arm = allocation_arms(11, 4)[0];
  const Budgets sum = budgets(arm, kNarrow3B, kWide3B, 1024);
  EXPECT_EQ(sum.pool, 11 * std::int64_t{302'776'320});
  EXPECT_EQ(sum.products, 11 * 9'461'760);
  EXPECT_EQ(sum.dispatch, 4 * 7'040 + 7 * 7'168);
  EXPECT_EQ(sum.rest, 11 * 9'240'576 - 7 * 1024);
}

TEST(Allocation, RangesAreThoseOfTheLayers) {
  const std::vector<std::int64_t> layers = {1, 2, 3, 5, 6};
  const ModelConfig model =
      ranges_of({"two_regime", {false, false, true, true, true}}, layers, kNarrow3B, kWide3B);
  ASSERT_EQ(model.feed_forward_range_size(), 3);  // layer 4 has no experts
  EXPECT_EQ(model.feed_forward_range(0).first(), 1);
  EXPECT_EQ(model.feed_forward_range(0).last(), 2);
  EXPECT_EQ(model.feed_forward_range(1).first(), 3);
  EXPECT_EQ(model.feed_forward_range(1).last(), 3);
  EXPECT_EQ(model.feed_forward_range(2).first(), 5);
  EXPECT_EQ(model.feed_forward_range(2).last(), 6);
  const ExpertsConfig& experts = model.feed_forward_range(2).feed_forward().experts();
  EXPECT_EQ(experts.active(), 14);
  EXPECT_EQ(experts.experts(), 448);
  EXPECT_EQ(experts.latent().width(), 512);
  EXPECT_EQ(experts.width(), 440);
  EXPECT_EQ(experts.shared_width(), 2517);
  EXPECT_TRUE(experts.selection_bias());
}

}  // namespace
}  // namespace tessera
