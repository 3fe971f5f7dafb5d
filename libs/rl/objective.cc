#include "libs/rl/objective.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/rl/loss_value.h"

namespace moerl::rl {
namespace {

// The last `count` entries of an array over a whole sequence: those of the completion.
template <typename T>
std::vector<double> Completion(std::span<const T> sequence, size_t count) {
  const std::span<const T> tail = sequence.last(count);
  return std::vector<double>(tail.begin(), tail.end());
}

template <typename T>
std::span<const T> View(const std::vector<T>& numbers) {
  return {numbers.data(), numbers.size()};
}

// INVALID_ARGUMENT unless `numbers` has one entry for each token of the sequence and those of trainable tokens are
// finite.
absl::Status CheckNumbers(const Sample& sample, size_t num_prompt_tokens, std::string_view name,
                          std::span<const float> numbers) {
  const TokenRun& run = sample.run;
  if (numbers.size() != num_prompt_tokens + run.size()) {
    return absl::InvalidArgumentError(absl::StrCat(SampleName(sample), ": ", std::string(name), " has ", numbers.size(),
                                                   " entries, expected ", num_prompt_tokens + run.size(),
                                                   " (prompt and completion)"));
  }
  for (size_t t = 0; t < run.size(); ++t) {
    const float number = numbers[num_prompt_tokens + t];
    if (run.trainable[t] == 0 || std::isfinite(number)) continue;
    return absl::InvalidArgumentError(absl::StrCat(SampleName(sample), ": ", std::string(name), " is ", number,
                                                   " at token ", t,
                                                   " of the completion; skip the update and keep the weights"));
  }
  return absl::OkStatus();
}

absl::Status CheckScores(const Recipe& recipe, const Sample& sample, size_t num_prompt_tokens,
                         const SampleScores& scores) {
  struct Needed {
    bool is_needed;
    std::string_view name;
    std::span<const float> numbers;
  };
  const Needed all[] = {{recipe.needs_old_logp(), "old_logp", scores.old_logp},
                        {recipe.needs_ref_logp(), "ref_logp", scores.ref_logp},
                        {recipe.needs_values(), "values", scores.values}};
  for (const Needed& needed : all) {
    if (!needed.is_needed && needed.numbers.empty()) continue;
    MOERL_RETURN_IF_ERROR(CheckNumbers(sample, num_prompt_tokens, needed.name, needed.numbers));
  }
  return absl::OkStatus();
}

double EffectiveTemperature(double temperature) { return temperature == 0.0 ? 1.0 : temperature; }

absl::Status CheckSampling(const Group& group, const StepContext& context) {
  const double found = EffectiveTemperature(group.sampling.temperature);
  const double expected = EffectiveTemperature(context.trainer_temperature);
  // Sampling parameters cross the wire in fp32.
  if (static_cast<float>(found) != static_cast<float>(expected)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "group ", group.group_id, ": sampled at temperature ", group.sampling.temperature, ", the trainer computes at ",
        context.trainer_temperature, "; ratios would be wrong: both sides must divide logits by the same"));
  }
  if (group.sampling.cuts_distribution() && !context.renormalises_kept_ids) {
    return absl::InvalidArgumentError(
        absl::StrCat("group ", group.group_id,
                     ": sampled with top-k, top-p or min-p, which the trainer does not renormalise; ratios ",
                     "would be wrong: sample from all ids or give the trainer the kept ids"));
  }
  return absl::OkStatus();
}

absl::Status CheckVersions(const Sample& sample, VersionName current) {
  for (size_t t = 0; t < sample.run.size(); ++t) {
    if (sample.run.trainable[t] == 0 || sample.run.versions[t].number <= current.number) continue;
    return absl::InvalidArgumentError(absl::StrCat(SampleName(sample), ": token ", t, " is of version ",
                                                   sample.run.versions[t].number, ", newer than the trainer's ",
                                                   current.number));
  }
  return absl::OkStatus();
}

void DescribeRatios(const TokenRun& run, std::span<const double> logp, std::span<const double> old_logp,
                    SampleReport& report) {
  report.min_ratio = std::numeric_limits<double>::infinity();
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0) continue;
    const double x = std::clamp(logp[t] - old_logp[t], -kMaxLogRatio, kMaxLogRatio);
    const double r = std::exp(x);
    report.sum_logp += logp[t];
    report.sum_ratio += r;
    report.max_ratio = std::max(report.max_ratio, r);
    report.min_ratio = std::min(report.min_ratio, r);
    report.sum_kl_old += std::expm1(x) - x;
  }
  if (report.num_tokens == 0) report.min_ratio = 0.0;
}

// How old each token is, and for tokens of the weights that `start_logp` came from, how far the two sides are apart.
void DescribeRollout(const TokenRun& run, VersionName current, std::span<const double> start_logp,
                     SampleReport& report) {
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0) continue;
    const int64_t behind = current.number - run.versions[t].number;
    ++report.staleness[static_cast<size_t>(std::min<int64_t>(behind, kStalenessBuckets - 1))];
    if (start_logp.empty() || run.versions[t] != current) continue;
    const double x = start_logp[t] - static_cast<double>(run.logprobs[t]);
    ++report.mismatch_tokens;
    report.sum_abs_mismatch += std::abs(x);
    report.max_abs_mismatch = std::max(report.max_abs_mismatch, std::abs(x));
    report.sum_mismatch_kl += std::expm1(std::clamp(x, -kMaxLogRatio, kMaxLogRatio)) - x;
  }
}

}  // namespace

absl::StatusOr<PolicyObjective> PolicyObjective::Create(const Recipe& recipe, std::span<const Group> groups,
                                                        std::span<const SampleScores> scores,
                                                        const StepContext& context) {
  PolicyObjective objective;
  objective.recipe_ = recipe;
  objective.context_ = context;
  objective.scores_ = scores;
  std::set<uint64_t> ids;
  const auto num_groups = static_cast<int64_t>(groups.size());
  for (int64_t g = 0; g < num_groups; ++g) {
    const Group& group = groups[static_cast<size_t>(g)];
    if (!ids.insert(group.group_id).second) {
      return absl::InvalidArgumentError(absl::StrCat("group ", group.group_id, ": twice in one step"));
    }
    MOERL_RETURN_IF_ERROR(CheckGroup(group));
    MOERL_RETURN_IF_ERROR(CheckSampling(group, context));
    for (const Sample& sample : group.samples) {
      MOERL_RETURN_IF_ERROR(CheckVersions(sample, context.version));
      objective.samples_.push_back(&sample);
      objective.num_prompt_tokens_.push_back(static_cast<int64_t>(group.prompt.size()));
      objective.mini_batch_.push_back(static_cast<int32_t>(g * recipe.num_mini_batches / num_groups));
    }
  }
  const bool needs_scores = recipe.needs_old_logp() || recipe.needs_ref_logp() || recipe.needs_values();
  if ((needs_scores || !scores.empty()) && scores.size() != objective.samples_.size()) {
    return absl::InvalidArgumentError(absl::StrCat("scores of ", scores.size(),
                                                   " samples, expected one for each of the ", objective.samples_.size(),
                                                   " samples of the step"));
  }
  for (size_t i = 0; i < scores.size(); ++i) {
    MOERL_RETURN_IF_ERROR(
        CheckScores(recipe, *objective.samples_[i], static_cast<size_t>(objective.num_prompt_tokens_[i]), scores[i]));
  }
  MOERL_ASSIGN_OR_RETURN(objective.targets_, ComputeTargets(recipe, groups, scores, context.kl_coefficient));

  std::vector<std::vector<int64_t>> trainable_tokens(static_cast<size_t>(recipe.num_mini_batches));
  for (size_t i = 0; i < objective.samples_.size(); ++i) {
    trainable_tokens[static_cast<size_t>(objective.mini_batch_[i])].push_back(objective.targets_.samples[i].num_tokens);
  }
  for (const std::vector<int64_t>& tokens : trainable_tokens) objective.counts_.push_back(CountUpdate(tokens));
  return objective;
}

std::vector<int64_t> PolicyObjective::UpdateOrdinals(int32_t update) const {
  MOERL_CHECK(update >= 0 && update < num_updates());
  std::vector<int64_t> ordinals;
  for (size_t i = 0; i < samples_.size(); ++i) {
    if (mini_batch_[i] == update % recipe_.num_mini_batches) ordinals.push_back(static_cast<int64_t>(i));
  }
  return ordinals;
}

const UpdateCounts& PolicyObjective::update_counts(int32_t update) const {
  MOERL_CHECK(update >= 0 && update < num_updates());
  return counts_[static_cast<size_t>(update % recipe_.num_mini_batches)];
}

absl::Status PolicyObjective::CheckMicroBatch(int32_t update, const MicroBatch& batch) const {
  const size_t num_tokens = batch.logp.size();
  if (batch.offsets.size() != batch.ordinals.size() + 1 || batch.offsets.front() != 0 ||
      batch.offsets.back() != static_cast<int64_t>(num_tokens)) {
    return absl::InvalidArgumentError(absl::StrCat("micro-batch: ", batch.ordinals.size(),
                                                   " samples need as many offsets ", "and one, from 0 to the ",
                                                   num_tokens, " log-probabilities"));
  }
  if (recipe_.needs_values() && batch.values.size() != num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("micro-batch: ", batch.values.size(), " values, expected ", num_tokens));
  }
  if ((recipe_.needs_entropy() || !batch.entropy.empty()) && batch.entropy.size() != num_tokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("micro-batch: ", batch.entropy.size(), " entropies, expected ", num_tokens));
  }
  for (size_t s = 0; s < batch.ordinals.size(); ++s) {
    const int64_t ordinal = batch.ordinals[s];
    if (ordinal < 0 || ordinal >= static_cast<int64_t>(samples_.size()) ||
        mini_batch_[static_cast<size_t>(ordinal)] != update % recipe_.num_mini_batches) {
      return absl::InvalidArgumentError(
          absl::StrCat("micro-batch: sample ordinal ", ordinal, " is not part of update ", update));
    }
    const auto at = static_cast<size_t>(ordinal);
    const int64_t expected = num_prompt_tokens_[at] + static_cast<int64_t>(samples_[at]->run.size());
    if (batch.offsets[s + 1] - batch.offsets[s] != expected) {
      return absl::InvalidArgumentError(absl::StrCat(SampleName(*samples_[at]), ": ",
                                                     batch.offsets[s + 1] - batch.offsets[s],
                                                     " tokens in the micro-batch, expected ", expected));
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<MicroBatchResult> PolicyObjective::Evaluate(int32_t update, const MicroBatch& batch) const {
  MOERL_CHECK(update >= 0 && update < num_updates());
  MOERL_RETURN_IF_ERROR(CheckMicroBatch(update, batch));
  MicroBatchResult result;
  result.grad_logp.assign(batch.logp.size(), 0.0f);
  if (recipe_.needs_values()) result.grad_values.assign(batch.logp.size(), 0.0f);
  if (recipe_.needs_entropy()) result.grad_entropy.assign(batch.logp.size(), 0.0f);
  for (size_t s = 0; s < batch.ordinals.size(); ++s) MOERL_RETURN_IF_ERROR(EvaluateSample(update, batch, s, result));
  for (const SampleReport& report : result.reports) {
    result.loss += report.policy_loss + report.kl_loss + report.value_loss + report.entropy_loss;
  }
  return result;
}

absl::Status PolicyObjective::EvaluateSample(int32_t update, const MicroBatch& batch, size_t position,
                                             MicroBatchResult& result) const {
  static const SampleScores no_scores;
  const auto ordinal = static_cast<size_t>(batch.ordinals[position]);
  const auto begin = static_cast<size_t>(batch.offsets[position]);
  const auto num_prompt_tokens = static_cast<size_t>(num_prompt_tokens_[ordinal]);
  const TokenRun& run = samples_[ordinal]->run;
  SampleView view{*samples_[ordinal],
                  num_prompt_tokens,
                  begin,
                  num_prompt_tokens + run.size(),
                  scores_.empty() ? no_scores : scores_[ordinal],
                  targets_.samples[ordinal],
                  0.0};
  view.weight = TokenWeight(recipe_.aggregation, update_counts(update), view.targets.num_tokens, recipe_.length_norm);
  SampleReport report;
  report.ordinal = batch.ordinals[position];
  report.num_tokens = view.targets.num_tokens;

  MOERL_RETURN_IF_ERROR(CheckNumbers(view.sample, num_prompt_tokens, "log-probability", view.Of(batch.logp)));
  Numbers numbers = Gather(view, batch);
  AddPolicyLoss(view, numbers, report);
  AddKlLoss(view, numbers, report);
  for (size_t t = 0; t < run.size(); ++t) result.grad_logp[view.first() + t] = static_cast<float>(numbers.grad[t]);
  MOERL_RETURN_IF_ERROR(AddValueLoss(view, batch, report, result));
  MOERL_RETURN_IF_ERROR(AddEntropyLoss(view, batch, report, result));

  DescribeRatios(run, numbers.logp, numbers.old_logp, report);
  const bool is_first_pass = update < recipe_.num_mini_batches;
  std::vector<double> start_logp;
  if (update == 0) start_logp = numbers.logp;
  if (update > 0 && is_first_pass && !view.scores.old_logp.empty()) {
    start_logp = Completion(View(view.scores.old_logp), run.size());
  }
  DescribeRollout(run, context_.version, start_logp, report);
  result.reports.push_back(report);
  return absl::OkStatus();
}

PolicyObjective::Numbers PolicyObjective::Gather(const SampleView& view, const MicroBatch& batch) const {
  const TokenRun& run = view.sample.run;
  Numbers numbers;
  numbers.logp = Completion(view.Of(batch.logp), run.size());
  numbers.rollout_logp.assign(run.logprobs.begin(), run.logprobs.end());
  if (recipe_.old_policy == OldPolicy::kRollout) {
    numbers.old_logp = numbers.rollout_logp;
  } else if (view.scores.old_logp.empty()) {
    numbers.old_logp = numbers.logp;  // the first and only update: the step's start is the current policy
  } else {
    numbers.old_logp = Completion(View(view.scores.old_logp), run.size());
  }
  numbers.grad.resize(run.size());
  return numbers;
}

void PolicyObjective::AddPolicyLoss(const SampleView& view, Numbers& numbers, SampleReport& report) const {
  const TokenRun& run = view.sample.run;
  std::vector<double> weights(run.size());
  std::vector<double> losses(run.size());
  report.correction =
      CorrectionWeights(recipe_.off_policy, numbers.old_logp, numbers.rollout_logp, run.trainable, weights);
  SequenceLoss out{losses, numbers.grad};
  recipe_.loss->compute(recipe_.loss_config, {numbers.logp, numbers.old_logp, view.targets.advantages, run.trainable},
                        out);
  report.num_clipped_low = out.num_clipped_low;
  report.num_clipped_high = out.num_clipped_high;
  for (size_t t = 0; t < run.size(); ++t) {
    report.policy_loss += view.weight * weights[t] * losses[t];
    numbers.grad[t] *= view.weight * weights[t];
  }
}

void PolicyObjective::AddKlLoss(const SampleView& view, Numbers& numbers, SampleReport& report) const {
  const KlConfig& kl = recipe_.kl;
  if (kl.estimator == KlEstimator::kNone) return;
  const TokenRun& run = view.sample.run;
  const bool is_silent = kl.skip_constant_groups && view.targets.is_group_constant;
  const double factor = kl.place == KlPlace::kLoss && !is_silent ? view.weight * context_.kl_coefficient : 0.0;
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0) continue;
    const double ref_logp = view.scores.ref_logp[view.num_prompt_tokens + t];
    report.sum_kl_ref += KlEstimate(kl.estimator, numbers.logp[t], ref_logp).value;
    if (factor == 0.0) continue;
    const KlTerm term = KlLoss(kl.estimator, kl.unbiased, numbers.logp[t], numbers.old_logp[t], ref_logp);
    report.kl_loss += factor * term.value;
    numbers.grad[t] += factor * term.grad;
  }
}

absl::Status PolicyObjective::AddValueLoss(const SampleView& view, const MicroBatch& batch, SampleReport& report,
                                           MicroBatchResult& result) const {
  if (!recipe_.needs_values()) return absl::OkStatus();
  const TokenRun& run = view.sample.run;
  MOERL_RETURN_IF_ERROR(CheckNumbers(view.sample, view.num_prompt_tokens, "value", view.Of(batch.values)));
  std::vector<double> losses(run.size());
  std::vector<double> grad(run.size());
  report.num_value_clipped =
      ValueLoss(recipe_.value_clip, Completion(view.Of(batch.values), run.size()),
                Completion(View(view.scores.values), run.size()), view.targets.returns, run.trainable, losses, grad);
  const double factor = recipe_.value_coefficient * view.weight;
  for (size_t t = 0; t < run.size(); ++t) {
    report.value_loss += factor * losses[t];
    result.grad_values[view.first() + t] = static_cast<float>(factor * grad[t]);
  }
  return absl::OkStatus();
}

absl::Status PolicyObjective::AddEntropyLoss(const SampleView& view, const MicroBatch& batch, SampleReport& report,
                                             MicroBatchResult& result) const {
  if (batch.entropy.empty()) return absl::OkStatus();
  const TokenRun& run = view.sample.run;
  MOERL_RETURN_IF_ERROR(CheckNumbers(view.sample, view.num_prompt_tokens, "entropy", view.Of(batch.entropy)));
  const double factor = -recipe_.entropy_coefficient * view.weight;
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0) continue;
    const double entropy = batch.entropy[view.first() + t];
    report.sum_entropy += entropy;
    report.entropy_loss += factor * entropy;
    if (recipe_.needs_entropy()) result.grad_entropy[view.first() + t] = static_cast<float>(factor);
  }
  return absl::OkStatus();
}

}  // namespace moerl::rl
