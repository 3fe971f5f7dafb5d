#ifndef MOERL_TESTS_UNIT_EP_SCENARIO_H_
#define MOERL_TESTS_UNIT_EP_SCENARIO_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "libs/ep/buffer.h"

// Random groups of ranks, random programs of dispatches and combines on them, the serial oracle, and a scheduler that
// steps all ranks in one thread. Everything follows from a seed.
namespace moerl::ep {

struct ScenarioConfig {
  std::vector<int> node_of;  // by rank
  int num_experts = 1;
  std::vector<int> owner;  // by expert
  int num_buffers = 1;
  int hidden = 8;
  int top_k = 1;
  int tokens_max = 6;      // of one rank in one operation
  int dispatches_max = 3;  // of a buffer's program
  int window = 4;          // operations in flight
  BufferOptions options;
  int wire_block = kNoWireBlock;
  bool has_chaos = false;
  int hold_percent = 50;
  bool is_queue_exact = false;  // completion queues of the stated minimum, 2 (I + O), else ample
  std::vector<int> slow;        // ranks that are stepped rarely
};

// Shapes the way the protocol's model draws them: small groups, often with every pool at its smallest.
ScenarioConfig RandomChaosConfig(uint64_t seed);
// Wide shapes: hidden to 16384, top-k to 64, 1 to 5 nodes of 1 to 8 ranks, any map.
ScenarioConfig RandomShapeConfig(uint64_t seed);

struct ScenarioResult {
  absl::Status status;  // OK, or what was wrong
  uint64_t steps = 0;
  uint64_t digest = 0;  // of all results, to compare runs of the same program
};

// Runs the program that `program_seed` draws, scheduled by `schedule_seed`; checks rows, sums and scalars against the
// serial oracle, rows and partials that crossed against the minimum, and that every credit comes home.
ScenarioResult RunScenario(const ScenarioConfig& config, uint64_t program_seed, uint64_t schedule_seed);

}  // namespace moerl::ep

#endif  // MOERL_TESTS_UNIT_EP_SCENARIO_H_
