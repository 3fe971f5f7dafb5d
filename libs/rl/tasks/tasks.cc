#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "libs/rl/tasks/task.h"

namespace moerl::rl {

std::span<const BuiltinTask> BuiltinTasks() {
  static const std::vector<BuiltinTask>* const tasks = new std::vector<BuiltinTask>{
      ReverseTask(),
      SortTask(),
      CountdownTask(),
      Gsm8kTask(),
  };
  return *tasks;
}

std::span<const Checker> Checkers() {
  static const std::vector<Checker>* const checkers = [] {
    auto* all = new std::vector<Checker>;
    for (const BuiltinTask& task : BuiltinTasks()) all->push_back(task.checker);
    return all;
  }();
  return *checkers;
}

absl::StatusOr<const Checker*> FindChecker(std::string_view task) {
  std::vector<std::string> names;
  for (const Checker& checker : Checkers()) {
    if (checker.task == task) return &checker;
    names.emplace_back(checker.task);
  }
  return absl::NotFoundError(absl::StrCat("task.name: no built-in task \"", std::string(task), "\"; use one of ",
                                          absl::StrJoin(names, ", "), ", or serve an environment that knows it"));
}

}  // namespace moerl::rl
