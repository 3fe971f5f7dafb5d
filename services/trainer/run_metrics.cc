#include "services/trainer/run_metrics.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "libs/base/metrics.h"
#include "services/trainer/admission.h"

namespace moerl::trainer {
namespace {

constexpr int64_t kSlotsAssumed = 64;  // of a server, while none is connected

// "TRAINER_PHASE_WARM_START": "warm_start".
std::string NameOf(v1::TrainerPhase phase) {
  return absl::AsciiStrToLower(v1::TrainerPhase_Name(phase).substr(std::string("TRAINER_PHASE_").size()));
}

// Of the tokens trained in a step, in versions.
double StalenessMax(const v1::StepMetrics& row) {
  int oldest = row.staleness_histogram_size() - 1;
  while (oldest > 0 && row.staleness_histogram(oldest) == 0) --oldest;
  return std::max(0, oldest);
}

double StalenessMean(const v1::StepMetrics& row) {
  double tokens = 0, sum = 0;
  for (int staleness = 0; staleness < row.staleness_histogram_size(); ++staleness) {
    tokens += static_cast<double>(row.staleness_histogram(staleness));
    sum += staleness * static_cast<double>(row.staleness_histogram(staleness));
  }
  return tokens > 0 ? sum / tokens : 0;
}

// Gauges that show the last step's row as it is.
struct RowGauge {
  const char* name;
  const char* help;
  double (*value)(const v1::StepMetrics& row);
};
using Row = const v1::StepMetrics&;
constexpr RowGauge kRowGauges[] = {
    {"reward_mean", "Mean reward of the last step's samples.", [](Row row) { return row.reward_mean(); }},
    {"pass_rate", "Fraction of the last step's samples that pass.", [](Row row) { return row.pass_rate(); }},
    {"max_abs_mismatch",
     "Largest difference of trainer and rollout log-probabilities in the last step; not 0 is a bug.",
     [](Row row) { return row.max_abs_mismatch(); }},
    {"loss", "Loss of the last step.", [](Row row) { return row.loss(); }},
    {"grad_norm", "Norm of the last step's gradient before clipping.", [](Row row) { return row.grad_norm(); }},
    {"learning_rate", "Learning rate of the last step.", [](Row row) { return row.learning_rate(); }},
    {"entropy", "Mean entropy of the policy over the last step's tokens.", [](Row row) { return row.entropy(); }},
    {"kl_reference", "KL divergence to the reference in the last step.", [](Row row) { return row.kl_reference(); }},
    {"clip_fraction", "Fraction of the last step's tokens that were clipped.",
     [](Row row) { return row.clip_fraction(); }},
    {"effective_sample_size", "Effective fraction of the last step's samples under their importance weights.",
     [](Row row) { return row.effective_sample_size(); }},
    {"response_length_mean", "Mean tokens of the last step's samples.",
     [](Row row) { return row.response_length_mean(); }},
    {"zero_variance_groups", "Groups of the last step whose rewards are all equal: they teach nothing.",
     [](Row row) { return static_cast<double>(row.num_zero_variance_groups()); }},
    {"expert_load_max_over_mean", "Tokens of the most loaded expert over the mean, the worst layer of the last step.",
     [](Row row) { return row.expert_load_max_over_mean(); }},
    {"dead_experts", "Experts without a token in the last step.",
     [](Row row) { return static_cast<double>(row.num_dead_experts()); }},
    {"staleness_max", "Oldest token trained in the last step, in versions.", StalenessMax},
    {"staleness_mean", "Mean age of the tokens trained in the last step, in versions.", StalenessMean},
};

Gauge& GaugeOf(const RowGauge& gauge) { return GetGauge(absl::StrCat("moerl_trainer_", gauge.name), gauge.help); }

Gauge& Groups(absl::string_view state) {
  return GetGauge("moerl_trainer_groups", "Groups of the run, by state.", {{"state", state}});
}

Counter& Dropped(DropReason reason) {
  const absl::string_view name = reason == DropReason::kVerifier  ? "verifier"
                                 : reason == DropReason::kLineage ? "lineage"
                                                                  : "no_signal";
  return GetCounter("moerl_trainer_groups_dropped_total",
                    "Groups dropped: the verifier failed, a fork left their tokens behind, or no signal.",
                    {{"reason", name}});
}

Counter& Samples(absl::string_view outcome) {
  return GetCounter("moerl_trainer_samples_total",
                    "Trajectories that came: recorded durably, superseded by an earlier outcome, failed by the "
                    "verifier, or refused for breaking a rule.",
                    {{"outcome", outcome}});
}

int64_t NumRefused(const ExperienceCounters& counters) {
  int64_t refused = 0;
  for (const auto& [rule, count] : counters.refused) refused += count;
  return refused;
}

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

RunMetrics::RunMetrics()
    : tokens_(GetCounter("moerl_trainer_tokens_total", "Tokens trained on.")),
      tokens_compared_(GetCounter("moerl_trainer_tokens_compared_total",
                                  "Tokens whose log-probability was compared with the rollout's.")),
      steps_skipped_(GetCounter("moerl_trainer_steps_skipped_total", "Updates skipped for a gradient not finite.")),
      step_seconds_(GetHistogram("moerl_trainer_step_seconds", "Duration of a step.", SecondsBounds())),
      wait_seconds_(
          GetHistogram("moerl_trainer_wait_seconds", "Part of a step spent waiting for samples.", SecondsBounds())) {
  for (int phase = v1::TRAINER_PHASE_STARTING; phase <= v1::TrainerPhase_MAX; ++phase) {
    const std::string name = NameOf(static_cast<v1::TrainerPhase>(phase));
    phases_[phase] = {&GetGauge("moerl_trainer_phase", "1 for what the run does now.", {{"phase", name}}),
                      &GetCounter("moerl_trainer_phase_seconds_total", "Time spent in a phase.", {{"phase", name}})};
  }
  for (const RowGauge& gauge : kRowGauges) GaugeOf(gauge);
  GetGauge("moerl_trainer_last_step_timestamp_seconds", "When the last step ended, in seconds since the Unix epoch.")
      .Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
}

void RunMetrics::ObservePhase(v1::TrainerPhase phase, absl::Duration now) {
  if (phase_ != nullptr) {
    phase_->seconds->Add(absl::ToDoubleSeconds(std::max(absl::ZeroDuration(), now - phase_seen_)));
    phase_->is_current->Set(0);
  }
  phase_ = &phases_.at(phase);
  phase_->is_current->Set(1);
  phase_seen_ = now;
}

void RunMetrics::Observe(const Experience& experience, int64_t step) {
  static Gauge& wanted = GetGauge("moerl_trainer_rollouts_wanted", "Rollout servers that would keep the trainer busy.");
  static Gauge& connected = GetGauge("moerl_trainer_rollouts_connected", "Rollout servers that have said hello.");
  static Gauge& slots = GetGauge("moerl_trainer_slots", "Samples that the connected servers take at once.");
  static Gauge& leases = GetGauge("moerl_trainer_leases", "Groups leased to connected servers.");
  static Gauge& steps_done = GetGauge("moerl_trainer_step", "Steps done.");
  static Gauge& num_steps = GetGauge("moerl_trainer_num_steps", "Steps in the run.");
  static Gauge& ranks = GetGauge("moerl_trainer_ranks", "Ranks that compute a step.");
  static Gauge& version = GetGauge("moerl_trainer_weight_version", "Number of the newest version that is READY.");
  static Gauge& checkpoint = GetGauge("moerl_trainer_checkpoint_step", "Step of the newest checkpoint that counts.");
  static Gauge& bound = GetGauge("moerl_trainer_staleness_bound", "Versions that a token may be behind when trained.");
  static Gauge& open = Groups("open");
  static Gauge& finished = Groups("finished");
  static Gauge& trained = Groups("trained");
  static Gauge& dropped = Groups("dropped");
  static Counter& recorded = Samples("recorded");
  static Counter& superseded = Samples("superseded");
  static Counter& failed = Samples("failed");
  static Counter& refused = Samples("refused");
  static Counter& expired = GetCounter("moerl_trainer_leases_expired_total", "Leases whose worker went silent.");

  int64_t num_connected = 0, num_slots = 0, num_leases = 0;
  for (const auto& [name, worker] : experience.Workers()) {
    if (!worker.is_connected) continue;
    ++num_connected;
    num_slots += worker.num_slots;
    num_leases += worker.num_leases;
  }
  wanted.Set(static_cast<double>(RolloutsWanted(experience)));
  connected.Set(static_cast<double>(num_connected));
  slots.Set(static_cast<double>(num_slots));
  leases.Set(static_cast<double>(num_leases));

  const LedgerState& state = experience.state();
  const ExperienceOptions& options = experience.options();
  steps_done.Set(static_cast<double>(step));
  num_steps.Set(static_cast<double>(options.num_steps));
  ranks.Set(static_cast<double>(options.ranks));
  version.Set(static_cast<double>(experience.ready()));
  checkpoint.Set(state.checkpoints.empty() ? 0 : static_cast<double>(state.checkpoints.back().step));
  bound.Set(static_cast<double>(options.staleness));
  const auto num_open = static_cast<int64_t>(experience.open_groups().size());
  const int64_t num_trained = step * options.batch_groups;
  open.Set(static_cast<double>(num_open));
  trained.Set(static_cast<double>(num_trained));
  finished.Set(static_cast<double>(std::max<int64_t>(0, state.NumUndropped() - num_open - num_trained)));
  dropped.Set(static_cast<double>(state.dropped.size()));

  const ExperienceCounters& now = experience.counters();
  recorded.Add(static_cast<double>(now.recorded - last_.recorded));
  superseded.Add(static_cast<double>(now.superseded - last_.superseded));
  failed.Add(static_cast<double>(now.failed - last_.failed));
  refused.Add(static_cast<double>(NumRefused(now) - NumRefused(last_)));
  expired.Add(static_cast<double>(now.leases_expired - last_.leases_expired));
  for (const DropReason reason : {DropReason::kVerifier, DropReason::kLineage, DropReason::kNoSignal}) {
    const auto count = [reason](const ExperienceCounters& counters) {
      const auto it = counters.dropped.find(reason);
      return it == counters.dropped.end() ? 0 : it->second;
    };
    Dropped(reason).Add(static_cast<double>(count(now) - count(last_)));
  }
  last_ = now;
}

void RunMetrics::ObserveStep(const v1::StepMetrics& row) {
  for (const RowGauge& gauge : kRowGauges) GaugeOf(gauge).Set(gauge.value(row));
  GetGauge("moerl_trainer_last_step_timestamp_seconds", "").Set(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()));
  tokens_.Add(static_cast<double>(row.trained_tokens()));
  tokens_compared_.Add(static_cast<double>(row.mismatch_tokens()));
  if (row.is_skipped()) steps_skipped_.Add();
  step_seconds_.Observe(row.step_seconds());
  wait_seconds_.Observe(row.wait_seconds());
}

}  // namespace moerl::trainer
