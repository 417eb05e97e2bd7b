// Training steps of a whole stack on random tokens. With --steps it prints a table; without, it
// takes turns with others under train_step.py: each number on standard input is that many steps,
// answered with "seconds peak_bytes loss". Alone or under mpirun.
#include <mpi.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>
#include <vector>

#include "launch/engine.h"
#include "layers/stack.h"
#include "runtime/products.h"
#include "tests/bench/bench.h"

namespace tessera::bench {
namespace {

struct Options {
  std::int64_t width = 512, layers = 8, heads = 8, feed_forward = 1365, vocabulary = 32000;
  std::int64_t batch = 4, length = 512;
  std::int64_t micro_batch = 0;
  int threads = 2;
  bool bf16 = false, recompute = false, per_step = false, local = false;
  bool fast = false, no_prefetch = false;
};

ModelConfig model_of(const Options& options) {
  ModelConfig config;
  config.set_width(options.width);
  config.set_vocabulary(options.vocabulary);
  config.set_length(options.length);
  config.mutable_feed_forward()->set_width(options.feed_forward);
  auto* schedule = config.mutable_schedule()->mutable_homogeneous();
  schedule->set_type("full");
  schedule->set_layers(options.layers);
  AttentionConfig* attention = config.add_mixer()->mutable_full();
  attention->set_heads(options.heads);
  attention->set_key_value_heads(options.heads);
  attention->set_head_width(options.width / options.heads);
  return config;
}

EngineOptions engine_options(const Options& options, const Communicator& communicator) {
  EngineOptions engine;
  engine.rank = communicator.rank();
  engine.ranks = communicator.size();
  const std::int64_t micro_batch =
      options.micro_batch > 0 ? options.micro_batch
                              : std::max<std::int64_t>(1, options.batch / communicator.size());
  engine.quantum = {micro_batch, options.length, options.threads};
  engine.quanta = options.batch / micro_batch;
  engine.accumulate = options.local ? Accumulate::kLocal : Accumulate::kSharded;
  engine.order = options.fast ? SumOrder::kPlain : SumOrder::kTree;
  if (options.fast) engine.accumulate = Accumulate::kLocal;
  engine.prefetch = !options.no_prefetch;
  engine.gather_per_step = options.per_step;
  engine.recompute = options.recompute;
  return engine;
}

class Run {
 public:
  Run(const Options& options, Communicator& communicator, Activity& activity)
      : communicator_(communicator),
        device_(options.threads),
        stack_(model_of(options), options.bf16 ? DType::kBF16 : DType::kF32),
        plan_(stack_, engine_options(options, communicator)),
        engine_(stack_, plan_, device_, communicator, activity),
        vocabulary_(options.vocabulary) {
    engine_.initialise(1);
  }

  // Seconds of `count` steps, each on random tokens.
  double steps(std::int64_t count) {
    return seconds_of([&] {
      for (std::int64_t i = 0; i < count; ++i) {
        const std::int64_t batches = plan_.share().count(communicator_.rank());
        for (std::int64_t round = 0; round < batches; ++round) fill(engine_.batch(round));
        result_ = engine_.step(OptimConfig(), 1e-4, batches, state_);
      }
    });
  }

  const Stack& stack() const { return stack_; }
  const EnginePlan& plan() const { return plan_; }
  double loss() const { return result_.loss; }
  // Of all ranks, as the system counts it.
  double peak_bytes() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    return 1024.0 * static_cast<double>(communicator_.all_reduce(
                        "memory", Reduction::kSum, static_cast<std::int64_t>(usage.ru_maxrss)));
  }

 private:
  void fill(const Batch& batch) {
    for (std::int64_t i = 0; i < batch.tokens.count(); ++i) {
      const auto token =
          static_cast<std::int32_t>(random_.uniform(next_++) * static_cast<double>(vocabulary_));
      batch.tokens.as<std::uint32_t>()[i] = static_cast<std::uint32_t>(token);
      batch.labels.as<std::int32_t>()[i] = token;
      batch.segments.as<std::int32_t>()[i] = 0;
    }
  }

  Communicator& communicator_;
  Device device_;
  Stack stack_;
  EnginePlan plan_;
  Engine engine_;
  std::int64_t vocabulary_;
  OptimState state_;
  StepResult result_;
  RandomStream random_{3, "tokens"};
  std::uint64_t next_ = 0;
};

// The number that rank 0 reads, on all ranks; 0 at the end. Those who wait sleep, for it is the
// others' turn.
std::int64_t next_order(const Communicator& communicator) {
  std::int64_t steps = 0;
  if (communicator.rank() == 0 && !(std::cin >> steps)) steps = 0;
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibcast(&steps, 1, MPI_INT64_T, 0, communicator.handle(), &request);
  for (int done = 0; MPI_Test(&request, &done, MPI_STATUS_IGNORE), done == 0;) usleep(1000);
  return steps;
}

void print_table(Run& run, const Options& options, Communicator& communicator, std::int64_t steps) {
  const Precision precision = options.bf16 ? Precision::kBF16 : Precision::kF32;
  // The other ranks sleep, so that rank 0 has all cores.
  double peak_of_all = 0.0;
  if (communicator.rank() == 0) {
    peak_of_all = measure_peak_flops(precision, options.threads * communicator.size());
  }
  communicator.quiet_barrier("peak");
  run.steps(2);
  std::vector<double> seconds;
  for (std::int64_t i = 0; i < steps; ++i) seconds.push_back(run.steps(1));
  const double bytes = run.peak_bytes();
  if (communicator.rank() != 0) return;
  const double step = median(seconds);
  const double peak = peak_of_all;
  const auto tokens = static_cast<double>(options.batch * options.length);
  const double operations = 3 * run.stack().flops_per_token(options.length) * tokens;
  print_machine(options.threads);
  const Table table(std::to_string(run.stack().parameter_count()) + " parameters, batch " +
                        std::to_string(options.batch) + " x " + std::to_string(options.length) +
                        ", " + std::to_string(communicator.size()) + " ranks, " +
                        (options.bf16 ? "bf16" : "f32"),
                    {"", "tokens/s", "ms/step", "GFLOP/s", "of peak", "peak MB", "planned MB"});
  table.row({"median of " + std::to_string(steps), number(tokens / step), number(step * 1e3),
             number(operations / step / 1e9), percent(operations / step / peak),
             number(bytes / 1e6), number(static_cast<double>(run.plan().memory().bytes()) / 1e6)});
}

}  // namespace
}  // namespace tessera::bench

int main(int argc, char** argv) {
  using namespace tessera;  // NOLINT(google-build-using-namespace)
  keep_large_allocations();
  MpiSession session(&argc, &argv);
  CLI::App app("Training steps on random tokens; with --steps a table, without orders from stdin");
  bench::Options options;
  std::int64_t steps = 0;
  std::string precision = "f32";
  const CLI::Range positive(1, 1 << 24);
  app.add_option("--width", options.width, "d")->check(positive);
  app.add_option("--layers", options.layers)->check(positive);
  app.add_option("--heads", options.heads)->check(positive);
  app.add_option("--feed-forward", options.feed_forward, "SwiGLU's width")->check(positive);
  app.add_option("--vocabulary", options.vocabulary)->check(positive);
  app.add_option("--batch", options.batch, "sequences of a step, over all ranks")->check(positive);
  app.add_option("--length", options.length, "tokens of a sequence")->check(positive);
  app.add_option("--micro-batch", options.micro_batch, "sequences of a quantum; 0: batch / ranks");
  app.add_option("--threads", options.threads, "of a rank")->check(CLI::Range(1, 4096));
  app.add_option("--precision", precision)->check(CLI::IsMember({"f32", "bf16"}));
  app.add_flag("--recompute", options.recompute);
  app.add_flag("--gather-per-step", options.per_step);
  app.add_flag("--accumulate-locally", options.local);
  app.add_flag("--fast", options.fast, "parallel.reduction: FAST");
  app.add_flag("--no-prefetch", options.no_prefetch);
  app.add_option("--steps", steps, "measured, after two of warm-up");
  CLI11_PARSE(app, argc, argv);
  options.bf16 = precision == "bf16";
  try {
    Activity activity;
    Communicator communicator(MPI_COMM_WORLD, &activity);
    bench::Run run(options, communicator, activity);
    if (steps > 0) {
      bench::print_table(run, options, communicator, steps);
      return 0;
    }
    for (std::int64_t order = 0; (order = bench::next_order(communicator)) > 0;) {
      const double seconds = run.steps(order);
      const double bytes = run.peak_bytes();
      if (communicator.rank() == 0) {
        std::cout << seconds << ' ' << bytes << ' ' << run.loss() << std::endl;
      }
    }
  } catch (const Error& error) {
    std::cerr << error.what() << '\n';
    MpiSession::abort(error.code());
  }
  return 0;
}
