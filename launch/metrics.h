// metrics.jsonl, and the progress line on the terminal.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launch/appended_file.h"
#include "launch/router_result.h"

namespace tessera {

// One training step. A value that isn't known (mfu without a known peak) is nullopt.
struct StepMetrics {
  std::int64_t step = 0;    // its number, counted from 0
  std::int64_t tokens = 0;  // trained on since the run began, with this step
  std::int64_t sample = 0;  // number of the step's first sample
  double loss = 0.0;        // cross-entropy, nats per valid label
  double learning_rate = 0.0;
  double grad_norm = 0.0;  // before clipping
  double seconds = 0.0;    // of the step, wall clock
  double tokens_per_second = 0.0;
  std::optional<double> mfu;      // share of the machine's peak, 0 to 1
  double gather_seconds = 0.0;    // waited for parameters
  double reduce_seconds = 0.0;    // waited for gradients and other sums
  double exchange_seconds = 0.0;  // waited for tokens of experts
  double data_seconds = 0.0;      // waited for the loader
  double advance_seconds = 0.0;   // moved transfers on between pieces of compute
  // Of parameters and gradients; those that were complete when they were asked for, so that nobody
  // waited; and how many were in flight at once at most.
  std::int64_t transfers = 0;
  std::int64_t transfers_overlapped = 0;
  std::int64_t transfers_in_flight = 0;
  // With experts: the caller's, until the next step; and the bytes that all ranks sent each other
  // for tokens of experts.
  const RouterResult* routers = nullptr;
  std::int64_t exchange_bytes = 0;
};

struct ValidationMetrics {
  std::int64_t step = 0;  // number of the last training step before it
  std::int64_t tokens = 0;
  // Component's name and its cross-entropy in nats per label, in the recipe's order.
  std::vector<std::pair<std::string, double>> validation_loss;
  double seconds = 0.0;
};

// Writes metrics.jsonl: one object a line, handed to the system line by line. Numbers read back as
// the same double; one that isn't finite is null. Not thread-safe. Rank 0 alone has one. A line
// that can't be written throws Error(kCheckpoint) naming the file, unless it waits for room; so
// does one that nobody would find, since the file was removed, replaced or its file system
// unmounted.
class MetricsFile {
 public:
  // Opens `path` for appending and makes it if need be. `next_step` is the number of the first step
  // that this start runs: lines of that step and later ones that earlier starts wrote are cut, with
  // `stopped` lines and lines that aren't whole; the rest stays byte for byte. Throws
  // Error(kCheckpoint) naming the file when it can't be read or written.
  MetricsFile(const std::string& path, std::int64_t next_step, NoRoom no_room = NoRoom::kFail);
  void write(const StepMetrics& metrics);
  void write(const ValidationMetrics& metrics);
  // The last line of a run: {"stopped": reason, "step": steps done}; reasons are "done", "signal",
  // "stop_at_step", "numerics".
  void write_stopped(const std::string& reason, std::int64_t steps_done);
  // Throws unless all lines are on the disk: before a checkpoint says that its steps are done.
  void sync() { file_->sync(); }
  bool waits() const { return file_->waits(); }  // whether a line waits for room
  // Behind the last step whose line an earlier start has left: next_step, unless lines were lost.
  std::int64_t first_missing() const { return first_missing_; }

 private:
  void write_line();

  std::string path_;
  std::int64_t first_missing_ = 0;
  std::optional<AppendedFile> file_;
  std::string line_;
};

// The time left of a run, from the tokens per second of its recent steps.
class Progress {
 public:
  // `tokens_left` when this start begins.
  Progress(std::int64_t total_steps, std::int64_t tokens_left);
  // After each step: its tokens, and the wall-clock seconds since the last step ended, so that
  // checkpoints and validation count.
  void step_done(std::int64_t tokens, double seconds);
  // After each step with experts.
  void add_loads(const RouterResult& routers);
  // Over the last 20 steps of this start; 0 before the first. The start's first step, which warms
  // up, counts only while it is the only one.
  double tokens_per_second() const;
  double seconds_left() const;  // 0 before the first step
  // After step 119: "step 120/2000  loss 3.1416  lr 3.00e-04  8,120 tokens/s  mfu 41.2 %  12 min 30
  // s left", and "  warning: expert 3 of layer 5 starves, with 0.04 of the mean load" when an
  // expert had less than kStarving of the mean since the last line.
  std::string line(const StepMetrics& metrics);
  static constexpr double kStarving = 0.1;

 private:
  static constexpr std::int64_t kRecent = 20;

  std::int64_t total_steps_;
  std::int64_t tokens_left_;
  std::int64_t steps_ = 0;
  std::array<std::pair<std::int64_t, double>, kRecent> recent_{};  // a ring: tokens, seconds
  RouterResult loads_;                                             // summed since the last line
};

}  // namespace tessera
