#include <gtest/gtest.h>

#include "tests/unit/ep/scenario.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::ep {
namespace {

// Two nodes of two ranks and one of three, a map that is not aligned to the tree, pools of a few entries.
ScenarioConfig Uneven(int wire_block) {
  ScenarioConfig c;
  c.node_of = {0, 0, 1, 1, 1, 2, 2};
  c.num_experts = 19;
  for (int e = 0; e < c.num_experts; ++e) c.owner.push_back((e * 5 + 3) % 7);
  c.hidden = 40;
  c.top_k = 6;
  c.tokens_max = 12;
  c.num_buffers = 2;
  c.options.hidden = c.hidden;
  c.options.top_k_max = c.top_k;
  c.options.part_bytes = 700;
  c.options.rows_slots = c.options.part_slots = c.options.ring_entries = 2;
  c.wire_block = wire_block;
  c.has_chaos = true;
  return c;
}

TEST(Scale, HundredRunsWithRandomArrivalGiveTheSameBits) {
  for (const int wire_block : {kNoWireBlock, 2}) {
    ScenarioConfig config = Uneven(wire_block);
    uint64_t digest = 0;
    for (uint64_t schedule = 1; schedule <= 50; ++schedule) {
      config.hold_percent = static_cast<int>(schedule * 7 % 80);
      config.slow = {static_cast<int>(schedule % 7)};
      const ScenarioResult result = RunScenario(config, /*program_seed=*/11, schedule);
      ASSERT_TRUE(result.status.ok()) << "schedule " << schedule << ": " << result.status;
      if (digest == 0) digest = result.digest;
      EXPECT_EQ(result.digest, digest) << "schedule " << schedule;
    }
  }
}

TEST(Scale, TwoHundredFiftySixRanksRunInOneProcess) {
  ScenarioConfig c;
  for (int rank = 0; rank < 256; ++rank) c.node_of.push_back(rank / 8);
  c.num_experts = 512;
  for (int e = 0; e < c.num_experts; ++e) c.owner.push_back(e / 2);
  c.hidden = 16;
  c.top_k = 8;
  c.tokens_max = 4;
  c.dispatches_max = 1;
  c.options.hidden = c.hidden;
  c.options.top_k_max = c.top_k;
  c.options.part_bytes = 1024;
  c.options.rows_slots = c.options.part_slots = 1;
  c.options.ring_entries = 1;
  c.wire_block = 64;
  c.has_chaos = true;
  c.hold_percent = 10;
  const ScenarioResult result = RunScenario(c, 3, 4);
  ASSERT_TRUE(result.status.ok()) << result.status;
  std::cout << result.steps << " steps" << std::endl;
}

// The completion queue holds two events for every slot, and no more is needed.
TEST(Scale, CompletionQueuesOfTwoEventsASlotNeverOverflow) {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    ScenarioConfig config = RandomChaosConfig(seed);
    config.options.rows_slots = config.options.part_slots = config.options.ring_entries = 1;
    config.options.part_bytes = 1;
    config.is_queue_exact = true;
    const ScenarioResult result = RunScenario(config, seed, seed);
    ASSERT_TRUE(result.status.ok()) << "seed " << seed << ": " << result.status;
  }
}

}  // namespace
}  // namespace moerl::ep
