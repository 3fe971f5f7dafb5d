#ifndef MOERL_TESTS_UNIT_EP_SEEDS_H_
#define MOERL_TESTS_UNIT_EP_SEEDS_H_

#include <cstdint>

namespace moerl::ep {

// --seeds=N runs N seeds instead of the test's own number, --first-seed=S starts at S (0). Parsed by seeds.cc's main.
struct SeedRange {
  uint64_t first = 0, last = 0;
};
SeedRange Seeds(uint64_t default_count);

}  // namespace moerl::ep

#endif  // MOERL_TESTS_UNIT_EP_SEEDS_H_
