#ifndef MOERL_TESTS_UNIT_ROLLOUT_ROLLOUT_FIXTURE_H_
#define MOERL_TESTS_UNIT_ROLLOUT_ROLLOUT_FIXTURE_H_

#include <memory>

#include "libs/base/check.h"
#include "libs/model/weights.h"
#include "libs/rl/char_tokenizer.h"
#include "services/rollout/scheduler.h"

namespace moerl::rollout {

// A small Qwen3-MoE over the characters of the synthetic tasks. Its weights are random: it rarely stops.
inline std::shared_ptr<const model::Weights> RandomWeights(uint64_t seed) {
  model::ModelConfig config;
  config.vocab_size = rl::CharTokenizer::kVocabSize;
  config.hidden_size = 32;
  config.num_layers = 2;
  config.num_heads = config.num_kv_heads = 2;
  config.head_dim = 16;
  config.max_position = 4096;
  config.qk_norm = model::QkNorm::kPerHead;
  config.layer_has_experts = {true, true};
  config.num_experts = 4;
  config.top_k = 2;
  config.moe_intermediate_size = 32;
  config.norm_topk_prob = true;
  model::WeightsOptions options;
  options.compute = model::Compute::kFp32;
  auto weights = model::Weights::FromTensors(config, model::RandomParameters(config, seed).views(), options);
  MOERL_CHECK(weights.ok());
  return *weights;
}

inline SchedulerOptions SmallScheduler() {
  SchedulerOptions options;
  options.engine.kv_cache_bytes = 64 << 20;
  options.engine.running_samples_max = 16;
  options.engine.prefill_chunk_tokens = 64;
  options.engine.waiting_requests_max = 1024;
  options.generate_queue_max = 64;
  options.leases.worker.name = "worker";
  options.leases.worker.incarnation = 1;
  options.leases.worker.num_slots = 16;
  options.leases.worker.progress_every_tokens = 8;
  options.leases.reward_min = 0;
  options.leases.reward_max = 1;
  return options;
}

}  // namespace moerl::rollout

#endif  // MOERL_TESTS_UNIT_ROLLOUT_ROLLOUT_FIXTURE_H_
