#include "libs/rl/char_tokenizer.h"

#include "absl/strings/str_cat.h"

namespace moerl::rl {

std::string CharTokenizer::Decode(std::span<const int32_t> ids) const {
  std::string text;
  for (int32_t id : ids) {
    if (id == kEndOfSequence || id == kBeginOfSequence) continue;
    if (id < 0 || id >= kVocabSize) {
      text += "\xEF\xBF\xBD";
    } else {
      text += kCharacters[static_cast<size_t>(id - 2)];
    }
  }
  return text;
}

absl::StatusOr<std::vector<int32_t>> CharTokenizer::Encode(std::string_view text) const {
  std::vector<int32_t> ids;
  ids.reserve(text.size());
  for (size_t i = 0; i < text.size(); ++i) {
    const size_t at = kCharacters.find(text[i]);
    if (at == std::string_view::npos) {
      return absl::InvalidArgumentError(
          absl::StrCat("character ", i, " (byte ", static_cast<int>(static_cast<uint8_t>(text[i])),
                       ") is not in the task vocabulary \"", std::string(kCharacters), "\""));
    }
    ids.push_back(static_cast<int32_t>(at) + 2);
  }
  return ids;
}

}  // namespace moerl::rl
