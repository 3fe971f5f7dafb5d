#include "libs/rl/overlong.h"

#include "libs/base/check.h"

namespace moerl::rl {

double OverlongPenalty(int64_t num_completion_tokens, int64_t num_max_tokens, int64_t num_cache_tokens) {
  if (num_cache_tokens == 0) return 0.0;
  MOERL_CHECK(num_cache_tokens > 0 && num_cache_tokens <= num_max_tokens);
  const int64_t over = num_completion_tokens - (num_max_tokens - num_cache_tokens);
  if (over <= 0) return 0.0;
  if (over >= num_cache_tokens) return -1.0;
  return -static_cast<double>(over) / static_cast<double>(num_cache_tokens);
}

}  // namespace moerl::rl
