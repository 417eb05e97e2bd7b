// Unicode normalisation form C, by ICU.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// `text`, valid UTF-8, in normalisation form C: `text` itself where it is so already, else
// `buffer`, which is overwritten. Time and memory linear (n log n in a run of combining marks).
std::string_view normalize_nfc(std::string_view text, std::string& buffer);

// The version of Unicode that normalize_nfc follows, such as "15.0".
std::string normalizer_unicode_version();

}  // namespace tessera
