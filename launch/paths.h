// Paths as a user gives them.
#pragma once

#include <filesystem>
#include <string>

namespace tessera {

// Against the working folder; "" stays as it is.
inline std::string absolute_path(const std::string& path) {
  return path.empty() ? path : std::filesystem::absolute(path).lexically_normal().string();
}

}  // namespace tessera
