#ifndef MOERL_LIBS_BASE_PROCESS_H_
#define MOERL_LIBS_BASE_PROCESS_H_

#include <sys/types.h>

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace moerl {

struct ProcessOptions {
  std::vector<std::string> command = {};  // program (found on PATH unless it has a "/") and its arguments
  // Set in addition to this process's environment, replacing what has the same name.
  std::vector<std::pair<std::string, std::string>> environment = {};
  // Standard output and error are appended to this file; empty leaves them as this process has them.
  std::string log_file = {};
  // CPUs it may run on; empty leaves the mask as this process has it.
  std::vector<int> cpus = {};
};

// How a process ended: one of the two is set.
struct ExitStatus {
  std::optional<int> code;
  std::optional<int> signal;

  // "exit code 75", "signal 9 (Killed)".
  std::string ToString() const;
};

// A child process. It leads a process group of its own, so that Ctrl-C at the terminal does not reach it, has
// no other open files than standard input (/dev/null), output and error, and is killed when the thread
// that started it ends, however it ends: start processes from a thread that lives as long as they should, such as
// the main one. (Started with posix_spawn through setpriv of util-linux, which sets the parent-death signal.)
// Thread-compatible. Destruction kills it and waits.
class Process {
 public:
  // Starts the program. NOT_FOUND and the like name the program or the log file.
  static absl::StatusOr<Process> Start(const ProcessOptions& options);

  Process(Process&& other) noexcept;
  Process& operator=(Process&& other) noexcept;
  ~Process();

  pid_t pid() const { return pid_; }

  // Becomes readable for poll(2) when the process ends.
  int pidfd() const { return pidfd_; }

  // How it ended, or nothing when it is still running after `timeout` (zero: just looks).
  std::optional<ExitStatus> Wait(absl::Duration timeout);

  // Sends the signal to the process; nothing happens when it has ended.
  void Signal(int signal);

  // Sends the signal to the process and everything in its group.
  void SignalGroup(int signal);

 private:
  Process(pid_t pid, int pidfd) : pid_(pid), pidfd_(pidfd) {}
  void KillAndReap();

  pid_t pid_ = -1;
  int pidfd_ = -1;
  std::optional<ExitStatus> exit_;
};

}  // namespace moerl

#endif  // MOERL_LIBS_BASE_PROCESS_H_
