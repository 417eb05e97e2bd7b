#include <algorithm>
#include <cmath>

#include "layers/stack.h"
#include "runtime/random.h"

namespace tessera {

void initialise(const ParameterSpec& parameter, std::uint64_t seed, std::int64_t begin,
                const View& values) {
  TESSERA_CHECK(begin >= 0 && begin + values.count() <= parameter.shape.count());
  const RandomStream stream(seed, parameter.name);
  const Init& init = parameter.init;
  float* const out = values.as<float>();
  for (std::int64_t i = 0; i < values.count(); ++i) {
    const auto index = static_cast<std::uint64_t>(begin + i);
    double value = init.scale;
    switch (parameter.init.kind) {
      case Init::Kind::kNormal:
        value = init.scale * stream.normal(index);
        break;
      case Init::Kind::kUniform:
        value = init.scale * (2.0 * stream.uniform(index) - 1.0);
        break;
      case Init::Kind::kConstant:
        break;
      case Init::Kind::kLogOfUniform:
        value = std::log(init.low + (init.high - init.low) * stream.uniform(index));
        break;
      case Init::Kind::kInverseSoftplusOfLogUniform: {
        const double log_low = std::log(init.low), log_high = std::log(init.high);
        const double drawn = std::exp(log_low + (log_high - log_low) * stream.uniform(index));
        const double step = std::max(drawn, init.floor);
        value = step + std::log(-std::expm1(-step));  // log(e^step - 1), without cancellation
        break;
      }
    }
    out[i] = static_cast<float>(value);
  }
}

}  // namespace tessera
