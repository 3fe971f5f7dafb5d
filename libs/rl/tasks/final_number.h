#ifndef MOERL_LIBS_RL_TASKS_FINAL_NUMBER_H_
#define MOERL_LIBS_RL_TASKS_FINAL_NUMBER_H_

#include <optional>
#include <string_view>

// Internal to the library: the number that a solution of a word problem ends in.
namespace moerl::rl {

// An exact rational number: numerator / denominator, denominator > 0, both below 10^18.
struct Rational {
  __int128 numerator = 0;
  __int128 denominator = 1;

  friend bool operator==(const Rational& a, const Rational& b) {
    return a.numerator * b.denominator == b.numerator * a.denominator;
  }
};

// The text of the last final answer: the rest of the line after "####", or the inside of "\boxed{…}" (or \fbox),
// whichever comes last in the text. None if there is no such mark, its braces do not close, or the text was cut off
// inside it
// (`is_ended` false and nothing after it). Linear in the text.
std::optional<std::string_view> FindFinalAnswer(std::string_view text, bool is_ended);

// Reads one number and nothing that could be another: "1,234", "-3.50", "$18", "3/4", "\frac{3}{4}", "1 1/2", "72
// apples", "5\%", "x = 5", "2 million". None for words alone, two numbers, a range, a time, a misplaced comma, division
// by zero, or more than kMaxAnswerBytes. A unit or a percent sign does not change the value.
std::optional<Rational> ParseNumber(std::string_view answer);

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TASKS_FINAL_NUMBER_H_
