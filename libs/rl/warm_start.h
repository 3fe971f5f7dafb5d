#ifndef MOERL_LIBS_RL_WARM_START_H_
#define MOERL_LIBS_RL_WARM_START_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace moerl::rl {

// Supervised steps before reinforcement learning go on until the *sampled* pass rate is inside a band: below it no
// group has a success to learn from, above it nothing is left to show. Not a step count: tasks cross a sharp transition
// at a step that no two seeds share.
struct WarmStartConfig {
  double pass_rate_min = 0.05;
  double pass_rate_max = 0.25;
  int64_t max_steps = 0;  // 0: no warm start
  int64_t measure_every_steps = 5;
};

enum class WarmStartVerdict {
  kContinue,   // take more steps
  kInBand,     // stop: the band is reached
  kAboveBand,  // stop: it was crossed between two measurements; say so
  kGiveUp,     // stop: max_steps without reaching it; the run would be dead
};

// Whether to measure after `num_steps` supervised steps (also before the first: a model that can already do the task
// needs none).
bool ShouldMeasure(const WarmStartConfig& config, int64_t num_steps);

// Pure: the verdict on a measurement after `num_steps`. A pass rate that is not a number in [0, 1] is a programmer
// error.
WarmStartVerdict JudgeWarmStart(const WarmStartConfig& config, int64_t num_steps, double sampled_pass_rate);

// For logs: what the verdict means and what to do about it.
std::string DescribeVerdict(const WarmStartConfig& config, WarmStartVerdict verdict, int64_t num_steps,
                            double sampled_pass_rate);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_WARM_START_H_
