#ifndef MOERL_LIBS_RL_ADVANTAGE_GROUP_H_
#define MOERL_LIBS_RL_ADVANTAGE_GROUP_H_

#include <span>
#include <vector>

// Advantages from the rewards of one group: one number a sample, the same for all its tokens.
//   grpo     (R − mean) / (std + ε), unbiased std (n − 1)        2402.03300
//   dr_grpo  R − mean                                            2503.20783
//   rloo     n/(n−1) · (R − mean): the mean of the others        2402.14740
//   maxrl    (R − mean) / mean, for rewards ≥ 0; 0 if mean is 0  2602.02710
// A group that is constant (largest − smallest reward ≤ kConstantTolerance · max(1, |largest|)), has one sample or none
// gives exact zeros: it says nothing about which completion was better. Mean and variance are computed in two passes in
// double.
namespace moerl::rl {

inline constexpr double kConstantTolerance = 1e-6;

struct GroupStats {
  double mean = 0.0;
  double std = 0.0;          // unbiased
  bool is_constant = false;  // also for one sample or none
};

GroupStats DescribeGroup(std::span<const double> rewards);

std::vector<double> GrpoAdvantages(std::span<const double> rewards, double epsilon);
std::vector<double> DrGrpoAdvantages(std::span<const double> rewards);
std::vector<double> RlooAdvantages(std::span<const double> rewards);
// Rewards must be ≥ 0 (checked where they enter, recipe and objective).
std::vector<double> MaxRlAdvantages(std::span<const double> rewards);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_ADVANTAGE_GROUP_H_
