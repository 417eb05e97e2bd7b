#include "layers/stack.h"
#include "runtime/random.h"

namespace tessera {

void initialise(const ParameterSpec& parameter, std::uint64_t seed, std::int64_t begin,
                const View& values) {
  TESSERA_CHECK(begin >= 0 && begin + values.count() <= parameter.shape.count());
  const RandomStream stream(seed, parameter.name);
  const double scale = parameter.init.scale;
  float* const out = values.as<float>();
  for (std::int64_t i = 0; i < values.count(); ++i) {
    const auto index = static_cast<std::uint64_t>(begin + i);
    double value = scale;
    switch (parameter.init.kind) {
      case Init::Kind::kNormal:
        value = scale * stream.normal(index);
        break;
      case Init::Kind::kUniform:
        value = scale * (2.0 * stream.uniform(index) - 1.0);
        break;
      case Init::Kind::kConstant:
        break;
    }
    out[i] = static_cast<float>(value);
  }
}

}  // namespace tessera
