#include "absl/strings/str_cat.h"
#include "libs/rl/tasks/final_number.h"
#include "libs/rl/tasks/task.h"

// gsm8k: word problems whose solution ends in a number, after "####" or in \boxed{}. The payload is that number, or the
// data set's whole solution. Reward 1 if the last final answer of the completion is the same number, else 0: a number
// that is not marked as the answer does not count, nor do two.
namespace moerl::rl {
namespace {

std::optional<Rational> Expected(std::string_view payload) {
  const std::optional<std::string_view> marked = FindFinalAnswer(payload, true);
  return ParseNumber(marked.value_or(payload));
}

absl::StatusOr<double> Check(std::string_view payload, std::string_view completion, bool is_ended) {
  const std::optional<Rational> expected = Expected(payload);
  if (!expected) {
    return absl::InvalidArgumentError(
        absl::StrCat("gsm8k payload \"", std::string(payload.substr(0, 80)),
                     "\" is no number; expected one, or a solution that ends in #### and one"));
  }
  const std::optional<std::string_view> answer = FindFinalAnswer(completion, is_ended);
  const std::optional<Rational> found = answer ? ParseNumber(*answer) : std::nullopt;
  return found && *found == *expected ? 1.0 : 0.0;
}

}  // namespace

BuiltinTask Gsm8kTask() { return {{"gsm8k", &Check}, nullptr}; }

}  // namespace moerl::rl
