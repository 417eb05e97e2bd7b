#include "launch/profile.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <fstream>
#include <numeric>

#include "layers/mixers/mixers.h"
#include "runtime/error.h"
#include "runtime/memory.h"
#include "runtime/random.h"

namespace tessera {
namespace {

void fill_normal(const View& view, const std::string& name) {
  const RandomStream stream(0, name);
  for (std::int64_t i = 0; i < view.count(); ++i) {
    const auto value = static_cast<float>(stream.normal(static_cast<std::uint64_t>(i)));
    if (view.dtype() == DType::kBF16) {
      view.as<BFloat16>()[i] = to_bfloat16(value);
    } else {
      view.as<float>()[i] = value;
    }
  }
}

void fill_parameter(const ParameterSpec& parameter, const View& view) {
  if (view.dtype() == DType::kF32) {
    initialise(parameter, 0, 0, view);
    return;
  }
  std::vector<float> values(static_cast<std::size_t>(view.count()));
  initialise(parameter, 0, 0, View(values.data(), {view.count()}));
  for (std::size_t i = 0; i < values.size(); ++i) {
    view.as<BFloat16>()[i] = to_bfloat16(values[i]);
  }
}

// A line of /proc/self/status in bytes; -1 where there is none.
std::int64_t process_memory(const std::string& name) {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word) {
    std::int64_t kilobytes = 0;
    if (word == name + ":" && status >> kilobytes) return kilobytes << 10;
  }
  return -1;
}

// From here on the system's record of this process' largest memory starts anew.
bool forget_largest_memory() {
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;
  return file.good();
}

// One layer with its memory, at one length.
class Isolated {
 public:
  Isolated(const Layer& layer, DType compute, BatchShape shape, std::int64_t width, bool backward,
           Device& device)
      : layer_(layer),
        queue_(device.queue()),
        before_(forget_largest_memory() ? process_memory("VmRSS") : -1) {
    const std::vector<ParameterSpec> specs = layer.parameters();
    std::vector<BufferSpec> parameters, gradients;
    for (const ParameterSpec& spec : specs) {
      parameters.push_back({spec.name, spec.full_precision ? DType::kF32 : compute, spec.shape});
      gradients.push_back({spec.name, DType::kF32, spec.shape});
    }
    const Shape rows = {shape.rows(), width};
    std::vector<BufferSpec> ends = {{"in", compute, rows}, {"out", DType::kF32, rows}};
    if (backward) {
      ends.push_back({"d_out", compute, rows});
      ends.push_back({"d_in", DType::kF32, rows});
    }
    const Layout layouts[] = {Layout(parameters), Layout(ends), Layout(layer.saved(shape)),
                              Layout(layer.scratch(shape)),
                              Layout(backward ? gradients : std::vector<BufferSpec>())};
    MemoryPlan memory;
    for (const Layout& layout : layouts) memory.book("layer", "", layout.bytes());
    booked_ = memory.bytes();
    arena_ = std::make_unique<Arena>(device, memory);
    // Only now, when it is known that there is room for so many tokens.
    segments_.assign(static_cast<std::size_t>(shape.rows()), 0);
    tokens_.assign(segments_.size(), 0);
    labels_.assign(segments_.size(), kNoLabel);
    const Shape places = {shape.batch, shape.length};
    batch_ = {shape, View(tokens_.data(), places), View(labels_.data(), places),
              View(segments_.data(), places)};
    std::size_t booking = 0;
    for (std::vector<View>* const views : {&parameters_, &ends_, &saved_, &scratch_, &gradients_}) {
      *views = layouts[booking].views(arena_->at(booking));
      ++booking;
    }
    for (std::size_t i = 0; i < specs.size(); ++i) fill_parameter(specs[i], parameters_[i]);
    fill_normal(ends_[0], "in");
    if (backward) fill_normal(ends_[2], "d_out");
  }

  void run() {
    const LayerMemory memory = {parameters_, saved_, scratch_};
    layer_.forward(queue_, batch_, ends_[0], ends_[1], memory);
    if (ends_.size() > 2) {
      layer_.backward(queue_, batch_, ends_[0], ends_[2], ends_[3], gradients_, memory);
    }
    queue_.synchronize();
  }

  ProfileCost measure(int repeats) {
    run();
    std::vector<double> seconds;
    for (int i = 0; i < repeats; ++i) {
      const auto start = std::chrono::steady_clock::now();
      run();
      seconds.push_back(
          std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    std::sort(seconds.begin(), seconds.end());
    const std::size_t half = seconds.size() / 2;
    ProfileCost cost;
    cost.seconds =
        seconds.size() % 2 == 1 ? seconds[half] : (seconds[half - 1] + seconds[half]) / 2;
    cost.least = seconds.front();
    cost.most = seconds.back();
    cost.booked_bytes = booked_;
    const std::int64_t largest = process_memory("VmHWM");
    if (before_ >= 0 && largest >= 0) cost.measured_bytes = largest - before_;
    return cost;
  }

 private:
  const Layer& layer_;
  Queue& queue_;
  std::int64_t before_;
  std::vector<std::int32_t> segments_;
  std::vector<std::uint32_t> tokens_;
  std::vector<std::int32_t> labels_;
  Batch batch_;
  std::int64_t booked_ = 0;
  std::unique_ptr<Arena> arena_;
  std::vector<View> parameters_, ends_, saved_, scratch_, gradients_;
};

}  // namespace

std::vector<ProfileLine> profile(const ModelConfig& model, DType compute,
                                 const ProfileOptions& options, Device& device,
                                 const std::function<void(const ProfileLine&)>& progress) {
  std::vector<ProfileLine> lines;
  for (const std::string& mixer : options.mixers) {
    for (const std::int64_t length : options.lengths) {
      ModelConfig at_length = model;
      at_length.set_length(length);
      const MixerContext context = {at_length, 0, 1, compute};
      const std::unique_ptr<Layer> layer = make_mixer(mixer, context);
      const BatchShape shape = {options.sequences, length, device.queue().threads()};
      const auto cost = [&](bool backward) {
        return Isolated(*layer, compute, shape, model.width(), backward, device)
            .measure(options.repeats);
      };
      ProfileLine line;
      line.mixer = mixer;
      line.length = length;
      line.forward = cost(false);
      if (options.backward) line.both = cost(true);
      lines.push_back(line);
      if (progress) progress(line);
    }
  }
  return lines;
}

double log_slope(double a, double b, std::int64_t length_a, std::int64_t length_b) {
  return std::log(b / a) / std::log(static_cast<double>(length_b) / static_cast<double>(length_a));
}

double paper_ratio(const std::string& mixer, std::int64_t length) {
  struct Row {
    const char* mixer;
    double milliseconds[3];
  };
  constexpr std::int64_t kLengths[] = {2048, 8192, 32768};
  constexpr Row kRows[] = {{"full", {0.4, 1.5, 13.6}},
                           {"differential", {0.5, 3.7, 46.5}},
                           {"sliding", {0.6, 1.9, 7.6}},
                           {"nsa", {1.0, 3.6, 26.8}},
                           {"hybrid", {1.5, 7.7, 74.7}}};
  for (int i = 0; i < 3; ++i) {
    if (kLengths[i] != length) continue;
    for (const Row& row : kRows) {
      if (mixer == row.mixer) return row.milliseconds[i] / kRows[0].milliseconds[i];
    }
  }
  return 0.0;
}

}  // namespace tessera
