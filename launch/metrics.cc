#include "launch/metrics.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "data/publish.h"
#include "runtime/error.h"

namespace tessera {
namespace {

[[noreturn]] void fail(const std::string& path, const std::string& what) {
  throw Error(ExitCode::kCheckpoint, path + ": " + what);
}

// Appends to a line that keeps its memory from step to step.
class Object {
 public:
  explicit Object(std::string& out) : out_(out) { out_ = "{"; }
  void integer(const char* name, std::int64_t value) {
    key(name);
    append(value);
  }
  void number(const char* name, double value) {
    key(name);
    this->value(value);
  }
  void value(double value) {
    if (std::isfinite(value)) {
      append(value);
    } else {
      out_ += "null";
    }
  }
  void integers(const char* name, const std::vector<std::int64_t>& list) {
    key(name);
    values(list);
  }
  void values(const std::vector<std::int64_t>& integers) {
    list(integers, [&](std::int64_t value) { append(value); });
  }
  template <class List, class Write>
  void list(const List& entries, const Write& write) {
    out_ += '[';
    for (std::size_t i = 0; i < entries.size(); ++i) {
      if (i > 0) out_ += ", ";
      write(entries[i]);
    }
    out_ += ']';
  }
  void text(const char* name, const std::string& value) {
    key(name);
    out_ += quoted(value);
  }
  void key(const char* name) {
    out_ += out_.back() == '{' ? "\"" : ", \"";
    out_ += name;
    out_ += "\": ";
  }
  void close() { out_ += "}"; }
  static std::string quoted(const std::string& value) {
    return nlohmann::json(value).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  }

 private:
  // Doubles in the shortest form that reads back the same.
  template <class T>
  void append(T value) {
    std::array<char, 32> digits{};
    const auto end = std::to_chars(digits.data(), digits.data() + digits.size(), value).ptr;
    out_.append(digits.data(), end);
  }
  std::string& out_;
};

// The step of an earlier start's line that stands after a resume at `next_step`.
std::optional<std::int64_t> kept_step(const std::string& line, std::int64_t next_step) {
  const auto object = nlohmann::json::parse(line, nullptr, false);
  if (!object.is_object() || object.contains("stopped")) return std::nullopt;
  const auto step = object.find("step");
  if (step == object.end() || !step->is_number_integer()) return std::nullopt;
  const auto number = step->get<std::int64_t>();
  return number < next_step ? std::optional(number) : std::nullopt;
}

// Rewrites the file without the lines that don't stay, if there are any. Returns the step after the
// last that stays.
std::int64_t cut_from(const std::string& path, std::int64_t next_step) {
  std::ifstream in(path, std::ios::binary);
  if (!in) fail(path, "can't be read; check its permissions");
  PublishedFile kept(path);
  bool whole = true;
  std::int64_t after = 0;
  for (std::string line; std::getline(in, line);) {
    // A last line without its newline was cut off.
    const auto step = in.eof() ? std::nullopt : kept_step(line, next_step);
    if (step) {
      after = std::max(after, *step + 1);
      line += '\n';
      kept.write(line.data(), line.size());
    } else {
      whole = false;
    }
  }
  if (in.bad()) fail(path, "can't be read to its end; check the disk and start again");
  if (!whole) kept.publish();
  return after;
}

std::string duration(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(std::min(seconds, 1e15)));
  const std::int64_t minutes = total / 60;
  const std::int64_t hours = minutes / 60;
  const std::int64_t days = hours / 24;
  const auto pair = [](std::int64_t a, const char* unit, std::int64_t b, const char* small) {
    return std::to_string(a) + unit + std::to_string(b) + small;
  };
  if (days > 0) {
    return pair(days, " d ", hours % 24, " h");
  }
  if (hours > 0) {
    return pair(hours, " h ", minutes % 60, " min");
  }
  if (minutes > 0) {
    return pair(minutes, " min ", total % 60, " s");
  }
  return std::to_string(total) + " s";
}

std::string with_commas(double value) {
  std::string digits = std::to_string(std::llround(std::min(value, 1e15)));
  for (auto i = static_cast<std::int64_t>(digits.size()) - 3; i > 0; i -= 3) {
    digits.insert(static_cast<std::size_t>(i), ",");
  }
  return digits;
}

template <class... Values>
std::string formatted(const char* format, Values... values) {
  std::array<char, 128> text{};
  std::snprintf(text.data(), text.size(), format, values...);
  return text.data();
}

}  // namespace

MetricsFile::MetricsFile(const std::string& path, std::int64_t next_step, NoRoom no_room)
    : path_(path) {
  std::error_code error;
  const auto status = std::filesystem::status(path, error);
  if (std::filesystem::is_regular_file(status)) {
    first_missing_ = cut_from(path, next_step);
  } else if (std::filesystem::exists(status)) {
    fail(path, "isn't a regular file; move it away");
  }
  file_.emplace(path, no_room);
}

void MetricsFile::write(const StepMetrics& metrics) {
  Object line(line_);
  line.integer("step", metrics.step);
  line.integer("tokens", metrics.tokens);
  line.integer("sample", metrics.sample);
  line.number("loss", metrics.loss);
  line.number("learning_rate", metrics.learning_rate);
  line.number("grad_norm", metrics.grad_norm);
  line.number("seconds", metrics.seconds);
  line.number("tokens_per_second", metrics.tokens_per_second);
  line.number("mfu", metrics.mfu.value_or(NAN));
  line.number("gather", metrics.gather_seconds);
  line.number("reduce", metrics.reduce_seconds);
  line.number("exchange", metrics.exchange_seconds);
  line.number("data", metrics.data_seconds);
  line.number("advance", metrics.advance_seconds);
  line.integer("transfers", metrics.transfers);
  line.integer("transfers_overlapped", metrics.transfers_overlapped);
  line.integer("transfers_in_flight", metrics.transfers_in_flight);
  if (metrics.routers != nullptr) {
    const RouterResult& routers = *metrics.routers;
    line.number("aux_loss", routers.auxiliary);
    line.number("z_loss", routers.z);
    line.integer("exchange_bytes", metrics.exchange_bytes);
    line.integers("expert_layers", routers.layers);
    line.key("expert_load");
    line.list(routers.loads, [&](const auto& loads) { line.values(loads); });
    line.integers("expert_drops", routers.dropped);
    line.key("router_entropy");
    line.list(routers.entropy, [&](double entropy) { line.value(entropy); });
  }
  line.close();
  write_line();
}

void MetricsFile::write(const ValidationMetrics& metrics) {
  Object line(line_);
  line.integer("step", metrics.step);
  line.integer("tokens", metrics.tokens);
  line.key("validation_loss");
  std::string components;
  Object losses(components);
  for (const auto& [name, loss] : metrics.validation_loss) {
    const std::string key = Object::quoted(name);
    losses.number(key.substr(1, key.size() - 2).c_str(), loss);
  }
  losses.close();
  line_ += components;
  line.number("seconds", metrics.seconds);
  line.close();
  write_line();
}

void MetricsFile::write_stopped(const std::string& reason, std::int64_t steps_done) {
  Object line(line_);
  line.text("stopped", reason);
  line.integer("step", steps_done);
  line.close();
  write_line();
}

void MetricsFile::write_line() {
  line_ += '\n';
  file_->append(line_);
  if (!file_->in_place()) {
    fail(path_,
         "isn't there any more, or is another file: it was moved, removed or its file system "
         "unmounted while the run was at work; what its folder's last checkpoint holds stands");
  }
}

Progress::Progress(std::int64_t total_steps, std::int64_t tokens_left)
    : total_steps_(total_steps), tokens_left_(tokens_left) {}

void Progress::step_done(std::int64_t tokens, double seconds) {
  tokens_left_ = std::max<std::int64_t>(0, tokens_left_ - tokens);
  // The first step's place is taken by the second.
  const std::int64_t slot = std::max<std::int64_t>(0, steps_ - 1) % kRecent;
  recent_[static_cast<std::size_t>(slot)] = {tokens, seconds};
  ++steps_;
}

double Progress::tokens_per_second() const {
  double tokens = 0.0;
  double seconds = 0.0;
  for (const auto& [step_tokens, step_seconds] : recent_) {
    tokens += static_cast<double>(step_tokens);
    seconds += step_seconds;
  }
  return seconds > 0.0 ? tokens / seconds : 0.0;
}

double Progress::seconds_left() const {
  const double rate = tokens_per_second();
  return rate > 0.0 ? static_cast<double>(tokens_left_) / rate : 0.0;
}

void Progress::add_loads(const RouterResult& routers) {
  if (loads_.layers.empty()) {
    loads_ = routers;
    return;
  }
  for (std::size_t l = 0; l < loads_.loads.size(); ++l) {
    for (std::size_t e = 0; e < loads_.loads[l].size(); ++e) {
      loads_.loads[l][e] += routers.loads[l][e];
    }
  }
}

std::string Progress::line(const StepMetrics& metrics) {
  std::string text = "step " + std::to_string(metrics.step + 1) + "/" +
                     std::to_string(total_steps_) +
                     formatted("  loss %.4f  lr %.2e  ", metrics.loss, metrics.learning_rate) +
                     with_commas(tokens_per_second()) + " tokens/s";
  if (metrics.mfu) {
    text += formatted("  mfu %.1f %%", 100.0 * *metrics.mfu);
  }
  text += "  " + duration(seconds_left()) + " left";
  double least = kStarving;
  std::size_t layer = 0, expert = 0;
  std::int64_t starving = 0;
  for (std::size_t l = 0; l < loads_.loads.size(); ++l) {
    const std::vector<std::int64_t>& loads = loads_.loads[l];
    const double mean =
        std::accumulate(loads.begin(), loads.end(), 0.0) / static_cast<double>(loads.size());
    for (std::size_t e = 0; e < loads.size(); ++e) {
      const double share = static_cast<double>(loads[e]) / std::max(mean, 1.0);
      starving += share < kStarving ? 1 : 0;
      if (share >= least) continue;
      least = share;
      layer = l;
      expert = e;
    }
  }
  if (starving > 0) {
    text += "  warning: expert " + std::to_string(expert) + " of layer " +
            std::to_string(loads_.layers[layer]) +
            formatted(" starves, with %.2f of the mean load", least);
    if (starving > 1) text += "; so do " + std::to_string(starving - 1) + " more";
  }
  loads_ = {};
  return text;
}

}  // namespace tessera
