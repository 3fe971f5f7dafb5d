#ifndef MOERL_LIBS_RL_CHAR_TOKENIZER_H_
#define MOERL_LIBS_RL_CHAR_TOKENIZER_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "libs/rl/environment.h"

namespace moerl::rl {

// The vocabulary of the synthetic tasks: one token a character, after the two special ones. It never changes: models
// trained on it depend on the ids.
class CharTokenizer final : public TokenCodec {
 public:
  static constexpr int32_t kEndOfSequence = 0;
  static constexpr int32_t kBeginOfSequence = 1;
  static constexpr std::string_view kCharacters = "0123456789abcdefghijklmn+-*()=,:";
  static constexpr int32_t kVocabSize = 2 + static_cast<int32_t>(kCharacters.size());

  int32_t vocab_size() const override { return kVocabSize; }
  std::string Decode(std::span<const int32_t> ids) const override;
  // INVALID_ARGUMENT names a character that is not in the vocabulary. Adds no special token.
  absl::StatusOr<std::vector<int32_t>> Encode(std::string_view text) const override;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_CHAR_TOKENIZER_H_
