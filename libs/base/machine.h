#ifndef MOERL_LIBS_BASE_MACHINE_H_
#define MOERL_LIBS_BASE_MACHINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

// What this process may use of the machine, and what it uses. Read from /proc and /sys at each call; what the
// kernel does not tell is absent. Every function takes the directory that holds proc/ and sys/, "" for the
// real one. Any thread.
namespace moerl {

// The limits of this process's cgroup (of version 2 or 1), the tightest on the way up to the root.
struct CgroupLimits {
  std::optional<uint64_t> memory_bytes;
  std::optional<double> cpu_cores;
};
CgroupLimits ReadCgroupLimits(const std::string& root = "");

// Cores this process can keep busy: those of its affinity mask, less when its cgroup has a lower quota.
// At least 1.
int AllowedCores();

// Bytes of memory this process can have: the machine's, less when its cgroup has a lower limit.
uint64_t AllowedMemoryBytes();

// One figure, as Prometheus would name it.
struct Reading {
  enum class Kind { kCounter, kGauge };
  std::string name;
  std::string help;
  Kind kind = Kind::kGauge;
  std::vector<std::pair<std::string, std::string>> labels;
  double value = 0;
};

// From now on ReadMachine has the size and the free bytes of the file system that holds `directory`, which need not
// exist yet: moerl_disk_size_bytes{volume} and moerl_disk_free_bytes{volume}. A volume named again gets the new
// directory.
void WatchDisk(const std::string& volume, const std::string& directory);

// process_*, cgroup limits and use, pressure-stall time, shared memory, watched disks, network bytes by interface.
// Readings of one name stand together.
std::vector<Reading> ReadMachine(const std::string& root = "");

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_MACHINE_H_
