// The shapes that scenarios are drawn from.
#include <algorithm>

#include "tests/unit/ep/draw.h"
#include "tests/unit/ep/scenario.h"

namespace moerl::ep {
namespace {

std::vector<int> DrawOwners(Random& random, int experts, int ranks) {
  std::vector<int> owner(experts);
  const bool is_aligned = Chance(random, 0.5);
  for (int e = 0; e < experts; ++e) owner[e] = is_aligned ? e * ranks / experts : Draw(random, 0, ranks - 1);
  return owner;
}

void DrawNodes(Random& random, int nodes, int ranks_max, ScenarioConfig* c) {
  for (int node = 0; node < nodes; ++node) {
    for (int i = Draw(random, 1, ranks_max); i > 0; --i) c->node_of.push_back(node);
  }
  if (Chance(random, 0.3)) {  // ranks of a node need not be neighbours
    std::shuffle(c->node_of.begin(), c->node_of.end(), random);
  }
}

}  // namespace

ScenarioConfig RandomChaosConfig(uint64_t seed) {
  Random random(seed * 2 + 1);
  ScenarioConfig c;
  constexpr int kNodes[] = {1, 2, 2, 2, 3, 3};
  constexpr int kExperts[] = {1, 2, 3, 4, 6, 8, 8, 11};
  DrawNodes(random, kNodes[random() % 6], 3, &c);
  const int ranks = static_cast<int>(c.node_of.size());
  c.num_experts = kExperts[random() % 8];
  c.owner = DrawOwners(random, c.num_experts, ranks);
  c.num_buffers = Draw(random, 1, 2);
  c.hidden = 8 * Draw(random, 1, 3);
  c.top_k = Draw(random, 1, 4);
  c.window = Draw(random, 1, 4);
  const bool is_smallest = Chance(random, 0.5);
  c.options.hidden = c.hidden;
  c.options.top_k_max = c.top_k;
  c.options.rows_slots = is_smallest ? 1 : Draw(random, 1, 3);
  c.options.part_slots = is_smallest ? 1 : Draw(random, 1, 3);
  c.options.ring_entries = is_smallest ? 1 : Draw(random, 1, 3);
  c.options.part_bytes = is_smallest ? 1 : Draw(random, 1, 1000);
  c.options.operations_max = c.window;
  constexpr int kWire[] = {1, 2, 4, kNoWireBlock};
  c.wire_block = kWire[random() % 4];
  c.has_chaos = true;
  c.hold_percent = Draw(random, 0, 80);
  for (int rank = 0; rank < ranks; ++rank) {
    if (Chance(random, 0.2)) c.slow.push_back(rank);
  }
  return c;
}

ScenarioConfig RandomShapeConfig(uint64_t seed) {
  Random random(seed * 2);
  ScenarioConfig c;
  constexpr int kNodes[] = {1, 2, 3, 5};
  const int nodes = kNodes[random() % 4];
  DrawNodes(random, nodes, nodes > 3 ? 4 : 8, &c);
  const int ranks = static_cast<int>(c.node_of.size());
  c.num_experts = Chance(random, 0.2) ? Draw(random, 1, ranks) : Draw(random, 1, 96);
  c.owner = DrawOwners(random, c.num_experts, ranks);
  constexpr int kHidden[] = {16, 24, 40, 72, 136, 520, 1000, 2048, 7168, 16384};
  c.hidden = kHidden[random() % (Chance(random, 0.1) ? 10 : 6)];
  c.top_k = Chance(random, 0.15) ? Draw(random, 9, 64) : Draw(random, 1, 8);
  c.tokens_max = c.hidden > 1000 ? 3 : 8;
  c.dispatches_max = 1;
  c.options.hidden = c.hidden;
  c.options.top_k_max = c.top_k;
  c.options.part_bytes = 4096;
  c.options.ring_entries = 4;
  c.options.rows_slots = c.options.part_slots = 2;
  c.wire_block = Chance(random, 0.5) ? kNoWireBlock : std::max(1, c.num_experts / 8);
  return c;
}

}  // namespace moerl::ep
