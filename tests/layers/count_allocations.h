// Counts what a piece of code takes from operator new, on all threads.
#pragma once

#include <cstdint>
#include <functional>

namespace tessera::testing {

// Allocations while `body` runs, but for those of the matrix library's own calls, which aren't ours
// to avoid.
std::int64_t count_allocations(const std::function<void()>& body);

}  // namespace tessera::testing
