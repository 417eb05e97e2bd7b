#include "launch/config.h"

#include <gmock/gmock.h>
#include <google/protobuf/descriptor.pb.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <set>

#include "runtime/error.h"
#include "runtime/schema.pb.h"

namespace tessera {
namespace {

using google::protobuf::Descriptor;
using google::protobuf::FieldDescriptor;
using testing::AllOf;
using testing::EndsWith;
using testing::HasSubstr;
using testing::StartsWith;

// Line numbers are what several tests below name.
constexpr const char* kGood = R"(# A small stack.
model {
  width: 64
  vocabulary: 512
  schedule { periodic { order: "full" order: "sliding" layers: 4 } }
  mixer { full { heads: 4 key_value_heads: 2 head_width: 16 } }
  mixer {
    sliding {
      attention { heads: 4 key_value_heads: 2 head_width: 16 }
      window: 32
    }
  }
  feed_forward { width: 128 }
}
data { recipe: "recipe.textproto" directory: "corpus" }
train {
  global_batch: 8
  micro_batch: 2
  steps: 100
}
optim {
  learning_rate: 1e-3
  warmup_steps: 10
}
)";

class ConfigTest : public testing::Test {
 protected:
  ConfigTest() : folder_(std::filesystem::temp_directory_path() / name()) {
    std::filesystem::create_directories(folder_);
    path_ = (folder_ / "run.textproto").string();
  }
  ~ConfigTest() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& text) const {
    std::ofstream(path_, std::ios::binary | std::ios::trunc) << text;
  }
  Config load(const std::string& text, const std::vector<std::string>& overrides = {}) const {
    write(text);
    return load_config(path_, overrides);
  }
  // The one line that a broken config gives, which must come within two seconds.
  std::string error_of(const std::function<void()>& action) const {
    const auto start = std::chrono::steady_clock::now();
    std::string message;
    try {
      action();
      ADD_FAILURE() << "nothing was refused";
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ExitCode::kUsage);
      message = error.what();
    }
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(2));
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    return message;
  }
  std::string load_error(const std::string& text, const std::vector<std::string>& overrides = {}) {
    return error_of([&] { load(text, overrides); });
  }
  std::string set_error(const std::string& override) { return load_error(kGood, {override}); }

  std::filesystem::path folder_;
  std::string path_;

 private:
  static std::string name() {
    return "tessera_config_test_" + std::to_string(getpid()) + "_" +
           testing::UnitTest::GetInstance()->current_test_info()->name();
  }
};

// kGood with one piece of text replaced.
std::string with(const std::string& from, const std::string& to) {
  std::string text = kGood;
  const auto at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  return text.replace(at, from.size(), to);
}

TEST_F(ConfigTest, ReadsFieldsAndDefaults) {
  const Config config = load(kGood);
  EXPECT_EQ(config.model().width(), 64);
  EXPECT_EQ(config.model().mixer(1).sliding().window(), 32);
  EXPECT_EQ(config.optim().learning_rate(), 1e-3);
  EXPECT_EQ(config.optim().beta2(), 0.95);
  EXPECT_EQ(config.execution().watchdog_seconds(), 300);
  EXPECT_EQ(config.checkpoint().keep_last(), 2);
  validate(config);
}

struct Broken {
  const char* what;
  const char* from;
  const char* to;
  const char* line;  // after the file's name
  const char* words;
};

TEST_F(ConfigTest, B35_BrokenConfigsNameLinePathAndNearestField) {
  const Broken cases[] = {
      {"misspelt", "  width: 64", "  widht: 64", ":3: model.widht: ", "nearest: width"},
      {"misspelt deep", "      window: 32", "      windows: 32",
       ":10: model.mixer[1].sliding.windows: ", "nearest: window"},
      {"misspelt section", "optim {", "optimizer {", ":21: optimizer: ", "nearest: optim"},
      {"no such name", "  steps: 100", "  qqqq: 100",
       ":19: train.qqqq: ", "expected one of global_batch, micro_batch, steps"},
      {"wrong nesting", "  learning_rate: 1e-3", "  global_batch: 8",
       ":22: optim.global_batch: ", "nearest: train.global_batch"},
      {"duplicate", "  vocabulary: 512", "  vocabulary: 512\n  width: 64",
       ":5: model.width: ", "set twice"},
      {"duplicate section", "optim {", "train {", ":21: train: ", "set twice"},
      {"text for a number", "1e-3", "\"1e-3\"",
       ":22: optim.learning_rate: ", "expected a number, got \"1e-3\""},
      {"fraction for a whole number", "  width: 64", "  width: 3.7",
       ":3: model.width: ", "expected a whole number (64 bits), got 3.7"},
      {"too large for 64 bits", "  width: 64", "  width: 99999999999999999999",
       ":3: model.width: ", "expected a whole number"},
      {"negative unsigned", "  steps: 100", "  seed: -1",
       ":19: train.seed: ", "expected a whole number of at least 0 (64 bits), got -1"},
      {"negative", "  width: 64", "  width: -64",
       ":3: model.width: ", "expected at least 1, got -64"},
      {"negative in a list", "steps: 100", "steps: 100 } checkpoint { archive_steps: [10, -3]",
       ":19: checkpoint.archive_steps[1]: ", "expected at least 1, got -3"},
      {"unknown enum", "  steps: 100", "  precision: F23\n  steps: 100",
       ":19: train.precision: ", "expected one of F32 BF16, got F23; nearest: F32"},
      {"bad boolean", "  steps: 100", "} execution { recompute: maybe",
       ":19: execution.recompute: ", "expected true or false, got maybe"},
      {"value for a section", "train {", "train: 3 optim {",
       ":16: train: ", "expected { fields }, got 3"},
      {"unquoted text", "\"corpus\"", "corpus",
       ":15: data.directory: ", "expected a text in quotes, got corpus"},
      {"micro-batch that doesn't divide", "micro_batch: 2", "micro_batch: 3",
       ":18: train.micro_batch: ", "expected a divisor of train.global_batch = 8, got 3"},
      {"a step of billions of micro-batches", "global_batch: 8", "global_batch: 2147483648",
       ":17: train.global_batch: ",
       "at most 1048576 micro-batches in a step, so 2097152, got 2147483648"},
      {"samples beyond 63 bits", "  global_batch: 8\n  micro_batch: 2\n  steps: 100",
       "  global_batch: 1048576\n  micro_batch: 2\n  steps: 281474976710656",
       ":19: train.steps: ", "at most 4398046511104, got 281474976710656"},
      {"zero batch", "global_batch: 8", "global_batch: 0",
       ":17: train.global_batch: ", "expected at least 1, got 0"},
      {"window below 1", "      window: 32", "      window: 0",
       ":10: model.mixer[1].sliding.window: ", "1"},
      {"key/value heads that don't divide", "heads: 4 key_value_heads: 2 head_width: 16 } }",
       "heads: 4 key_value_heads: 3 head_width: 16 } }", ":6: model.mixer[0].full", "3"},
      {"missing width", "  width: 64\n", "", ":2: model.width: ", "required"},
      {"missing recipe", "recipe: \"recipe.textproto\"", "", ":15: data.recipe: ", "required"},
      {"two kinds of schedule", "layers: 4 } }", "layers: 4 } explicit: \"F\" }",
       ":5: model.schedule.explicit: ", "another member of oneof"},
      {"no schedule", "schedule { periodic { order: \"full\" order: \"sliding\" layers: 4 } }", "",
       ":2: model.schedule: ", "required: one of latin"},
      {"a mixer that isn't described", "order: \"sliding\"", "order: \"slidin\"", "", "slidin"},
      {"not a number", "1e-3", "nan", ":22: optim.learning_rate: ", "at least 0, got nan"},
      {"infinite", "1e-3", "1e999", ":22: optim.learning_rate: ", "at least 0, got inf"},
      {"warm-up beyond the run", "warmup_steps: 10", "warmup_steps: 101",
       ":23: optim.warmup_steps: ", "at most all of the run's 100 steps, got 101"},
      {"decay without its schedule", "warmup_steps: 10", "decay_steps: 10",
       ":23: optim.decay_steps: ", "expected 0 unless optim.schedule is WARMUP_STABLE_DECAY"},
      {"beta of 1", "warmup_steps: 10", "beta1: 1", ":23: optim.beta1: ", "below 1, got 1"},
      {"an opened brace", "optim {", "optim {{", ":21: ", "not protobuf text format"},
      {"a brace too many", "optim {", "}\noptim {", ":21: ", "not protobuf text format"},
      {"no value", "width: 64",
       "width:", ":3: model.width: ", "expected a whole number (64 bits), got vocabulary"},
      {"no colon", "width: 64", "width 64", ":3: model.width: ", "not protobuf text format"},
      {"an open quote", "\"corpus\"", "\"corpus", ":15: ", "String literals cannot cross line"},
      {"a width beside experts", "feed_forward { width: 128 }",
       "feed_forward { width: 128 experts { experts: 4 active: 2 width: 16 } }",
       ":13: model.feed_forward.experts: ", "another member of oneof"},
      {"no number of experts", "feed_forward { width: 128 }",
       "feed_forward { experts { active: 2 width: 16 } }",
       ":13: model.feed_forward.experts.experts: ", "must be at least 1, is 0"},
      {"more experts than there are", "feed_forward { width: 128 }",
       "feed_forward { experts { experts: 4 active: 5 width: 16 } }",
       ":13: model.feed_forward.experts.active: ", "must be at most 4, is 5"},
      {"a capacity below 0", "feed_forward { width: 128 }",
       "feed_forward { experts { experts: 4 active: 2 width: 16 capacity_factor: -1 } }",
       ":13: model.feed_forward.experts.capacity_factor: ", "at least 0, is -1"},
      {"a latent space of nothing", "feed_forward { width: 128 }",
       "feed_forward { experts { experts: 4 active: 2 width: 16 latent { } } }",
       ":13: model.feed_forward.experts.latent.width: ", "must be at least 1, is 0"},
      {"a layer in two ranges", "feed_forward { width: 128 }",
       "feed_forward { width: 128 } feed_forward_range { first: 1 last: 2 feed_forward { width: 3 "
       "} "
       "} feed_forward_range { first: 2 last: 3 feed_forward { width: 4 } }",
       ":13: model.feed_forward_range[1].first: ", "model.feed_forward_range[0]"},
      {"a range beyond the layers", "feed_forward { width: 128 }",
       "feed_forward { width: 128 } feed_forward_range { first: 1 last: 4 feed_forward { width: 3 "
       "} "
       "}",
       ":13: model.feed_forward_range[0].last: ", "must be at most 3, is 4"},
      {"no expert ranks", "warmup_steps: 10", "} parallel { expert_ranks: 0",
       ":23: parallel.expert_ranks: ", "expected at least 1, got 0"},
      {"layers without end", "layers: 4", "layers: 4000000000",
       ":5: model.schedule.periodic.layers: ", "expected at most 10000"},
  };
  for (const Broken& c : cases) {
    SCOPED_TRACE(c.what);
    const std::string message = load_error(with(c.from, c.to));
    EXPECT_THAT(message, AllOf(StartsWith(path_ + c.line), HasSubstr(c.words)));
  }
}

TEST_F(ConfigTest, B35_WhatIsNoConfigIsRefusedByName) {
  EXPECT_EQ(error_of([&] { load_config("/nonexistent/run.textproto"); }),
            "/nonexistent/run.textproto: no such file; expected a config in protobuf text format");
  EXPECT_THAT(error_of([&] { load_config(folder_.string()); }),
              StartsWith(folder_.string() + ": this is a folder"));
  EXPECT_THAT(load_error(""), StartsWith(path_ + ": the file is empty"));
  EXPECT_THAT(load_error(" \n\t\n"), StartsWith(path_ + ": the file is empty"));
  EXPECT_THAT(load_error("# nothing but a comment\n"),
              StartsWith(path_ + ": model.width: required"));
  EXPECT_THAT(load_error(std::string("\x7f"
                                     "ELF\x02\x01\x01\0\0\xff",
                                     10)),
              AllOf(StartsWith(path_ + ":1: "), HasSubstr("not protobuf text format")));
  EXPECT_THAT(error_of([&] { load_config("/dev/zero"); }), HasSubstr("isn't a regular file"));
  const std::string pipe = (folder_ / "pipe").string();
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(error_of([&] { load_config(pipe); }), HasSubstr("isn't a regular file"));
  write("");
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 33);
  EXPECT_THAT(error_of([&] { load_config(path_); }), HasSubstr("too many; expected a config"));
}

// Neither crash nor hang, and always one line: the good config with bytes changed at random.
TEST_F(ConfigTest, B35_DamagedConfigsNeverCrash) {
  std::mt19937 random(1);
  int refused = 0;
  for (int i = 0; i < 400; ++i) {
    std::string text = kGood;
    for (int changes = 1 + static_cast<int>(random() % 3); changes > 0; --changes) {
      const auto at = random() % text.size();
      switch (random() % 3) {
        case 0:
          text[at] = static_cast<char>(random() % 256);
          break;
        case 1:
          text.erase(at, 1 + random() % 20);
          break;
        default:
          text.insert(at, 1, "{}<>[]:;,\"'#-\\"[random() % 14]);
      }
    }
    try {
      load(text);
    } catch (const Error& error) {
      ++refused;
      ASSERT_EQ(error.code(), ExitCode::kUsage) << text;
      const std::string message = error.what();
      ASSERT_TRUE(message.starts_with(path_)) << message;
      ASSERT_EQ(message.find('\n'), std::string::npos) << message;
    }
  }
  EXPECT_GT(refused, 200);
}

TEST_F(ConfigTest, OverridesReachEveryKindOfField) {
  const Config config =
      load(kGood, {"optim.learning_rate=3e-4", "model.mixer[1].sliding.window=64",
                   "parallel.gather=PER_STEP", "execution.recompute=true", "train.seed=7",
                   "data.recipe=with \"quotes\" and = signs", "data.directory=\"quoted\"",
                   "checkpoint.archive_steps=[10, 20, 30]", "checkpoint.archive_steps[1]=25",
                   "checkpoint.archive_steps[3]=40", "model.schedule.explicit=FSFS",
                   "train.stop_at_step=5", "train.stop_at_step=6"});
  EXPECT_EQ(config.optim().learning_rate(), 3e-4);
  EXPECT_EQ(config.optim().warmup_steps(), 10);
  EXPECT_EQ(config.model().mixer(1).sliding().window(), 64);
  EXPECT_EQ(config.model().mixer(1).sliding().attention().heads(), 4);
  EXPECT_EQ(config.parallel().gather(), ParallelConfig::PER_STEP);
  EXPECT_TRUE(config.execution().recompute());
  EXPECT_EQ(config.train().seed(), 7U);
  EXPECT_EQ(config.data().recipe(), "with \"quotes\" and = signs");
  EXPECT_EQ(config.data().directory(), "quoted");
  EXPECT_THAT(config.checkpoint().archive_steps(), testing::ElementsAre(10, 25, 30, 40));
  EXPECT_EQ(config.model().schedule().explicit_(), "FSFS");
  EXPECT_FALSE(config.model().schedule().has_periodic());
  EXPECT_EQ(config.train().stop_at_step(), 6);
  EXPECT_EQ(load(kGood, {"checkpoint.archive_steps=7"}).checkpoint().archive_steps(0), 7);
  EXPECT_EQ(load(kGood, {"model.schedule={homogeneous {type: \"full\" layers: 2}}"})
                .model()
                .schedule()
                .homogeneous()
                .layers(),
            2);
}

TEST_F(ConfigTest, B35_BrokenOverridesNameThemselves) {
  const std::pair<const char*, const char*> cases[] = {
      {"optim.learning_rate", "expected path=value"},
      {"=3", "expected a field path"},
      {"optim..beta1=3", "expected a field path"},
      {"model.mixer[x].sliding.window=3", "expected a field path"},
      {"model.mixer[-1].sliding.window=3", "expected a field path"},
      {"optim.learing_rate=3",
       "optim.learing_rate: there is no field learing_rate here; nearest: "
       "learning_rate"},
      {"learning_rate=3", "nearest: optim.learning_rate"},
      {"optim.learning_rate=abc", "optim.learning_rate: expected a number, got abc"},
      {"optim.learning_rate=", "optim.learning_rate: expected a number, got nothing"},
      {"train.steps=3.7", "train.steps: expected a whole number (64 bits), got 3.7"},
      {"train.steps=1 micro_batch: 4", "train.steps: expected a whole number"},
      {"train.steps=1 } optim { beta1: 0", "train.steps: expected a whole number"},
      {"optim.schedule=COSINUS",
       "expected one of COSINE CONSTANT WARMUP_STABLE_DECAY, got "
       "COSINUS; nearest: COSINE"},
      {"optim.schedule.kind=3", "it has no fields"},
      {"optim=3", "optim: expected { fields }, got 3"},
      {"model.mixer.sliding.window=3", "this is a list; expected an index, as in model.mixer[0]"},
      {"model.mixer[5].sliding.window=3", "the list has 2 entries; expected an index of at most 2"},
      {"model.width[0]=3", "model.width: this isn't a list"},
      {"checkpoint.archive_steps[0]=[1, 2]", "expected one value"},
      {"train.micro_batch=3", "train.micro_batch: expected a divisor"},
      {"optim.learning_rate=-1", "optim.learning_rate: expected a number of at least 0, got -1"},
      {"model.mixer[1].sliding.window=0", "model.mixer[1].sliding.window: "},
      {"model.schedule={homogeneous {tipe: \"full\"}}",
       "model.schedule.homogeneous.tipe: there is no field tipe here; nearest: type"},
      {"model.mixer[1]={slidin {window: 3}}", "model.mixer[1].slidin: there is no field slidin"},
  };
  for (const auto& [override, words] : cases) {
    EXPECT_THAT(set_error(override),
                AllOf(StartsWith(std::string("--set ") + override + ": "), HasSubstr(words)));
  }
}

// A fault that the file has is the file's, whatever is set elsewhere.
TEST_F(ConfigTest, FaultsAreReportedWhereTheyWereWritten) {
  EXPECT_THAT(load_error(with("micro_batch: 2", "micro_batch: 3"), {"optim.beta1=0.8"}),
              StartsWith(path_ + ":18: train.micro_batch: "));
  EXPECT_EQ(
      load(with("micro_batch: 2", "micro_batch: 3"), {"train.micro_batch=4"}).train().micro_batch(),
      4);
}

// --- the schema itself -------------------------------------------------------------------------

TEST(Schema, EveryFieldIsMarkedAndExplained) {
  google::protobuf::FileDescriptorSet set;
  std::ifstream stream(TESSERA_SCHEMA, std::ios::binary);
  ASSERT_TRUE(set.ParseFromIstream(&stream));
  google::protobuf::DescriptorPool pool;
  for (const auto& file : set.file()) {
    ASSERT_NE(pool.BuildFile(file), nullptr) << file.name();
  }
  int fields = 0;
  std::set<std::string> seen;
  const std::function<void(const Descriptor&, const Descriptor&)> walk =
      [&](const Descriptor& source, const Descriptor& compiled) {
        if (!seen.insert(source.full_name()).second) {
          return;
        }
        for (int i = 0; i < source.field_count(); ++i) {
          const FieldDescriptor& field = *source.field(i);
          google::protobuf::SourceLocation location;
          ASSERT_TRUE(field.GetSourceLocation(&location));
          if (field.message_type() != nullptr) {
            walk(*field.message_type(), *compiled.field(i)->message_type());
            continue;
          }
          ++fields;
          EXPECT_TRUE(compiled.field(i)->options().HasExtension(effect))
              << field.full_name() << " is marked neither NUMERICS nor EXECUTION";
          EXPECT_GT(location.leading_comments.size(), 10U)
              << field.full_name() << " has no comment";
          EXPECT_TRUE(field.cpp_type() == FieldDescriptor::CPPTYPE_INT64 ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_UINT64 ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_DOUBLE ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_BOOL ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_ENUM ||
                      field.cpp_type() == FieldDescriptor::CPPTYPE_STRING)
              << field.full_name() << " has a type that config_text.cc doesn't write";
        }
      };
  walk(*pool.FindMessageTypeByName("tessera.Config"), *Config::descriptor());
  EXPECT_GT(fields, 50);
}

// --- what a checkpoint keeps -------------------------------------------------------------------

TEST_F(ConfigTest, NumericsIsAFixedText) {
  EXPECT_EQ(numerics(load(kGood)), R"(model.width=64
model.vocabulary=512
model.length=0
model.schedule.periodic.order[0]="full"
model.schedule.periodic.order[1]="sliding"
model.schedule.periodic.layers=4
model.mixer[0].full.heads=4
model.mixer[0].full.key_value_heads=2
model.mixer[0].full.head_width=16
model.mixer[0].full.rope_theta=1e+06
model.mixer[0].full.query_key_norm=false
model.mixer[1].sliding.attention.heads=4
model.mixer[1].sliding.attention.key_value_heads=2
model.mixer[1].sliding.attention.head_width=16
model.mixer[1].sliding.attention.rope_theta=1e+06
model.mixer[1].sliding.attention.query_key_norm=false
model.mixer[1].sliding.window=32
model.feed_forward.width=128
model.feed_forward.wider_layers=0
model.norm_epsilon=1e-06
model.init_deviation=0.02
data.document_masking=false
train.global_batch=8
train.micro_batch=2
train.steps=100
train.seed=0
train.precision=F32
optim.learning_rate=0.001
optim.schedule=COSINE
optim.warmup_steps=10
optim.decay_steps=0
optim.final_learning_rate=0
optim.beta1=0.9
optim.beta2=0.95
optim.epsilon=1e-08
optim.weight_decay=0.1
optim.clip_norm=1
optim.embedding_rate_scale=1
optim.layer_decay=1
optim.bad_steps_limit=3
parallel.reduction=CANONICAL
)");
}

TEST_F(ConfigTest, NumericsKnowsNothingOfHowARunIsExecuted) {
  const std::string base = numerics(load(kGood));
  // Writing a default out, or the order of the file, is no change either.
  EXPECT_EQ(numerics(load(kGood, {"optim.beta1=0.9", "train.precision=F32", "execution={}"})),
            base);
  EXPECT_EQ(
      numerics(load(kGood,
                    {"execution.threads=7", "parallel.gather=PER_STEP", "parallel.prefetch=false",
                     "data.directory=elsewhere", "checkpoint.every=3", "validation.every=5",
                     "train.stop_at_step=4", "train.init_from=a.h5", "logging.tensorboard=false"})),
      base);
  EXPECT_NE(numerics(load(kGood, {"train.seed=1"})), base);
  // The nearest double differs.
  EXPECT_NE(numerics(load(kGood, {"optim.learning_rate=0.0010000000000000002"})), base);
}

TEST_F(ConfigTest, DifferencesAreFoundByPathAndRefusedUnlessAllowed) {
  const std::string saved = numerics(load(kGood));
  const std::string now =
      numerics(load(kGood, {"optim.learning_rate=2e-3", "model.schedule.explicit=FSFS"})) +
      "data.recipe_sha256=\"ab\"\n";
  const auto differences = compare_numerics(saved, now);
  ASSERT_EQ(differences.size(), 6U);
  EXPECT_EQ(differences[0].path, "model.schedule.periodic.order[0]");
  EXPECT_EQ(differences[0].saved, "\"full\"");
  EXPECT_EQ(differences[0].now, "");
  EXPECT_EQ(differences[3].path, "optim.learning_rate");
  EXPECT_EQ(differences[3].saved, "0.001");
  EXPECT_EQ(differences[3].now, "0.002");
  EXPECT_EQ(differences[4].path, "model.schedule.explicit");
  EXPECT_EQ(differences[5].path, "data.recipe_sha256");
  EXPECT_TRUE(compare_numerics(saved, saved).empty());

  check_resume(saved, saved, {});
  check_resume(saved, now, {"optim", "model.schedule", "data.recipe_sha256"});
  const auto refusal = [&](const std::vector<std::string>& allowed) {
    return error_of([&] { check_resume(saved, now, allowed); });
  };
  EXPECT_EQ(refusal({"model.schedule", "data"}),
            "optim.learning_rate: the checkpoint was trained with 0.001, this run has 0.002; put "
            "the old value back, or add --allow-change optim.learning_rate");
  EXPECT_THAT(refusal({"optim", "data"}), StartsWith("model.schedule.periodic.order[0]: "));
  EXPECT_THAT(refusal({"model", "data", "optim.learning"}),
              StartsWith("--allow-change optim.learning: no NUMERICS field"));
  EXPECT_THAT(refusal({""}), StartsWith("--allow-change : no NUMERICS field"));
}

TEST_F(ConfigTest, TheResolvedConfigReadsBackAsItself) {
  const Config config =
      load(kGood, {"optim.learning_rate=0.1234567890123456789", "train.seed=18446744073709551615",
                   "data.recipe=a \"b\"\n\\\xed\x95\x9c", "checkpoint.archive_steps=[1,2]",
                   "parallel.gather=PER_STEP"});
  const std::string text = resolved_text(config);
  EXPECT_THAT(text, HasSubstr("\n  keep_last: 2\n"));
  EXPECT_THAT(text, HasSubstr("\n  gather: PER_STEP\n"));
  EXPECT_THAT(text, EndsWith("logging {\n  progress_every: 10\n  tensorboard: true\n}\n"));
  const Config again = load(text);
  EXPECT_EQ(resolved_text(again), text);
  EXPECT_EQ(numerics(again), numerics(config));
  EXPECT_EQ(again.data().recipe(), config.data().recipe());
  EXPECT_EQ(again.train().seed(), 18446744073709551615U);
}

// What isn't set and depends on other fields is filled in, and stands in what a checkpoint keeps.
TEST_F(ConfigTest, ExpertsDefaultsDependOnTheirKind) {
  const auto experts_of = [&](const std::string& more) {
    std::string text = kGood;
    text.replace(text.find("width: 128"), 10,
                 "experts { experts: 4 active: 2 width: 16 " + more + " }");
    const Config config = load(text);
    EXPECT_EQ(resolved_text(load(resolved_text(config))), resolved_text(config));
    EXPECT_THAT(numerics(config), HasSubstr("model.feed_forward.experts.renormalise="));
    EXPECT_THAT(numerics(config), Not(HasSubstr("model.feed_forward.width")));
    return config.model().feed_forward().experts();
  };
  EXPECT_TRUE(experts_of("").renormalise());
  EXPECT_EQ(experts_of("").auxiliary_coefficient(), 0.01);
  EXPECT_EQ(experts_of("selection_bias: true").auxiliary_coefficient(), 1e-4);
  EXPECT_EQ(experts_of("auxiliary_coefficient: 0").auxiliary_coefficient(), 0);
  EXPECT_FALSE(experts_of("latent { width: 8 }").renormalise());
  EXPECT_EQ(experts_of("latent { width: 8 }").auxiliary_coefficient(), 1e-4);
  EXPECT_TRUE(experts_of("latent { width: 8 } renormalise: true").renormalise());
}

TEST(ReadyConfigs, AllOfThemLoad) {
  int files = 0;
  for (const auto& entry :
       std::filesystem::directory_iterator(TESSERA_SOURCE_DIR "/launch/configs")) {
    const std::string path = entry.path().string();
    if (!path.ends_with(".textproto") || path.ends_with("recipe.textproto")) {
      continue;
    }
    ++files;
    EXPECT_NO_THROW(load_config(path)) << path;
  }
  EXPECT_GT(files, 0);
}

}  // namespace
}  // namespace tessera
