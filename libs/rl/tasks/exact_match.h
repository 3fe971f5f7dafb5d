#ifndef MOERL_LIBS_RL_TASKS_EXACT_MATCH_H_
#define MOERL_LIBS_RL_TASKS_EXACT_MATCH_H_

#include <string_view>

#include "absl/status/statusor.h"

// Internal to the library: the checker of tasks with one right answer.
namespace moerl::rl {

// 1 if the completion is the payload and ended by itself, else 0. INVALID_ARGUMENT for an empty payload.
inline absl::StatusOr<double> CheckExactMatch(std::string_view payload, std::string_view completion, bool is_ended) {
  if (payload.empty()) return absl::InvalidArgumentError("task payload is empty; expected the right answer");
  return is_ended && completion == payload ? 1.0 : 0.0;
}

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TASKS_EXACT_MATCH_H_
