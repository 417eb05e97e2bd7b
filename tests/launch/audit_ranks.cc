// The audit, on stacks that are right and on stacks that are broken in known ways.
#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <mpi.h>

#include <algorithm>
#include <cmath>
#include <set>

#include "launch/audit.h"
#include "launch/audit_certificate.h"
#include "launch/together.h"
#include "layers/mixers/mixers.h"

namespace tessera {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

constexpr std::int64_t kBrokenLayer = 2;

ModelConfig model_of(const std::string& letters) {
  ModelConfig model;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      R"(width: 16 vocabulary: 61 length: 150 init_deviation: 0.1
         mixer { full { heads: 2 key_value_heads: 1 head_width: 8 } }
         mixer { sliding { attention { heads: 2 key_value_heads: 2 head_width: 8 } window: 12 } }
         feed_forward { width: 24 } schedule { explicit: ")" +
          letters + "\" }",
      &model));
  return model;
}

// A mixer that is one matrix, v = x W, and then whatever `mix` makes of one sequence's v [T, d]
// under its segments.
using Mix = std::function<void(std::int64_t length, std::int64_t width,
                               const std::int32_t* segments, const float* v, float* out)>;
class PlainMixer : public Layer {
 public:
  PlainMixer(std::int64_t width, std::vector<LayerSize> sizes, Mix mix)
      : width_(width), sizes_(std::move(sizes)), mix_(std::move(mix)) {}
  std::vector<ParameterSpec> parameters() const override {
    return {{"weight", {width_, width_}, {Init::Kind::kNormal, 0.3}}};
  }
  std::vector<BufferSpec> saved(BatchShape /*shape*/) const override { return {}; }
  std::vector<BufferSpec> scratch(BatchShape shape) const override {
    return {{"v", DType::kF32, {shape.rows(), width_}}};
  }
  double flops_per_token(std::int64_t /*length*/) const override { return 0.0; }
  std::vector<LayerSize> sizes() const override { return sizes_; }
  void forward(Queue& /*queue*/, const Batch& batch, const View& in, const View& out,
               const LayerMemory& memory) const override {
    const auto* const x = in.as<float>();
    const auto* const w = memory.parameters[0].as<float>();
    auto* const v = shaped(memory.scratch[0], DType::kF32, in.shape()).as<float>();
    for (std::int64_t row = 0; row < batch.shape.rows(); ++row) {
      for (std::int64_t c = 0; c < width_; ++c) {
        float sum = 0.0F;
        for (std::int64_t k = 0; k < width_; ++k) sum += x[row * width_ + k] * w[c * width_ + k];
        v[row * width_ + c] = sum;
      }
    }
    for (std::int64_t s = 0; s < batch.shape.batch; ++s) {
      const std::int64_t begin = s * batch.shape.length;
      mix_(batch.shape.length, width_, batch.segments.as<std::int32_t>() + begin,
           v + begin * width_, out.as<float>() + begin * width_);
    }
  }
  void backward(Queue& /*queue*/, const Batch& /*batch*/, const View& /*in*/, const View& /*d_out*/,
                const View& /*d_in*/, std::span<const View> /*d_parameters*/,
                const LayerMemory& /*memory*/) const override {}

 private:
  std::int64_t width_;
  std::vector<LayerSize> sizes_;
  Mix mix_;
};

// out[t] = the mean of v over the tokens that t sees; 0 where it sees none.
template <class Visible>
Mix mean_of(const Visible& visible) {
  return [visible](std::int64_t length, std::int64_t width, const std::int32_t* segments,
                   const float* v, float* out) {
    for (std::int64_t t = 0; t < length; ++t) {
      std::vector<double> sum(static_cast<std::size_t>(width), 0.0);
      double count = 0.0;
      for (std::int64_t j = 0; j < length; ++j) {
        if (!visible(t, j, segments)) continue;
        count += 1.0;
        for (std::int64_t c = 0; c < width; ++c) {
          sum[static_cast<std::size_t>(c)] += static_cast<double>(v[j * width + c]);
        }
      }
      for (std::int64_t c = 0; c < width; ++c) {
        out[t * width + c] =
            static_cast<float>(sum[static_cast<std::size_t>(c)] / std::max(count, 1.0));
      }
    }
  };
}

// Keys of the last `window` positions up to t + ahead.
Mix window(std::int64_t window, std::int64_t ahead) {
  return mean_of([=](std::int64_t t, std::int64_t j, const std::int32_t* segments) {
    return j <= t + ahead && t + ahead - j < window && segments[j] == segments[t];
  });
}
// Blocks of `size` tokens, each seen from `early` tokens before its last one on.
Mix blocks(std::int64_t size, std::int64_t early) {
  return mean_of([=](std::int64_t t, std::int64_t j, const std::int32_t* segments) {
    const std::int64_t last = j / size * size + size - 1;
    return last - early <= t && segments[j / size * size] == segments[t] &&
           segments[std::min(last, t)] == segments[t];
  });
}
// Running sums within chunks, and the state that is carried into each: those of the chunks before
// it or, summed over the wrong axis, of those behind it.
Mix chunks(std::int64_t size, bool wrong) {
  return mean_of([=](std::int64_t t, std::int64_t j, const std::int32_t* segments) {
    const std::int64_t own = t / size, its = j / size;
    const bool carried = wrong ? its > own : its < own;
    return segments[j] == segments[t] && (carried || (own == its && j <= t));
  });
}
// A convolution whose last tap, or whose middle one, is the current token.
Mix convolution(bool centred) {
  return [=](std::int64_t length, std::int64_t width, const std::int32_t* segments, const float* v,
             float* out) {
    for (std::int64_t t = 0; t < length; ++t) {
      for (std::int64_t c = 0; c < width; ++c) {
        float sum = 0.0F;
        for (std::int64_t tap = 0; tap < 4; ++tap) {
          const std::int64_t j = t - 3 + tap + (centred ? 2 : 0);
          if (j < 0 || j >= length || segments[j] != segments[t]) continue;
          sum += 0.25F * static_cast<float>(tap + 1) * v[j * width + c];
        }
        out[t * width + c] = sum;
      }
    }
  };
}
// v over its root mean square, of the position's width or of all of time.
Mix norm(bool over_time) {
  return [=](std::int64_t length, std::int64_t width, const std::int32_t* /*segments*/,
             const float* v, float* out) {
    const std::int64_t rows = over_time ? length : 1;
    for (std::int64_t begin = 0; begin < length; begin += rows) {
      double squares = 0.0;
      for (std::int64_t i = begin * width; i < (begin + rows) * width; ++i) {
        squares += static_cast<double>(v[i]) * static_cast<double>(v[i]);
      }
      const double scale = std::sqrt(static_cast<double>(rows * width) / squares);
      for (std::int64_t i = begin * width; i < (begin + rows) * width; ++i) {
        out[i] = static_cast<float>(static_cast<double>(v[i]) * scale);
      }
    }
  };
}
Mix documents(bool ignored) {
  return mean_of([=](std::int64_t t, std::int64_t j, const std::int32_t* segments) {
    return j <= t && (ignored || segments[j] == segments[t]);
  });
}

// The real mixers but for one layer.
AuditSubject with_layer(const ModelConfig& model, std::int64_t layer,
                        const std::function<std::unique_ptr<Layer>()>& make, Device& device) {
  AuditSubject subject = initialised_subject(model, 5, device);
  const auto real = subject.mixer;
  subject.mixer = [=](const ModelConfig& at_length, std::int64_t l) {
    return l == layer ? make() : real(at_length, l);
  };
  return subject;
}

AuditSubject with_mix(const Mix& mix, const std::vector<LayerSize>& sizes, Device& device,
                      std::int64_t layer = kBrokenLayer) {
  return with_layer(
      model_of("FSFSF"), layer, [=] { return std::make_unique<PlainMixer>(16, sizes, mix); },
      device);
}

AuditResult audit_of(const AuditSubject& subject, Device& device,
                     const AuditOptions& options = {}) {
  Communicator world(MPI_COMM_WORLD);
  return audit(subject, options, device, world);
}

std::string certificate(const AuditResult& result) {
  return certificate_json({"test", "", 0, 5, 1, 24}, result).dump();
}

TEST(Audit, AStackThatIsRightIsCleanAndEveryFaultIsFound) {
  Device device(1);
  const AuditSubject subject = initialised_subject(model_of("FSFSF"), 5, device);
  const AuditResult result = audit_of(subject, device);
  EXPECT_EQ(result.verdict, AuditVerdict::kClean) << verdict_line(result);
  ASSERT_EQ(result.layers.size(), 5U);
  for (const AuditLayer& layer : result.layers) {
    EXPECT_EQ(layer.time.largest, 0.0) << layer.mixer;
    EXPECT_EQ(layer.document.largest, 0.0) << layer.mixer;
  }
  EXPECT_EQ(result.control.size(), 24U);
  EXPECT_EQ(result.localised, 24);
  std::set<std::int64_t> depths;
  for (const AuditInjection& injection : result.control) depths.insert(injection.layer);
  EXPECT_EQ(depths, (std::set<std::int64_t>{1, 2, 3}));
  EXPECT_FALSE(result.onset);
  EXPECT_FALSE(result.sweep);
}

TEST(Audit, TheCertificateIsTheSameOnAnyNumberOfRanksAndThreads) {
  Device one(1), two(2);
  Communicator alone(MPI_COMM_SELF);
  const ModelConfig model = model_of("SFSFS");
  const std::string here = certificate(audit(initialised_subject(model, 5, one), {}, one, alone));
  EXPECT_EQ(certificate(audit_of(initialised_subject(model, 5, one), one)), here);
  EXPECT_EQ(certificate(audit_of(initialised_subject(model, 5, two), two)), here);
  // And so it is of a leak, with its sweep.
  const AuditSubject leaks = with_mix(norm(true), {}, one);
  EXPECT_EQ(certificate(audit_of(leaks, one)), certificate(audit(leaks, {}, one, alone)));
}

struct Build {
  std::string name;
  Mix right, broken;
  std::vector<LayerSize> sizes;
  bool across_documents = false;
};
const std::vector<Build>& builds() {
  static const std::vector<Build> all = {
      {"window off by one", window(20, 0), window(20, 1), {{"window", 20}}},
      {"chunk state summed over the wrong axis",
       chunks(16, false),
       chunks(16, true),
       {{"chunk", 16}}},
      {"block visible one token early", blocks(16, 0), blocks(16, 1), {{"block", 16}}},
      {"convolution not causal", convolution(false), convolution(true), {{"kernel", 4}}},
      {"norm over time", norm(false), norm(true), {}},
      {"segment ignored", documents(false), documents(true), {}, true},
  };
  return all;
}

TEST(Audit, B22_BrokenBuildsAreCaughtAndNamed) {
  Device device(1);
  for (const Build& build : builds()) {
    SCOPED_TRACE(build.name);
    const AuditResult right = audit_of(with_mix(build.right, build.sizes, device), device);
    EXPECT_EQ(right.verdict, AuditVerdict::kClean) << verdict_line(right);
    EXPECT_EQ(right.localised, 24);

    const AuditResult broken = audit_of(with_mix(build.broken, build.sizes, device), device);
    EXPECT_EQ(broken.verdict, AuditVerdict::kLeak);
    ASSERT_TRUE(broken.onset);
    EXPECT_EQ(broken.onset->layer, kBrokenLayer);
    EXPECT_EQ(broken.onset->across_documents, build.across_documents);
    EXPECT_THAT(verdict_line(broken), StartsWith("leak: layer 2 (full): position "));
    for (std::int64_t l = 0; l < kBrokenLayer; ++l) {
      EXPECT_EQ(broken.layers[static_cast<std::size_t>(l)].time.largest, 0.0);
      EXPECT_EQ(broken.layers[static_cast<std::size_t>(l)].document.largest, 0.0);
    }
    ASSERT_TRUE(broken.sweep);
    EXPECT_TRUE(broken.sweep->grows()) << broken.sweep->slope;
    // What position and token say is so: it must not have seen the token.
    const AuditDelta& delta = broken.onset->delta;
    if (build.across_documents) {
      EXPECT_NE(delta.position, delta.changed);
    } else {
      EXPECT_LT(delta.position, delta.changed);
    }
    Communicator world(MPI_COMM_WORLD);
    EXPECT_THAT(certificate_page({"test", "", 0, 5, 1, 24}, broken), HasSubstr("**leak: layer 2"));
  }
}

// A leak that only its block's first token shows, at any block: the positions by the rule see it.
TEST(Audit, B22_AFaultOfOneBlockIsFoundAtItsEdge) {
  Device device(1);
  const auto one_block = mean_of([](std::int64_t t, std::int64_t j, const std::int32_t* segments) {
    return segments[j] == segments[t] && (j <= t || (t == 31 && j == 32));
  });
  const AuditResult result = audit_of(with_mix(one_block, {{"block", 16}}, device), device);
  EXPECT_EQ(result.verdict, AuditVerdict::kLeak);
  ASSERT_TRUE(result.onset);
  EXPECT_EQ(result.onset->delta.position, 31);
  EXPECT_EQ(result.onset->delta.changed, 32);
}

TEST(Audit, ASmallDifferenceIsALeakOnlyIfItGrows) {
  Device device(1);
  const auto later = [](float strength) {
    return [=](std::int64_t length, std::int64_t width, const std::int32_t* /*segments*/,
               const float* v, float* out) {
      std::copy(v, v + length * width, out);
      for (std::int64_t t = 0; t + 1 < length; ++t) out[t * width] += strength * v[(t + 1) * width];
    };
  };
  // Of about one rounding, and of a few.
  for (const float strength : {1e-7F, 2e-7F}) {
    const AuditResult leak = audit_of(with_mix(later(strength), {}, device, 4), device);
    EXPECT_EQ(leak.verdict, AuditVerdict::kLeak) << verdict_line(leak);
    ASSERT_TRUE(leak.onset && leak.sweep);
    EXPECT_EQ(leak.onset->layer, 4);
    EXPECT_LT(leak.onset->delta.largest, kAuditThreshold);
    EXPECT_GT(leak.onset->delta.largest, 0.0);
  }

  // As threads that race would: another result each time, whatever the input.
  auto calls = std::make_shared<std::int64_t>(0);
  const Mix noise = [calls](std::int64_t length, std::int64_t width,
                            const std::int32_t* /*segments*/, const float* v, float* out) {
    std::copy(v, v + length * width, out);
    const bool odd = ++*calls % 2 == 1;
    for (std::int64_t t = 0; t < length; ++t) out[t * width] += odd ? 3e-7F : 0.0F;
  };
  const AuditResult clean = audit_of(with_mix(noise, {}, device, 4), device);
  ASSERT_TRUE(clean.sweep);
  EXPECT_FALSE(clean.sweep->grows()) << clean.sweep->slope;
  EXPECT_EQ(clean.verdict, AuditVerdict::kClean) << verdict_line(clean);
  EXPECT_THAT(verdict_line(clean), HasSubstr("noise"));
}

// A mixer that says nothing of the past or the future: faults that spread its output find nothing,
// and the audit says so instead of "clean".
TEST(Audit, WithoutItsControlNothingIsClean) {
  Device device(1);
  const Mix silent = [](std::int64_t length, std::int64_t width, const std::int32_t* /*segments*/,
                        const float* /*v*/,
                        float* out) { std::fill(out, out + length * width, 0.0F); };
  const AuditResult result = audit_of(with_mix(silent, {}, device), device);
  EXPECT_EQ(result.verdict, AuditVerdict::kInconclusive);
  EXPECT_LT(result.localised, 24);
  EXPECT_THAT(verdict_line(result), StartsWith("inconclusive: "));
}

// The control looks at the layer of the fault alone; a whole stack with the fault says the same.
TEST(Audit, TheControlIsWhatTheWholeStackShows) {
  Device device(1);
  const ModelConfig model = model_of("FSFSF");
  const AuditSubject right = initialised_subject(model, 5, device);
  const AuditResult control = audit_of(right, device);
  for (const AuditFault& fault : kAuditFaults) {
    SCOPED_TRACE(name_of(fault));
    AuditSubject spoilt = right;
    spoilt.mixer = [&](const ModelConfig& at_length, std::int64_t l) -> std::unique_ptr<Layer> {
      if (l != kBrokenLayer) return right.mixer(at_length, l);
      return std::make_unique<FaultyMixer>(right.mixer(at_length, l), fault);
    };
    const AuditResult whole = audit_of(spoilt, device);
    ASSERT_TRUE(whole.onset);
    EXPECT_EQ(whole.onset->layer, kBrokenLayer);
    const auto same = std::find_if(
        control.control.begin(), control.control.end(), [&](const AuditInjection& injection) {
          return injection.fault == fault && injection.layer == kBrokenLayer;
        });
    ASSERT_NE(same, control.control.end());
    EXPECT_EQ(whole.layers[kBrokenLayer].time.largest, same->largest);
  }
}

TEST(Audit, B36_WhatIsntFiniteIsRefused) {
  Device device(1);
  const Mix infinite = [](std::int64_t length, std::int64_t width, const std::int32_t* /*segments*/,
                          const float* v, float* out) {
    std::copy(v, v + length * width, out);
    out[width] = std::numeric_limits<float>::infinity();
  };
  try {
    audit_of(with_mix(infinite, {}, device), device);
    FAIL() << "nothing was refused";
  } catch (const AgreedError& error) {
    EXPECT_EQ(error.code(), ExitCode::kNumerics);
    EXPECT_THAT(error.what(), HasSubstr("layer 2 (full)"));
  }
}

TEST(AuditPlan, LengthAndPositionsFollowFromTheSizes) {
  const std::vector<AuditSize> sizes = {{"window", 512, {"sliding"}},
                                        {"chunk", 256, {"mamba2"}},
                                        {"stride", 16, {"nsa"}},
                                        {"selection", 1024, {"nsa"}}};
  const AuditPlan plan = plan_audit(sizes, 0, {});
  EXPECT_EQ(plan.length, 1024 + 64 + 1);
  const std::set<std::int64_t> positions(plan.positions.begin(), plan.positions.end());
  const std::int64_t last = plan.length - 1;
  for (const std::int64_t p : {last, last - 1}) EXPECT_TRUE(positions.contains(p));
  for (const AuditSize& size : sizes) {
    EXPECT_GT(plan.length, size.positions);
    const std::int64_t multiples = last / size.positions;
    for (const std::int64_t m : {std::int64_t{1}, multiples}) {
      EXPECT_TRUE(positions.contains(m * size.positions)) << size.name << " " << m;
      EXPECT_TRUE(positions.contains(m * size.positions - 1)) << size.name << " " << m;
    }
  }
  // 2 ends, 8 random, and at most 16 multiples a size with the position before each.
  EXPECT_LE(positions.size(), 2U + 8U + (2U + 4U + 2U * 16U + 1U) * 2U);
  EXPECT_GE(*positions.begin(), 1);
  EXPECT_EQ(plan.starts.front(), 0);
  EXPECT_GE(plan.starts.size(), 4U);

  // Whole chunks on both sides of a boundary.
  EXPECT_EQ(plan_audit({{"chunk", 256, {"mamba2"}}}, 0, {}).length, 513);
  EXPECT_EQ(plan_audit({}, 0, {}).length, 65);

  // A tile is only a way to cut the work: one that no sequence reaches the end of doesn't count.
  const std::vector<AuditSize> tiles = {{"window", 64, {"nsa"}}, {"query tile", 2048, {"nsa"}}};
  EXPECT_EQ(plan_audit(tiles, 4096, {}).length, 2048 + 128 + 1);
  EXPECT_EQ(plan_audit(tiles, 0, {}).length, 2048 + 128 + 1);
  EXPECT_EQ(plan_audit(tiles, 256, {}).length, 64 + 4 + 1);
  EXPECT_FALSE(plan_audit(tiles, 256, {}).sizes[0].counts);
  // Nor a window; at the model's length it never hides a key either.
  const std::vector<AuditSize> windows = {{"window", std::int64_t{1} << 40, {"sliding"}},
                                          {"window", 64, {"nsa"}}};
  EXPECT_EQ(plan_audit(windows, 4096, {}).length, 64 + 4 + 1);
  EXPECT_EQ(plan_audit(windows, 64, {}).length, 65);
  EXPECT_EQ(plan_audit(windows, 65, {}).length, 64 + 4 + 1);
  EXPECT_THROW(plan_audit(windows, 0, {}), Error);
}

TEST(AuditPlan, B35_ALengthThatSeesTooLittleIsRefused) {
  const std::vector<AuditSize> sizes = {{"window", 512, {"sliding"}}, {"stride", 16, {"nsa"}}};
  AuditOptions options;
  options.length = 513;
  EXPECT_EQ(plan_audit(sizes, 0, options).length, 513);
  options.length = 512;
  try {
    plan_audit(sizes, 0, options);
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("window is 512"));
  }
}

TEST(AuditFaults, DoWhatTheirNamesSay) {
  constexpr std::int64_t kLength = 6, kWidth = 2;
  // Channel 0: t^2; channel 1: -t.
  std::vector<float> o;
  for (std::int64_t t = 0; t < kLength; ++t) {
    o.push_back(static_cast<float>(t * t));
    o.push_back(static_cast<float>(-t));
  }
  const auto spoilt = [&](AuditFault fault) {
    std::vector<float> result = o;
    inject(fault, kLength, kWidth, result.data());
    return result;
  };
  using Values = std::vector<float>;
  EXPECT_EQ(spoilt(AuditFault::kShift), (Values{1, -1, 4, -2, 9, -3, 16, -4, 25, -5, 25, -5}));
  EXPECT_EQ(spoilt(AuditFault::kPeek), (Values{1, -1, 5, -3, 13, -5, 25, -7, 41, -9, 25, -5}));
  EXPECT_EQ(spoilt(AuditFault::kGlobalMax),
            (Values{25, 0, 26, -1, 29, -2, 34, -3, 41, -4, 50, -5}));
  EXPECT_EQ(spoilt(AuditFault::kLastBroadcast),
            (Values{25, -5, 26, -6, 29, -7, 34, -8, 41, -9, 50, -10}));
  // Means of up to four later ones: (1+4+9+16)/4, (4+9+16+25)/4, (9+16+25)/3, (16+25)/2, 25, none.
  EXPECT_EQ(spoilt(AuditFault::kFutureMean),
            (Values{7.5, -2.5, 14.5, -4.5, 4 + 50.0F / 3, -6, 29.5, -7.5, 41, -9, 25, -5}));
  // Sums from t on, over T: 55/6, 55/6, 54/6, 50/6, 41/6, 25/6; -15/6, -15/6, -14/6, ...
  const Values scan = spoilt(AuditFault::kReverseScan);
  EXPECT_FLOAT_EQ(scan[0], 55.0F / 6);
  EXPECT_FLOAT_EQ(scan[6], 9 + 50.0F / 6);
  EXPECT_FLOAT_EQ(scan[11], -5 - 5.0F / 6);
  const Values pool = spoilt(AuditFault::kPool);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_FLOAT_EQ(pool[i], o[i] + (i % 2 == 0 ? 55.0F / 6 : -2.5F));
  }
  // Mean 40/12 = 10/3; squares (0+1+16+81+256+625 + 0+1+4+9+16+25)/12 - 100/9 = 1034/12 - 100/9.
  const double deviation = std::sqrt(1034.0 / 12 - 100.0 / 9);
  const Values normed = spoilt(AuditFault::kNormLeak);
  for (std::size_t i = 0; i < o.size(); ++i) {
    EXPECT_FLOAT_EQ(normed[i],
                    static_cast<float>((static_cast<double>(o[i]) - 10.0 / 3) / deviation));
  }
}

}  // namespace
}  // namespace tessera
