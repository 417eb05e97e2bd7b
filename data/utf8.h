// What is UTF-8 and what isn't: the strict rule (Unicode 16, table 3-7): no overlong form, no
// surrogate, nothing above U+10FFFF.
#pragma once

#include <cstddef>
#include <string_view>

namespace tessera {

// Byte offset of the first sequence that isn't valid UTF-8, or npos where all of it is.
std::size_t first_invalid_utf8(std::string_view text);

}  // namespace tessera
