#include "services/rollout/leased_group.h"

#include <algorithm>

#include "libs/base/check.h"

namespace moerl::rollout {

model::SamplingParams SamplingFromProto(const v1::SamplingParams& from) {
  model::SamplingParams params;
  if (from.has_temperature()) params.temperature = from.temperature();
  if (from.has_top_k()) params.top_k = from.top_k();
  if (from.has_top_p()) params.top_p = from.top_p();
  if (from.has_min_p()) params.min_p = from.min_p();
  params.max_new_tokens = from.max_new_tokens();
  params.stop_token_ids.assign(from.stop_token_ids().begin(), from.stop_token_ids().end());
  for (const v1::TokenSequence& sequence : from.stop_sequences()) {
    params.stop_sequences.emplace_back(sequence.token_ids().begin(), sequence.token_ids().end());
  }
  return params;
}

LeasedGroup GroupFromProto(const v1::Lease& lease) {
  return {.prompt = {lease.prompt_token_ids().begin(), lease.prompt_token_ids().end()},
          .task = {lease.task().name(), lease.task().payload()},
          .sampling = SamplingFromProto(lease.sampling()),
          .run_seed = lease.run_seed(),
          .group_id = lease.group_id()};
}

std::optional<model::FinishReason> EndOf(const rl::TokenRun& tokens, size_t prompt_tokens,
                                         const model::SamplingParams& sampling, int64_t context_length) {
  const auto size = static_cast<int64_t>(tokens.size());
  if (size > 0 && tokens.trainable.back() != 0) {
    if (std::ranges::count(sampling.stop_token_ids, tokens.ids.back()) > 0) return model::FinishReason::kStop;
    for (const std::vector<int32_t>& sequence : sampling.stop_sequences) {
      if (sequence.size() <= tokens.ids.size() && std::equal(sequence.rbegin(), sequence.rend(), tokens.ids.rbegin())) {
        return model::FinishReason::kStop;
      }
    }
  }
  const int64_t room = std::min(sampling.max_new_tokens, context_length - static_cast<int64_t>(prompt_tokens));
  if (size >= room) return model::FinishReason::kLength;
  return std::nullopt;
}

RouteFormat RouteFormatOf(const model::ModelConfig& config) {
  return {.ids_per_token = config.num_moe_layers() * config.top_k, .bytes_per_id = config.num_experts <= 256 ? 1 : 2};
}

rl::TokenRun RunOf(const model::SampleOutput& output, int64_t prompt_tokens, const RouteFormat* routes) {
  rl::TokenRun run;
  run.ids = output.tokens;
  run.logprobs = output.logprobs;
  run.versions.assign(output.tokens.size(),
                      {static_cast<int64_t>(output.version.epoch), static_cast<int64_t>(output.version.number)});
  run.trainable.assign(output.tokens.size(), 1);
  run.kept_ids = output.kept_ids;
  for (size_t i = 0; i + 1 < output.kept_offsets.size(); ++i) {
    run.kept_counts.push_back(static_cast<int32_t>(output.kept_offsets[i + 1] - output.kept_offsets[i]));
  }
  if (routes == nullptr) return run;
  const auto width = static_cast<size_t>(routes->ids_per_token);
  const auto first = static_cast<size_t>(prompt_tokens + output.first_token - 1 - output.first_route);
  MOERL_CHECK((first + output.tokens.size()) * width <= output.routes.size());
  for (size_t i = first * width; i < (first + output.tokens.size()) * width; ++i) {
    run.routes.push_back(static_cast<char>(output.routes[i] & 0xff));
    if (routes->bytes_per_id == 2) run.routes.push_back(static_cast<char>(output.routes[i] >> 8));
  }
  return run;
}

std::vector<rl::Turn> TranscriptOf(const std::vector<int32_t>& prompt, const rl::TokenRun& tokens, bool is_truncated) {
  std::vector<rl::Turn> turns = {{.token_ids = prompt}};
  for (size_t i = 0; i < tokens.size(); ++i) {
    const bool is_action = tokens.trainable[i] != 0;
    if (turns.size() == 1 || turns.back().is_action != is_action)
      turns.push_back({.token_ids = {}, .is_action = is_action});
    turns.back().token_ids.push_back(tokens.ids[i]);
  }
  if (turns.back().is_action) turns.back().is_truncated = is_truncated;
  return turns;
}

}  // namespace moerl::rollout
