#ifndef MOERL_LIBS_RL_BYTE_LEVEL_DECODER_H_
#define MOERL_LIBS_RL_BYTE_LEVEL_DECODER_H_

#include <memory>
#include <string_view>

#include "absl/status/statusor.h"
#include "libs/rl/environment.h"

namespace moerl::rl {

// Reads the vocabulary of a Hugging Face `tokenizer.json` whose decoder is byte-level (GPT-2's mapping of bytes to
// printable characters; Qwen, OLMoE, Llama 3) and decodes with it, so that C++ checkers can read completions. Special
// added tokens give no text, other added tokens their content. Encode is UNIMPLEMENTED: C++ never encodes such text.
//
// INVALID_ARGUMENT says what is wrong with the file: not JSON, not byte-level (a SentencePiece vocabulary), ids that
// repeat or are out of range (0 … 4,194,303), characters outside the mapping.
absl::StatusOr<std::unique_ptr<TokenCodec>> ParseByteLevelTokenizer(std::string_view tokenizer_json);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_BYTE_LEVEL_DECODER_H_
