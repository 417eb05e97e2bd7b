// The profile: what it books, counts and prints. Times are only checked for being there.
#include "launch/profile.h"

#include <gmock/gmock.h>
#include <google/protobuf/text_format.h>
#include <gtest/gtest.h>

#include "layers/mixers/mixers.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/products.h"

namespace tessera {
namespace {

using testing::HasSubstr;

ModelConfig model() {
  ModelConfig model;
  EXPECT_TRUE(google::protobuf::TextFormat::ParseFromString(
      R"(width: 32 vocabulary: 2 length: 8 feed_forward { width: 1 }
         mixer { full { heads: 2 key_value_heads: 1 head_width: 16 } }
         mixer { sliding { attention { heads: 2 key_value_heads: 1 head_width: 16 } window: 8 } }
         schedule { explicit: "FS" })",
      &model));
  return model;
}

std::int64_t bytes_of(const std::vector<BufferSpec>& buffers) { return Layout(buffers).bytes(); }

TEST(Profile, BooksWhatTheLayerDeclares) {
  Device device(1);
  for (const DType compute : {DType::kF32, DType::kBF16}) {
    ProfileOptions options;
    options.mixers = {"full", "sliding"};
    options.lengths = {40, 80};
    options.sequences = 2;
    options.repeats = 3;
    const std::vector<ProfileLine> lines = profile(model(), compute, options, device);
    ASSERT_EQ(lines.size(), 4U);
    EXPECT_EQ(lines[0].mixer, "full");
    EXPECT_EQ(lines[1].length, 80);
    EXPECT_EQ(lines[2].mixer, "sliding");
    for (const ProfileLine& line : lines) {
      SCOPED_TRACE(line.mixer + " " + std::to_string(line.length));
      ModelConfig at_length = model();
      at_length.set_length(line.length);
      const auto layer = make_mixer(line.mixer, {at_length, 0, 1, compute});
      const BatchShape shape = {2, line.length, 1};
      std::vector<BufferSpec> parameters, gradients;
      for (const ParameterSpec& p : layer->parameters()) {
        parameters.push_back({p.name, p.full_precision ? DType::kF32 : compute, p.shape});
        gradients.push_back({p.name, DType::kF32, p.shape});
      }
      const BufferSpec in = {"in", compute, {shape.rows(), 32}};
      const BufferSpec out = {"out", DType::kF32, {shape.rows(), 32}};
      const std::int64_t forward = bytes_of(parameters) + bytes_of({in, out}) +
                                   bytes_of(layer->saved(shape)) + bytes_of(layer->scratch(shape));
      EXPECT_EQ(line.forward.booked_bytes, forward);
      EXPECT_EQ(line.both.booked_bytes, forward + bytes_of(gradients) + bytes_of({in, out}));
      for (const ProfileCost& cost : {line.forward, line.both}) {
        EXPECT_GT(cost.least, 0.0);
        EXPECT_LE(cost.least, cost.seconds);
        EXPECT_LE(cost.seconds, cost.most);
      }
    }
  }
}

TEST(Profile, B35_ATypeThatIsntConfiguredIsRefused) {
  Device device(1);
  ModelConfig only_full = model();
  only_full.mutable_mixer()->RemoveLast();
  ProfileOptions options;
  options.mixers = {"sliding"};
  options.lengths = {8};
  EXPECT_THROW(profile(only_full, DType::kF32, options, device), Error);
}

// Times as a straight line in log-log would have them: full T^2, sliding T.
std::vector<ProfileLine> made_up() {
  std::vector<ProfileLine> lines;
  for (const char* const mixer : {"full", "sliding"}) {
    for (const std::int64_t length : {2048, 8192, 32768}) {
      const double scale = static_cast<double>(length) / 2048;
      const double seconds = std::string(mixer) == "full" ? 1e-3 * scale * scale : 2e-3 * scale;
      ProfileLine line;
      line.mixer = mixer;
      line.length = length;
      line.forward = {seconds, seconds, seconds, length * 100, length * 110};
      line.both = {3 * seconds, 3 * seconds, 3 * seconds, length * 200, -1};
      lines.push_back(line);
    }
  }
  return lines;
}
const ProfileSubject kSubject = {"test", "CPU", 32, 1, false, true, 5};

TEST(Profile, SlopesAndRatiosAreThoseOfTheTimes) {
  const nlohmann::ordered_json json = profile_json(kSubject, made_up());
  EXPECT_NEAR(json["slopes"]["full"]["forward"].get<double>(), 2.0, 1e-12);
  EXPECT_NEAR(json["slopes"]["sliding"]["forward_backward"].get<double>(), 1.0, 1e-12);
  EXPECT_NEAR(json["lines"][5]["forward"]["times_full"].get<double>(), 2.0 / 16, 1e-12);
  EXPECT_NEAR(json["lines"][5]["paper_times_full"].get<double>(), 7.6 / 13.6, 1e-12);
  EXPECT_TRUE(json["lines"][0]["forward_backward"]["measured_bytes"].is_null());

  const std::string table = profile_table(kSubject, made_up());
  EXPECT_THAT(table, HasSubstr("32.00    0.12x( 0.56x)"));
  EXPECT_THAT(table, HasSubstr("      2.00\n"));
  const std::string csv = profile_csv(made_up());
  EXPECT_THAT(csv, HasSubstr("\nsliding,32768,forward,0.032,0.032,0.032,3276800,3604480\n"));
  EXPECT_THAT(csv, HasSubstr("\nfull,2048,forward_backward,0.003,0.003,0.003,409600,\n"));
}

TEST(Profile, ThePapersRatios) {
  EXPECT_NEAR(paper_ratio("differential", 32768), 46.5 / 13.6, 1e-12);
  EXPECT_NEAR(paper_ratio("nsa", 2048), 2.5, 1e-12);
  EXPECT_EQ(paper_ratio("full", 8192), 1.0);
  EXPECT_EQ(paper_ratio("mamba2", 8192), 0.0);
  EXPECT_EQ(paper_ratio("full", 4096), 0.0);
}

// A straight line in log-log is one in the figure: equal steps of its points.
TEST(Profile, TheFigureIsLogarithmic) {
  const std::string svg = profile_svg(kSubject, made_up());
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  const std::size_t at = svg.find("points=\"");
  double x[3], y[3];
  ASSERT_EQ(std::sscanf(svg.c_str() + at, "points=\"%lf,%lf %lf,%lf %lf,%lf", &x[0], &y[0], &x[1],
                        &y[1], &x[2], &y[2]),
            6);
  EXPECT_NEAR(x[1] - x[0], x[2] - x[1], 0.15);
  EXPECT_NEAR(y[1] - y[0], y[2] - y[1], 0.15);
  EXPECT_LT(y[2], y[0]);
  EXPECT_THAT(svg, HasSubstr(">sliding</text>"));
}

}  // namespace
}  // namespace tessera
