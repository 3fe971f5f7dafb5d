#ifndef MOERL_TOOLS_MOERL_COMMANDS_H_
#define MOERL_TOOLS_MOERL_COMMANDS_H_

#include "tools/moerl/command.h"

// The functions behind main.cc's table, one file each.
namespace moerl {

int RunBench(const Arguments& arguments);
int RunConfig(const Arguments& arguments);
int RunDoctor(const Arguments& arguments);
int RunEval(const Arguments& arguments);
int RunExport(const Arguments& arguments);
int RunGenerate(const Arguments& arguments);
int RunInit(const Arguments& arguments);
int RunLogprobs(const Arguments& arguments);
int RunUpcycle(const Arguments& arguments);
int RunRun(const Arguments& arguments);
int RunStatus(const Arguments& arguments);
int RunTop(const Arguments& arguments);
int RunWeights(const Arguments& arguments);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_COMMANDS_H_
