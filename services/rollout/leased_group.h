#ifndef MOERL_SERVICES_ROLLOUT_LEASED_GROUP_H_
#define MOERL_SERVICES_ROLLOUT_LEASED_GROUP_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "libs/model/generator.h"
#include "libs/model/sampling.h"
#include "libs/rl/environment.h"
#include "libs/rl/trajectory.h"
#include "moerl/v1/experience.pb.h"

// What a lease says to sample, in the engine's words; pure functions.
namespace moerl::rollout {

struct LeasedGroup {
  std::vector<int32_t> prompt;
  rl::Task task;
  model::SamplingParams sampling;
  uint64_t run_seed = 0;
  uint64_t group_id = 0;
};

model::SamplingParams SamplingFromProto(const v1::SamplingParams& from);
LeasedGroup GroupFromProto(const v1::Lease& lease);

// How a sample with these tokens has ended already, or nothing: it is to be continued. Only an action can end one;
// tokens that end in an observation are followed by an action.
std::optional<model::FinishReason> EndOf(const rl::TokenRun& tokens, size_t prompt_tokens,
                                         const model::SamplingParams& sampling, int64_t context_length);

// What routed expert ids look like on the wire: `ids_per_token` (MoE layers x top-k) of `bytes_per_id`, little-endian.
struct RouteFormat {
  int64_t ids_per_token = 0;
  int bytes_per_id = 0;
};
RouteFormat RouteFormatOf(const model::ModelConfig& config);

// What an engine step adds to a sample, as a run of tokens that the policy wrote. With `routes`, the entry of a token
// is where the position before it went, the one whose output it was drawn from.
rl::TokenRun RunOf(const model::SampleOutput& output, int64_t prompt_tokens, const RouteFormat* routes);

// The turns of a sample: the prompt, then its runs of trainable (action) and other (observation) tokens. `is_truncated`
// is that of the last action.
std::vector<rl::Turn> TranscriptOf(const std::vector<int32_t>& prompt, const rl::TokenRun& tokens, bool is_truncated);

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_LEASED_GROUP_H_
