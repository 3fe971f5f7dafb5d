#include <algorithm>
#include <array>
#include <cctype>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/rl/tasks/task.h"

// countdown: reach a target with three numbers, each used once, + − * and parentheses. The prompt is "3,7,2:19=".
// Reward 1 for an expression of the right value, 0.1 for one that uses the numbers but has another value, else 0.
namespace moerl::rl {
namespace {

constexpr int kNumNumbers = 3;
constexpr uint32_t kLargestNumber = 9;
constexpr int64_t kLargestTarget = 99;
constexpr double kFormatReward = 0.1;

constexpr size_t kMaxExpressionBytes = 64;  // three numbers, two operators and more parentheses than anyone needs
constexpr int kMaxDepth = 16;
constexpr size_t kMaxDigits = 4;

struct Game {
  std::vector<int64_t> numbers;
  int64_t target = 0;
};

std::optional<int64_t> TakeNumber(std::string_view& text) {
  size_t digits = 0;
  int64_t number = 0;
  while (digits < text.size() && std::isdigit(static_cast<unsigned char>(text[digits]))) {
    if (digits == kMaxDigits) return std::nullopt;
    number = number * 10 + (text[digits++] - '0');
  }
  if (digits == 0) return std::nullopt;
  text.remove_prefix(digits);
  return number;
}

bool Take(std::string_view& text, char c) {
  if (text.empty() || text.front() != c) return false;
  text.remove_prefix(1);
  return true;
}

absl::StatusOr<Game> ParsePayload(std::string_view payload) {
  Game game;
  std::string_view rest = payload;
  do {
    const std::optional<int64_t> number = TakeNumber(rest);
    if (!number) break;
    game.numbers.push_back(*number);
  } while (game.numbers.size() < kMaxExpressionBytes && Take(rest, ','));
  const bool has_target = Take(rest, ':');
  const bool is_negative = Take(rest, '-');
  const std::optional<int64_t> target = TakeNumber(rest);
  if (game.numbers.empty() || !has_target || !target || !rest.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("countdown payload \"", std::string(payload.substr(0, 80)),
                                                   "\"; expected numbers and target like 3,7,2:19"));
  }
  game.target = is_negative ? -*target : *target;
  return game;
}

// expression = term { (+|−) term };  term = factor { * factor };  factor = number | ( expression ).
// Wrap-around arithmetic in 64 bits: the value is only looked at when the numbers are the task's own few.
struct Parser {
  std::string_view rest;
  std::vector<int64_t> numbers;  // in the order written
  int depth = 0;
  bool is_valid = true;

  uint64_t Expression() {
    uint64_t value = Term();
    while (is_valid) {
      if (Take(rest, '+')) {
        value += Term();
      } else if (Take(rest, '-')) {
        value -= Term();
      } else {
        break;
      }
    }
    return value;
  }

  uint64_t Term() {
    uint64_t value = Factor();
    while (is_valid && Take(rest, '*')) value *= Factor();
    return value;
  }

  uint64_t Factor() {
    if (Take(rest, '(')) {
      is_valid = is_valid && ++depth <= kMaxDepth;
      const uint64_t value = is_valid ? Expression() : 0;
      is_valid = is_valid && Take(rest, ')');
      --depth;
      return value;
    }
    const std::optional<int64_t> number = TakeNumber(rest);
    is_valid = is_valid && number.has_value();
    if (!is_valid) return 0;
    numbers.push_back(*number);
    return static_cast<uint64_t>(*number);
  }
};

absl::StatusOr<double> Check(std::string_view payload, std::string_view completion, bool is_ended) {
  MOERL_ASSIGN_OR_RETURN(Game game, ParsePayload(payload));
  if (!is_ended || completion.size() > kMaxExpressionBytes) return 0.0;
  Parser parser{completion, {}};
  const uint64_t value = parser.Expression();
  if (!parser.is_valid || !parser.rest.empty()) return 0.0;
  std::sort(parser.numbers.begin(), parser.numbers.end());
  std::sort(game.numbers.begin(), game.numbers.end());
  if (parser.numbers != game.numbers) return 0.0;
  return static_cast<int64_t>(value) == game.target ? 1.0 : kFormatReward;
}

int64_t Apply(char op, int64_t a, int64_t b) { return op == '+' ? a + b : op == '-' ? a - b : a * b; }

// One random expression over the numbers, in random order and grouping.
std::string DrawExpression(KeyedRandom& random, std::array<int64_t, kNumNumbers> numbers, int64_t& value) {
  constexpr std::string_view kOperators = "+-*";
  for (uint32_t i = kNumNumbers - 1; i > 0; --i) std::swap(numbers[i], numbers[random.Below(i + 1)]);
  const char first = kOperators[random.Below(3)];
  const char second = kOperators[random.Below(3)];
  const bool groups_left = random.Below(2) == 0;
  const auto [a, b, c] = numbers;
  if (groups_left) {
    value = Apply(second, Apply(first, a, b), c);
    const bool needs_parentheses = second == '*' && first != '*';
    return needs_parentheses ? absl::StrCat("(", a, std::string(1, first), b, ")", std::string(1, second), c)
                             : absl::StrCat(a, std::string(1, first), b, std::string(1, second), c);
  }
  value = Apply(first, a, Apply(second, b, c));
  const bool needs_parentheses = second == '*' ? false : first != '+';
  return needs_parentheses ? absl::StrCat(a, std::string(1, first), "(", b, std::string(1, second), c, ")")
                           : absl::StrCat(a, std::string(1, first), b, std::string(1, second), c);
}

Problem Draw(KeyedRandom& random) {
  while (true) {  // about three of four expressions have a target in range
    std::array<int64_t, kNumNumbers> numbers;
    for (int64_t& number : numbers) number = 1 + random.Below(kLargestNumber);
    int64_t target = 0;
    const std::string expression = DrawExpression(random, numbers, target);
    if (target < 0 || target > kLargestTarget) continue;
    const std::string payload = absl::StrCat(numbers[0], ",", numbers[1], ",", numbers[2], ":", target);
    return {payload + "=", payload, expression};
  }
}

}  // namespace

BuiltinTask CountdownTask() { return {{"countdown", &Check}, &Draw}; }

}  // namespace moerl::rl
