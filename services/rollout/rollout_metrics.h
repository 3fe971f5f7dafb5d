#ifndef MOERL_SERVICES_ROLLOUT_ROLLOUT_METRICS_H_
#define MOERL_SERVICES_ROLLOUT_ROLLOUT_METRICS_H_

#include "libs/base/metrics.h"
#include "libs/model/generator.h"

namespace moerl::rollout {

// This server's metrics. Where a name means what it means in vLLM (vllm:num_requests_running), it is the same
// after the prefix moerl_rollout_; a "request" is one sample.
struct RolloutMetrics {
  Gauge& num_requests_running;
  Gauge& num_requests_waiting;
  Gauge& kv_cache_usage_perc;  // 1 is full
  Counter& prompt_tokens_total;
  Counter& generation_tokens_total;
  Counter& num_preemptions_total;
  Counter& prefix_cache_queries_total;
  Counter& prefix_cache_hits_total;
  Counter& recomputed_samples_total;
  Counter& busy_seconds_total;
  Gauge& num_slots;
  Gauge& weight_version;
  Gauge& trainer_connected;
  Gauge& leases;
  Gauge& samples_waiting;
  Gauge& samples_running;
  Gauge& samples_judged;
  Counter& judge_failures_total;
  Histogram& request_queue_time_seconds;
  Histogram& time_to_first_token_seconds;
  Histogram& inter_token_latency_seconds;
  Histogram& e2e_request_latency_seconds;
  Histogram& iteration_tokens;
  Histogram& judge_seconds;
  Histogram& pack_seconds;
  Histogram& flip_seconds;

  // Takes over the engine's counters.
  void Report(const model::GeneratorLoad& load, int64_t num_new_tokens);

 private:
  model::GeneratorLoad last_ = {};  // of the scheduler's thread

  friend RolloutMetrics& Metrics();
  RolloutMetrics();
};

RolloutMetrics& Metrics();

// request_success_total{finished_reason}: stop, length or abort.
void CountFinished(model::FinishReason reason);

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_ROLLOUT_METRICS_H_
