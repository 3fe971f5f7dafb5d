#include <xxhash.h>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/rl/char_tokenizer.h"
#include "libs/rl/prompt_source.h"
#include "libs/rl/tasks/task.h"

namespace moerl::rl {
namespace {

// A sixteenth of a task's problems is held out, a quarter is for the warm start, the rest for training.
constexpr uint64_t kNumParts = 16;
constexpr uint64_t kNumWarmStartParts = 4;
// Draws until a problem of the wanted split comes: the rarest is one in sixteen, so this many fail once in 10^28
// prompts.
constexpr int kMaxDraws = 1000;

Split SplitOf(std::string_view task, std::string_view prompt) {
  const std::string key = absl::StrCat(std::string(task), "/", std::string(prompt));
  const uint64_t part = XXH3_64bits(key.data(), key.size()) % kNumParts;
  if (part == 0) return Split::kHeldOut;
  return part <= kNumWarmStartParts ? Split::kWarmStart : Split::kTrain;
}

class SyntheticSource final : public PromptSource {
 public:
  SyntheticSource(const BuiltinTask& task, uint64_t seed, Split split) : task_(task), seed_(seed), split_(split) {
    const std::string name(task.checker.task);
    key_ = Mix(Mix(seed) ^ Mix(XXH3_64bits(name.data(), name.size())) ^ static_cast<uint64_t>(split));
  }

  absl::StatusOr<Prompt> Get(uint64_t index) const override {
    KeyedRandom random(key_ ^ Mix(index));
    for (int draw = 0; draw < kMaxDraws; ++draw) {
      Problem problem = task_.draw(random);
      if (SplitOf(task_.checker.task, problem.prompt) != split_) continue;
      Prompt prompt;
      prompt.task = {std::string(task_.checker.task), std::move(problem.payload)};
      prompt.token_ids = {CharTokenizer::kBeginOfSequence};
      MOERL_ASSIGN_OR_RETURN(const std::vector<int32_t> ids, CharTokenizer().Encode(problem.prompt));
      prompt.token_ids.insert(prompt.token_ids.end(), ids.begin(), ids.end());
      prompt.text = std::move(problem.prompt);
      prompt.solution = std::move(problem.solution);
      return prompt;
    }
    return absl::InternalError(
        absl::StrCat(std::string(task_.checker.task), ": no problem of the wanted split in ", kMaxDraws, " draws"));
  }

  uint64_t size() const override { return 0; }

  std::string fingerprint() const override {
    const std::string what = absl::StrCat("synthetic 1 ", std::string(task_.checker.task), " ", seed_, " ", split_);
    const XXH128_hash_t hash = XXH3_128bits(what.data(), what.size());
    return absl::StrFormat("%016x%016x", hash.high64, hash.low64);
  }

 private:
  const BuiltinTask task_;
  const uint64_t seed_;
  const Split split_;
  uint64_t key_ = 0;
};

}  // namespace

absl::StatusOr<std::unique_ptr<PromptSource>> MakeSyntheticSource(std::string_view task, uint64_t seed, Split split) {
  std::string names;
  for (const BuiltinTask& builtin : BuiltinTasks()) {
    if (builtin.draw == nullptr) continue;
    if (builtin.checker.task == task) return std::make_unique<SyntheticSource>(builtin, seed, split);
    absl::StrAppend(&names, names.empty() ? "" : ", ", std::string(builtin.checker.task));
  }
  return absl::NotFoundError(absl::StrCat("task.name: \"", std::string(task),
                                          "\" does not make its own prompts; use one of ", names,
                                          ", or give task.prompt_file"));
}

absl::Status CheckFingerprint(const PromptSource& source, std::string_view expected) {
  const std::string found = source.fingerprint();
  if (found == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "prompts: fingerprint ", found, ", the checkpoint was made with ", std::string(expected),
      "; prompts already trained on could come again or others be skipped: restore the prompt file, task and "
      "seed, or start a new run"));
}

absl::StatusOr<SupervisedExample> MakeSupervisedExample(const Prompt& prompt, const TokenCodec& codec,
                                                        int32_t end_of_sequence) {
  if (prompt.token_ids.empty() || prompt.solution.empty()) {
    return absl::FailedPreconditionError(absl::StrCat(
        "task ", prompt.task.name, ": a prompt without ", prompt.token_ids.empty() ? "token ids" : "a solution",
        " cannot be a supervised example; turn the warm start off or add it to the prompt file"));
  }
  MOERL_ASSIGN_OR_RETURN(const std::vector<int32_t> solution, codec.Encode(prompt.solution));
  SupervisedExample example;
  example.tokens = prompt.token_ids;
  example.tokens.insert(example.tokens.end(), solution.begin(), solution.end());
  example.tokens.push_back(end_of_sequence);
  example.trainable.assign(example.tokens.size(), 1);
  std::fill_n(example.trainable.begin(), prompt.token_ids.size(), uint8_t{0});
  return example;
}

}  // namespace moerl::rl
