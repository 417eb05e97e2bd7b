#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "launch/ckpt_command.h"
#include "tests/parallel/checkpoint_fixture.h"

namespace tessera {
namespace {

using testing::HasSubstr;

struct Answer {
  int exit_code = 0;
  std::string output, errors;
};

Answer run(const std::string& line) {
  CLI::App app;
  Answer answer;
  add_ckpt_command(app, answer.exit_code);
  testing::internal::CaptureStdout();
  testing::internal::CaptureStderr();
  try {
    app.parse(line);
  } catch (...) {
    testing::internal::GetCapturedStdout();
    testing::internal::GetCapturedStderr();
    throw;
  }
  answer.output = testing::internal::GetCapturedStdout();
  answer.errors = testing::internal::GetCapturedStderr();
  return answer;
}

std::string error_of(const std::string& line) {
  try {
    run(line);
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kCheckpoint);
    return error.what();
  }
  return "";
}

class CkptCommand : public testing::Test {
 protected:
  void SetUp() override {
    Communicator communicator(MPI_COMM_WORLD);
    for (const std::int64_t step : {100, 200}) {
      ShardedState state(communicator, true);
      if (step == 200) ++state.arrays()[0].parts[0].data[37 + 5];
      write_checkpoint(communicator, folder_.inner("checkpoints"), checkpoint_meta(step),
                       state.arrays());
    }
    a_ = folder_.inner("checkpoints/step-00000100.h5");
    b_ = folder_.inner("checkpoints/step-00000200.h5");
  }
  SharedFolder folder_;
  std::string a_, b_;
};

TEST_F(CkptCommand, ListsARunDirOrItsFolder) {
  write_bytes(folder_.inner("checkpoints/step-00000300.h5"), "junk");
  const Answer table = run("ckpt ls " + folder_.path());
  EXPECT_EQ(table.exit_code, 0);
  EXPECT_LT(table.output.find("step-00000300.h5  unusable:"), table.output.find("00000200.h5"));
  EXPECT_LT(table.output.find("00000200.h5"), table.output.find("00000100.h5"));
  EXPECT_EQ(run("ckpt ls " + folder_.inner("checkpoints")).output, table.output);

  const auto json = nlohmann::json::parse(run("ckpt ls --json " + folder_.path()).output);
  ASSERT_EQ(json["checkpoints"].size(), 3U);
  EXPECT_EQ(json["checkpoints"][0]["usable"], false);
  EXPECT_THAT(json["checkpoints"][0]["fault"].get<std::string>(), HasSubstr("isn't an HDF5 file"));
  EXPECT_EQ(json["checkpoints"][1]["step"], 200);
  EXPECT_EQ(json["checkpoints"][1]["tokens"], 200 * 4096);
  EXPECT_EQ(json["checkpoints"][1]["file"], b_);
  EXPECT_THROW(run("ckpt ls " + folder_.inner("nowhere")), Error);
}

TEST_F(CkptCommand, SaysThatThereAreNoCheckpoints) {
  const std::string empty = folder_.inner("empty");
  std::filesystem::create_directories(empty);
  EXPECT_EQ(run("ckpt ls " + empty).output, "no checkpoints in " + empty + "\n");
  EXPECT_EQ(run("ckpt ls " + empty).exit_code, 0);
  EXPECT_EQ(nlohmann::json::parse(run("ckpt ls --json " + empty).output)["checkpoints"],
            nlohmann::json::array());
  EXPECT_EQ(error_of("ckpt verify " + empty), "no checkpoints in " + empty);
}

TEST_F(CkptCommand, VerifyNamesEveryDamagedFile) {
  EXPECT_EQ(run("ckpt verify " + a_ + " " + b_).exit_code, 0);
  std::string bytes = file_bytes(b_);
  bytes.pop_back();
  write_bytes(b_, bytes);
  const Answer answer = run("ckpt verify " + b_ + " " + a_);
  EXPECT_EQ(answer.exit_code, 4);
  EXPECT_THAT(answer.errors, HasSubstr(b_));
  EXPECT_THAT(answer.output, HasSubstr(a_));
}

TEST_F(CkptCommand, VerifyTakesAFolderForItsCheckpoints) {
  write_bytes(folder_.inner("checkpoints/step-00000300.h5.partial"), "cut short");
  const std::string right = ": every checksum is right\n";
  for (const std::string& folder : {folder_.path(), folder_.inner("checkpoints")}) {
    const Answer answer = run("ckpt verify " + folder);
    EXPECT_EQ(answer.exit_code, 0);
    EXPECT_EQ(answer.output, b_ + right + a_ + right);
  }
  std::filesystem::resize_file(b_, 100);
  const Answer answer = run("ckpt verify " + folder_.path());
  EXPECT_EQ(answer.exit_code, 4);
  EXPECT_THAT(answer.errors, HasSubstr(b_ + ": is truncated: only 100 of its "));
  EXPECT_EQ(answer.output, a_ + right);
}

TEST_F(CkptCommand, DiffSaysNoByItsExitCodeAndNamesTheElement) {
  EXPECT_EQ(run("ckpt diff " + a_ + " " + a_).exit_code, 0);
  const Answer answer = run("ckpt diff " + a_ + " " + b_);
  EXPECT_EQ(answer.exit_code, 1);
  EXPECT_THAT(answer.output, HasSubstr("params/model.embed_tokens.weight[1, 5]: "));
  const Answer json = run("ckpt diff --json " + a_ + " " + b_);
  EXPECT_EQ(json.exit_code, 1);
  const auto parsed = nlohmann::json::parse(json.output);
  EXPECT_EQ(parsed["equal"], false);
  EXPECT_EQ(parsed["array"], "params/model.embed_tokens.weight");
  EXPECT_EQ(parsed["index"], nlohmann::json({1, 5}));
  EXPECT_EQ(nlohmann::json::parse(run("ckpt diff --json " + a_ + " " + a_).output)["equal"], true);
  EXPECT_THROW(run("ckpt diff " + a_ + " " + folder_.inner("nothing.h5")), Error);
  EXPECT_THROW(run("ckpt diff " + a_), CLI::ParseError);
}

}  // namespace
}  // namespace tessera
