// Neither micro-batches nor packing order nor ranks show in the gradient.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "libs/rl/objective.h"
#include "libs/rl/packing.h"
#include "tests/unit/rl/step_builder.h"

namespace moerl::rl {
namespace {

struct Outcome {
  std::map<std::pair<int64_t, int64_t>, std::pair<float, float>>
      gradients;  // by sample and token: of logp, of the value
  std::vector<SampleReport> reports;
  double loss = 0.0;  // added up micro-batch by micro-batch
};

void Add(const RandomStep& step, const PolicyObjective& objective, int32_t update, std::span<const int64_t> ordinals,
         Outcome& outcome) {
  const PackedBatch packed = step.Pack(ordinals);
  const auto result = objective.Evaluate(update, packed.view());
  ASSERT_TRUE(result.ok()) << result.status();
  for (size_t s = 0; s < ordinals.size(); ++s) {
    for (int64_t at = packed.offsets[s]; at < packed.offsets[s + 1]; ++at) {
      const auto i = static_cast<size_t>(at);
      const float value = result->grad_values.empty() ? 0.0f : result->grad_values[i];
      outcome.gradients[{ordinals[s], at - packed.offsets[s]}] = {result->grad_logp[i], value};
    }
  }
  outcome.reports.insert(outcome.reports.end(), result->reports.begin(), result->reports.end());
  outcome.loss += result->loss;
}

bool SameBits(const UpdateSummary& a, const UpdateSummary& b) {
  return a.loss == b.loss && a.policy_loss == b.policy_loss && a.kl_loss == b.kl_loss && a.value_loss == b.value_loss &&
         a.mean_ratio == b.mean_ratio && a.kl_ref == b.kl_ref && a.kl_old == b.kl_old && a.mean_logp == b.mean_logp &&
         a.clip_fraction == b.clip_fraction && a.effective_sample_fraction == b.effective_sample_fraction &&
         a.mismatch_kl == b.mismatch_kl && a.num_tokens == b.num_tokens;
}

TEST(Invariance, GradientsAreEqualToTheBitInEveryMicroBatchPackingAndRank) {
  for (std::string_view name : AlgorithmNames()) {
    for (uint32_t seed = 1; seed <= 3; ++seed) {
      AlgorithmOptions options;
      options.name = std::string(name);
      options.max_new_tokens = 12;
      options.kl_coefficient = 0.05;
      options.num_mini_batches = 2;
      const Recipe recipe = *MakeRecipe(options);
      const RandomStep step = MakeRandomStep(seed);
      const auto objective = PolicyObjective::Create(recipe, step.groups, step.scores, Context(0.05));
      ASSERT_TRUE(objective.ok()) << objective.status();
      for (int32_t update = 0; update < 2; ++update) {
        std::vector<int64_t> ordinals = objective->UpdateOrdinals(update);
        Outcome whole;
        Add(step, *objective, update, ordinals, whole);

        Outcome shuffled;  // another order, one micro-batch
        std::shuffle(ordinals.begin(), ordinals.end(), std::mt19937(seed));
        Add(step, *objective, update, ordinals, shuffled);

        Outcome single;  // one sample a micro-batch
        for (int64_t ordinal : ordinals) Add(step, *objective, update, std::vector<int64_t>{ordinal}, single);

        Outcome ranks;  // three ranks, small micro-batches, the last rank first
        std::vector<int64_t> lengths;
        for (int64_t ordinal : ordinals)
          lengths.push_back(static_cast<int64_t>(step.logp[static_cast<size_t>(ordinal)].size()));
        const auto packing = PackSamples(ordinals, lengths, 24, 3);
        ASSERT_TRUE(packing.ok());
        for (auto rank = packing->ranks.rbegin(); rank != packing->ranks.rend(); ++rank) {
          for (const auto& micro_batch : *rank) Add(step, *objective, update, micro_batch, ranks);
        }

        for (const Outcome* other : {&shuffled, &single, &ranks}) {
          EXPECT_EQ(whole.gradients, other->gradients) << name << " seed " << seed;
          EXPECT_NEAR(whole.loss, other->loss, 1e-12) << name << " seed " << seed;
          EXPECT_TRUE(SameBits(Summarize(whole.reports), Summarize(other->reports))) << name << " seed " << seed;
        }
      }
    }
  }
}

TEST(Invariance, MiniBatchesPartTheStepByWholeGroups) {
  AlgorithmOptions options;
  options.num_mini_batches = 3;
  options.num_epochs = 2;
  const RandomStep step = MakeRandomStep(7, {.num_groups = 7});
  const auto objective = PolicyObjective::Create(*MakeRecipe(options), step.groups, step.scores, Context());
  ASSERT_TRUE(objective.ok()) << objective.status();
  ASSERT_EQ(objective->num_updates(), 6);
  std::vector<int64_t> seen;
  int64_t tokens = 0;
  for (int32_t update = 0; update < 3; ++update) {
    const std::vector<int64_t> ordinals = objective->UpdateOrdinals(update);
    EXPECT_EQ(ordinals, objective->UpdateOrdinals(update + 3));
    EXPECT_EQ(ordinals.size() % 4, 0u);
    seen.insert(seen.end(), ordinals.begin(), ordinals.end());
    tokens += objective->update_counts(update).num_tokens;
  }
  EXPECT_EQ(seen.size(), 28u);
  EXPECT_TRUE(std::is_sorted(seen.begin(), seen.end()));
  EXPECT_EQ(tokens, objective->stats().num_tokens);
}

TEST(Packing, GivesEveryRankTheSameNumberOfMicroBatchesAndEverySampleOnce) {
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    std::vector<int64_t> ordinals, lengths;
    const size_t count = random() % 40;
    for (size_t i = 0; i < count; ++i) {
      ordinals.push_back(static_cast<int64_t>(3 * i));
      lengths.push_back(1 + static_cast<int64_t>(random() % 50));
    }
    const int32_t num_ranks = 1 + static_cast<int32_t>(random() % 4);
    const auto packing = PackSamples(ordinals, lengths, 64, num_ranks);
    ASSERT_TRUE(packing.ok());
    ASSERT_EQ(packing->ranks.size(), static_cast<size_t>(num_ranks));
    std::vector<int64_t> seen;
    for (const auto& rank : packing->ranks) {
      EXPECT_EQ(static_cast<int64_t>(rank.size()), packing->num_micro_batches());
      for (const auto& micro_batch : rank) {
        int64_t tokens = 0;
        for (int64_t ordinal : micro_batch) tokens += lengths[static_cast<size_t>(ordinal / 3)];
        EXPECT_LE(tokens, 64);
        seen.insert(seen.end(), micro_batch.begin(), micro_batch.end());
      }
    }
    std::sort(seen.begin(), seen.end());
    EXPECT_EQ(seen, ordinals);
  }
}

TEST(Packing, NamesASampleThatFitsNoMicroBatch) {
  const std::vector<int64_t> ordinals = {4, 5}, lengths = {10, 65};
  const auto packing = PackSamples(ordinals, lengths, 64, 2);
  EXPECT_EQ(packing.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(packing.status().message().find("sample ordinal 5 has 65 tokens"), std::string::npos) << packing.status();
}

}  // namespace
}  // namespace moerl::rl
