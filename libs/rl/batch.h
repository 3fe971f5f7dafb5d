#ifndef MOERL_LIBS_RL_BATCH_H_
#define MOERL_LIBS_RL_BATCH_H_

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "libs/rl/trajectory.h"

// The data a training step works on. A *sample* is one completion, a *group* the samples of one prompt, a *step* one
// batch of groups. A sample's sequence has T = P + C tokens: its group's prompt, then its own run (what the policy and,
// over several turns, an environment wrote). In every per-token array entry t speaks of token t: the log-probability of
// token t given the tokens before it, the value of the state *before* token t was chosen. Arrays are [C] or [T] as
// noted.
//
// Plain data: copyable, safe to share between threads while nobody writes.
namespace moerl::rl {

// How tokens were drawn; log-probabilities are those of the distribution after temperature and kept set.
struct Sampling {
  double temperature = 1.0;  // 0 is greedy, with log-probabilities at temperature 1
  double top_p = 1.0;
  double min_p = 0.0;
  int32_t top_k = 0;  // 0: all

  bool cuts_distribution() const { return top_p < 1.0 || min_p > 0.0 || top_k > 0; }
};

// One completion as a rollout server finished it. It has a reward or a failure, never neither and never an invented
// reward.
struct Sample {
  uint64_t group_id = 0;         // assigned once, by the trainer, at admission
  uint32_t sample_index = 0;     // 0 … samples of the group − 1
  TokenRun run;                  // [C]; run.trainable says which tokens the policy chose and the loss counts
  std::optional<double> reward;  // of the whole completion; absent after a failure
  std::string failure;           // why there is no reward; empty when there is one
  bool is_truncated = false;     // ended by the token budget, not by a stop token
};

struct Group {
  uint64_t group_id = 0;
  std::vector<int32_t> prompt;  // [P], at least one token
  Sampling sampling;
  std::vector<Sample> samples;
};

// What the trainer computed for one sample before the first update of a step; empty where the recipe asks for none
// (Recipe::needs_…). All [T], the prompt included; read only where trainable.
struct SampleScores {
  std::vector<float> old_logp;  // log-probabilities under the weights the step starts from
  std::vector<float> ref_logp;  // under the reference policy
  std::vector<float> values;    // the critic's values under the weights the step starts from
};

// A trainable mask from lengths alone, never from token values (a padding id may equal the end-of-sequence id): 1 for
// the `num_completion_tokens` that were generated, 0 for the padding up to `num_padded_tokens`.
std::vector<uint8_t> TrainableFromLengths(int64_t num_completion_tokens, int64_t num_padded_tokens);

// Checks what must hold before a group may be trained: there is a prompt; every sample carries the group's id; indices
// are 0 … n−1, each once; arrays have one entry a token; every sample has a finite reward (a failed sample drops its
// whole group: there is no advantage to compare with); log-probabilities of trainable tokens are finite; a distribution
// cut by top-k, top-p or min-p came with its kept ids. INVALID_ARGUMENT names the group and the sample.
absl::Status CheckGroup(const Group& group);

// "group 7 sample 2", as every message of this library names a sample.
std::string SampleName(const Sample& sample);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_BATCH_H_
