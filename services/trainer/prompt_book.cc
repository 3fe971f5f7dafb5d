#include "services/trainer/prompt_book.h"

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"

namespace moerl::trainer {

std::shared_ptr<const rl::Prompt> PromptBook::Find(int64_t index) {
  absl::MutexLock lock(&mutex_);
  const auto it = prompts_.find(index);
  return it == prompts_.end() ? nullptr : it->second;
}

absl::StatusOr<std::shared_ptr<const rl::Prompt>> PromptBook::Fetch(int64_t index) {
  if (auto known = Find(index)) return known;
  MOERL_ASSIGN_OR_RETURN(rl::Prompt prompt, source_.Get(static_cast<uint64_t>(index)));
  if (prompt.token_ids.empty()) {
    if (environment_ == nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("prompt ", index, " is text; set environment.address to one that encodes it"));
    }
    MOERL_ASSIGN_OR_RETURN(rl::Episode episode, environment_->Reset(prompt.task, prompt.text));
    prompt.token_ids = std::move(episode.prompt);
  }
  if (prompt.token_ids.empty()) return absl::InvalidArgumentError(absl::StrCat("prompt ", index, " has no tokens"));
  auto shared = std::make_shared<const rl::Prompt>(std::move(prompt));
  absl::MutexLock lock(&mutex_);
  prompts_[index] = shared;
  if (prompts_.size() > kPromptsMax) prompts_.erase(prompts_.begin());
  return shared;
}

}  // namespace moerl::trainer
