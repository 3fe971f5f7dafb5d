#ifndef MOERL_SERVICES_TRAINER_RUN_SETTINGS_H_
#define MOERL_SERVICES_TRAINER_RUN_SETTINGS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "libs/model/config.h"
#include "libs/rl/batch.h"
#include "libs/rl/prompt_source.h"
#include "libs/rl/recipe.h"
#include "libs/rl/routing_replay.h"
#include "libs/rl/warm_start.h"
#include "moerl/v1/config.pb.h"

namespace moerl::trainer {

// What the configuration means, resolved once at the start: every later part reads this, not YAML. Immutable.
struct RunSettings {
  v1::Config config;
  model::ModelConfig model;
  model::Compute compute = model::Compute::kBf16;
  rl::Recipe recipe;
  rl::Sampling sampling;
  rl::WarmStartConfig warm_start;
  v1::SamplingParams lease_sampling;  // as workers get it: stop tokens filled in
  int32_t end_of_sequence = 0;
  std::shared_ptr<const rl::TokenCodec> codec;  // null where only the environment knows text
  std::shared_ptr<const rl::PromptSource> prompts;
  std::shared_ptr<const rl::PromptSource> held_out;
  std::shared_ptr<const rl::PromptSource> supervised;  // null: the task has no solutions to imitate
  std::string numerics_fingerprint;
  rl::RouteShape token_routes;  // of one token; without bytes routes are not recorded
  int num_threads = 1;

  // The learning rate of step `step`, from 1: linear warm-up, then constant or cosine down to the minimum.
  double LearningRate(int64_t step) const;
  std::string RunPath(const std::string& name) const;  // inside the run directory
};

// What the bytes of a step depend on beside its batch and the number of ranks: model, algorithm, sampling, and how the
// optimizer steps. Recorded batches are replayed to the same bytes where this is equal.
v1::Config ReplayConfig(const v1::Config& config);

// INVALID_ARGUMENT names the configuration's field. Reads model.path's config.json, prompt and tokenizer files.
absl::StatusOr<RunSettings> ResolveRunSettings(const v1::Config& config);

}  // namespace moerl::trainer

#endif  // MOERL_SERVICES_TRAINER_RUN_SETTINGS_H_
