#include "services/trainer/run_settings.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>
#include <thread>

#include "absl/strings/str_cat.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"
#include "libs/environment/task.h"
#include "libs/rl/char_tokenizer.h"

namespace moerl::trainer {
namespace {

absl::StatusOr<model::ModelConfig> FreshModel(const v1::ModelInit& init, bool is_synthetic) {
  const auto vocab_size =
      init.vocab_size() == 0 && is_synthetic ? rl::CharTokenizer::kVocabSize : static_cast<int64_t>(init.vocab_size());
  nlohmann::json json = {{"model_type", init.architecture()},
                         {"vocab_size", vocab_size},
                         {"hidden_size", init.hidden_size()},
                         {"num_hidden_layers", init.num_hidden_layers()},
                         {"num_attention_heads", init.num_attention_heads()},
                         {"num_key_value_heads", init.num_key_value_heads()},
                         {"head_dim", init.head_dim()},
                         {"intermediate_size", init.intermediate_size()},
                         {"max_position_embeddings", init.max_position_embeddings()},
                         {"rope_theta", init.rope_theta()},
                         {"rms_norm_eps", 1e-6},
                         {"hidden_act", "silu"},
                         {"tie_word_embeddings", init.tie_word_embeddings()}};
  if (is_synthetic) json["eos_token_id"] = rl::CharTokenizer::kEndOfSequence;
  if (init.architecture() == "mixtral") {
    json["num_local_experts"] = init.num_experts();
    json["num_experts_per_tok"] = init.num_experts_per_tok();
    json["intermediate_size"] = init.moe_intermediate_size();
  } else if (init.architecture() == "olmoe") {
    json["num_experts"] = init.num_experts();
    json["num_experts_per_tok"] = init.num_experts_per_tok();
    json["intermediate_size"] = init.moe_intermediate_size();
    json["norm_topk_prob"] = init.norm_topk_prob();
  } else if (init.architecture() == "qwen3_moe" || init.architecture() == "qwen2_moe") {
    json["num_experts"] = init.num_experts();
    json["num_experts_per_tok"] = init.num_experts_per_tok();
    json["moe_intermediate_size"] = init.moe_intermediate_size();
    json["norm_topk_prob"] = init.norm_topk_prob();
    json["decoder_sparse_step"] = 1;
    json["mlp_only_layers"] = nlohmann::json::array();
    if (init.architecture() == "qwen2_moe") json["shared_expert_intermediate_size"] = 0;
  }
  if (init.architecture() == "glm4_moe") {
    json["n_routed_experts"] = init.num_experts();
    json["num_experts_per_tok"] = init.num_experts_per_tok();
    json["moe_intermediate_size"] = init.moe_intermediate_size();
    json["norm_topk_prob"] = init.norm_topk_prob();
    json["first_k_dense_replace"] = 0;
  }
  return model::ParseConfig(json.dump());
}

rl::AlgorithmOptions Algorithm(const v1::Config& config) {
  const v1::AlgorithmConfig& from = config.algorithm();
  rl::AlgorithmOptions to;
  to.name = from.name();
  const auto copy = [](bool has, auto value, auto& target) {
    if (has) target = static_cast<typename std::decay_t<decltype(target)>::value_type>(value);
  };
  copy(from.has_clip_low(), from.clip_low(), to.clip_low);
  copy(from.has_clip_high(), from.clip_high(), to.clip_high);
  copy(from.has_dual_clip(), from.dual_clip(), to.dual_clip);
  copy(from.aggregation() != 0, from.aggregation() - 1, to.aggregation);
  copy(from.has_length_norm(), from.length_norm(), to.length_norm);
  copy(from.has_gamma(), from.gamma(), to.gamma);
  copy(from.has_gae_lambda(), from.gae_lambda(), to.gae_lambda);
  copy(from.has_value_clip(), from.value_clip(), to.value_clip);
  copy(from.has_value_coefficient(), from.value_coefficient(), to.value_coefficient);
  copy(from.has_kl_coefficient(), from.kl_coefficient(), to.kl_coefficient);
  copy(from.kl_estimator() != 0, from.kl_estimator(), to.kl_estimator);
  copy(from.kl_place() != 0, from.kl_place() - 1, to.kl_place);
  copy(from.has_kl_target(), from.kl_target(), to.kl_target);
  copy(from.off_policy() != 0, from.off_policy() - 1, to.off_policy);
  copy(from.has_off_policy_cap(), from.off_policy_cap(), to.off_policy_cap);
  copy(from.has_off_policy_low(), from.off_policy_low(), to.off_policy_low);
  copy(from.has_entropy_coefficient(), from.entropy_coefficient(), to.entropy_coefficient);
  copy(from.has_routing_replay(), from.routing_replay(), to.routing_replay);
  copy(from.has_num_mini_batches(), from.num_mini_batches(), to.num_mini_batches);
  copy(from.has_num_epochs(), from.num_epochs(), to.num_epochs);
  copy(from.has_dynamic_sampling_refills(), from.dynamic_sampling_refills(), to.dynamic_sampling_refills);
  copy(from.has_overlong_cache_tokens(), from.overlong_cache_tokens(), to.overlong_cache_tokens);
  to.max_new_tokens = config.rollout().sampling().max_new_tokens();
  to.samples_per_prompt = config.trainer().samples_per_prompt();
  return to;
}

// As workers get it: with every token that ends a completion.
v1::SamplingParams LeaseSampling(const v1::Config& config, const model::ModelConfig& model) {
  v1::SamplingParams sampling = config.rollout().sampling();
  sampling.clear_stop_token_ids();
  for (int32_t id : StopTokens(config, model.eos_token_ids)) sampling.add_stop_token_ids(static_cast<uint32_t>(id));
  return sampling;
}

rl::RouteShape RoutesOfAToken(const model::ModelConfig& model) {
  return {1, model.num_moe_layers(), static_cast<int32_t>(model.top_k), static_cast<int32_t>(model.num_experts)};
}

}  // namespace

v1::Config ReplayConfig(const v1::Config& config) {
  v1::Config replay;
  *replay.mutable_model() = config.model();
  replay.mutable_model()->clear_path();
  *replay.mutable_algorithm() = config.algorithm();
  *replay.mutable_rollout()->mutable_sampling() = config.rollout().sampling();
  const v1::TrainerConfig& from = config.trainer();
  v1::TrainerConfig& to = *replay.mutable_trainer();
  to.set_samples_per_prompt(from.samples_per_prompt());
  to.set_learning_rate(from.learning_rate());
  to.set_min_learning_rate(from.min_learning_rate());
  to.set_warmup_steps(from.warmup_steps());
  to.set_schedule(from.schedule());
  if (from.schedule() == v1::SCHEDULE_COSINE) to.set_num_steps(from.num_steps());
  to.set_beta1(from.beta1());
  to.set_beta2(from.beta2());
  to.set_epsilon(from.epsilon());
  to.set_weight_decay(from.weight_decay());
  to.set_max_grad_norm(from.max_grad_norm());
  to.set_micro_batch_tokens(from.micro_batch_tokens());
  return replay;
}

absl::StatusOr<RunSettings> ResolveRunSettings(const v1::Config& config) {
  RunSettings settings;
  settings.config = config;
  if (config.trainer().run_directory().empty())
    settings.config.mutable_trainer()->set_run_directory("runs/" + config.name());
  const bool is_synthetic = IsSynthetic(config.task());
  if (!config.model().path().empty()) {
    MOERL_ASSIGN_OR_RETURN(settings.model, model::LoadConfig(config.model().path()));
  } else {
    MOERL_ASSIGN_OR_RETURN(settings.model, FreshModel(config.model().init(), is_synthetic));
  }
  if (config.algorithm().router_bias_update_rate() > 0 &&
      (!settings.model.has_router_bias || settings.model.num_moe_layers() == 0)) {
    return absl::InvalidArgumentError(
        absl::StrCat("config: algorithm.router_bias_update_rate: ", model::ModelType(settings.model.family),
                     " has no router bias to move; set 0 and balance with aux_loss_coefficient, or take a glm4_moe"));
  }
  settings.compute = config.model().compute() == v1::COMPUTE_FP32 ? model::Compute::kFp32 : model::Compute::kBf16;
  MOERL_ASSIGN_OR_RETURN(settings.recipe, rl::MakeRecipe(Algorithm(config)));
  settings.lease_sampling = LeaseSampling(config, settings.model);
  const v1::SamplingParams& sampling = settings.lease_sampling;
  if (sampling.max_new_tokens() == 0) {
    return absl::InvalidArgumentError("config: rollout.sampling.max_new_tokens: needed, at least 1");
  }
  if (sampling.max_new_tokens() >= settings.model.max_position) {
    return absl::InvalidArgumentError(absl::StrCat(
        "config: rollout.sampling.max_new_tokens: ", sampling.max_new_tokens(),
        " and a prompt do not fit the model's context of ", settings.model.max_position, " positions; lower it"));
  }
  settings.sampling = {sampling.has_temperature() ? sampling.temperature() : 1.0,
                       sampling.has_top_p() ? sampling.top_p() : 1.0, sampling.min_p(),
                       static_cast<int32_t>(sampling.top_k())};
  const v1::WarmStartConfig& warm = config.trainer().warm_start();
  settings.warm_start = {warm.pass_rate_min(), warm.pass_rate_max(), warm.max_steps(), warm.measure_every_steps()};
  if (is_synthetic) {
    settings.end_of_sequence = rl::CharTokenizer::kEndOfSequence;
  } else if (!settings.model.eos_token_ids.empty()) {
    settings.end_of_sequence = static_cast<int32_t>(settings.model.eos_token_ids.front());
  }
  MOERL_ASSIGN_OR_RETURN(settings.codec, LoadCodec(config.task()));
  MOERL_ASSIGN_OR_RETURN(TaskPrompts prompts, LoadPrompts(config.task()));
  settings.prompts = std::move(prompts.train);
  settings.held_out = std::move(prompts.held_out);
  settings.supervised = std::move(prompts.warm_start);
  if (settings.warm_start.max_steps > 0 && !settings.supervised) {
    return absl::InvalidArgumentError(absl::StrCat("config: trainer.warm_start.max_steps: task \"",
                                                   config.task().name(), "\" has no solutions to imitate; set 0"));
  }
  settings.numerics_fingerprint = model::NumericsFingerprint(settings.model, settings.compute);
  if (settings.recipe.routing_replay) settings.token_routes = RoutesOfAToken(settings.model);
  const auto cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  settings.num_threads = config.trainer().num_threads() > 0 ? static_cast<int>(config.trainer().num_threads()) : cores;
  return settings;
}

double RunSettings::LearningRate(int64_t step) const {
  const v1::TrainerConfig& trainer = config.trainer();
  const double peak = trainer.learning_rate();
  const auto warmup = static_cast<int64_t>(trainer.warmup_steps());
  if (step <= warmup) return peak * static_cast<double>(step) / static_cast<double>(warmup);
  if (trainer.schedule() != v1::SCHEDULE_COSINE) return peak;
  const double span = std::max<double>(1.0, static_cast<double>(trainer.num_steps()) - static_cast<double>(warmup));
  const double progress = std::min(1.0, static_cast<double>(step - warmup) / span);
  const double low = trainer.min_learning_rate();
  return low + 0.5 * (peak - low) * (1.0 + std::cos(std::numbers::pi * progress));
}

std::string RunSettings::RunPath(const std::string& name) const {
  return JoinPath(config.trainer().run_directory(), name);
}

}  // namespace moerl::trainer
