#include "launch/checkpoint_model.h"

#include <algorithm>
#include <filesystem>

#include "launch/router_result.h"
#include "runtime/error.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

std::string model_lines(const std::string& numerics) {
  std::string lines;
  for (std::size_t begin = 0; begin < numerics.size();) {
    const std::size_t end = std::min(numerics.find('\n', begin), numerics.size());
    const std::string line = numerics.substr(begin, end - begin);
    if (line.starts_with("model.") && !line.starts_with("model.length=")) lines += line + "\n";
    begin = end + 1;
  }
  return lines;
}

}  // namespace

std::string config_of_checkpoint(const std::string& checkpoint) {
  std::string config = (fs::absolute(checkpoint).parent_path().parent_path() / "config.textproto")
                           .lexically_normal()
                           .string();
  if (!fs::exists(config)) {
    throw Error(ExitCode::kUsage,
                config + ": no such file; name the checkpoint's config by --config");
  }
  return config;
}

void check_model(const Config& config, const CheckpointMeta& meta, const std::string& checkpoint) {
  const auto text = meta.texts.find("config");
  const auto differences = compare_numerics(
      model_lines(text == meta.texts.end() ? "" : text->second), model_lines(numerics(config)));
  if (differences.empty()) return;
  throw Error(ExitCode::kUsage, differences[0].path + ": " + checkpoint + " has " +
                                    differences[0].saved + ", the config has " +
                                    differences[0].now);
}

std::function<void(std::span<const ParameterSpec>, std::span<const View>)> parameters_of(
    const std::string& checkpoint, Communicator& alone) {
  return [checkpoint, &alone](std::span<const ParameterSpec> parameters,
                              std::span<const View> values) {
    std::vector<CheckpointArray> arrays;
    for (std::size_t i = 0; i < parameters.size(); ++i) {
      arrays.push_back({"params/" + parameters[i].name,
                        parameters[i].shape,
                        {{0, values[i].count(), values[i].as<float>()}}});
    }
    read_checkpoint(alone, checkpoint, arrays);
  };
}

std::function<void(std::int64_t, const View&)> selection_bias_of(const std::string& checkpoint,
                                                                 Communicator& alone) {
  return [checkpoint, &alone](std::int64_t layer, const View& bias) {
    const CheckpointArray array = {
        selection_bias_name(layer), bias.shape(), {{0, bias.count(), bias.as<float>()}}};
    read_checkpoint(alone, checkpoint, std::span(&array, 1));
  };
}

}  // namespace tessera
