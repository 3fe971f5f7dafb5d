#ifndef MOERL_SERVICES_TRAINER_PROMPT_BOOK_H_
#define MOERL_SERVICES_TRAINER_PROMPT_BOOK_H_

#include <cstdint>
#include <map>
#include <memory>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "libs/rl/environment.h"
#include "libs/rl/prompt_source.h"

namespace moerl::trainer {

// The prompts of the groups in flight, as tokens. A prompt that is text is encoded by the environment that owns the
// tokenizer (Reset), so Fetch may block. Thread-safe.
class PromptBook {
 public:
  // `environment` may be null where every prompt has tokens; both must outlive the book.
  PromptBook(const rl::PromptSource& source, rl::Environment* environment)
      : source_(source), environment_(environment) {}

  // Null if it must be fetched first.
  std::shared_ptr<const rl::Prompt> Find(int64_t index);
  // UNAVAILABLE: the environment is away, try again. Other errors: this prompt cannot be used.
  absl::StatusOr<std::shared_ptr<const rl::Prompt>> Fetch(int64_t index);

 private:
  static constexpr size_t kPromptsMax = 65536;  // the oldest ones are forgotten, and fetched again when needed

  const rl::PromptSource& source_;
  rl::Environment* const environment_;
  absl::Mutex mutex_;
  std::map<int64_t, std::shared_ptr<const rl::Prompt>> prompts_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_PROMPT_BOOK_H_
