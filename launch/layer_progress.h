// The layer that is at work, on one line of a terminal; nothing where there is none.
#pragma once

#include <unistd.h>

#include <cstdint>
#include <cstdio>

namespace tessera {

class LayerProgress {
 public:
  explicit LayerProgress(bool speaks) : speaks_(speaks && isatty(STDERR_FILENO) != 0) {}
  ~LayerProgress() {
    if (speaks_) std::fprintf(stderr, "\r            \r");
  }
  LayerProgress(const LayerProgress&) = delete;
  LayerProgress& operator=(const LayerProgress&) = delete;
  void show(std::int64_t layer) const {
    if (!speaks_) return;
    std::fprintf(stderr, "\rlayer %lld", static_cast<long long>(layer));
    std::fflush(stderr);
  }

 private:
  bool speaks_;
};

}  // namespace tessera
