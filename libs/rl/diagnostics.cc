#include "libs/rl/diagnostics.h"

#include <algorithm>

#include "libs/base/check.h"

namespace moerl::rl {
namespace {

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole);
}

double Mean(double sum, int64_t count) { return count == 0 ? 0.0 : sum / static_cast<double>(count); }

}  // namespace

UpdateSummary Summarize(std::vector<SampleReport> reports) {
  std::sort(reports.begin(), reports.end(),
            [](const SampleReport& a, const SampleReport& b) { return a.ordinal < b.ordinal; });
  UpdateSummary out;
  SampleReport sum;
  bool has_ratio = false;
  for (const SampleReport& report : reports) {
    ++out.num_samples;
    out.num_empty_samples += report.num_tokens == 0;
    out.num_tokens += report.num_tokens;
    out.policy_loss += report.policy_loss;
    out.kl_loss += report.kl_loss;
    out.value_loss += report.value_loss;
    out.entropy_loss += report.entropy_loss;
    sum.sum_logp += report.sum_logp;
    sum.sum_entropy += report.sum_entropy;
    sum.sum_ratio += report.sum_ratio;
    sum.sum_kl_old += report.sum_kl_old;
    sum.sum_kl_ref += report.sum_kl_ref;
    sum.num_clipped_low += report.num_clipped_low;
    sum.num_clipped_high += report.num_clipped_high;
    sum.num_value_clipped += report.num_value_clipped;
    sum.correction.Add(report.correction);
    sum.mismatch_tokens += report.mismatch_tokens;
    sum.sum_abs_mismatch += report.sum_abs_mismatch;
    sum.max_abs_mismatch = std::max(sum.max_abs_mismatch, report.max_abs_mismatch);
    sum.sum_mismatch_kl += report.sum_mismatch_kl;
    for (int i = 0; i < kStalenessBuckets; ++i) out.staleness[i] += report.staleness[i];
    if (report.num_tokens == 0) continue;
    out.max_ratio = has_ratio ? std::max(out.max_ratio, report.max_ratio) : report.max_ratio;
    out.min_ratio = has_ratio ? std::min(out.min_ratio, report.min_ratio) : report.min_ratio;
    has_ratio = true;
  }
  out.loss = out.policy_loss + out.kl_loss + out.value_loss + out.entropy_loss;
  if (out.num_tokens == 0) return out;
  out.mean_logp = Mean(sum.sum_logp, out.num_tokens);
  out.mean_entropy = Mean(sum.sum_entropy, out.num_tokens);
  out.mean_ratio = Mean(sum.sum_ratio, out.num_tokens);
  out.kl_old = Mean(sum.sum_kl_old, out.num_tokens);
  out.kl_ref = Mean(sum.sum_kl_ref, out.num_tokens);
  out.clip_fraction_low = Share(sum.num_clipped_low, out.num_tokens);
  out.clip_fraction_high = Share(sum.num_clipped_high, out.num_tokens);
  out.clip_fraction = out.clip_fraction_low + out.clip_fraction_high;
  out.value_clip_fraction = Share(sum.num_value_clipped, out.num_tokens);
  out.correction_truncated_fraction = Share(sum.correction.num_truncated, out.num_tokens);
  out.correction_masked_fraction = Share(sum.correction.num_masked, out.num_tokens);
  out.effective_sample_fraction = sum.correction.effective_fraction();
  out.mismatch_tokens = sum.mismatch_tokens;
  out.mean_abs_mismatch = Mean(sum.sum_abs_mismatch, sum.mismatch_tokens);
  out.max_abs_mismatch = sum.max_abs_mismatch;
  out.mismatch_kl = Mean(sum.sum_mismatch_kl, sum.mismatch_tokens);
  return out;
}

ExpertLoad DescribeExpertLoad(std::span<const int64_t> counts, int32_t num_layers, int32_t num_experts) {
  MOERL_CHECK(num_layers >= 0 && num_experts > 0);
  MOERL_CHECK(counts.size() == static_cast<size_t>(num_layers) * static_cast<size_t>(num_experts));
  ExpertLoad load;
  int32_t busy_layers = 0;
  for (int32_t layer = 0; layer < num_layers; ++layer) {
    const auto of_layer =
        counts.subspan(static_cast<size_t>(layer) * static_cast<size_t>(num_experts), static_cast<size_t>(num_experts));
    int64_t total = 0;
    for (int64_t count : of_layer) total += count;
    if (total == 0) continue;
    ++busy_layers;
    const double mean = static_cast<double>(total) / static_cast<double>(num_experts);
    const double ratio = static_cast<double>(*std::max_element(of_layer.begin(), of_layer.end())) / mean;
    load.max_over_mean = std::max(load.max_over_mean, ratio);
    load.mean_max_over_mean += ratio;
    for (int32_t expert = 0; expert < num_experts; ++expert) {
      if (of_layer[static_cast<size_t>(expert)] == 0) load.dead.push_back({layer, expert});
    }
  }
  if (busy_layers > 0) load.mean_max_over_mean /= busy_layers;
  return load;
}

bool DeadStartWatch::AddStep(int64_t num_informative_groups) {
  steps_without_ = num_informative_groups > 0 ? 0 : steps_without_ + 1;
  return steps_without_ == patience_;
}

}  // namespace moerl::rl
