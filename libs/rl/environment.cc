#include "libs/rl/environment.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/rl/checker.h"

namespace moerl::rl {
namespace {

class BuiltinEnvironment final : public Environment {
 public:
  explicit BuiltinEnvironment(std::shared_ptr<const TokenCodec> codec) : codec_(std::move(codec)) {
    MOERL_CHECK(codec_ != nullptr);
  }

  absl::StatusOr<Episode> Reset(const Task& task, std::string_view text) override {
    MOERL_RETURN_IF_ERROR(FindChecker(task.name).status());
    Episode episode;
    episode.id = task.name;  // the judgement needs no memory: every step brings its task
    MOERL_ASSIGN_OR_RETURN(episode.prompt, codec_->Encode(text));
    return episode;
  }

  absl::StatusOr<StepOutcome> Step(std::string_view, const Task& task, uint32_t,
                                   std::span<const Turn> transcript) override {
    if (transcript.empty() || !transcript.back().is_action) {
      return StepOutcome(Failure{FailureReason::kVerifierError, "the transcript does not end with an answer"});
    }
    MOERL_ASSIGN_OR_RETURN(const Checker* checker, FindChecker(task.name));
    const Turn& answer = transcript.back();
    const absl::StatusOr<double> reward =
        checker->check(task.payload, codec_->Decode(answer.token_ids), !answer.is_truncated);
    if (!reward.ok())
      return StepOutcome(Failure{FailureReason::kVerifierError, std::string(reward.status().message())});
    return StepOutcome(Judgement{.observation = {}, .reward = *reward, .is_done = true});
  }

 private:
  const std::shared_ptr<const TokenCodec> codec_;
};

}  // namespace

std::string_view FailureReasonName(FailureReason reason) {
  switch (reason) {
    case FailureReason::kVerifierTimeout:
      return "verifier_timeout";
    case FailureReason::kVerifierError:
      return "verifier_error";
    case FailureReason::kRewardOutOfRange:
      return "reward_out_of_range";
    case FailureReason::kBadObservation:
      return "bad_observation";
    case FailureReason::kBadPrompt:
      return "bad_prompt";
  }
  return "?";
}

StepOutcome CheckOutcome(StepOutcome outcome, const OutcomeLimits& limits) {
  const auto* judgement = std::get_if<Judgement>(&outcome);
  if (judgement == nullptr) return outcome;
  const double reward = judgement->reward;
  if (!std::isfinite(reward) || reward < limits.reward_min || reward > limits.reward_max) {
    return Failure{FailureReason::kRewardOutOfRange,
                   absl::StrCat("reward ", reward, ", environment.reward_min and reward_max allow ", limits.reward_min,
                                " to ", limits.reward_max)};
  }
  for (int32_t id : judgement->observation) {
    if (id >= 0 && id < limits.vocab_size) continue;
    return Failure{FailureReason::kBadObservation,
                   absl::StrCat("observation token ", id, " is outside the vocabulary of ", limits.vocab_size)};
  }
  return outcome;
}

std::unique_ptr<Environment> MakeBuiltinEnvironment(std::shared_ptr<const TokenCodec> codec) {
  return std::make_unique<BuiltinEnvironment>(std::move(codec));
}

}  // namespace moerl::rl
