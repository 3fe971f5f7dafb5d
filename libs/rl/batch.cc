#include "libs/rl/batch.h"

#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"

namespace moerl::rl {
namespace {

template <typename... Words>
absl::Status SampleError(const Sample& sample, const Words&... words) {
  return absl::InvalidArgumentError(absl::StrCat(SampleName(sample), ": ", words...));
}

absl::Status CheckRun(const Sample& sample, bool needs_kept_ids) {
  const TokenRun& run = sample.run;
  if (run.logprobs.size() != run.size() || run.versions.size() != run.size() || run.trainable.size() != run.size()) {
    return SampleError(sample, run.size(), " tokens, but ", run.logprobs.size(), " log-probabilities, ",
                       run.versions.size(), " versions, ", run.trainable.size(),
                       " mask entries; each token needs one of each");
  }
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0 || std::isfinite(run.logprobs[t])) continue;
    return SampleError(sample, "log-probability ", run.logprobs[t], " at token ", t,
                       " of the completion, expected a finite number");
  }
  if (needs_kept_ids && run.kept_counts.size() != run.size()) {
    return SampleError(sample,
                       "sampled with top-k, top-p or min-p but without the kept ids, so that its "
                       "log-probabilities cannot be renormalised; ask for kept ids or sample from all ids");
  }
  return absl::OkStatus();
}

}  // namespace

std::string SampleName(const Sample& sample) {
  return absl::StrCat("group ", sample.group_id, " sample ", sample.sample_index);
}

std::vector<uint8_t> TrainableFromLengths(int64_t num_completion_tokens, int64_t num_padded_tokens) {
  MOERL_CHECK(0 <= num_completion_tokens && num_completion_tokens <= num_padded_tokens);
  std::vector<uint8_t> trainable(static_cast<size_t>(num_padded_tokens), 0);
  std::fill_n(trainable.begin(), num_completion_tokens, uint8_t{1});
  return trainable;
}

absl::Status CheckGroup(const Group& group) {
  if (group.prompt.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group.group_id, ": an empty prompt; it needs at least one token"));
  }
  std::vector<bool> seen(group.samples.size(), false);
  for (const Sample& sample : group.samples) {
    if (sample.group_id != group.group_id) {
      return SampleError(sample, "found in group ", group.group_id,
                         "; a sample is compared only with samples of its own prompt");
    }
    if (sample.sample_index >= seen.size() || seen[sample.sample_index]) {
      return SampleError(sample, "index repeats or is outside the group's ", seen.size(), " samples");
    }
    seen[sample.sample_index] = true;
    if (!sample.reward.has_value()) {
      return SampleError(sample, "has no reward (", sample.failure.empty() ? "no reason given" : sample.failure,
                         "); drop the whole group, a failure is not a reward of zero");
    }
    if (!std::isfinite(*sample.reward))
      return SampleError(sample, "reward ", *sample.reward, ", expected a finite number");
    MOERL_RETURN_IF_ERROR(CheckRun(sample, group.sampling.cuts_distribution()));
  }
  return absl::OkStatus();
}

}  // namespace moerl::rl
