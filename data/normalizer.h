// Unicode normalisation form C, by ICU.
#pragma once

#include <string>
#include <string_view>

namespace tessera {

// `text`, valid UTF-8, in normalisation form C: `text` itself where it is so already, else
// `buffer`, which is overwritten. Time and memory linear (n log n in a run of combining marks).
std::string_view normalize_nfc(std::string_view text, std::string& buffer);

// The version of Unicode whose normalisation this is, whatever version ICU has: that of the
// reference tokenizer (Hugging Face tokenizers 0.22 to 0.23). Marks that came later aren't
// reordered.
inline constexpr const char* kNormalizerUnicodeVersion = "9.0";

}  // namespace tessera
