#ifndef MOERL_BENCH_EP_ROUTING_H_
#define MOERL_BENCH_EP_ROUTING_H_

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

namespace moerl::bench {

// The experts of a rank's tokens in one round, [tokens, top_k], distinct within a token. Experts' popularity is
// log-normal with sigma `skew` (0: uniform), the same for all ranks and rounds.
inline std::vector<int32_t> DrawIds(int tokens, int top_k, int experts, double skew, int rank, int round) {
  std::mt19937_64 popularity_random(42), random(rank * 1000 + round + 7);
  std::normal_distribution<double> normal;
  std::vector<double> popularity(experts);
  for (double& p : popularity) p = std::exp(skew * normal(popularity_random));
  std::vector<int32_t> ids;
  for (int t = 0; t < tokens; ++t) {
    std::vector<double> left = popularity;
    for (int j = 0; j < top_k; ++j) {
      std::discrete_distribution<int> draw(left.begin(), left.end());
      const int expert = draw(random);
      left[expert] = 0;
      ids.push_back(expert);
    }
  }
  return ids;
}

}  // namespace moerl::bench

#endif  // MOERL_BENCH_EP_ROUTING_H_
