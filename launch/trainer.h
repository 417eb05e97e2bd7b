// The training loop of one rank, from opened data to the last checkpoint.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/loader.h"
#include "data/stream.h"
#include "launch/config.h"
#include "launch/engine.h"
#include "launch/metrics.h"
#include "launch/tensorboard.h"
#include "layers/stack.h"
#include "parallel/communicator.h"
#include "runtime/activity.h"
#include "runtime/device.h"

namespace tessera {

// Where a run's files lie; absolute.
struct RunFolder {
  std::string path;
  std::string checkpoints() const { return path + "/checkpoints"; }
  std::string logs() const { return path + "/logs"; }
  std::string metrics() const { return path + "/metrics.jsonl"; }
  std::string tensorboard() const { return path + "/tensorboard"; }
};

// How a run begins.
struct ResumeOptions {
  std::string from = "auto";  // "auto": the newest usable checkpoint of the run; "never"; a file
  std::vector<std::string> allow_change;  // NUMERICS paths that may differ from the checkpoint's
};

// Fills in what the data decides: model.length, and train.steps where it is 0. `vocabulary` is one
// past the largest token id, 0 where it isn't known. Throws Error(kUsage) when model and data don't
// fit.
void resolve(Config& config, const Recipe& recipe, std::int64_t vocabulary);

// The NUMERICS part of the run: the config's, and the digests of recipe, tokenizer and data.
std::string run_numerics(const Config& config, const TokenStream& stream);

// The type that train.precision asks for.
DType compute_type(const Config& config);

EngineOptions engine_options(const Config& config, std::int64_t sequence_length, int rank,
                             int ranks);

class Trainer {
 public:
  // Collective; all arguments outlive the trainer. `config` is resolved, `folder` exists. Grants
  // the run's memory, then initialises or resumes. Throws AgreedError.
  Trainer(const Config& config, const TokenStream& stream, const Stack& stack,
          const RunFolder& folder, const ResumeOptions& resume, Communicator& communicator,
          Device& device, Activity& activity);

  // Collective. Trains to the end, to train.stop_at_step or to a signal, with a checkpoint at the
  // last step. Throws AgreedError(kNumerics) after too many bad steps in a row.
  void run();

  std::int64_t steps_done() const { return steps_done_; }
  Engine& engine() { return *engine_; }

 private:
  void start(const ResumeOptions& resume);
  // Floating-point operations per second of all hosts' cores that the ranks' threads can use.
  double measure_peak();
  bool resume_from(const std::string& path, const ResumeOptions& resume, bool may_skip);
  void refuse_rewind();
  void load_parameters(const std::string& path);
  void start_loader();
  void load_batches();
  StepResult train_step();
  void validate();
  void save(bool last);
  bool checkpoint_due() const;
  std::string stop_reason();
  void write_metrics(const StepResult& result, double rate, double seconds, double data_seconds);
  void say(const std::string& text) const;  // on rank 0's terminal, and in the log

  const Config& config_;
  const TokenStream& stream_;
  const Stack& stack_;
  const RunFolder& folder_;
  Communicator& communicator_;
  Activity& activity_;
  const std::int64_t length_;  // L
  const std::string numerics_;
  double peak_flops_ = 0.0;
  std::optional<EnginePlan> plan_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Loader> loader_;  // none on a rank without quanta
  OptimState optim_state_;
  std::int64_t steps_done_ = 0;
  std::int64_t last_step_ = 0;            // this start's end
  std::int64_t saved_step_ = -1;          // of the newest checkpoint that holds the present state
  std::unique_ptr<MetricsFile> metrics_;  // rank 0
  std::unique_ptr<TensorBoardWriter> events_;  // rank 0, if wanted
  std::optional<Progress> progress_;
  std::chrono::steady_clock::time_point last_step_end_;
};

}  // namespace tessera
