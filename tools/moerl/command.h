#ifndef MOERL_TOOLS_MOERL_COMMAND_H_
#define MOERL_TOOLS_MOERL_COMMAND_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// A subcommand of `moerl`: its name, one line of help, and the function that runs it with the arguments after the name.
// Returns the exit code: 0 done, 1 failed (one line on standard error says why), 2 bad arguments or configuration.
namespace moerl {

using Arguments = std::vector<std::string>;

struct Command {
  const char* name;
  const char* help;
  int (*run)(const Arguments& arguments);
};

// "--name VALUE" and "--name=VALUE" options of a subcommand, in any order; what is left are the positional arguments.
//
//   Flags flags("eval", arguments);
//   const std::string model = flags.String("model", "");
//   const int64_t prompts = flags.Integer("num-prompts", 256, 1, 1'000'000);
//   if (absl::Status status = flags.Finish(1); !status.ok()) return UsageError(status);
//
// The first error is kept and returned by Finish.
class Flags {
 public:
  Flags(absl::string_view command, const Arguments& arguments);

  std::string String(absl::string_view name, const std::string& otherwise);
  // All values of an option that may be given several times.
  std::vector<std::string> Strings(absl::string_view name);
  int64_t Integer(absl::string_view name, int64_t otherwise, int64_t min, int64_t max);
  double Real(absl::string_view name, double otherwise, double min, double max);
  // An option without a value.
  bool Switch(absl::string_view name);

  // Errors: an option that nobody asked for, a bad value, another number of positional arguments than min..max.
  absl::Status Finish(size_t positional_min = 0, size_t positional_max = SIZE_MAX);
  // After Finish.
  const std::vector<std::string>& positional() const { return positional_; }

 private:
  bool Take(absl::string_view name, bool has_value, std::string* value);
  void Fail(const std::string& message);

  const std::string command_;
  std::vector<std::string> rest_;
  std::vector<std::string> positional_;
  absl::Status status_;
};

// Print one line to standard error and return the exit code 2, 1.
int UsageError(const absl::Status& status);
int Failure(const absl::Status& status);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_COMMAND_H_
