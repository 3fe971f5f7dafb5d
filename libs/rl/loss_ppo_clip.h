#ifndef MOERL_LIBS_RL_LOSS_PPO_CLIP_H_
#define MOERL_LIBS_RL_LOSS_PPO_CLIP_H_

#include "libs/rl/loss.h"

namespace moerl::rl {

// PPO's clipped surrogate (1707.06347): L_t = max(−A r, −A clip(r, 1−ε_low, 1+ε_high)). ε_high > ε_low is DAPO's
// clip-higher (2503.14476). With dual_clip c > 1 a negative advantage costs at most: L_t = min(L_t, −A c) (1912.09729).
// Decoupled PPO (2505.24298) is this loss against the recomputed policy, times the token correction of off_policy.h.
PolicyLoss PpoClipLoss();

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_PPO_CLIP_H_
