// What the programs of tests/bench share: timing in turn, and tables.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <functional>
#include <initializer_list>
#include <string>
#include <thread>
#include <vector>

#include "runtime/device.h"
#include "runtime/peak.h"
#include "runtime/random.h"
#include "runtime/view.h"

namespace tessera::bench {

inline double seconds_of(const std::function<void()>& body) {
  const auto start = std::chrono::steady_clock::now();
  body();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

inline double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const std::size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// Seconds of one call of each body: all are called once to warm up, then in turn for `rounds`
// rounds, each often enough to last about `least` seconds; the median round counts.
inline std::vector<double> alternate(const std::vector<std::function<void()>>& bodies,
                                     int rounds = 7, double least = 0.05) {
  std::vector<std::int64_t> calls;
  for (const auto& body : bodies) {
    body();
    const double once = seconds_of(body);
    calls.push_back(std::max<std::int64_t>(1, static_cast<std::int64_t>(least / once)));
  }
  std::vector<std::vector<double>> seconds(bodies.size());
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      const double total = seconds_of([&] {
        for (std::int64_t call = 0; call < calls[i]; ++call) bodies[i]();
      });
      seconds[i].push_back(total / static_cast<double>(calls[i]));
    }
  }
  std::vector<double> medians;
  medians.reserve(seconds.size());
  for (const auto& all : seconds) medians.push_back(median(all));
  return medians;
}

// "Intel(R) Xeon(R) Processor, 2 cores, AVX-512 with bf16; peaks by f32 AVX3, bf16 AMX"
inline std::string machine() {
  std::string model = "unknown CPU";
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("model name")) {
      model = line.substr(std::min(line.size(), line.find(':') + 2));
      break;
    }
  }
  return model + ", " + std::to_string(std::thread::hardware_concurrency()) + " cores, " +
         instruction_set() + "; peaks by " + peak_instructions(Precision::kF32) + ", " +
         peak_instructions(Precision::kBF16);
}

inline std::string number(double value, int digits = 1) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}
inline std::string percent(double share) { return number(100 * share) + " %"; }

// Printed row by row, so that a long program shows how far it is.
class Table {
 public:
  Table(const std::string& title, std::vector<std::string> columns) : columns_(std::move(columns)) {
    std::printf("\n%s\n", title.c_str());
    row(columns_);
  }
  void row(const std::vector<std::string>& cells) const {
    for (std::size_t i = 0; i < cells.size(); ++i) {
      const int width = i == 0 ? 34 : std::max(12, static_cast<int>(columns_[i].size()));
      std::printf(i == 0 ? "%-*s" : "  %*s", width, cells[i].c_str());
    }
    std::printf("\n");
    std::fflush(stdout);
  }

 private:
  std::vector<std::string> columns_;
};

inline void print_machine(int threads) {
  std::printf("machine: %s\nthreads: %d; warm-up left out; median of rounds taken in turn\n",
              machine().c_str(), threads);
}

// Memory of a device, filled with normal numbers of this deviation.
class Memory {
 public:
  Memory(Device& device, DType dtype, Shape shape, double deviation = 1.0)
      : device_(device),
        view_(dtype, shape,
              device.allocate(std::max<std::int64_t>(1, shape.count()) * size_of(dtype))) {
    // A block of numbers again and again: drawing all of them would take longer than measuring.
    constexpr std::int64_t kDrawn = 65521;
    std::vector<float> numbers(static_cast<std::size_t>(std::min(kDrawn, view_.count())));
    const RandomStream stream(1, "bench");
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = static_cast<float>(stream.normal(i) * deviation);
    }
    for (std::int64_t i = 0; i < view_.count(); ++i) {
      const float value = numbers[static_cast<std::size_t>(i % kDrawn)];
      if (dtype == DType::kF32) view_.as<float>()[i] = value;
      if (dtype == DType::kBF16) view_.as<BFloat16>()[i] = to_bfloat16(value);
    }
  }
  ~Memory() { device_.release(view_.raw(), view_.bytes()); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  const View& view() const { return view_; }

 private:
  Device& device_;
  View view_;
};

inline Precision precision_of(DType dtype) {
  return dtype == DType::kBF16 ? Precision::kBF16 : Precision::kF32;
}

}  // namespace tessera::bench
