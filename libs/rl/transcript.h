#ifndef MOERL_LIBS_RL_TRANSCRIPT_H_
#define MOERL_LIBS_RL_TRANSCRIPT_H_

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "libs/rl/environment.h"

namespace moerl::rl {

// The tokens of one sample while it is being made: append-only, with the mask that says which ones the policy chose.
// The prompt is fixed at construction. Not thread-safe.
class Transcript {
 public:
  explicit Transcript(std::span<const int32_t> prompt);

  void AppendAction(std::span<const int32_t> ids, bool is_truncated);
  void AppendObservation(std::span<const int32_t> ids);

  // For engines and servers that answer with the whole sequence: it must begin with every token there is.
  // INVALID_ARGUMENT names the first position that differs (a text round trip would do that), nothing is appended then.
  absl::Status AppendActionFromFull(std::span<const int32_t> full, bool is_truncated);

  const std::vector<Turn>& turns() const { return turns_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const std::vector<uint8_t>& trainable() const { return trainable_; }  // [T]
  int64_t num_prompt_tokens() const { return static_cast<int64_t>(turns_[0].token_ids.size()); }

 private:
  void Append(std::span<const int32_t> ids, bool is_action, bool is_truncated);

  std::vector<Turn> turns_;
  std::vector<int32_t> tokens_;
  std::vector<uint8_t> trainable_;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TRANSCRIPT_H_
