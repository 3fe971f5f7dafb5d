#ifndef MOERL_LIBS_RL_LOSS_VALUE_H_
#define MOERL_LIBS_RL_LOSS_VALUE_H_

#include <cstdint>
#include <span>

namespace moerl::rl {

// The critic's loss, per token (1707.06347, as every current system has it):
//   L_t = ½ max((v − R)², (clip(v, v_old − ε, v_old + ε) − R)²)
// `clip` ε in units of value; 0 or less means no clip. Spans have one length; tokens with trainable 0 get zeros.
// Returns the number of tokens whose clipped branch was taken.
int64_t ValueLoss(double clip, std::span<const double> values, std::span<const double> old_values,
                  std::span<const double> returns, std::span<const uint8_t> trainable, std::span<double> loss,
                  std::span<double> grad);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_LOSS_VALUE_H_
