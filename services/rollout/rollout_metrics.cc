#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

constexpr double kIterationBounds[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

}  // namespace

RolloutMetrics::RolloutMetrics()
    : num_requests_running(GetGauge("moerl_rollout_num_requests_running", "Samples in the batch.")),
      num_requests_waiting(
          GetGauge("moerl_rollout_num_requests_waiting", "Samples that wait for a place in the batch.")),
      kv_cache_usage_perc(
          GetGauge("moerl_rollout_kv_cache_usage_perc", "Share of the KV cache's pages in use; 1 is full.")),
      prompt_tokens_total(GetCounter("moerl_rollout_prompt_tokens_total", "Prompt tokens of accepted samples.")),
      generation_tokens_total(GetCounter("moerl_rollout_generation_tokens_total", "Tokens sampled.")),
      num_preemptions_total(GetCounter("moerl_rollout_num_preemptions_total", "Samples put back for want of pages.")),
      prefix_cache_queries_total(GetCounter("moerl_rollout_prefix_cache_queries_total",
                                            "Prompt tokens that a shared prefill could have served.")),
      prefix_cache_hits_total(
          GetCounter("moerl_rollout_prefix_cache_hits_total", "Prompt tokens that a shared prefill served.")),
      recomputed_samples_total(GetCounter("moerl_rollout_recomputed_samples_total",
                                          "Samples whose keys and values were rebuilt for new weights.")),
      time_to_first_token_seconds(GetHistogram("moerl_rollout_time_to_first_token_seconds",
                                               "From the acceptance of a Generate call to its first token.",
                                               SecondsBounds())),
      e2e_request_latency_seconds(GetHistogram("moerl_rollout_e2e_request_latency_seconds",
                                               "From the acceptance of a Generate call to its end.", SecondsBounds())),
      iteration_tokens(GetHistogram("moerl_rollout_iteration_tokens", "Tokens sampled by one step.", kIterationBounds)),
      flip_seconds(
          GetHistogram("moerl_rollout_flip_seconds", "Pause of sampling to change weights.", SecondsBounds())) {}

RolloutMetrics& Metrics() {
  static auto& metrics = *new RolloutMetrics();
  return metrics;
}

void RolloutMetrics::Report(const model::GeneratorLoad& load, int64_t num_new_tokens) {
  const auto add = [](Counter& counter, int64_t now, int64_t before) {
    if (now > before) counter.Add(static_cast<double>(now - before));
  };
  num_requests_running.Set(static_cast<double>(load.running_samples));
  num_requests_waiting.Set(static_cast<double>(load.waiting_samples));
  if (load.pages_total > 0) {
    kv_cache_usage_perc.Set(static_cast<double>(load.pages_used) / static_cast<double>(load.pages_total));
  }
  add(prompt_tokens_total, load.prompt_tokens_total, last_.prompt_tokens_total);
  add(prefix_cache_queries_total, load.prompt_tokens_total, last_.prompt_tokens_total);
  add(prefix_cache_hits_total, load.prefix_hit_tokens_total, last_.prefix_hit_tokens_total);
  add(num_preemptions_total, load.preemptions_total, last_.preemptions_total);
  add(recomputed_samples_total, load.recomputed_samples_total, last_.recomputed_samples_total);
  if (num_new_tokens > 0) {
    generation_tokens_total.Add(static_cast<double>(num_new_tokens));
    iteration_tokens.Observe(static_cast<double>(num_new_tokens));
  }
  last_ = load;
}

void CountFinished(model::FinishReason reason) {
  static const auto count = [](absl::string_view name) -> Counter& {
    return GetCounter("moerl_rollout_request_success_total", "Samples that ended, by reason.",
                      {{"finished_reason", name}});
  };
  static Counter& stop = count("stop");
  static Counter& length = count("length");
  static Counter& abort = count("abort");
  Counter& counter = reason == model::FinishReason::kStop     ? stop
                     : reason == model::FinishReason::kLength ? length
                                                              : abort;
  counter.Add();
}

}  // namespace moerl::rollout
