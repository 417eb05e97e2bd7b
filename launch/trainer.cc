#include "launch/trainer.h"

#include <glog/logging.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <set>
#include <sstream>

#include "launch/signals.h"
#include "launch/together.h"
#include "launch/version.h"
#include "optim/schedule.h"
#include "parallel/checkpoint.h"
#include "runtime/peak.h"

namespace tessera {
namespace {

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

std::int64_t quanta_of(const Config& config) {
  return config.train().global_batch() / config.train().micro_batch();
}

}  // namespace

void resolve(Config& config, const Recipe& recipe, std::int64_t vocabulary) {
  const std::int64_t length = recipe.sequence_length;
  ModelConfig& model = *config.mutable_model();
  if (model.length() == 0) model.set_length(length);
  if (model.length() < length) {
    throw Error(ExitCode::kUsage, "model.length: must be at least the recipe's sequence_length " +
                                      std::to_string(length) + ", is " +
                                      std::to_string(model.length()));
  }
  if (model.vocabulary() < vocabulary) {
    throw Error(ExitCode::kUsage, "model.vocabulary: must be at least the data's " +
                                      std::to_string(vocabulary) + " token ids, is " +
                                      std::to_string(model.vocabulary()));
  }
  TrainConfig& train = *config.mutable_train();
  if (train.steps() == 0) train.set_steps(recipe.samples() / train.global_batch());
  if (train.steps() == 0) {
    throw Error(
        ExitCode::kUsage,
        "train.steps: the recipe's total_tokens make less than one step of train.global_batch " +
            std::to_string(train.global_batch()) + " samples");
  }
  check_schedule(config.optim(), train.steps());
}

std::string run_numerics(const Config& config, const TokenStream& stream) {
  return numerics(config) + "data.recipe_sha256=\"" + recipe_digest(stream.recipe()) +
         "\"\ndata.manifests_sha256=\"" + stream.corpus().digest + "\"\ndata.tokenizer_sha256=\"" +
         stream.corpus().tokenizer_digest + "\"\n";
}

DType compute_type(const Config& config) {
  return config.train().precision() == TrainConfig::BF16 ? DType::kBF16 : DType::kF32;
}

EngineOptions engine_options(const Config& config, std::int64_t sequence_length, int rank,
                             int ranks) {
  EngineOptions options;
  options.rank = rank;
  options.ranks = ranks;
  options.expert_ranks = static_cast<int>(config.parallel().expert_ranks());
  options.quantum = {config.train().micro_batch(), sequence_length,
                     static_cast<int>(config.execution().threads())};
  options.quanta = quanta_of(config);
  const bool fast = config.parallel().reduction() == ParallelConfig::FAST;
  options.accumulate = fast || config.parallel().accumulate() == ParallelConfig::LOCAL
                           ? Accumulate::kLocal
                           : Accumulate::kSharded;
  options.order = fast ? SumOrder::kPlain : SumOrder::kTree;
  options.gather_per_step = config.parallel().gather() == ParallelConfig::PER_STEP;
  options.prefetch = config.parallel().prefetch();
  options.recompute = config.execution().recompute();
  return options;
}

Trainer::Trainer(const Config& config, const TokenStream& stream, const Stack& stack,
                 const RunFolder& folder, const ResumeOptions& resume, Communicator& communicator,
                 Device& device, Activity& activity)
    : config_(config),
      stream_(stream),
      stack_(stack),
      folder_(folder),
      communicator_(communicator),
      activity_(activity),
      length_(stream.sequence_length()),
      numerics_(run_numerics(config, stream)) {
  activity_.set("grant memory");
  together(communicator_, "memory", [&] {
    plan_.emplace(stack, engine_options(config, length_, communicator.rank(), communicator.size()));
    engine_ = std::make_unique<Engine>(stack, *plan_, device, communicator, activity);
  });
  if (quanta_of(config) % communicator.size() != 0) {
    say("note: " + std::to_string(communicator.size()) + " ranks don't divide the step's " +
        std::to_string(quanta_of(config)) + " quanta: some ranks wait; the results are the same");
  }
  peak_flops_ = measure_peak();
  start(resume);
}

double Trainer::measure_peak() {
  activity_.set("measure peak");
  const std::vector<std::string>& hosts = communicator_.hosts();
  const bool first = std::find(hosts.begin(), hosts.end(), communicator_.host()) ==
                     hosts.begin() + communicator_.rank();
  // A rank may be bound to some cores: this host's are all of its ranks'.
  std::string mine;
  for (const int core : usable_cores()) mine += std::to_string(core) + " ";
  const std::vector<std::string> cores = communicator_.all_gather_strings("cores", mine);
  std::int64_t flops = 0;
  if (first) {
    std::int64_t threads = 0;
    std::set<int> of_host;
    for (std::size_t rank = 0; rank < hosts.size(); ++rank) {
      if (hosts[rank] != communicator_.host()) continue;
      threads += config_.execution().threads();
      std::istringstream list(cores[rank]);
      for (int core = 0; list >> core;) of_host.insert(core);
    }
    const auto running = std::min(threads, static_cast<std::int64_t>(of_host.size()));
    const auto measured = std::min(running, static_cast<std::int64_t>(usable_cores().size()));
    const Precision precision =
        stack_.compute() == DType::kBF16 ? Precision::kBF16 : Precision::kF32;
    flops = static_cast<std::int64_t>(measure_peak_flops(precision, static_cast<int>(measured)) *
                                      static_cast<double>(running) / static_cast<double>(measured));
  }
  communicator_.quiet_barrier("peak");
  return static_cast<double>(communicator_.all_reduce("peak", Reduction::kSum, flops));
}

void Trainer::start(const ResumeOptions& resume) {
  activity_.set("read checkpoint");
  bool resumed = false;
  if (resume.from != "auto" && resume.from != "never") {
    resumed = resume_from(resume.from, resume, false);
    refuse_rewind();
  } else {
    std::string usable;     // paths, newest first, a line each: the same on all ranks
    std::string published;  // a name, if any save was ever finished
    together(communicator_, "list checkpoints", [&] {
      if (communicator_.rank() != 0) return;
      for (const CheckpointEntry& entry : list_checkpoints(folder_.checkpoints())) {
        if (entry.path.ends_with(".h5")) published = entry.path;
        if (!entry.fault.empty()) {
          say("skipping " + entry.path + ": " + entry.fault);
        } else {
          usable += entry.path + "\n";
        }
      }
      if (resume.from == "never" && !published.empty()) {
        throw Error(ExitCode::kUsage,
                    folder_.path +
                        " already holds checkpoints of a run: remove it or choose "
                        "another --run-dir to start anew (--resume never)");
      }
    });
    communicator_.broadcast("list checkpoints", usable, 0);
    communicator_.broadcast("list checkpoints", published, 0);
    while (!resumed && !usable.empty()) {
      const std::size_t end = usable.find('\n');
      resumed = resume_from(usable.substr(0, end), resume, true);
      usable.erase(0, end + 1);
    }
    if (!published.empty() && !resumed) {
      throw AgreedError(
          ExitCode::kCheckpoint,
          folder_.checkpoints() +
              ": no checkpoint of the run can be resumed from: restore one, or choose "
              "another --run-dir to start anew");
    }
  }
  if (!resumed) {
    // Nothing to compare with, but a path that means nothing is a mistake here too.
    together(communicator_, "compare with checkpoint",
             [&] { check_resume(numerics_, numerics_, resume.allow_change); });
    engine_->initialise(config_.train().seed());
    if (!config_.train().init_from().empty()) load_parameters(config_.train().init_from());
  }
  last_step_ = config_.train().steps();
  if (config_.train().stop_at_step() > 0) {
    last_step_ = std::min(last_step_, config_.train().stop_at_step());
  }
  together(communicator_, "open metrics", [&] {
    if (communicator_.rank() != 0) return;
    const NoRoom no_room = config_.checkpoint().on_disk_full() == CheckpointConfig::STOP
                               ? NoRoom::kFail
                               : NoRoom::kWait;
    metrics_ = std::make_unique<MetricsFile>(folder_.metrics(), steps_done_, no_room);
    const std::int64_t missing = metrics_->first_missing();
    if (resumed && resume.from == "auto" && missing < steps_done_) {
      say("warning: " + folder_.metrics() + " has no lines of steps " + std::to_string(missing) +
          " to " + std::to_string(steps_done_ - 1) +
          ": they were lost; the run goes on without them");
    }
    if (config_.logging().tensorboard()) {
      events_ = std::make_unique<TensorBoardWriter>(folder_.tensorboard(), steps_done_, no_room);
    }
  });
  const std::int64_t step_tokens = config_.train().global_batch() * length_;
  progress_.emplace(config_.train().steps(),
                    std::max<std::int64_t>(last_step_ - steps_done_, 0) * step_tokens);
}

// Going back within a folder would leave the later checkpoints of the old course in the way: the
// next start would take the newest of them.
void Trainer::refuse_rewind() {
  together(communicator_, "list checkpoints", [&] {
    if (communicator_.rank() != 0) return;
    for (const CheckpointEntry& entry : list_checkpoints(folder_.checkpoints())) {
      if (entry.path.ends_with(".h5") && entry.step > steps_done_) {
        throw Error(ExitCode::kUsage,
                    "resuming at step " + std::to_string(steps_done_) + ", but " + entry.path +
                        " is of a later step: choose another --run-dir, or move the later "
                        "checkpoints away");
      }
    }
  });
}

// With may_skip a damaged file is said and skipped; a config that doesn't fit never is.
bool Trainer::resume_from(const std::string& path, const ResumeOptions& resume, bool may_skip) {
  CheckpointMeta meta;
  try {
    together(communicator_, "read checkpoint", [&] { meta = read_checkpoint_meta(path); });
    together(communicator_, "compare with checkpoint", [&] {
      const auto saved = meta.texts.find("config");
      check_resume(saved == meta.texts.end() ? "" : saved->second, numerics_, resume.allow_change);
    });
    agreed([&] { read_checkpoint(communicator_, path, engine_->arrays(true)); });
    engine_->weights_changed();
  } catch (const AgreedError& error) {
    if (!may_skip || error.code() != ExitCode::kCheckpoint) throw;
    say("skipping " + path + ": " + error.what());
    return false;
  }
  steps_done_ = meta.step;
  saved_step_ = meta.step;
  optim_state_.adam_steps = meta.state["adam_steps"];
  optim_state_.bad_steps_in_a_row = meta.state["bad_steps_in_a_row"];
  say("resuming from " + path + " at step " + std::to_string(steps_done_));
  return true;
}

void Trainer::load_parameters(const std::string& path) {
  std::vector<CheckpointArray> arrays = engine_->arrays(false);
  together(communicator_, "compare with checkpoint", [&] {
    std::set<std::string> ours;
    for (const CheckpointArray& array : arrays) ours.insert(array.name);
    const std::vector<std::string> theirs = checkpoint_parameters(path);
    // Biases that the checkpoint's run didn't have begin at 0.
    std::erase_if(arrays, [&](const CheckpointArray& array) {
      return array.name.starts_with("state/") &&
             std::find(theirs.begin(), theirs.end(), array.name) == theirs.end();
    });
    for (const std::string& name : theirs) {
      if (!ours.contains(name)) {
        throw Error(ExitCode::kCheckpoint,
                    path + ": holds " + name +
                        ", which this model doesn't have: train.init_from needs the same model");
      }
    }
  });
  agreed([&] { read_checkpoint(communicator_, path, arrays); });
  engine_->weights_changed();
  say("parameters from " + path + "; moments, stream and schedule start anew");
}

void Trainer::start_loader() {
  const QuantumShare& share = plan_->share();
  const int rank = communicator_.rank();
  const std::int64_t count = share.count(rank);
  if (count == 0) return;
  const std::int64_t last = last_step_;
  loader_ = std::make_unique<Loader>(
      stream_, config_.train().micro_batch(),
      [share, rank, count, last](std::int64_t n) {
        const std::int64_t step = n / count;
        if (step >= last) return std::int64_t{-1};
        return step * share.quanta() + share.quantum(n % count, rank);
      },
      std::clamp<std::int64_t>(2 * count, 2, 64), steps_done_ * count);
}

void Trainer::load_batches() {
  activity_.set("wait for data");
  const std::int64_t count = plan_->share().count(communicator_.rank());
  for (std::int64_t round = 0; round < count; ++round) {
    const Batch& batch = engine_->batch(round);
    const View windows = loader_->acquire();
    TESSERA_CHECK(!windows.empty());
    split_windows(windows, batch.tokens, batch.labels);
    fill_segments(windows, stream_.corpus().end_of_sequence, config_.data().document_masking(),
                  batch.segments);
    loader_->release();
  }
}

// One step, as data flows: quanta in, this rank's shards updated, metrics out.
StepResult Trainer::train_step() {
  const auto start = std::chrono::steady_clock::now();
  activity_.set_step(steps_done_);
  engine_->mesh().reset_traffic();
  load_batches();
  const double data_seconds = seconds_since(start);
  const double rate = learning_rate(config_.optim(), steps_done_, config_.train().steps());
  const std::int64_t count = plan_->share().count(communicator_.rank());
  const StepResult result = engine_->step(config_.optim(), rate, count, optim_state_);
  ++steps_done_;
  write_metrics(result, rate, seconds_since(start), data_seconds);
  return result;
}

void Trainer::write_metrics(const StepResult& result, double rate, double seconds,
                            double data_seconds) {
  const std::int64_t step_tokens = config_.train().global_batch() * length_;
  StepMetrics metrics;
  metrics.step = steps_done_ - 1;
  metrics.tokens = steps_done_ * step_tokens;
  metrics.sample = metrics.step * config_.train().global_batch();
  metrics.loss = result.loss;
  metrics.learning_rate = rate;
  metrics.grad_norm = result.gradient_norm;
  metrics.seconds = seconds;
  metrics.tokens_per_second = static_cast<double>(step_tokens) / seconds;
  // The backward pass is twice the forward's work; recomputation doesn't count.
  if (peak_flops_ > 0.0) {
    metrics.mfu = 3 * stack_.flops_per_token(length_) * metrics.tokens_per_second / peak_flops_;
  }
  const Mesh& mesh = engine_->mesh();
  const TrafficCount gather = mesh.traffic(Traffic::kGather);
  const TrafficCount reduce = mesh.traffic(Traffic::kReduce);
  const TrafficCount exchange = mesh.traffic(Traffic::kExchange);
  metrics.gather_seconds = gather.seconds;
  metrics.reduce_seconds = reduce.seconds + mesh.traffic(Traffic::kControl).seconds;
  metrics.exchange_seconds = exchange.seconds;
  metrics.advance_seconds = mesh.advance_seconds();
  metrics.transfers = gather.calls + reduce.calls + exchange.calls;
  metrics.transfers_overlapped = gather.overlapped + reduce.overlapped + exchange.overlapped;
  metrics.transfers_in_flight = mesh.most_in_flight();
  metrics.routers = result.routers;
  if (result.routers != nullptr) {
    progress_->add_loads(*result.routers);
    metrics.exchange_bytes =
        communicator_.all_reduce("exchange bytes", Reduction::kSum, exchange.bytes_sent);
  }
  metrics.data_seconds = data_seconds;
  // Checkpoints and validation between steps count in the time left.
  const auto now = std::chrono::steady_clock::now();
  progress_->step_done(step_tokens, std::chrono::duration<double>(now - last_step_end_).count());
  last_step_end_ = now;
  together(communicator_, "write metrics", [&] {
    if (communicator_.rank() != 0) return;
    const bool waited = metrics_->waits();
    metrics_->write(metrics);
    if (events_) events_->write(metrics);
    if (metrics_->waits() != waited) {
      say(waited ? "the lines of " + folder_.metrics() + " that waited for room are written"
                 : "warning: no room for the lines of " + folder_.metrics() +
                       ": they wait in memory, and no checkpoint is written before they are");
    }
  });
  const std::int64_t every = config_.logging().progress_every();
  if (every > 0 && (steps_done_ % every == 0 || steps_done_ == last_step_)) {
    say(progress_->line(metrics));
  }
  if (!result.applied) {
    // The sign of a NaN says nothing.
    const auto text = [](double value) {
      return std::isnan(value) ? std::string("nan") : std::to_string(value);
    };
    say("warning: step " + std::to_string(metrics.step) + " isn't applied: loss " +
        text(result.loss) + ", gradient norm " + text(result.gradient_norm) + ", samples " +
        std::to_string(metrics.sample) + " to " +
        std::to_string(metrics.sample + config_.train().global_batch() - 1));
  }
}

void Trainer::validate() {
  const auto start = std::chrono::steady_clock::now();
  activity_.set("validate");
  const std::int64_t micro_batch = config_.train().micro_batch();
  const std::int64_t limit = config_.validation().windows();
  struct Group {
    std::int64_t component, first, count;
  };
  std::vector<Group> groups;
  std::vector<std::int64_t> windows_of(static_cast<std::size_t>(stream_.components()));
  for (std::int64_t c = 0; c < stream_.components(); ++c) {
    std::int64_t windows = stream_.held_out_windows(c);
    if (limit > 0) windows = std::min(windows, limit);
    windows_of[static_cast<std::size_t>(c)] = windows;
    for (std::int64_t first = 0; first < windows; first += micro_batch) {
      groups.push_back({c, first, std::min(micro_batch, windows - first)});
    }
  }
  const auto ranks = static_cast<std::size_t>(communicator_.size());
  const auto rank = static_cast<std::size_t>(communicator_.rank());
  const Batch& batch = engine_->batch(0);
  std::vector<std::uint32_t> memory(static_cast<std::size_t>(micro_batch * (length_ + 1)));
  const View windows(memory.data(), {micro_batch, length_ + 1});
  std::vector<std::int64_t> loss_bits(groups.size());
  for (std::size_t first = 0; first < groups.size(); first += ranks) {
    const std::size_t g = first + rank;
    if (g < groups.size()) {
      std::fill(memory.begin(), memory.end(), 0U);
      for (std::int64_t k = 0; k < groups[g].count; ++k) {
        stream_.read_held_out(groups[g].component, groups[g].first + k,
                              memory.data() + k * (length_ + 1));
      }
      split_windows(windows, batch.tokens, batch.labels);
      fill_segments(windows, stream_.corpus().end_of_sequence, config_.data().document_masking(),
                    batch.segments);
      // A last group that isn't full has the shape of the others; what is missing doesn't count.
      std::fill(batch.labels.as<std::int32_t>() + groups[g].count * length_,
                batch.labels.as<std::int32_t>() + micro_batch * length_, kNoLabel);
    }
    const double loss = engine_->evaluate(g < groups.size());
    if (g < groups.size()) loss_bits[g] = std::bit_cast<std::int64_t>(loss);
  }
  communicator_.all_reduce("validation losses", Reduction::kSum, std::span(loss_bits));

  ValidationMetrics metrics;
  metrics.step = steps_done_ - 1;
  metrics.tokens = steps_done_ * config_.train().global_batch() * length_;
  std::string text = "validation";
  std::size_t group = 0;
  for (std::int64_t c = 0; c < stream_.components(); ++c) {
    std::vector<double> losses;
    for (; group < groups.size() && groups[group].component == c; ++group) {
      losses.push_back(std::bit_cast<double>(loss_bits[group]));
    }
    const std::int64_t count = windows_of[static_cast<std::size_t>(c)];
    if (count == 0) continue;
    const double loss = tree_sum(losses) / static_cast<double>(count * length_);
    metrics.validation_loss.emplace_back(stream_.component_name(c), loss);
    char entry[64];
    std::snprintf(entry, sizeof(entry), " %.4f", loss);
    text += "  " + stream_.component_name(c) + entry;
  }
  metrics.seconds = seconds_since(start);
  together(communicator_, "write metrics", [&] {
    if (communicator_.rank() != 0) return;
    metrics_->write(metrics);
    if (events_) events_->write(metrics);
  });
  say(text);
}

bool Trainer::checkpoint_due() const {
  const CheckpointConfig& config = config_.checkpoint();
  const auto& archive = config.archive_steps();
  return (config.every() > 0 && steps_done_ % config.every() == 0) ||
         (config.keep_every() > 0 && steps_done_ % config.keep_every() == 0) ||
         std::find(archive.begin(), archive.end(), steps_done_) != archive.end();
}

void Trainer::save(bool last) {
  if (saved_step_ == steps_done_) return;
  activity_.set("write checkpoint");
  CheckpointMeta meta;
  meta.step = steps_done_;
  const std::int64_t next_sample = steps_done_ * config_.train().global_batch();
  meta.numbers["tokens"] = next_sample * length_;
  meta.numbers["next_sample"] = next_sample;
  meta.texts["config"] = numerics_;
  meta.texts["recipe_digest"] = recipe_digest(stream_.recipe());
  meta.texts["tokenizer_digest"] = stream_.corpus().tokenizer_digest;
  meta.texts["seed"] = std::to_string(config_.train().seed());
  meta.texts["program_version"] = kVersion;
  meta.state["adam_steps"] = optim_state_.adam_steps;
  meta.state["bad_steps_in_a_row"] = optim_state_.bad_steps_in_a_row;
  std::string path;
  try {
    // A resume takes it that the lines of the checkpoint's steps are there.
    together(communicator_, "write metrics", [&] {
      if (communicator_.rank() != 0) return;
      metrics_->sync();
      if (events_) events_->sync();
    });
    agreed([&] {
      path = write_checkpoint(communicator_, folder_.checkpoints(), meta, engine_->arrays(true));
    });
  } catch (const AgreedError& error) {
    if (last || config_.checkpoint().on_disk_full() == CheckpointConfig::STOP) throw;
    say("warning: no checkpoint at step " + std::to_string(steps_done_) +
        ", the run goes on: " + error.what());
    return;
  }
  saved_step_ = steps_done_;
  say("checkpoint " + path);
  together(communicator_, "delete old checkpoints", [&] {
    if (communicator_.rank() != 0) return;
    Retention retention;
    retention.keep_last = std::max<std::int64_t>(config_.checkpoint().keep_last(), 1);
    retention.keep_every = config_.checkpoint().keep_every();
    retention.archive_steps.assign(config_.checkpoint().archive_steps().begin(),
                                   config_.checkpoint().archive_steps().end());
    const Retired retired = apply_retention(folder_.checkpoints(), retention);
    for (const std::string& path : retired.deleted) LOG(INFO) << "deleted " << path;
    for (const std::string& fault : retired.faults) say("warning: " + fault);
  });
}

// Why the run ends at this step's edge; "" when it goes on. Agreed by all ranks.
std::string Trainer::stop_reason() {
  const Communicator::Meeting edge = communicator_.meet("stop signal", stop_signal_seen() ? 1 : 0);
  if (!edge.different_call.empty()) {
    throw AgreedError(ExitCode::kCommunication,
                      "step " + std::to_string(steps_done_) +
                          ": the ranks communicate in different orders, their results can't be "
                          "trusted: " +
                          edge.different_call + "; please report this");
  }
  if (steps_done_ >= config_.train().steps()) return "done";
  if (edge.largest != 0) return "signal";
  if (steps_done_ >= last_step_) return "stop_at_step";
  return "";
}

void Trainer::run() {
  start_loader();
  last_step_end_ = std::chrono::steady_clock::now();
  std::string reason = stop_reason();
  while (reason.empty()) {
    const StepResult result = train_step();
    if (result.stop) {
      together(communicator_, "write metrics", [&] {
        if (metrics_) metrics_->write_stopped("numerics", steps_done_);
      });
      throw AgreedError(ExitCode::kNumerics,
                        std::to_string(optim_state_.bad_steps_in_a_row) +
                            " steps in a row had a loss or gradient that isn't finite, the last at "
                            "step " +
                            std::to_string(steps_done_ - 1) + "; the last checkpoint is kept");
    }
    reason = stop_reason();
    const std::int64_t every = config_.validation().every();
    const bool validates = every > 0 && (steps_done_ % every == 0 || reason == "done");
    const bool saves = checkpoint_due();
    if (validates) validate();
    if (saves) save(!reason.empty());
    // A signal that came meanwhile need not wait for another step and another save.
    if (reason.empty() && (validates || saves)) reason = stop_reason();
  }
  save(true);
  together(communicator_, "write metrics", [&] {
    if (!metrics_) return;
    metrics_->write_stopped(reason, steps_done_);
    metrics_->sync();
  });
  say("stopped: " + reason + " after " + std::to_string(steps_done_) + " steps");
}

void Trainer::say(const std::string& text) const {
  LOG(INFO) << text;
  if (communicator_.rank() != 0) return;
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

}  // namespace tessera
