#ifndef MOERL_LIBS_RL_RANDOM_H_
#define MOERL_LIBS_RL_RANDOM_H_

#include <cstdint>

#include "libs/base/check.h"

// Internal to the library: random numbers as a function of a key, the same on every machine and compiler.
namespace moerl::rl {

// The finaliser of SplitMix64 (Steele, Lea & Flood, 2014): a bijection of 64 bits.
inline uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

// A short stream of draws for one key.
class KeyedRandom {
 public:
  explicit KeyedRandom(uint64_t key) : state_(Mix(key)) {}

  // Uniform in [0, bound), without bias (Lemire, 2019).
  uint32_t Below(uint32_t bound) {
    MOERL_CHECK(bound > 0);
    const uint32_t threshold = (0u - bound) % bound;
    while (true) {
      state_ += 0x9e3779b97f4a7c15u;
      const uint64_t product = (Mix(state_) >> 32) * bound;
      if (static_cast<uint32_t>(product) >= threshold) return static_cast<uint32_t>(product >> 32);
    }
  }

 private:
  uint64_t state_;
};

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_RANDOM_H_
