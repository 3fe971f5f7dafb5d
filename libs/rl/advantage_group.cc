#include "libs/rl/advantage_group.h"

#include <algorithm>
#include <cmath>

#include "libs/base/check.h"

namespace moerl::rl {
namespace {

// (R − mean) · factor, zeros for a constant group.
std::vector<double> Centered(std::span<const double> rewards, const GroupStats& stats, double factor) {
  std::vector<double> advantages(rewards.size(), 0.0);
  if (stats.is_constant) return advantages;
  for (size_t i = 0; i < rewards.size(); ++i) advantages[i] = (rewards[i] - stats.mean) * factor;
  return advantages;
}

}  // namespace

GroupStats DescribeGroup(std::span<const double> rewards) {
  GroupStats stats;
  stats.is_constant = true;
  if (rewards.empty()) return stats;
  const double n = static_cast<double>(rewards.size());
  double sum = 0.0;
  for (double reward : rewards) sum += reward;
  stats.mean = sum / n;
  const auto [least, most] = std::minmax_element(rewards.begin(), rewards.end());
  const double scale = std::max({1.0, std::abs(*least), std::abs(*most)});
  stats.is_constant = rewards.size() < 2 || *most - *least <= kConstantTolerance * scale;
  if (stats.is_constant) return stats;
  double squares = 0.0;
  for (double reward : rewards) squares += (reward - stats.mean) * (reward - stats.mean);
  stats.std = std::sqrt(squares / (n - 1.0));
  return stats;
}

std::vector<double> GrpoAdvantages(std::span<const double> rewards, double epsilon) {
  const GroupStats stats = DescribeGroup(rewards);
  return Centered(rewards, stats, stats.is_constant ? 0.0 : 1.0 / (stats.std + epsilon));
}

std::vector<double> DrGrpoAdvantages(std::span<const double> rewards) {
  return Centered(rewards, DescribeGroup(rewards), 1.0);
}

std::vector<double> RlooAdvantages(std::span<const double> rewards) {
  const double n = static_cast<double>(rewards.size());
  return Centered(rewards, DescribeGroup(rewards), rewards.size() < 2 ? 0.0 : n / (n - 1.0));
}

std::vector<double> MaxRlAdvantages(std::span<const double> rewards) {
  const GroupStats stats = DescribeGroup(rewards);
  for (double reward : rewards) MOERL_CHECK(reward >= 0.0);
  return Centered(rewards, stats, stats.mean > 0.0 ? 1.0 / stats.mean : 0.0);
}

}  // namespace moerl::rl
