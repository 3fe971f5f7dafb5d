#ifndef MOERL_LIBS_RL_OVERLONG_H_
#define MOERL_LIBS_RL_OVERLONG_H_

#include <cstdint>

namespace moerl::rl {

// DAPO's soft punishment of long completions (2503.14476), added to the reward, before its factor:
//   0 if L ≤ L_max − L_cache;  (L_max − L_cache − L) / L_cache up to L_max;  −1 beyond.
// Lengths in tokens of the completion. num_cache_tokens 0 is off.
double OverlongPenalty(int64_t num_completion_tokens, int64_t num_max_tokens, int64_t num_cache_tokens);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_OVERLONG_H_
