#ifndef MOERL_TESTS_UNIT_RL_STEP_BUILDER_H_
#define MOERL_TESTS_UNIT_RL_STEP_BUILDER_H_

#include <cmath>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "libs/rl/batch.h"
#include "libs/rl/objective.h"
#include "libs/rl/recipe.h"

// Random steps for the tests of libs/rl: groups as rollouts would report them, and what a trainer would compute for
// them.
namespace moerl::rl {

// One packed micro-batch with its own storage.
struct PackedBatch {
  std::vector<int64_t> ordinals;
  std::vector<int64_t> offsets;
  std::vector<float> logp;
  std::vector<float> values;
  std::vector<float> entropy;

  MicroBatch view() const { return {ordinals, offsets, logp, values, entropy}; }
};

struct RandomStep {
  std::vector<Group> groups;
  std::vector<SampleScores> scores;       // by ordinal
  std::vector<std::vector<float>> logp;   // current policy, by ordinal, [T]
  std::vector<std::vector<float>> value;  // current critic
  std::vector<std::vector<float>> entropy;

  size_t num_samples() const { return logp.size(); }
  const Group& group_of(size_t ordinal) const { return groups[ordinal / groups[0].samples.size()]; }
  const Sample& sample(size_t ordinal) const {
    return groups[ordinal / groups[0].samples.size()].samples[ordinal % groups[0].samples.size()];
  }

  PackedBatch Pack(std::span<const int64_t> ordinals) const {
    PackedBatch packed;
    packed.offsets.push_back(0);
    for (int64_t ordinal : ordinals) {
      const auto at = static_cast<size_t>(ordinal);
      packed.ordinals.push_back(ordinal);
      packed.logp.insert(packed.logp.end(), logp[at].begin(), logp[at].end());
      packed.values.insert(packed.values.end(), value[at].begin(), value[at].end());
      packed.entropy.insert(packed.entropy.end(), entropy[at].begin(), entropy[at].end());
      packed.offsets.push_back(static_cast<int64_t>(packed.logp.size()));
    }
    return packed;
  }
};

struct StepShape {
  int num_groups = 4;
  int samples_per_group = 4;
  int max_completion_tokens = 12;
  bool has_masked_tokens = true;  // an environment wrote some of the tokens
};

inline RandomStep MakeRandomStep(uint32_t seed, const StepShape& shape = {}) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<float> logp(-3.0f, -0.05f);
  std::normal_distribution<float> noise(0.0f, 0.3f);
  std::uniform_real_distribution<float> unit(0.0f, 1.0f);
  RandomStep step;
  for (int g = 0; g < shape.num_groups; ++g) {
    Group group;
    group.group_id = 100 + static_cast<uint64_t>(g);
    group.prompt.assign(1 + random() % 5, 7);
    for (int i = 0; i < shape.samples_per_group; ++i) {
      Sample sample;
      sample.group_id = group.group_id;
      sample.sample_index = static_cast<uint32_t>(i);
      sample.reward = std::round(unit(random) * 4.0f) / 4.0f;
      const int length = 1 + static_cast<int>(random() % static_cast<uint32_t>(shape.max_completion_tokens));
      SampleScores scores;
      std::vector<float> current(group.prompt.size(), 0.0f), value = current, entropy = current;
      scores.old_logp = scores.ref_logp = scores.values = current;
      for (int t = 0; t < length; ++t) {
        const bool is_trainable = t == 0 || !shape.has_masked_tokens || random() % 4 != 0;
        const float old_logp = logp(random);
        const auto near = [&] { return std::min(old_logp + noise(random), -1e-3f); };
        sample.run.ids.push_back(static_cast<int32_t>(random() % 50));
        sample.run.trainable.push_back(is_trainable);
        sample.run.logprobs.push_back(is_trainable ? near() : 0.0f);
        sample.run.versions.push_back({1, 8 + static_cast<int64_t>(random() % 3)});
        scores.old_logp.push_back(old_logp);
        scores.ref_logp.push_back(near());
        scores.values.push_back(unit(random));
        current.push_back(near());
        value.push_back(unit(random));
        entropy.push_back(unit(random));
      }
      group.samples.push_back(std::move(sample));
      step.scores.push_back(std::move(scores));
      step.logp.push_back(std::move(current));
      step.value.push_back(std::move(value));
      step.entropy.push_back(std::move(entropy));
    }
    step.groups.push_back(std::move(group));
  }
  return step;
}

inline StepContext Context(double kl_coefficient = 0.0) {
  StepContext context;
  context.version = {1, 10};
  context.kl_coefficient = kl_coefficient;
  return context;
}

}  // namespace moerl::rl

#endif  // MOERL_TESTS_UNIT_RL_STEP_BUILDER_H_
