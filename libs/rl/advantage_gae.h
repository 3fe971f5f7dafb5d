#ifndef MOERL_LIBS_RL_ADVANTAGE_GAE_H_
#define MOERL_LIBS_RL_ADVANTAGE_GAE_H_

#include <cstdint>
#include <span>

namespace moerl::rl {

// Generalised advantage estimation (1506.02438) over the trainable tokens of one sequence, last to first:
//   δ_t = r_t + γ V_next − V_t      Â_t = δ_t + γλ Â_next      return_t = Â_t + V_t
// `next` is the next *trainable* token; others are passed over, so neither their values nor the text of a tool reach
// the result. After the last trainable token V_next and Â_next are 0. All spans have the sequence's length; outputs are
// 0 where not trainable. Whitening, where wanted, comes after: returns keep the scale of the reward.
void GaeAdvantages(double gamma, double lambda, std::span<const double> rewards, std::span<const double> values,
                   std::span<const uint8_t> trainable, std::span<double> advantages, std::span<double> returns);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_ADVANTAGE_GAE_H_
