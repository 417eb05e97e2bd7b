#include "launch/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <sstream>

#include "launch/tensorboard.h"
#include "launch/tensorboard.pb.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

class MetricsTest : public testing::Test {
 protected:
  MetricsTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("tessera_metrics_test_" + std::to_string(getpid()) + "_" +
                 testing::UnitTest::GetInstance()->current_test_info()->name())) {
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "metrics.jsonl").string();
  }
  ~MetricsTest() override { std::filesystem::remove_all(folder_); }

  std::string text() const {
    std::ifstream file(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  }
  std::vector<nlohmann::json> lines() const {
    std::vector<nlohmann::json> result;
    std::istringstream stream(text());
    for (std::string line; std::getline(stream, line);) {
      result.push_back(nlohmann::json::parse(line));
    }
    return result;
  }

  std::filesystem::path folder_;
  std::string path_;
};

StepMetrics step(std::int64_t number, double loss = 3.25) {
  StepMetrics metrics;
  metrics.step = number;
  metrics.tokens = 512 * (number + 1);
  metrics.sample = 8 * number;
  metrics.loss = loss;
  metrics.learning_rate = 3e-4;
  metrics.grad_norm = 0.5;
  metrics.seconds = 0.25;
  metrics.tokens_per_second = 2048;
  metrics.mfu = 0.4;
  metrics.data_seconds = 0.001;
  metrics.transfers = 40;
  metrics.transfers_overlapped = 36;
  metrics.transfers_in_flight = 2;
  return metrics;
}

TEST_F(MetricsTest, StepLinesHoldEveryField) {
  MetricsFile file(path_, 0);
  file.write(step(0));
  EXPECT_EQ(text(),
            "{\"step\": 0, \"tokens\": 512, \"sample\": 0, \"loss\": 3.25, "
            "\"learning_rate\": 3e-04, \"grad_norm\": 0.5, \"seconds\": 0.25, "
            "\"tokens_per_second\": 2048, \"mfu\": 0.4, \"gather\": 0, \"reduce\": 0, "
            "\"exchange\": 0, \"data\": 0.001, \"advance\": 0, \"transfers\": 40, "
            "\"transfers_overlapped\": 36, \"transfers_in_flight\": 2}\n");
}

TEST_F(MetricsTest, NumbersReadBackAsTheSameDouble) {
  MetricsFile file(path_, 0);
  std::mt19937_64 random(1);
  std::vector<double> written;
  for (std::int64_t s = 0; s < 2000; ++s) {
    double value = std::bit_cast<double>(random());
    if (!std::isfinite(value)) {
      value = std::numeric_limits<double>::denorm_min();
    }
    written.push_back(value);
    file.write(step(s, value));
  }
  const auto read = lines();
  ASSERT_EQ(read.size(), written.size());
  for (std::size_t i = 0; i < read.size(); ++i) {
    ASSERT_EQ(std::bit_cast<std::uint64_t>(read[i]["loss"].get<double>()),
              std::bit_cast<std::uint64_t>(written[i]));
  }
  // B03: counters beyond 32 bits.
  StepMetrics metrics = step(1);
  metrics.step = 5000000000;
  metrics.tokens = 144200000000000;
  metrics.sample = std::numeric_limits<std::int64_t>::max();
  file.write(metrics);
  EXPECT_EQ(lines().back()["step"].get<std::int64_t>(), 5000000000);
  EXPECT_EQ(lines().back()["tokens"].get<std::int64_t>(), 144200000000000);
  EXPECT_EQ(lines().back()["sample"].get<std::int64_t>(), std::numeric_limits<std::int64_t>::max());
}

TEST_F(MetricsTest, WhatIsUnknownOrNotFiniteIsNull) {
  MetricsFile file(path_, 0);
  StepMetrics metrics = step(0, NAN);
  metrics.grad_norm = INFINITY;
  metrics.mfu.reset();
  file.write(metrics);
  ValidationMetrics validation;
  validation.validation_loss = {{"web", 4.5}, {"a \"b\"\n\xff", -INFINITY}};
  file.write(validation);
  EXPECT_TRUE(lines()[0]["loss"].is_null());
  EXPECT_TRUE(lines()[0]["grad_norm"].is_null());
  EXPECT_TRUE(lines()[0]["mfu"].is_null());
  EXPECT_EQ(lines()[1]["validation_loss"]["web"], 4.5);
  EXPECT_TRUE(lines()[1]["validation_loss"]["a \"b\"\n\xef\xbf\xbd"].is_null());
  EXPECT_FALSE(lines()[1].contains("loss"));
}

TEST_F(MetricsTest, AResumeCutsWhatCameAfterItsCheckpoint) {
  {
    MetricsFile file(path_, 0);
    for (std::int64_t s = 0; s < 10; ++s) {
      file.write(step(s, 5.0 - 0.1 * static_cast<double>(s)));
      if (s == 4 || s == 9) {
        ValidationMetrics validation;
        validation.step = s;
        validation.validation_loss = {{"web", 4.5}};
        file.write(validation);
      }
    }
    file.write_stopped("signal", 10);
  }
  const std::string whole = text();
  EXPECT_THAT(whole, EndsWith("\n{\"stopped\": \"signal\", \"step\": 10}\n"));
  const std::string kept = whole.substr(0, whole.find("{\"step\": 5,"));
  EXPECT_THAT(kept, HasSubstr("validation_loss"));
  // A power cut left half a line, and one that is whole but not JSON.
  std::ofstream(path_, std::ios::app | std::ios::binary)
      << std::string(3, '\0') << "\n{\"step\": 3, \"tok";
  {
    MetricsFile file(path_, 5);
    EXPECT_EQ(text(), kept);
    file.write(step(5));
  }
  EXPECT_EQ(lines().back()["step"], 5);
  // From a checkpoint later than the last line: the lines stay.
  const std::string before = text();
  { const MetricsFile opened(path_, 100); }
  EXPECT_EQ(text(), before);
  // A new run over the folder of an old one.
  { const MetricsFile opened(path_, 0); }
  EXPECT_EQ(text(), "");
  EXPECT_EQ(std::distance(std::filesystem::directory_iterator(folder_), {}), 1);
}

TEST_F(MetricsTest, StepsWhoseLinesWereLostAreFound) {
  const auto write = [&](std::int64_t begin, std::int64_t end) {
    MetricsFile file(path_, begin);
    for (std::int64_t s = begin; s < end; ++s) file.write(step(s));
  };
  EXPECT_EQ(MetricsFile(path_, 4).first_missing(), 0);  // removed
  write(0, 6);
  EXPECT_EQ(MetricsFile(path_, 4).first_missing(), 4);  // none
  EXPECT_EQ(MetricsFile(path_, 9).first_missing(), 4);  // cut off
}

TEST_F(MetricsTest, AHalfLineThatIsValidJsonIsStillCut) {
  std::ofstream(path_) << "{\"step\": 0}\n{\"step\": 1}";
  { const MetricsFile opened(path_, 5); }
  EXPECT_EQ(text(), "{\"step\": 0}\n");
}

TEST_F(MetricsTest, FilesThatCannotBeWrittenAreNamed) {
  const auto message_of = [](const std::function<void()>& action) {
    try {
      action();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
      return std::string(error.what());
    }
    return std::string("nothing was refused");
  };
  const std::string missing = (folder_ / "missing" / "metrics.jsonl").string();
  EXPECT_THAT(message_of([&] { MetricsFile(missing, 0); }), StartsWith(missing + ": "));
  EXPECT_THAT(message_of([&] { MetricsFile("/dev/zero", 0); }), StartsWith("/dev/zero: "));
  EXPECT_THAT(message_of([&] { TensorBoardWriter("/dev/null/events", 0); }),
              StartsWith("/dev/null is a file"));
}

// As on a full disk: no file of this process may grow beyond 2,000 bytes.
TEST_F(MetricsTest, AFullDiskIsReportedAtTheLineThatDoesNotFit) {
  MetricsFile file(path_, 0);
  TensorBoardWriter events((folder_ / "tensorboard").string(), 0);
  rlimit old{};
  getrlimit(RLIMIT_FSIZE, &old);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  rlimit small = old;
  small.rlim_cur = 2000;
  setrlimit(RLIMIT_FSIZE, &small);
  const auto steps_until_refused = [](const auto& write, const std::string& name) {
    for (std::int64_t s = 0; s < 100; ++s) {
      try {
        write(step(s));
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
        EXPECT_THAT(error.what(), AllOf(HasSubstr(name), HasSubstr("ulimit -f")));
        return s;
      }
    }
    return std::int64_t{100};
  };
  const auto lines_written = steps_until_refused([&](const auto& m) { file.write(m); }, path_);
  const auto events_written =
      steps_until_refused([&](const auto& m) { events.write(m); }, "events.out.tfevents");
  setrlimit(RLIMIT_FSIZE, &old);
  std::signal(SIGXFSZ, handler);
  EXPECT_GT(lines_written, 5);
  EXPECT_LT(lines_written, 12);
  EXPECT_GT(events_written, 4);
  EXPECT_LT(events_written, 20);
}

TEST_F(MetricsTest, AFileThatIsNotThereAnyMoreIsAnError) {
  MetricsFile file(path_, 0);
  file.write(step(0));
  std::filesystem::rename(path_, folder_ / "elsewhere");
  EXPECT_THROW(file.write(step(1)), Error);
  std::ofstream(path_) << "another's\n";
  EXPECT_THROW(file.write(step(2)), Error);
}

// --- progress ----------------------------------------------------------------------------------

// Steps whose time wavers by 5 % around what the machine takes, after a first one that warms up.
TEST(Progress, B36_TimeLeftIsRightAfterTwentyStepsAndAfterAResume) {
  constexpr std::int64_t kSteps = 400;
  constexpr std::int64_t kTokens = 4096;
  std::mt19937 random(1);
  std::uniform_real_distribution<double> waver(0.95, 1.05);
  std::vector<double> seconds;
  for (std::int64_t s = 0; s < kSteps; ++s) {
    // The second half of the run has a machine twice as fast.
    seconds.push_back((s < kSteps / 2 ? 0.5 : 0.25) * waver(random));
  }
  for (const std::int64_t start : {std::int64_t{0}, kSteps / 2}) {
    Progress progress(kSteps, (kSteps - start) * kTokens);
    EXPECT_EQ(progress.seconds_left(), 0.0);
    EXPECT_EQ(progress.tokens_per_second(), 0.0);
    progress.step_done(kTokens, 20.0);
    EXPECT_NEAR(progress.tokens_per_second(), kTokens / 20.0, 1e-9);
    double left = 0.0;
    const std::int64_t end = start == 0 ? kSteps / 2 : kSteps;
    for (std::int64_t s = start + 1; s < end; ++s) {
      progress.step_done(kTokens, seconds[static_cast<std::size_t>(s)]);
      if (s >= start + 20) {
        const double pace = start == 0 ? 0.5 : 0.25;
        left = pace * static_cast<double>(kSteps - s - 1);
        ASSERT_NEAR(progress.seconds_left(), left, 0.1 * left) << s;
        ASSERT_NEAR(progress.tokens_per_second(), kTokens / pace, 0.1 * kTokens / pace);
      }
    }
  }
}

TEST(Progress, TheAverageIsOfTheLastTwentySteps) {
  Progress progress(1000, 1000);
  for (int i = 0; i < 50; ++i) {
    progress.step_done(1, 100.0);
  }
  for (int i = 0; i < 20; ++i) {
    progress.step_done(1, 0.5);
  }
  EXPECT_EQ(progress.tokens_per_second(), 2.0);
  EXPECT_EQ(progress.seconds_left(), (1000 - 70) / 2.0);
}

TEST(Progress, TheLineSaysStepLossRateAndTimeLeft) {
  Progress progress(2000, std::int64_t{2000} * 8120);
  progress.step_done(8120, 1.0);
  StepMetrics metrics = step(0, 3.14159);
  metrics.mfu = 0.412;
  EXPECT_EQ(progress.line(metrics),
            "step 1/2000  loss 3.1416  lr 3.00e-04  8,120 tokens/s  mfu 41.2 %  33 min 19 s left");
  metrics.mfu.reset();
  EXPECT_THAT(progress.line(metrics), testing::Not(HasSubstr("mfu")));
  Progress slow(10, 1000000);
  slow.step_done(1000, 400.0);
  EXPECT_THAT(slow.line(metrics), EndsWith("3 tokens/s  4 d 15 h left"));
  Progress done(1, 10);
  done.step_done(10, 1.0);
  EXPECT_THAT(done.line(metrics), EndsWith("  0 s left"));
}

RouterResult routers(std::vector<std::int64_t> first, std::vector<std::int64_t> second) {
  RouterResult routers;
  routers.layers = {1, 4};
  routers.loads = {std::move(first), std::move(second)};
  routers.dropped = {0, 3};
  routers.entropy = {1.25, NAN};
  routers.auxiliary = 2.5;
  routers.z = 0.125;
  return routers;
}

TEST_F(MetricsTest, ExpertsStandInTheStepsLine) {
  MetricsFile file(path_, 0);
  StepMetrics metrics = step(0);
  const RouterResult result = routers({10, 20, 30}, {7, 5000000000});
  metrics.routers = &result;
  metrics.exchange_bytes = 12345678901;
  file.write(metrics);
  file.write(step(1));
  const auto line = lines()[0];
  EXPECT_EQ(line["expert_layers"].dump(), "[1,4]");
  EXPECT_EQ(line["expert_load"].dump(), "[[10,20,30],[7,5000000000]]");
  EXPECT_EQ(line["expert_drops"].dump(), "[0,3]");
  EXPECT_EQ(line["router_entropy"].dump(), "[1.25,null]");
  EXPECT_EQ(line["aux_loss"].get<double>(), 2.5);
  EXPECT_EQ(line["z_loss"].get<double>(), 0.125);
  EXPECT_EQ(line["exchange_bytes"].get<std::int64_t>(), 12345678901);
  EXPECT_FALSE(lines()[1].contains("expert_load")) << "without experts there is nothing to say";
}

// Over the steps since the last line, not of one alone.
TEST(Progress, TheLineWarnsOfExpertsThatStarve) {
  Progress progress(100, 1000);
  progress.step_done(10, 1.0);
  progress.add_loads(routers({0, 20, 40}, {10, 10}));
  progress.add_loads(routers({8, 12, 40}, {10, 10}));  // 8 of a mean of 40
  EXPECT_THAT(progress.line(step(1)), testing::Not(HasSubstr("starve")));
  progress.add_loads(routers({1, 20, 39}, {10, 10}));  // 1 of 20
  EXPECT_THAT(progress.line(step(2)),
              EndsWith(" left  warning: expert 0 of layer 1 starves, with 0.05 of the mean load"));
  progress.add_loads(routers({1, 20, 39}, {20, 0}));
  EXPECT_THAT(
      progress.line(step(3)),
      EndsWith("  warning: expert 1 of layer 4 starves, with 0.00 of the mean load; so do 1 more"));
  EXPECT_THAT(progress.line(step(4)), testing::Not(HasSubstr("starve"))) << "begins anew";
}

// --- TensorBoard -------------------------------------------------------------------------------

TEST(Crc32c, VectorsOfRfc3720) {
  EXPECT_EQ(crc32c("123456789"), 0xe3069283U);
  EXPECT_EQ(crc32c(std::string(32, '\0')), 0x8a9136aaU);
  EXPECT_EQ(crc32c(std::string(32, '\xff')), 0x62a8ab43U);
  std::string rising(32, '\0');
  for (std::size_t i = 0; i < rising.size(); ++i) {
    rising[i] = static_cast<char>(i);
  }
  EXPECT_EQ(crc32c(rising), 0x46dd794eU);
}

// An independent reader: a bit at a time, and the frame as TensorFlow's documentation has it.
std::uint32_t slow_masked_crc(const std::string& bytes) {
  std::uint32_t crc = ~0U;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc & 1U) != 0 ? (crc >> 1) ^ 0x82f63b78U : crc >> 1;
    }
  }
  crc = ~crc;
  return std::rotr(crc, 15) + 0xa282ead8U;
}

std::vector<tensorboard::Event> read_events(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<tensorboard::Event> events;
  std::string header(12, '\0');
  while (file.read(header.data(), 12)) {
    std::uint64_t length = 0;
    std::uint32_t crc = 0;
    std::memcpy(&length, header.data(), 8);
    std::memcpy(&crc, header.data() + 8, 4);
    EXPECT_EQ(crc, slow_masked_crc(header.substr(0, 8)));
    std::string data(length, '\0');
    EXPECT_TRUE(file.read(data.data(), static_cast<std::streamsize>(length)));
    EXPECT_TRUE(file.read(reinterpret_cast<char*>(&crc), 4));
    EXPECT_EQ(crc, slow_masked_crc(data));
    EXPECT_TRUE(events.emplace_back().ParseFromString(data));
  }
  EXPECT_EQ(file.gcount(), 0);
  return events;
}

TEST_F(MetricsTest, EventFilesHoldTheScalars) {
  const std::string folder = (folder_ / "run" / "tensorboard").string();
  {
    TensorBoardWriter writer(folder, 0);
    writer.write(step(0, 4.5));
    ValidationMetrics validation;
    validation.step = 0;
    validation.validation_loss = {{"web", 4.25}};
    writer.write(validation);
  }
  { TensorBoardWriter(folder, 7).write(step(7)); }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  ASSERT_EQ(files.size(), 2U);
  EXPECT_THAT(files[0].filename().string(), StartsWith("events.out.tfevents."));

  const auto first = read_events(files[0]);
  ASSERT_EQ(first.size(), 8U);
  EXPECT_EQ(first[0].file_version(), "brain.Event:2");
  EXPECT_EQ(first[1].session_log().status(), tensorboard::SessionLog::START);
  std::vector<std::string> tags;
  for (std::size_t i = 2; i < first.size(); ++i) {
    EXPECT_GT(first[i].wall_time(), 1.6e9);
    EXPECT_EQ(first[i].step(), 0);
    ASSERT_EQ(first[i].summary().value_size(), 1);
    tags.push_back(first[i].summary().value(0).tag());
  }
  EXPECT_THAT(tags, testing::ElementsAre("loss", "learning_rate", "grad_norm", "tokens_per_second",
                                         "mfu", "validation/web"));
  EXPECT_EQ(first[2].summary().value(0).simple_value(), 4.5F);
  EXPECT_EQ(first[7].summary().value(0).simple_value(), 4.25F);

  const auto second = read_events(files[1]);
  EXPECT_EQ(second[1].session_log().status(), tensorboard::SessionLog::START);
  EXPECT_EQ(second[1].step(), 7);
  EXPECT_EQ(second[2].step(), 7);
}

// Leaves what tensorboard_reads.py shows to TensorBoard itself: a run that was stopped after step 9
// and resumed from a checkpoint of 6 steps.
TEST_F(MetricsTest, ASampleForTensorBoard) {
  const std::string folder = TESSERA_BINARY_DIR "/tests/tensorboard_sample";
  std::filesystem::remove_all(folder);
  {
    TensorBoardWriter writer(folder, 0);
    for (std::int64_t s = 0; s < 10; ++s) {
      writer.write(step(s, 100.0 + static_cast<double>(s)));
    }
  }
  TensorBoardWriter writer(folder, 6);
  for (std::int64_t s = 6; s < 8; ++s) {
    writer.write(step(s, static_cast<double>(s)));
    ValidationMetrics validation;
    validation.step = s;
    validation.validation_loss = {{"web", 0.5}};
    writer.write(validation);
  }
}

}  // namespace
}  // namespace tessera
