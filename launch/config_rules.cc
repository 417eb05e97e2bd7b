// What a config must satisfy before anything is opened or allocated.
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "launch/config.h"
#include "launch/config_fields.h"
#include "layers/stack.h"
#include "optim/schedule.h"
#include "runtime/error.h"

namespace tessera {
namespace {

// Sizes above these are typing errors; below them no product of sizes passes 64 bits.
constexpr std::int64_t kLargestWidth = std::int64_t{1} << 20;
constexpr std::int64_t kLargestVocabulary = (std::int64_t{1} << 31) - 1;  // labels are 32-bit
constexpr std::int64_t kLargestLength = std::int64_t{1} << 31;
constexpr std::int64_t kMostLayers = 10000;
constexpr std::int64_t kLargestBatch = std::int64_t{1} << 31;
constexpr std::int64_t kMostQuanta = std::int64_t{1} << 20;   // a plan lists them
constexpr std::int64_t kMostSamples = std::int64_t{1} << 62;  // of a run
constexpr std::int64_t kMostSteps = std::int64_t{1} << 48;
constexpr std::int64_t kMostThreads = 4096;
constexpr std::int64_t kMostRanks = 1 << 20;
constexpr double kSmallestEpsilon = 1e-16;  // below it an f32 gradient's square can vanish first

// Collects the first fault; later checks do nothing.
class Rules {
 public:
  void require(bool holds, const std::string& path, const std::string& message) {
    if (!holds && !fault_) {
      fault_ = ConfigFault{path, message};
    }
  }
  void range(std::int64_t value, std::int64_t smallest, std::int64_t largest,
             const std::string& path) {
    const std::string got = ", got " + std::to_string(value);
    require(value >= smallest, path, "expected at least " + std::to_string(smallest) + got);
    require(value <= largest, path, "expected at most " + std::to_string(largest) + got);
  }
  void at_least(std::int64_t value, std::int64_t smallest, const std::string& path) {
    range(value, smallest, INT64_MAX, path);
  }
  // A finite number for which `holds`, in words "expected ...".
  void number(double value, bool holds, const std::string& rule,
              const google::protobuf::Message& in, const std::string& section, const char* name) {
    const auto* const field = in.GetDescriptor()->FindFieldByName(name);
    require(std::isfinite(value) && holds, section + "." + name,
            "expected " + rule + ", got " + value_text(in, *field, -1));
  }
  std::optional<ConfigFault>& fault() { return fault_; }

 private:
  std::optional<ConfigFault> fault_;
};

void check_layers(Rules& rules, std::int64_t layers, const std::string& path) {
  rules.require(layers != 0, path, "required: the number of layers");
  rules.range(layers, 1, kMostLayers, path);
}

// Sizes that would make the model's own checks slow or overflow; the shapes themselves are the
// layers' to judge.
void check_model(Rules& rules, const ModelConfig& model) {
  rules.require(model.has_width(), "model.width", "required: the width of the residual stream");
  rules.range(model.width(), 1, kLargestWidth, "model.width");
  rules.require(model.has_vocabulary(), "model.vocabulary",
                "required: at least the number of the tokenizer's ids");
  rules.range(model.vocabulary(), 1, kLargestVocabulary, "model.vocabulary");
  rules.range(model.length(), 0, kLargestLength, "model.length");
  const Schedule& schedule = model.schedule();
  switch (schedule.kind_case()) {
    case Schedule::kLatin:
      rules.require(schedule.latin().order_size() > 0, "model.schedule.latin.order",
                    "required: the types of mixers");
      rules.range(schedule.latin().order_size(), 0, 100, "model.schedule.latin.order");
      break;
    case Schedule::kPeriodic:
      check_layers(rules, schedule.periodic().layers(), "model.schedule.periodic.layers");
      break;
    case Schedule::kBlock:
      check_layers(rules, schedule.block().layers(), "model.schedule.block.layers");
      break;
    case Schedule::kHomogeneous:
      check_layers(rules, schedule.homogeneous().layers(), "model.schedule.homogeneous.layers");
      break;
    case Schedule::kExplicit:
      rules.range(static_cast<std::int64_t>(schedule.explicit_().size()), 1, kMostLayers,
                  "model.schedule.explicit");
      break;
    case Schedule::KIND_NOT_SET:
      rules.require(false, "model.schedule",
                    "required: one of latin, periodic, block, homogeneous, explicit");
  }
  rules.require(model.mixer_size() > 0, "model.mixer", "required: one for each type of mixer");
  std::set<int> types;
  for (int i = 0; i < model.mixer_size(); ++i) {
    const std::string path = "model.mixer[" + std::to_string(i) + "]";
    const int type = model.mixer(i).type_case();
    rules.require(type != MixerConfig::TYPE_NOT_SET, path, "required: the type of mixer");
    rules.require(types.insert(type).second, path, "this type of mixer is described twice");
  }
  rules.number(model.norm_epsilon(), model.norm_epsilon() > 0, "a number above 0", model, "model",
               "norm_epsilon");
  rules.number(model.init_deviation(), model.init_deviation() >= 0, "a number of at least 0", model,
               "model", "init_deviation");
}

void check_train(Rules& rules, const TrainConfig& train) {
  rules.range(train.global_batch(), 1, kLargestBatch, "train.global_batch");
  rules.range(train.micro_batch(), 1, kLargestBatch, "train.micro_batch");
  if (!rules.fault()) {
    rules.require(
        train.global_batch() % train.micro_batch() == 0, "train.micro_batch",
        "expected a divisor of train.global_batch = " + std::to_string(train.global_batch()) +
            ", got " + std::to_string(train.micro_batch()));
  }
  rules.range(train.steps(), 0, kMostSteps, "train.steps");
  if (!rules.fault()) {
    const std::int64_t batch = train.global_batch();
    const std::int64_t most = kMostQuanta * train.micro_batch();
    rules.require(batch <= most, "train.global_batch",
                  "expected at most " + std::to_string(kMostQuanta) +
                      " micro-batches in a step, so " + std::to_string(most) + ", got " +
                      std::to_string(batch));
    rules.range(train.steps(), 0, kMostSamples / batch, "train.steps");
  }
  rules.range(train.stop_at_step(), 0, kMostSteps, "train.stop_at_step");
}

void check_optim(Rules& rules, const OptimConfig& optim, std::int64_t steps) {
  const auto at_least_0 = [&](double value, const char* name) {
    rules.number(value, value >= 0, "a number of at least 0", optim, "optim", name);
  };
  at_least_0(optim.learning_rate(), "learning_rate");
  at_least_0(optim.final_learning_rate(), "final_learning_rate");
  at_least_0(optim.weight_decay(), "weight_decay");
  at_least_0(optim.clip_norm(), "clip_norm");
  at_least_0(optim.embedding_rate_scale(), "embedding_rate_scale");
  const auto beta = [&](double value, const char* name) {
    rules.number(value, value >= 0 && value < 1, "a number from 0 to below 1", optim, "optim",
                 name);
  };
  beta(optim.beta1(), "beta1");
  beta(optim.beta2(), "beta2");
  rules.number(optim.epsilon(), optim.epsilon() >= kSmallestEpsilon && optim.epsilon() <= 1,
               "a number from 1e-16 to 1", optim, "optim", "epsilon");
  rules.number(optim.layer_decay(), optim.layer_decay() > 0 && optim.layer_decay() <= 1,
               "a number above 0 and at most 1", optim, "optim", "layer_decay");
  rules.at_least(optim.bad_steps_limit(), 1, "optim.bad_steps_limit");
  rules.range(optim.warmup_steps(), 0, kMostSteps, "optim.warmup_steps");
  rules.range(optim.decay_steps(), 0, kMostSteps, "optim.decay_steps");
  rules.require(optim.decay_steps() == 0 || optim.schedule() == OptimConfig::WARMUP_STABLE_DECAY,
                "optim.decay_steps",
                "expected 0 unless optim.schedule is WARMUP_STABLE_DECAY, got " +
                    std::to_string(optim.decay_steps()));
  if (steps > 0 && !rules.fault()) {
    try {
      check_schedule(optim, steps);
    } catch (const Error& error) {
      const std::string message = error.what();
      const auto colon = message.find(": ");
      rules.require(false, message.substr(0, colon), message.substr(colon + 2));
    }
  }
}

void check_rest(Rules& rules, const Config& config) {
  rules.require(!config.data().recipe().empty(), "data.recipe", "required: the recipe's file");
  rules.require(!config.data().directory().empty(), "data.directory",
                "required: the folder that tessera data build wrote");
  rules.range(config.parallel().expert_ranks(), 1, kMostRanks, "parallel.expert_ranks");
  rules.range(config.execution().threads(), 1, kMostThreads, "execution.threads");
  rules.at_least(config.execution().watchdog_seconds(), 1, "execution.watchdog_seconds");
  rules.at_least(config.execution().memory_limit_bytes(), 0, "execution.memory_limit_bytes");
  rules.at_least(config.validation().every(), 0, "validation.every");
  rules.at_least(config.validation().windows(), 0, "validation.windows");
  const CheckpointConfig& checkpoint = config.checkpoint();
  rules.at_least(checkpoint.every(), 0, "checkpoint.every");
  rules.at_least(checkpoint.keep_last(), 1, "checkpoint.keep_last");
  rules.at_least(checkpoint.keep_every(), 0, "checkpoint.keep_every");
  for (int i = 0; i < checkpoint.archive_steps_size(); ++i) {
    rules.at_least(checkpoint.archive_steps(i), 1,
                   "checkpoint.archive_steps[" + std::to_string(i) + "]");
  }
  rules.at_least(config.logging().progress_every(), 0, "logging.progress_every");
}

// The layers judge their own shapes: making the stack allocates no parameters. Their message begins
// with the field's path. The length can be the recipe's, which isn't known here, and no shape
// depends on it.
void check_stack(Rules& rules, ModelConfig model) {
  model.set_length(1);
  try {
    const Stack stack(model);
  } catch (const Error& error) {
    if (error.code() != ExitCode::kUsage) {
      throw;
    }
    const std::string message = error.what();
    const auto colon = message.find(": ");
    const bool has_path = message.starts_with("model") && colon != std::string::npos;
    rules.require(false, has_path ? message.substr(0, colon) : "model",
                  has_path ? message.substr(colon + 2) : message);
  }
}

}  // namespace

std::optional<ConfigFault> find_fault(const Config& config) {
  Rules rules;
  check_model(rules, config.model());
  if (!rules.fault()) {
    check_stack(rules, config.model());
  }
  check_train(rules, config.train());
  check_optim(rules, config.optim(), config.train().steps());
  check_rest(rules, config);
  return rules.fault();
}

}  // namespace tessera
