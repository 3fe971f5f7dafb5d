#include <gtest/gtest.h>

#include "tests/unit/ep/scenario.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::ep {
namespace {

TEST(Oracle, EveryShapeMatchesTheSerialSum) {
  const SeedRange seeds = Seeds(400);
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
    const ScenarioConfig config = RandomShapeConfig(seed);
    const ScenarioResult result = RunScenario(config, seed, seed);
    ASSERT_TRUE(result.status.ok()) << "seed " << seed << ": " << result.status;
  }
}

}  // namespace
}  // namespace moerl::ep
