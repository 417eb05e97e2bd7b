// The ready configs: found by name, and of the sizes that they promise.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <map>
#include <set>

#include "launch/config.h"
#include "launch/match.h"
#include "launch/plan.h"
#include "layers/mixers/mixers.h"
#include "runtime/error.h"

namespace tessera {
namespace {

using testing::HasSubstr;

// Letters of the schedule, blanks between rows of `row`.
std::string letters(const Config& config, std::size_t row) {
  std::string text;
  const std::vector<std::string> types = schedule_types(config.model().schedule());
  for (std::size_t l = 0; l < types.size(); ++l) {
    if (l > 0 && l % row == 0) text += ' ';
    text += find_mixer_type(types[l])->letter;
  }
  return text;
}

std::vector<std::string> ready_configs() {
  std::vector<std::string> names;
  for (const auto& entry :
       std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/launch/configs")) {
    const std::string stem = entry.path().stem().string();
    if (!stem.ends_with("recipe")) names.push_back(stem);
  }
  return names;
}

TEST(ReadyConfigs, AreFoundByName) {
  for (const std::string& name : ready_configs()) {
    SCOPED_TRACE(name);
    EXPECT_THAT(find_config(name), testing::EndsWith("launch/configs/" + name + ".textproto"));
    const Config config = load_config(name);
    EXPECT_GT(config.model().length() + config.train().steps(), 0);
  }
  EXPECT_EQ(find_config("runs/mine/config.textproto"), "runs/mine/config.textproto");
}

TEST(ReadyConfigs, B35_AnUnknownNameIsRefusedWithTheReadyOnes) {
  try {
    load_config("latin8_small");
    FAIL() << "nothing was refused";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ExitCode::kUsage);
    EXPECT_THAT(error.what(), HasSubstr("latin8_small: no such file"));
    EXPECT_THAT(error.what(), HasSubstr("latin7_small"));
    EXPECT_THAT(error.what(), testing::Not(HasSubstr("recipe")));
  }
}

TEST(ReadyConfigs, TheStudysArmsHaveTheirSchedules) {
  const std::map<std::string, std::string> arms = {
      {"latin", "SGMF GMFS MFSG FSGM"}, {"periodic", "SGMF SGMF SGMF SGMF"},
      {"block", "SSSS GGGG MMMM FFFF"}, {"homo_f", "FFFF FFFF FFFF FFFF"},
      {"no_s", "GMFG MFGM FGMF GMFG"},  {"no_g", "SMFS MFSM FSMF SMFS"},
      {"no_m", "SGFS GFSG FSGF SGFS"},  {"no_f", "SGMS GMSG MSGM SGMS"}};
  int found = 0;
  for (const std::string& name : ready_configs()) {
    if (!name.starts_with("pilot_")) continue;
    ++found;
    std::string arm = name.substr(6);
    for (const std::string suffix : {"_small", "_1514m"}) {
      if (arm.ends_with(suffix)) arm.resize(arm.size() - suffix.size());
    }
    ASSERT_TRUE(arms.contains(arm)) << name;
    const std::string of_config = letters(load_config(name), 4);
    EXPECT_EQ(of_config, arms.at(arm)) << name;
    if (!arm.starts_with("no_")) continue;
    // Three types in turn: 6, 5 and 5 layers.
    std::map<char, int> counts;
    for (const char letter : of_config) counts[letter] += letter == ' ' ? 0 : 1;
    counts.erase(' ');
    std::multiset<int> sizes;
    for (const auto& [letter, count] : counts) sizes.insert(count);
    EXPECT_EQ(sizes, (std::multiset<int>{5, 5, 6})) << name;
  }
  EXPECT_EQ(found, 8 + 3 + 8);
}

// Within 0.004 % of the size, and by the widths that the matcher says.
TEST(ReadyConfigs, TheStudysArmsAreMatched) {
  for (const std::string& name : ready_configs()) {
    if (!name.starts_with("pilot_")) continue;
    SCOPED_TRACE(name);
    const std::int64_t target = name.ends_with("_small")   ? 6'000'000
                                : name.ends_with("_1514m") ? 1'514'000'000
                                                           : 700'900'000;
    const ModelConfig model = load_config(name).model();
    const std::int64_t parameters = Stack(model).parameter_count();
    EXPECT_LE(std::abs(static_cast<double>(parameters - target)),
              4e-5 * static_cast<double>(target))
        << parameters;
    const ParameterMatch match = match_parameters(model, target);
    EXPECT_EQ(match.width, model.feed_forward().width());
    EXPECT_EQ(match.wider_layers, model.feed_forward().wider_layers());
    EXPECT_EQ(match.parameters, parameters);
  }
}

TEST(ReadyConfigs, TheFlagshipIsThePapers) {
  const Config config = load_config("aether_7b");
  const Stack stack(config.model(), DType::kBF16);
  const RunSummary summary = summarise(stack, config, 4096, 1);
  ASSERT_EQ(summary.layers.size(), 49U);
  // spec: parameters of one layer's mixer.
  const std::map<std::string, std::int64_t> parameters = {
      {"full", 10'485'760},   {"sliding", 10'485'760}, {"differential", 10'486'016},
      {"linear", 14'712'992}, {"nsa", 16'408'576},     {"compress", 12'115'968},
      {"hybrid", 22'733'056}};
  std::int64_t sum = summary.embedding_parameters + summary.head_parameters;
  for (const LayerSummary& layer : summary.layers) {
    EXPECT_EQ(layer.mixer_parameters, parameters.at(layer.mixer)) << layer.mixer;
    sum += layer.mixer_parameters + layer.feed_forward_parameters + layer.norm_parameters;
  }
  EXPECT_EQ(summary.total_parameters, sum);
  EXPECT_EQ(summary.total_parameters, 6'586'356'320);
  EXPECT_EQ(summary.active_parameters, 3'118'191'200);
  // The identities that the authors published.
  EXPECT_EQ(summary.layers[0].mixer, "nsa");
  EXPECT_EQ(summary.layers[12].mixer, "hybrid");
  EXPECT_EQ(summary.layers[25].mixer, "nsa");
  EXPECT_EQ(summary.layers[40].mixer, "linear");
  // The paper's recipe.
  EXPECT_EQ(config.train().steps(), 162000);
  EXPECT_EQ(config.optim().layer_decay(), 0.97);
  EXPECT_EQ(config.optim().embedding_rate_scale(), 0.1);
}

// Each of the seven types once in every row and in every column; the small one is the same square.
TEST(ReadyConfigs, TheFlagshipIsALatinSquare) {
  for (const char* const name : {"aether_7b", "latin7_small"}) {
    const std::vector<std::string> types = schedule_types(load_config(name).model().schedule());
    ASSERT_EQ(types.size(), 49U);
    for (std::size_t i = 0; i < 7; ++i) {
      std::set<std::string> row, column;
      for (std::size_t j = 0; j < 7; ++j) {
        row.insert(types[7 * i + j]);
        column.insert(types[7 * j + i]);
      }
      EXPECT_EQ(row.size(), 7U) << name << " row " << i;
      EXPECT_EQ(column.size(), 7U) << name << " column " << i;
    }
  }
  EXPECT_EQ(letters(load_config("aether_7b"), 7),
            "NGFLSCH GFLSCHN FLSCHNG LSCHNGF SCHNGFL CHNGFLS HNGFLSC");
  EXPECT_EQ(letters(load_config("latin7_small"), 7), letters(load_config("aether_7b"), 7));
}

}  // namespace
}  // namespace tessera
