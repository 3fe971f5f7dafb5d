#ifndef MOERL_LIBS_RL_ADVANTAGE_REINFORCE_H_
#define MOERL_LIBS_RL_ADVANTAGE_REINFORCE_H_

#include <cstdint>
#include <span>
#include <vector>

// REINFORCE++ (2501.03262): token returns, whitened over the trainable tokens of the whole step. Its baseline form
// takes the group's mean from the reward first.
namespace moerl::rl {

// return_t = r_t + γ return_next over the trainable tokens of one sequence, last to first; 0 elsewhere.
void DiscountedReturns(double gamma, std::span<const double> rewards, std::span<const uint8_t> trainable,
                       std::span<double> returns);

// One sequence of the step in Whiten: its numbers, changed in place, and which of them count.
struct MaskedSequence {
  std::span<double> numbers;
  std::span<const uint8_t> trainable;
};

// x ← (x − mean) / sqrt(var + 1e-8) over all trainable tokens of the step, unbiased variance, summed in the order
// given. False, and all zeros, if there are fewer than two tokens or all are equal: nothing can be told apart.
bool Whiten(std::span<const MaskedSequence> sequences);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_ADVANTAGE_REINFORCE_H_
