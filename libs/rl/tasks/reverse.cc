#include <algorithm>

#include "libs/rl/tasks/exact_match.h"
#include "libs/rl/tasks/task.h"

// reverse: write 8 letters backwards. The prompt is the letters and "=".
namespace moerl::rl {
namespace {

constexpr int kNumLetters = 8;
constexpr uint32_t kAlphabetSize = 14;

Problem Draw(KeyedRandom& random) {
  std::string letters;
  for (int i = 0; i < kNumLetters; ++i) letters += static_cast<char>('a' + random.Below(kAlphabetSize));
  const std::string reversed(letters.rbegin(), letters.rend());
  return {letters + "=", reversed, reversed};
}

}  // namespace

BuiltinTask ReverseTask() { return {{"reverse", &CheckExactMatch}, &Draw}; }

}  // namespace moerl::rl
