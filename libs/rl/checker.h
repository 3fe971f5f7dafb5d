#ifndef MOERL_LIBS_RL_CHECKER_H_
#define MOERL_LIBS_RL_CHECKER_H_

#include <span>
#include <string_view>

#include "absl/status/statusor.h"

namespace moerl::rl {

// A checker judges a completion by what the task's payload says: pure, deterministic, linear in the length of the text.
struct Checker {
  std::string_view task;
  // `completion` is the text after the prompt, without the end of sequence; `is_ended` is false when it was cut off by
  // its token budget. INVALID_ARGUMENT only for a payload that no task of this name can have.
  absl::StatusOr<double> (*check)(std::string_view payload, std::string_view completion, bool is_ended);
};

// reverse, sort, countdown, gsm8k.
std::span<const Checker> Checkers();

// NOT_FOUND lists the names there are.
absl::StatusOr<const Checker*> FindChecker(std::string_view task);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_CHECKER_H_
