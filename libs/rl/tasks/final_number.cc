#include "libs/rl/tasks/final_number.h"

#include <array>
#include <cctype>
#include <cstdint>
#include <string>
#include <utility>

namespace moerl::rl {
namespace {

constexpr size_t kMaxAnswerBytes = 256;
constexpr int kMaxDigits = 18;
constexpr __int128 kBound = 1'000'000'000'000'000'000;  // 10^18: products of two stay below 2^127

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsLetter(char c) { return std::isalpha(static_cast<unsigned char>(c)) != 0; }
bool IsSpace(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

std::string_view Trim(std::string_view text) {
  while (!text.empty() && IsSpace(text.front())) text.remove_prefix(1);
  while (!text.empty() && IsSpace(text.back())) text.remove_suffix(1);
  return text;
}

// The inside of the braces that open at text[0]; none if they do not close within the bound.
std::optional<std::string_view> InsideBraces(std::string_view text) {
  int depth = 0;
  for (size_t i = 0; i < text.size() && i <= kMaxAnswerBytes; ++i) {
    depth += text[i] == '{';
    depth -= text[i] == '}';
    if (depth == 0) return text.substr(1, i - 1);
  }
  return std::nullopt;
}

void ReplaceAll(std::string& text, std::string_view from, std::string_view to) {
  for (size_t at = text.find(from); at != std::string::npos; at = text.find(from, at + to.size())) {
    text.replace(at, from.size(), to);
  }
}

// LaTeX and typography to plain text; lengths are bounded by kMaxAnswerBytes.
std::string Plain(std::string_view answer) {
  static constexpr std::array<std::pair<std::string_view, std::string_view>, 34> kReplacements = {{
      {"\xE2\x88\x92", "-"},  // minus sign
      {"\xE2\x80\x93", "-"},  // en dash
      {"\xC2\xA0", " "},      // no-break space
      {"\xE2\x80\xAF", " "},  // narrow no-break space
      {"\xC2\xBD", " 1/2"},   // one half
      {"\xC2\xBC", " 1/4"},   // one quarter
      {"\xC2\xBE", " 3/4"},   // three quarters
      {"\xC2\xB0", ""},       // degree
      {"\xC2\xB2", ""},       // square, of a unit
      {"\xC2\xB3", ""},       // cube, of a unit
      {"{,}", ","},
      {"\\!", ""},
      {"\\,", ""},
      {"\\;", " "},
      {"\\:", " "},
      {"\\ ", " "},
      {"~", " "},
      {"\\left", ""},
      {"\\right", ""},
      {"\\dfrac", "\\frac"},
      {"\\tfrac", "\\frac"},
      {"\\%", "%"},
      {"\\$", "$"},
      {"^{\\circ}", ""},
      {"^\\circ", ""},
      {"\\text", ""},
      {"\\mathrm", ""},
      {"\\mathbf", ""},
      {"\\(", ""},
      {"\\)", ""},
      {"**", ""},
      {"\\mbox", ""},
      {"\\degree", ""},
      {"\\approx", "="},
  }};
  std::string text(answer);
  for (const auto& [from, to] : kReplacements) ReplaceAll(text, from, to);
  // Exponents of units: a letter before ^ makes "cm^2" and "cm^{2}" a unit, a digit before it leaves a power.
  for (size_t i = 1; i + 1 < text.size(); ++i) {
    if (text[i] != '^' || !IsLetter(text[i - 1])) continue;
    const size_t digit = text[i + 1] == '{' ? i + 2 : i + 1;
    const size_t end = text[i + 1] == '{' ? digit + 2 : digit + 1;
    if (digit >= text.size() || end > text.size() || !IsDigit(text[digit])) continue;
    if (text[i + 1] == '{' && text[digit + 1] != '}') continue;
    text.erase(i, end - i);
  }
  return text;
}

// A cursor over plain text.
struct Reader {
  std::string_view rest;

  bool Take(std::string_view word) {
    if (rest.substr(0, word.size()) != word) return false;
    rest.remove_prefix(word.size());
    return true;
  }
  void SkipSpace() {
    while (!rest.empty() && IsSpace(rest.front())) rest.remove_prefix(1);
  }
  bool AtDigit() const { return !rest.empty() && IsDigit(rest.front()); }
};

// Digits with well-placed thousands commas: 1234 or 1,234 or 12,345,678. False if they are misplaced or too many.
bool TakeDigits(Reader& in, bool allows_commas, __int128& number, int& num_digits) {
  int since_comma = -1;  // digits since the last comma, -1 before any
  int leading = 0;
  while (!in.rest.empty()) {
    if (in.AtDigit()) {
      if (number != 0 || in.rest.front() != '0') {
        if (++num_digits > kMaxDigits) return false;
      }
      number = number * 10 + (in.rest.front() - '0');
      if (since_comma >= 0) ++since_comma;
      ++leading;
    } else if (allows_commas && in.rest.front() == ',' && in.rest.size() > 1 && IsDigit(in.rest[1])) {
      const bool is_first = since_comma < 0;
      if ((is_first && (leading == 0 || leading > 3)) || (!is_first && since_comma != 3)) return false;
      since_comma = 0;
    } else {
      break;
    }
    in.rest.remove_prefix(1);
  }
  return since_comma < 0 || since_comma == 3;
}

// 12, 1,234, 3.50, .5
std::optional<Rational> TakeDecimal(Reader& in) {
  Rational value;
  int num_digits = 0;
  const bool starts_with_digit = in.AtDigit();
  if (!TakeDigits(in, true, value.numerator, num_digits)) return std::nullopt;
  const bool has_point = in.rest.size() > 1 && in.rest.front() == '.' && IsDigit(in.rest[1]);
  if (!starts_with_digit && !has_point) return std::nullopt;
  if (!has_point) return value;
  in.rest.remove_prefix(1);
  size_t places = 0;
  while (places < in.rest.size() && IsDigit(in.rest[places])) ++places;
  std::string_view digits = in.rest.substr(0, places);
  in.rest.remove_prefix(places);
  while (!digits.empty() && digits.back() == '0') digits.remove_suffix(1);
  for (char digit : digits) {
    value.numerator = value.numerator * 10 + (digit - '0');
    value.denominator *= 10;
    if (value.numerator >= kBound || value.denominator >= kBound) {
      return std::nullopt;
    }
  }
  return value;
}

bool IsWhole(const Rational& value) { return value.numerator % value.denominator == 0; }

std::optional<Rational> Divide(const Rational& a, const Rational& b) {
  if (b.numerator == 0) return std::nullopt;
  const Rational quotient{a.numerator * b.denominator, a.denominator * b.numerator};
  if (quotient.numerator >= kBound || quotient.denominator >= kBound) return std::nullopt;
  return quotient;
}

// \frac{a}{b} or \frac12, of decimals without sign.
std::optional<Rational> TakeFrac(Reader& in) {
  std::array<Rational, 2> parts;
  for (Rational& part : parts) {
    in.SkipSpace();
    if (in.Take("{")) {
      in.SkipSpace();
      const std::optional<Rational> decimal = TakeDecimal(in);
      in.SkipSpace();
      if (!decimal || !in.Take("}")) return std::nullopt;
      part = *decimal;
    } else if (in.AtDigit()) {
      part.numerator = in.rest.front() - '0';
      in.rest.remove_prefix(1);
    } else {
      return std::nullopt;
    }
  }
  return Divide(parts[0], parts[1]);
}

std::optional<Rational> Add(const Rational& whole, const Rational& part) {
  if (!IsWhole(whole) || part.numerator >= part.denominator) return std::nullopt;
  const __int128 numerator = whole.numerator / whole.denominator * part.denominator + part.numerator;
  if (numerator >= kBound) return std::nullopt;
  return Rational{numerator, part.denominator};
}

// A number without sign: decimal, fraction, or whole and fraction ("1 1/2", "1\frac{1}{2}").
std::optional<Rational> TakeUnsigned(Reader& in) {
  in.SkipSpace();
  if (in.Take("\\frac")) return TakeFrac(in);
  std::optional<Rational> value = TakeDecimal(in);
  if (!value) return std::nullopt;
  Reader ahead = in;
  ahead.SkipSpace();
  if (ahead.Take("/")) {
    ahead.SkipSpace();
    if (!ahead.AtDigit()) return value;  // "18/hour": a unit follows
    const std::optional<Rational> below = TakeDecimal(ahead);
    in = ahead;
    return below ? Divide(*value, *below) : std::nullopt;
  }
  if (ahead.Take("\\frac")) {
    const std::optional<Rational> part = TakeFrac(ahead);
    in = ahead;
    return part ? Add(*value, *part) : std::nullopt;
  }
  if (ahead.AtDigit() && ahead.rest.size() != in.rest.size()) {  // "1 1/2", after a space
    const std::optional<Rational> above = TakeDecimal(ahead);
    ahead.SkipSpace();
    if (!above || !ahead.Take("/")) return std::nullopt;
    ahead.SkipSpace();
    const std::optional<Rational> below = TakeDecimal(ahead);
    const std::optional<Rational> part = below ? Divide(*above, *below) : std::nullopt;
    in = ahead;
    return part ? Add(*value, *part) : std::nullopt;
  }
  return value;
}

std::string_view TakeWord(Reader& in) {
  in.SkipSpace();
  size_t length = 0;
  while (length < in.rest.size() && IsLetter(in.rest[length])) ++length;
  const std::string_view word = in.rest.substr(0, length);
  in.rest.remove_prefix(length);
  return word;
}

__int128 ScaleOf(std::string_view word) {
  if (word == "hundred") return 100;
  if (word == "thousand") return 1'000;
  if (word == "million") return 1'000'000;
  if (word == "billion") return 1'000'000'000;
  return 1;
}

// What stands before the number: words, currency and brackets; "-", "minus" or "negative" directly before it is its
// sign. False if a digit-bearing or otherwise meaningful character is in the way.
bool SkipLead(Reader& in, bool& is_negative) {
  is_negative = false;
  while (!in.rest.empty() && !in.AtDigit()) {
    const char c = in.rest.front();
    if (c == '\\') return in.rest.substr(0, 5) == "\\frac";
    if (c == '.' && in.rest.size() > 1 && IsDigit(in.rest[1])) return true;
    if (IsLetter(c)) {
      const std::string_view word = TakeWord(in);
      is_negative = word == "minus" || word == "negative";
      continue;
    }
    if (c == '-') {
      if (is_negative) return false;
      is_negative = true;
    } else if (c == '=' || c == ':') {
      is_negative = false;
    } else if (c == ',' && in.rest.size() > 1 && IsDigit(in.rest[1])) {
      return false;
    } else if (c == '/' || c == '^' || c == '*' || c == '<' || c == '>') {
      return false;
    }
    in.rest.remove_prefix(1);
  }
  return !in.rest.empty();
}

// What may follow: units, currency, closing brackets, a full stop. Another digit would be another number.
bool IsHarmlessTail(std::string_view tail) {
  for (char c : tail) {
    if (IsDigit(c) || c == '^' || c == '*' || c == '=' || c == '\\' || c == '+' || c == '<' || c == '>' || c == '!')
      return false;
  }
  return true;
}

}  // namespace

std::optional<std::string_view> FindFinalAnswer(std::string_view text, bool is_ended) {
  const size_t hashes = text.rfind("####");
  size_t box = text.rfind("\\boxed");
  const size_t fbox = text.rfind("\\fbox");
  if (box == std::string_view::npos || (fbox != std::string_view::npos && fbox > box)) box = fbox;
  const bool has_hashes = hashes != std::string_view::npos;
  const bool has_box = box != std::string_view::npos;
  if (has_box && (!has_hashes || box > hashes)) {
    const size_t open = text.find('{', box);
    const bool opens_here = open != std::string_view::npos && open - box <= std::string_view("\\boxed ").size();
    return opens_here ? InsideBraces(text.substr(open)) : std::nullopt;
  }
  if (!has_hashes) return std::nullopt;
  std::string_view line = text.substr(hashes + 4);
  const size_t end = line.substr(0, kMaxAnswerBytes + 1).find('\n');
  if (end == std::string_view::npos && (!is_ended || line.size() > kMaxAnswerBytes)) return std::nullopt;
  return line.substr(0, end);
}

std::optional<Rational> ParseNumber(std::string_view answer) {
  if (answer.size() > kMaxAnswerBytes) return std::nullopt;
  const std::string plain = Plain(Trim(answer));
  std::string_view text = plain;
  if (const size_t equals = text.rfind('='); equals != std::string_view::npos) text.remove_prefix(equals + 1);
  Reader in{text};
  bool is_negative = false;
  if (!SkipLead(in, is_negative)) return std::nullopt;
  std::optional<Rational> value = TakeUnsigned(in);
  if (!value) return std::nullopt;
  Reader unit = in;
  const __int128 scale = ScaleOf(TakeWord(unit));
  value->numerator *= scale;
  if (value->numerator >= kBound) return std::nullopt;
  if (!IsHarmlessTail(in.rest)) return std::nullopt;
  if (is_negative) value->numerator = -value->numerator;
  return value;
}

}  // namespace moerl::rl
