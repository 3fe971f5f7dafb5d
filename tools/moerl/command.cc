#include "tools/moerl/command.h"

#include <cstdio>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace moerl {

Flags::Flags(absl::string_view command, const Arguments& arguments) : command_(command), rest_(arguments) {}

bool Flags::Take(absl::string_view name, bool has_value, std::string* value) {
  const std::string option = absl::StrCat("--", name);
  for (size_t i = 0; i < rest_.size(); ++i) {
    if (rest_[i] == "--") break;
    if (has_value && absl::StartsWith(rest_[i], option + "=")) {
      *value = rest_[i].substr(option.size() + 1);
      rest_.erase(rest_.begin() + static_cast<ptrdiff_t>(i));
      return true;
    }
    if (rest_[i] != option) continue;
    if (has_value && i + 1 == rest_.size()) {
      Fail(absl::StrCat(option, ": expected a value"));
      rest_.pop_back();
      return false;
    }
    if (has_value) *value = rest_[i + 1];
    const ptrdiff_t at = static_cast<ptrdiff_t>(i);
    rest_.erase(rest_.begin() + at, rest_.begin() + at + (has_value ? 2 : 1));
    return true;
  }
  return false;
}

void Flags::Fail(const std::string& message) {
  if (status_.ok()) status_ = absl::InvalidArgumentError(absl::StrCat("moerl ", command_, ": ", message));
}

std::string Flags::String(absl::string_view name, const std::string& otherwise) {
  std::string value;
  return Take(name, true, &value) ? value : otherwise;
}

std::vector<std::string> Flags::Strings(absl::string_view name) {
  std::vector<std::string> values;
  for (std::string value; Take(name, true, &value);) values.push_back(value);
  return values;
}

int64_t Flags::Integer(absl::string_view name, int64_t otherwise, int64_t min, int64_t max) {
  std::string text;
  if (!Take(name, true, &text)) return otherwise;
  int64_t value = 0;
  if (!absl::SimpleAtoi(text, &value) || value < min || value > max) {
    Fail(absl::StrCat("--", name, ": expected an integer from ", min, " to ", max, ", found \"", text, "\""));
    return otherwise;
  }
  return value;
}

double Flags::Real(absl::string_view name, double otherwise, double min, double max) {
  std::string text;
  if (!Take(name, true, &text)) return otherwise;
  double value = 0;
  if (!absl::SimpleAtod(text, &value) || !(value >= min && value <= max)) {
    Fail(absl::StrCat("--", name, ": expected a number from ", min, " to ", max, ", found \"", text, "\""));
    return otherwise;
  }
  return value;
}

bool Flags::Switch(absl::string_view name) {
  std::string unused;
  return Take(name, false, &unused);
}

absl::Status Flags::Finish(size_t positional_min, size_t positional_max) {
  bool options_ended = false;
  for (std::string& argument : rest_) {
    if (!options_ended && argument == "--") {
      options_ended = true;
    } else if (!options_ended && absl::StartsWith(argument, "--")) {
      Fail(absl::StrCat("unknown option ", argument, "; see moerl ", command_, " --help"));
    } else {
      positional_.push_back(std::move(argument));
    }
  }
  if (positional_.size() < positional_min || positional_.size() > positional_max) {
    Fail(absl::StrCat("expected ", positional_min,
                      positional_max == positional_min ? "" : absl::StrCat(" to ", positional_max),
                      " arguments beside options, found ", positional_.size(), "; see moerl ", command_, " --help"));
  }
  return status_;
}

int UsageError(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 2;
}

int Failure(const absl::Status& status) {
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

}  // namespace moerl
