#ifndef MOERL_TESTS_UNIT_EP_DRAW_H_
#define MOERL_TESTS_UNIT_EP_DRAW_H_

#include <cstdint>
#include <random>

// Draws that are the same with every standard library.
namespace moerl::ep {

using Random = std::mt19937_64;

inline int Draw(Random& random, int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); }
inline bool Chance(Random& random, double p) { return (random() >> 11) * 0x1p-53 < p; }
inline float DrawFloat(Random& random) {
  return static_cast<float>(static_cast<int64_t>(random() >> 40) - (1 << 23)) * 0x1p-20f;
}

}  // namespace moerl::ep

#endif  // MOERL_TESTS_UNIT_EP_DRAW_H_
