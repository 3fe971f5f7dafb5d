#include "libs/rl/targets.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rl/advantage_gae.h"
#include "libs/rl/advantage_group.h"
#include "libs/rl/advantage_reinforce.h"
#include "libs/rl/overlong.h"

namespace moerl::rl {
namespace {

// One sample on its way from a reward to advantages. [C] each.
struct Shaped {
  const Sample* sample = nullptr;
  const SampleScores* scores = nullptr;
  size_t num_prompt_tokens = 0;
  double outcome = 0.0;          // reward and overlong penalty
  double kl_penalty = 0.0;       // sum of the tokens' ones
  std::vector<double> token_kl;  // coefficient · estimate; empty if KL is not in the reward
};

std::vector<double> TokenKl(const Recipe& recipe, const Shaped& shaped, double kl_coefficient) {
  const TokenRun& run = shaped.sample->run;
  std::vector<double> token_kl(run.size(), 0.0);
  for (size_t t = 0; t < run.size(); ++t) {
    if (run.trainable[t] == 0) continue;
    const size_t at = shaped.num_prompt_tokens + t;
    const double logp = shaped.scores->old_logp.empty() ? run.logprobs[t] : shaped.scores->old_logp[at];
    token_kl[t] = kl_coefficient * KlEstimate(recipe.kl.estimator, logp, shaped.scores->ref_logp[at]).value;
  }
  return token_kl;
}

std::vector<Shaped> ShapeRewards(const Recipe& recipe, std::span<const Group> groups,
                                 std::span<const SampleScores> scores, double kl_coefficient) {
  static const SampleScores none;
  const bool is_kl_in_reward = recipe.kl.estimator != KlEstimator::kNone && recipe.kl.place == KlPlace::kReward;
  std::vector<Shaped> all;
  for (const Group& group : groups) {
    for (const Sample& sample : group.samples) {
      Shaped shaped;
      shaped.sample = &sample;
      shaped.scores = scores.empty() ? &none : &scores[all.size()];
      shaped.num_prompt_tokens = group.prompt.size();
      shaped.outcome = *sample.reward + OverlongPenalty(static_cast<int64_t>(sample.run.size()),
                                                        recipe.overlong_max_tokens, recipe.overlong_cache_tokens);
      if (is_kl_in_reward) {
        shaped.token_kl = TokenKl(recipe, shaped, kl_coefficient);
        for (double penalty : shaped.token_kl) shaped.kl_penalty += penalty;
      }
      all.push_back(std::move(shaped));
    }
  }
  return all;
}

// Rewards by token: the outcome on the last trainable token, where it is learned from, and the KL where it arose.
std::vector<double> TokenRewards(const Shaped& shaped) {
  const std::vector<uint8_t>& trainable = shaped.sample->run.trainable;
  std::vector<double> rewards(trainable.size(), 0.0);
  for (size_t t = 0; t < shaped.token_kl.size(); ++t) rewards[t] = -shaped.token_kl[t];
  const auto last = std::find(trainable.rbegin(), trainable.rend(), uint8_t{1});
  if (last != trainable.rend()) rewards[static_cast<size_t>(trainable.rend() - last - 1)] += shaped.outcome;
  return rewards;
}

absl::StatusOr<std::vector<double>> GroupAdvantages(const Recipe& recipe, std::span<const Shaped> group,
                                                    std::span<const double> rewards) {
  switch (recipe.advantage) {
    case AdvantageKind::kGrpo:
      return GrpoAdvantages(rewards, recipe.advantage_epsilon);
    case AdvantageKind::kRloo:
      return RlooAdvantages(rewards);
    case AdvantageKind::kMaxRl:
      for (size_t i = 0; i < rewards.size(); ++i) {
        if (rewards[i] >= 0.0) continue;
        return absl::InvalidArgumentError(absl::StrCat(SampleName(*group[i].sample), ": reward ", rewards[i],
                                                       ", but maxrl divides by the mean and needs rewards >= 0"));
      }
      return MaxRlAdvantages(rewards);
    default:
      return DrGrpoAdvantages(rewards);  // also the baseline of reinforce_pp_baseline
  }
}

void Spread(double advantage, std::span<const uint8_t> trainable, std::span<double> advantages) {
  for (size_t t = 0; t < trainable.size(); ++t) advantages[t] = trainable[t] != 0 ? advantage : 0.0;
}

// Token-level estimators: one sequence at a time.
void TokenTargets(const Recipe& recipe, const Shaped& shaped, SampleTargets& out) {
  const std::vector<double> rewards = TokenRewards(shaped);
  if (recipe.advantage == AdvantageKind::kReinforcePp) {
    DiscountedReturns(recipe.gamma, rewards, shaped.sample->run.trainable, out.advantages);
    return;
  }
  out.returns.resize(rewards.size());
  const auto values_begin = shaped.scores->values.begin() + static_cast<ptrdiff_t>(shaped.num_prompt_tokens);
  const std::vector<double> values(values_begin, shaped.scores->values.end());
  GaeAdvantages(recipe.gamma, recipe.gae_lambda, rewards, values, shaped.sample->run.trainable, out.advantages,
                out.returns);
}

bool WhitenStep(std::span<const Shaped> shaped, std::vector<SampleTargets>& targets) {
  std::vector<MaskedSequence> sequences;
  for (size_t i = 0; i < shaped.size(); ++i) {
    sequences.push_back({targets[i].advantages, shaped[i].sample->run.trainable});
  }
  return Whiten(sequences);
}

struct Moments {
  double mean = 0.0;
  double std = 0.0;  // of the population
};

Moments MomentsOf(std::span<const double> numbers) {
  Moments moments;
  if (numbers.empty()) return moments;
  const double n = static_cast<double>(numbers.size());
  for (double x : numbers) moments.mean += x;
  moments.mean /= n;
  for (double x : numbers) moments.std += (x - moments.mean) * (x - moments.mean);
  moments.std = std::sqrt(moments.std / n);
  return moments;
}

void CountGroups(std::span<const Group> groups, StepStats& stats) {
  stats.num_groups = static_cast<int64_t>(groups.size());
  for (const Group& group : groups) {
    std::vector<double> rewards;
    for (const Sample& sample : group.samples) rewards.push_back(*sample.reward);
    const bool is_constant = DescribeGroup(rewards).is_constant;
    stats.num_constant_groups += is_constant;
    stats.num_informative_groups += !is_constant;
    stats.num_single_sample_groups += rewards.size() == 1;
  }
}

void DescribeSamples(std::span<const Shaped> shaped, const std::vector<SampleTargets>& targets, StepStats& stats) {
  std::vector<double> rewards;
  std::vector<double> advantages;
  double completion_tokens = 0.0;
  for (size_t i = 0; i < shaped.size(); ++i) {
    const Sample& sample = *shaped[i].sample;
    rewards.push_back(*sample.reward);
    stats.num_tokens += targets[i].num_tokens;
    stats.num_empty_samples += targets[i].num_tokens == 0;
    stats.num_truncated_samples += sample.is_truncated;
    stats.overlong_penalty_mean += shaped[i].outcome - *sample.reward;
    stats.kl_penalty_mean += shaped[i].kl_penalty;
    completion_tokens += static_cast<double>(sample.run.size());
    for (size_t t = 0; t < sample.run.size(); ++t) {
      if (sample.run.trainable[t] != 0) advantages.push_back(targets[i].advantages[t]);
    }
  }
  stats.num_samples = static_cast<int64_t>(shaped.size());
  if (shaped.empty()) return;
  const double n = static_cast<double>(shaped.size());
  stats.overlong_penalty_mean /= n;
  stats.kl_penalty_mean /= n;
  stats.completion_tokens_mean = completion_tokens / n;
  const Moments reward = MomentsOf(rewards);
  stats.reward_mean = reward.mean;
  stats.reward_std = reward.std;
  const auto [least, most] = std::minmax_element(rewards.begin(), rewards.end());
  stats.reward_min = *least;
  stats.reward_max = *most;
  const Moments advantage = MomentsOf(advantages);
  stats.advantage_mean = advantage.mean;
  stats.advantage_std = advantage.std;
}

}  // namespace

absl::StatusOr<StepTargets> ComputeTargets(const Recipe& recipe, std::span<const Group> groups,
                                           std::span<const SampleScores> scores, double kl_coefficient) {
  const std::vector<Shaped> shaped = ShapeRewards(recipe, groups, scores, kl_coefficient);
  StepTargets step;
  step.samples.resize(shaped.size());
  size_t first = 0;
  for (const Group& group : groups) {
    const std::span<const Shaped> members(shaped.data() + first, group.samples.size());
    std::vector<double> rewards;
    for (const Shaped& member : members) rewards.push_back(member.outcome - member.kl_penalty);
    std::vector<double> of_group(members.size(), 0.0);
    if (recipe.is_group_relative()) {
      MOERL_ASSIGN_OR_RETURN(of_group, GroupAdvantages(recipe, members, rewards));
    }
    const bool is_constant = recipe.is_group_relative() && DescribeGroup(rewards).is_constant;
    for (size_t i = 0; i < members.size(); ++i) {
      const std::vector<uint8_t>& trainable = members[i].sample->run.trainable;
      SampleTargets& out = step.samples[first + i];
      out.advantages.resize(trainable.size(), 0.0);
      out.num_tokens = std::count(trainable.begin(), trainable.end(), uint8_t{1});
      out.is_group_constant = is_constant;
      if (recipe.is_group_relative()) {
        Spread(of_group[i], trainable, out.advantages);
      } else {
        TokenTargets(recipe, members[i], out);
      }
    }
    first += members.size();
  }
  const bool whitens = recipe.advantage == AdvantageKind::kGae || recipe.advantage == AdvantageKind::kReinforcePp ||
                       recipe.advantage == AdvantageKind::kReinforcePpBaseline;
  if (whitens) step.stats.is_whitening_degenerate = !WhitenStep(shaped, step.samples);
  CountGroups(groups, step.stats);
  DescribeSamples(shaped, step.samples, step.stats);
  return step;
}

}  // namespace moerl::rl
