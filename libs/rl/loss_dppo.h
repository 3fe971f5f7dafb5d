#ifndef MOERL_LIBS_RL_LOSS_DPPO_H_
#define MOERL_LIBS_RL_LOSS_DPPO_H_

#include "libs/rl/loss.h"

namespace moerl::rl {

// Divergence PPO (2602.04879), binary form: with Δp = exp(logp) − exp(old_logp), a token moves no further when A > 0
// and Δp > gap, or A < 0 and Δp < −gap; otherwise L_t = −A r. Every token pays penalty·log²r.
PolicyLoss DppoLoss();

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_DPPO_H_
