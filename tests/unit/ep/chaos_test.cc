#include <gtest/gtest.h>

#include "libs/fabric/mutation.h"
#include "tests/unit/ep/scenario.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::ep {
namespace {

TEST(Chaos, NoSeedGivesAWrongResultOrHangs) {
  const SeedRange seeds = Seeds(300);
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
    const ScenarioResult result = RunScenario(RandomChaosConfig(seed), seed, seed);
    ASSERT_TRUE(result.status.ok()) << "seed " << seed << ": " << result.status;
  }
}

#ifdef MOERL_FAILPOINTS
struct Mistake {
  fabric::Mutation mutation;
  const char* what;
};

class Mutants : public testing::TestWithParam<Mistake> {};

// The checks above can fail: each deliberate mistake is found by some seed.
TEST_P(Mutants, AreCaught) {
  constexpr uint64_t kSeedsMax = 4000;
  fabric::active_mutation = GetParam().mutation;
  uint64_t seed = 0;
  absl::Status status;
  for (; seed < kSeedsMax && status.ok(); ++seed) status = RunScenario(RandomChaosConfig(seed), seed, seed).status;
  fabric::active_mutation = fabric::Mutation::kNone;
  EXPECT_FALSE(status.ok()) << GetParam().what << ": not caught in " << kSeedsMax << " seeds";
  std::cout << GetParam().what << ": caught by seed " << seed - 1 << ": " << status.message() << std::endl;
}

INSTANTIATE_TEST_SUITE_P(
    Each, Mutants,
    testing::Values(Mistake{fabric::Mutation::kTrustHeader, "a slot is read before its immediate"},
                    Mistake{fabric::Mutation::kStageReuse, "a staging place is reused before its local completion"},
                    Mistake{fabric::Mutation::kArrivalOrder, "parts are taken as they arrive"},
                    Mistake{fabric::Mutation::kRunningCredit, "a credit is a running total"},
                    Mistake{fabric::Mutation::kNoBufferInSlot, "the immediate does not tell buffers apart"},
                    Mistake{fabric::Mutation::kOnePool, "both hops draw on one pool"},
                    Mistake{fabric::Mutation::kNoReady, "rows enter a ring before its reader has memory"},
                    Mistake{fabric::Mutation::kNoSequence, "rows belong to the oldest operation"},
                    Mistake{fabric::Mutation::kOwnRowsOnly, "a dispatch ends before what it forwards came"},
                    Mistake{fabric::Mutation::kSumAsArrived, "partials are added as they arrive"},
                    Mistake{fabric::Mutation::kRankDedup, "a token crosses once per rank"},
                    Mistake{fabric::Mutation::kNoFlush, "partly filled parts wait until they are full"}));
#endif  // MOERL_FAILPOINTS

}  // namespace
}  // namespace moerl::ep
