#ifndef MOERL_LIBS_RL_LOSS_GSPO_H_
#define MOERL_LIBS_RL_LOSS_GSPO_H_

#include "libs/rl/loss.h"

namespace moerl::rl {

// GSPO (2507.18071): the ratio of a sequence is s = exp(mean_t(logp − old_logp)), the mean over trainable tokens and
// the logarithm at most 10; every token has ratio sg[s]·π/sg[π] and PPO's clip. Ranges are small: 3e-4 and 4e-4.
PolicyLoss GspoLoss();

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_GSPO_H_
