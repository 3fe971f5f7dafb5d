#ifndef MOERL_LIBS_RL_TASKS_TASK_H_
#define MOERL_LIBS_RL_TASKS_TASK_H_

#include <string>

#include "libs/rl/checker.h"
#include "libs/rl/random.h"

// Internal to the library: what a built-in task consists of. Adding one is a file here and a line in tasks.cc.
namespace moerl::rl {

struct Problem {
  std::string prompt;    // what the policy reads, and the key that decides which split the problem belongs to
  std::string payload;   // what the checker reads
  std::string solution;  // one right answer
};

struct BuiltinTask {
  Checker checker;
  Problem (*draw)(KeyedRandom& random);  // null for tasks that do not make their own problems
};

BuiltinTask ReverseTask();
BuiltinTask SortTask();
BuiltinTask CountdownTask();
BuiltinTask Gsm8kTask();

std::span<const BuiltinTask> BuiltinTasks();

}  // namespace moerl::rl

#endif  // MOERL_LIBS_RL_TASKS_TASK_H_
