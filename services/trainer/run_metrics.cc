#include "services/trainer/run_metrics.h"

#include <algorithm>
#include <limits>

#include "libs/base/metrics.h"
#include "services/trainer/admission.h"

namespace moerl::trainer {
namespace {

constexpr int64_t kSlotsAssumed = 64;  // of a server, while none is connected

}  // namespace

int64_t RolloutsWanted(const Experience& experience) {
  const ExperienceOptions& options = experience.options();
  int64_t slots = 0;
  int64_t num_workers = 0;
  for (const auto& [name, worker] : experience.Workers()) {
    slots += worker.is_connected ? worker.num_slots : 0;
    num_workers += worker.is_connected ? 1 : 0;
  }
  const int64_t each = num_workers > 0 ? std::max<int64_t>(1, slots / num_workers) : kSlotsAssumed;
  const int64_t could_be_admitted =
      NumAdmissible(experience.state(), std::numeric_limits<int64_t>::max(), options.staleness, experience.ready(),
                    options.num_steps, options.batch_groups);
  const auto open = static_cast<int64_t>(experience.open_groups().size());
  const int64_t samples = (open + could_be_admitted) * experience.state().group_size;
  return std::max<int64_t>(1, (samples + each - 1) / each);
}

void RunMetrics::Observe(const Experience& experience) {
  static Gauge& wanted = GetGauge("moerl_trainer_rollouts_wanted", "Rollout servers that would keep the trainer busy.");
  static Gauge& open = GetGauge("moerl_trainer_groups_open", "Groups admitted and not decided.");
  static Counter& recorded = GetCounter("moerl_trainer_samples_recorded_total", "Samples made durable.");
  static Counter& superseded = GetCounter("moerl_trainer_samples_superseded_total", "Outcomes that came too late.");
  static Counter& failed = GetCounter("moerl_trainer_samples_failed_total", "Verifier failures; each dropped a group.");
  static Counter& expired = GetCounter("moerl_trainer_leases_expired_total", "Leases whose worker went silent.");
  static Counter& refused = GetCounter("moerl_trainer_samples_refused_total", "Trajectories that broke a rule.");
  const ExperienceCounters& now = experience.counters();
  int64_t refused_now = 0;
  int64_t refused_before = 0;
  for (const auto& [rule, count] : now.refused) refused_now += count;
  for (const auto& [rule, count] : last_.refused) refused_before += count;
  wanted.Set(static_cast<double>(RolloutsWanted(experience)));
  open.Set(static_cast<double>(experience.open_groups().size()));
  recorded.Add(static_cast<double>(now.recorded - last_.recorded));
  superseded.Add(static_cast<double>(now.superseded - last_.superseded));
  failed.Add(static_cast<double>(now.failed - last_.failed));
  expired.Add(static_cast<double>(now.leases_expired - last_.leases_expired));
  refused.Add(static_cast<double>(refused_now - refused_before));
  last_ = now;
}

void RunMetrics::ObserveStep(const v1::StepMetrics& row) {
  static Gauge& step = GetGauge("moerl_trainer_step", "Steps done.");
  static Gauge& reward = GetGauge("moerl_trainer_reward_mean", "Mean reward of the last step's samples.");
  static Gauge& pass_rate = GetGauge("moerl_trainer_pass_rate", "Fraction of the last step's samples that pass.");
  static Gauge& mismatch =
      GetGauge("moerl_trainer_mismatch_abs_max", "Largest difference of trainer and rollout log-probabilities.");
  static Counter& tokens = GetCounter("moerl_trainer_tokens_total", "Tokens trained on.");
  static Histogram& seconds = GetHistogram("moerl_trainer_step_seconds", "Duration of a step.", SecondsBounds());
  static Histogram& waiting =
      GetHistogram("moerl_trainer_wait_seconds", "Part of a step spent waiting for samples.", SecondsBounds());
  step.Set(static_cast<double>(row.step()));
  reward.Set(row.reward_mean());
  pass_rate.Set(row.pass_rate());
  mismatch.Set(row.max_abs_mismatch());
  tokens.Add(static_cast<double>(row.trained_tokens()));
  seconds.Observe(row.step_seconds());
  waiting.Observe(row.wait_seconds());
}

}  // namespace moerl::trainer
