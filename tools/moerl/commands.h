#ifndef MOERL_TOOLS_MOERL_COMMANDS_H_
#define MOERL_TOOLS_MOERL_COMMANDS_H_

#include "tools/moerl/command.h"

// The functions behind main.cc's table, one file each.
namespace moerl {

int RunConfig(const Arguments& arguments);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_COMMANDS_H_
