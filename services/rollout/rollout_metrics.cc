#include "services/rollout/rollout_metrics.h"

namespace moerl::rollout {
namespace {

constexpr double kIterationBounds[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192};

Gauge& LeasedSamples(absl::string_view state) {
  return GetGauge("moerl_rollout_samples",
                  "Leased samples: waiting for weights they may sample from or for their turn, running, or judged.",
                  {{"state", state}});
}

Counter& CounterOfFinished(model::FinishReason reason) {
  const absl::string_view name = reason == model::FinishReason::kStop     ? "stop"
                                 : reason == model::FinishReason::kLength ? "length"
                                                                          : "abort";
  return GetCounter("moerl_rollout_request_success_total", "Samples that ended, by reason.",
                    {{"finished_reason", name}});
}

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
      busy_seconds_total(GetCounter("moerl_rollout_busy_seconds_total", "Time spent in steps of the engine.")),
      num_slots(GetGauge("moerl_rollout_num_slots", "Leased samples this server takes at once.")),
      weight_version(GetGauge("moerl_rollout_weight_version", "Number of the version that samples; -1 before any.")),
      trainer_connected(GetGauge("moerl_rollout_trainer_connected", "1 while the trainer has welcomed this server.")),
      leases(GetGauge("moerl_rollout_leases", "Leases held.")),
      samples_waiting(LeasedSamples("waiting")),
      samples_running(LeasedSamples("running")),
      samples_judged(LeasedSamples("judged")),
      judge_failures_total(GetCounter("moerl_rollout_judge_failures_total", "Samples without a valid reward.")),
      request_queue_time_seconds(GetHistogram("moerl_rollout_request_queue_time_seconds",
                                              "A sample's time in the queue before its first place in the batch.",
                                              SecondsBounds())),
      time_to_first_token_seconds(GetHistogram("moerl_rollout_time_to_first_token_seconds",
                                               "From a sample's joining the queue to its first token.",
                                               SecondsBounds())),
      inter_token_latency_seconds(GetHistogram("moerl_rollout_inter_token_latency_seconds",
                                               "Between two tokens of a sample.", SecondsBounds())),
      e2e_request_latency_seconds(GetHistogram("moerl_rollout_e2e_request_latency_seconds",
                                               "From a sample's joining the queue to its end.", SecondsBounds())),
      iteration_tokens(GetHistogram("moerl_rollout_iteration_tokens", "Tokens sampled by one step.", kIterationBounds)),
      judge_seconds(GetHistogram("moerl_rollout_judge_seconds",
                                 "From a sample's end to its reward, the queue for the environment included.",
                                 SecondsBounds())),
      pack_seconds(
          GetHistogram("moerl_rollout_pack_seconds", "Packing a staged version for the engine.", SecondsBounds())),
      flip_seconds(
          GetHistogram("moerl_rollout_flip_seconds", "Pause of sampling to change weights.", SecondsBounds())) {
  weight_version.Set(-1);
  for (auto reason : {model::FinishReason::kStop, model::FinishReason::kLength, model::FinishReason::kAbort}) {
    CounterOfFinished(reason);
  }
}

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
  static Counter& stop = CounterOfFinished(model::FinishReason::kStop);
  static Counter& length = CounterOfFinished(model::FinishReason::kLength);
  static Counter& abort = CounterOfFinished(model::FinishReason::kAbort);
  Counter& counter = reason == model::FinishReason::kStop     ? stop
                     : reason == model::FinishReason::kLength ? length
                                                              : abort;
  counter.Add();
}

}  // namespace moerl::rollout
