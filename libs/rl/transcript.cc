#include "libs/rl/transcript.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace moerl::rl {

Transcript::Transcript(std::span<const int32_t> prompt) { Append(prompt, false, false); }

void Transcript::AppendAction(std::span<const int32_t> ids, bool is_truncated) { Append(ids, true, is_truncated); }

void Transcript::AppendObservation(std::span<const int32_t> ids) { Append(ids, false, false); }

absl::Status Transcript::AppendActionFromFull(std::span<const int32_t> full, bool is_truncated) {
  const auto [ours, theirs] = std::mismatch(tokens_.begin(), tokens_.end(), full.begin(), full.end());
  if (ours != tokens_.end()) {
    const auto at = ours - tokens_.begin();
    return absl::InvalidArgumentError(
        absl::StrCat("transcript: token ", at, " of ", tokens_.size(), " was ", *ours, ", the answer ",
                     theirs == full.end() ? "ends there" : absl::StrCat("has ", *theirs),
                     "; a sequence only grows: pass tokens on, never text that is encoded again"));
  }
  Append(full.subspan(tokens_.size()), true, is_truncated);
  return absl::OkStatus();
}

void Transcript::Append(std::span<const int32_t> ids, bool is_action, bool is_truncated) {
  turns_.push_back({{ids.begin(), ids.end()}, is_action, is_truncated});
  tokens_.insert(tokens_.end(), ids.begin(), ids.end());
  trainable_.insert(trainable_.end(), ids.size(), is_action ? 1 : 0);
}

}  // namespace moerl::rl
