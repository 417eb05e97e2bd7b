#pragma once

namespace tessera {

constexpr char kVersion[] = "0.1.0";

}  // namespace tessera
