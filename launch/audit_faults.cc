#include "launch/audit_faults.h"

#include <algorithm>
#include <cmath>

#include "runtime/error.h"

namespace tessera {
namespace {

// o[t] += what `of(t, c)` says, for each channel c; `of` sees o[t] and all later rows as they were.
template <class Value>
void add_from_later(std::int64_t length, std::int64_t width, float* o, const Value& of) {
  for (std::int64_t t = 0; t < length; ++t) {
    for (std::int64_t c = 0; c < width; ++c) {
      o[t * width + c] = static_cast<float>(static_cast<double>(o[t * width + c]) + of(t, c));
    }
  }
}

// One value a channel from all of time, added everywhere.
template <class Value>
void add_everywhere(std::int64_t length, std::int64_t width, float* o, const Value& of) {
  std::vector<double> values(static_cast<std::size_t>(width));
  for (std::int64_t c = 0; c < width; ++c) values[static_cast<std::size_t>(c)] = of(c);
  add_from_later(length, width, o, [&](std::int64_t /*t*/, std::int64_t c) {
    return values[static_cast<std::size_t>(c)];
  });
}

void norm_leak(std::int64_t count, float* o) {
  double sum = 0.0, squares = 0.0;
  for (std::int64_t i = 0; i < count; ++i) sum += static_cast<double>(o[i]);
  const double mean = sum / static_cast<double>(count);
  for (std::int64_t i = 0; i < count; ++i) {
    const double off = static_cast<double>(o[i]) - mean;
    squares += off * off;
  }
  const double deviation = std::sqrt(squares / static_cast<double>(count));
  if (deviation == 0.0) return;
  for (std::int64_t i = 0; i < count; ++i) {
    o[i] = static_cast<float>((static_cast<double>(o[i]) - mean) / deviation);
  }
}

}  // namespace

const char* name_of(AuditFault fault) {
  switch (fault) {
    case AuditFault::kShift:
      return "shift";
    case AuditFault::kPeek:
      return "peek";
    case AuditFault::kPool:
      return "pool";
    case AuditFault::kGlobalMax:
      return "global max";
    case AuditFault::kFutureMean:
      return "future mean";
    case AuditFault::kNormLeak:
      return "norm leak";
    case AuditFault::kReverseScan:
      return "reverse scan";
    case AuditFault::kLastBroadcast:
      return "last broadcast";
  }
  return "?";
}

void inject(AuditFault fault, std::int64_t length, std::int64_t width, float* o) {
  const auto at = [&](std::int64_t t, std::int64_t c) {
    return static_cast<double>(o[t * width + c]);
  };
  switch (fault) {
    case AuditFault::kShift:
      std::copy(o + width, o + length * width, o);
      return;
    case AuditFault::kPeek:
      add_from_later(length, width, o, [&](std::int64_t t, std::int64_t c) {
        return t + 1 < length ? at(t + 1, c) : 0.0;
      });
      return;
    case AuditFault::kPool:
      add_everywhere(length, width, o, [&](std::int64_t c) {
        double sum = 0.0;
        for (std::int64_t t = 0; t < length; ++t) sum += at(t, c);
        return sum / static_cast<double>(length);
      });
      return;
    case AuditFault::kGlobalMax:
      add_everywhere(length, width, o, [&](std::int64_t c) {
        double most = at(0, c);
        for (std::int64_t t = 1; t < length; ++t) most = std::max(most, at(t, c));
        return most;
      });
      return;
    case AuditFault::kFutureMean:
      add_from_later(length, width, o, [&](std::int64_t t, std::int64_t c) {
        const std::int64_t last = std::min(t + 4, length - 1);
        double sum = 0.0;
        for (std::int64_t later = t + 1; later <= last; ++later) sum += at(later, c);
        return last > t ? sum / static_cast<double>(last - t) : 0.0;
      });
      return;
    case AuditFault::kNormLeak:
      norm_leak(length * width, o);
      return;
    case AuditFault::kReverseScan:
      for (std::int64_t c = 0; c < width; ++c) {
        double sum = 0.0;
        for (std::int64_t t = length; t-- > 0;) {
          sum += at(t, c);
          o[t * width + c] = static_cast<float>(at(t, c) + sum / static_cast<double>(length));
        }
      }
      return;
    case AuditFault::kLastBroadcast:
      add_everywhere(length, width, o, [&](std::int64_t c) { return at(length - 1, c); });
      return;
  }
}

void FaultyMixer::forward(Queue& queue, const Batch& batch, const View& in, const View& out,
                          const LayerMemory& memory) const {
  mixer_->forward(queue, batch, in, out, memory);
  const std::int64_t width = out.extent(1);
  queue.parallel_for(batch.shape.batch, [&](std::int64_t sequence, Worker& /*worker*/) {
    inject(fault_, batch.shape.length, width,
           out.as<float>() + sequence * batch.shape.length * width);
  });
}

void FaultyMixer::backward(Queue& /*queue*/, const Batch& /*batch*/, const View& /*in*/,
                           const View& /*d_out*/, const View& /*d_in*/,
                           std::span<const View> /*d_parameters*/,
                           const LayerMemory& /*memory*/) const {
  TESSERA_CHECK(false);  // an audit has no backward pass
}

}  // namespace tessera
