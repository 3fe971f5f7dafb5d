#ifndef MOERL_TOOLS_MOERL_LOG_TAIL_H_
#define MOERL_TOOLS_MOERL_LOG_TAIL_H_

#include <cstdint>
#include <string>

#include "libs/base/env.h"

namespace moerl {

// The end of a file, from `from` on but no more than its last 64 KiB; empty when it cannot be read.
std::string ReadTail(Env& env, const std::string& path, uint64_t from = 0);

// Why a program ended, in its own words: of the last error in the log it wrote from byte `from` on, message and reason,
// or its last line if that is no log line (a refused command line). Empty when it said nothing.
std::string LastWords(Env& env, const std::string& log_file, uint64_t from);

}  // namespace moerl

#endif  // MOERL_TOOLS_MOERL_LOG_TAIL_H_
