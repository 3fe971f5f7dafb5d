#ifndef MOERL_LIBS_RL_LOSS_CISPO_H_
#define MOERL_LIBS_RL_LOSS_CISPO_H_

#include "libs/rl/loss.h"

namespace moerl::rl {

// CISPO (2506.13585): L_t = −sg[clip(r, 1−ε_low, 1+ε_high)]·A·logp. The weight is clipped, no token is dropped.
// ε_low ≥ 1 means no lower bound; ε_high is 4 to 5 (2510.13786).
PolicyLoss CispoLoss();

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_CISPO_H_
