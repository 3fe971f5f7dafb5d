#include <algorithm>

#include "libs/rl/tasks/exact_match.h"
#include "libs/rl/tasks/task.h"

// sort: write 6 digits in ascending order. The prompt is the digits and "=".
namespace moerl::rl {
namespace {

constexpr int kNumDigits = 6;

Problem Draw(KeyedRandom& random) {
  std::string digits;
  for (int i = 0; i < kNumDigits; ++i) digits += static_cast<char>('0' + random.Below(10));
  std::string sorted = digits;
  std::sort(sorted.begin(), sorted.end());
  return {digits + "=", sorted, sorted};
}

}  // namespace

BuiltinTask SortTask() { return {{"sort", &CheckExactMatch}, &Draw}; }

}  // namespace moerl::rl
