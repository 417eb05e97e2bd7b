// Values that other programs computed, as tests/oracle's scripts store them.
#pragma once

#include <gtest/gtest.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/layers/testing.h"

namespace tessera::testing {

inline nlohmann::json read_oracle(const std::string& name) {
  const std::string path = std::string(TESSERA_SOURCE_DIR) + "/tests/oracle/" + name + ".json";
  std::ifstream file(path);
  EXPECT_TRUE(file.good()) << path;
  return nlohmann::json::parse(file);
}

inline reference::Array array_of(const nlohmann::json& stored) {
  return stored.at("values").get<reference::Array>();
}

inline void fill(const View& view, const nlohmann::json& stored) {
  const reference::Array from = array_of(stored);
  ASSERT_EQ(static_cast<std::size_t>(view.count()), from.size());
  for (std::size_t i = 0; i < from.size(); ++i) view.as<float>()[i] = static_cast<float>(from[i]);
}

}  // namespace tessera::testing
