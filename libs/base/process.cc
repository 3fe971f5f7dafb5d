#include "libs/base/process.h"

#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libs/base/check.h"
#include "libs/base/env.h"
#include "libs/base/status_macros.h"

extern char** environ;

namespace moerl {
namespace {

// glibc 2.36 has these two, but declares them without C linkage.
int PidfdOpen(pid_t pid) { return static_cast<int>(syscall(SYS_pidfd_open, pid, 0)); }
void PidfdSendSignal(int pidfd, int signal) { syscall(SYS_pidfd_send_signal, pidfd, signal, nullptr, 0); }

// Owns what posix_spawn is told.
struct SpawnPlan {
  posix_spawn_file_actions_t actions;
  posix_spawnattr_t attributes;

  SpawnPlan() {
    MOERL_CHECK(posix_spawn_file_actions_init(&actions) == 0);
    MOERL_CHECK(posix_spawnattr_init(&attributes) == 0);
  }
  ~SpawnPlan() {
    posix_spawn_file_actions_destroy(&actions);
    posix_spawnattr_destroy(&attributes);
  }
  SpawnPlan(const SpawnPlan&) = delete;
  SpawnPlan& operator=(const SpawnPlan&) = delete;
};

void PlanFiles(const std::string& log_file, SpawnPlan& plan) {
  posix_spawn_file_actions_addopen(&plan.actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  if (!log_file.empty()) {
    posix_spawn_file_actions_addopen(&plan.actions, STDOUT_FILENO, log_file.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                     0644);
    posix_spawn_file_actions_adddup2(&plan.actions, STDOUT_FILENO, STDERR_FILENO);
  }
  posix_spawn_file_actions_addclosefrom_np(&plan.actions, STDERR_FILENO + 1);
}

// A group of its own, no signal blocked, every signal as by default.
void PlanAttributes(SpawnPlan& plan) {
  sigset_t none, all;
  sigemptyset(&none);
  sigfillset(&all);
  posix_spawnattr_setpgroup(&plan.attributes, 0);
  posix_spawnattr_setsigmask(&plan.attributes, &none);
  posix_spawnattr_setsigdefault(&plan.attributes, &all);
  posix_spawnattr_setflags(&plan.attributes, POSIX_SPAWN_SETPGROUP | POSIX_SPAWN_SETSIGMASK | POSIX_SPAWN_SETSIGDEF);
}

std::vector<std::string> MergedEnvironment(const ProcessOptions& options) {
  std::map<std::string, std::string> merged;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::pair<std::string, std::string> pair = absl::StrSplit(*entry, absl::MaxSplits('=', 1));
    merged[pair.first] = pair.second;
  }
  for (const auto& [name, value] : options.environment) merged[name] = value;
  std::vector<std::string> out;
  out.reserve(merged.size());
  for (const auto& [name, value] : merged) out.push_back(absl::StrCat(name, "=", value));
  return out;
}

std::vector<char*> Pointers(std::vector<std::string>& strings) {
  std::vector<char*> out;
  out.reserve(strings.size() + 1);
  for (std::string& string : strings) out.push_back(string.data());
  out.push_back(nullptr);
  return out;
}

// A child inherits the CPU mask of the thread that starts it: narrows this thread's while it lives.
class ScopedCpus {
 public:
  explicit ScopedCpus(const std::vector<int>& cpus) {
    if (cpus.empty() || sched_getaffinity(0, sizeof(previous_), &previous_) != 0) return;
    cpu_set_t wanted;
    CPU_ZERO(&wanted);
    for (int cpu : cpus) CPU_SET(cpu, &wanted);
    is_changed_ = sched_setaffinity(0, sizeof(wanted), &wanted) == 0;
  }
  ~ScopedCpus() {
    if (is_changed_) sched_setaffinity(0, sizeof(previous_), &previous_);
  }
  ScopedCpus(const ScopedCpus&) = delete;
  ScopedCpus& operator=(const ScopedCpus&) = delete;

 private:
  cpu_set_t previous_;
  bool is_changed_ = false;
};

// The file that will be run, so that a missing program is told here and not by an exit code.
absl::StatusOr<std::string> FindProgram(const std::string& name) {
  if (name.find('/') != std::string::npos) {
    if (access(name.c_str(), X_OK) == 0) return name;
    return absl::ErrnoToStatus(errno, absl::StrCat("start ", name));
  }
  const char* path = std::getenv("PATH");
  for (absl::string_view directory : absl::StrSplit(path == nullptr ? "/usr/bin:/bin" : path, ':')) {
    const std::string candidate = JoinPath(directory, name);
    if (access(candidate.c_str(), X_OK) == 0) return candidate;
  }
  return absl::NotFoundError(absl::StrCat("start ", name, ": not found on PATH"));
}

int PollMs(absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return -1;
  return static_cast<int>(absl::ToInt64Milliseconds(absl::Ceil(timeout, absl::Milliseconds(1))));
}

}  // namespace

std::string ExitStatus::ToString() const {
  if (signal.has_value()) return absl::StrCat("signal ", *signal, " (", strsignal(*signal), ")");
  return absl::StrCat("exit code ", code.value_or(-1));
}

absl::StatusOr<Process> Process::Start(const ProcessOptions& options) {
  MOERL_CHECK(!options.command.empty());
  MOERL_ASSIGN_OR_RETURN(const std::string program, FindProgram(options.command[0]));
  MOERL_ASSIGN_OR_RETURN(const std::string setpriv, FindProgram("setpriv"));
  std::vector<std::string> arguments = {setpriv, "--pdeathsig", "KILL", "--", program};
  arguments.insert(arguments.end(), options.command.begin() + 1, options.command.end());
  std::vector<std::string> environment = MergedEnvironment(options);

  SpawnPlan plan;
  PlanFiles(options.log_file, plan);
  PlanAttributes(plan);
  pid_t pid = -1;
  int error = 0;
  {
    const ScopedCpus cpus(options.cpus);
    error = posix_spawn(&pid, setpriv.c_str(), &plan.actions, &plan.attributes, Pointers(arguments).data(),
                        Pointers(environment).data());
  }
  if (error != 0) {
    return absl::ErrnoToStatus(
        error, absl::StrCat("start ", program, options.log_file.empty() ? "" : " with log ", options.log_file));
  }
  // The child is not reaped yet, so its id cannot have gone to another process.
  const int pidfd = PidfdOpen(pid);
  if (pidfd < 0) {
    const absl::Status status = absl::ErrnoToStatus(errno, absl::StrCat("pidfd_open for ", program));
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    return status;
  }
  return Process(pid, pidfd);
}

Process::Process(Process&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), pidfd_(std::exchange(other.pidfd_, -1)), exit_(other.exit_) {}

Process& Process::operator=(Process&& other) noexcept {
  if (this == &other) return *this;
  KillAndReap();
  pid_ = std::exchange(other.pid_, -1);
  pidfd_ = std::exchange(other.pidfd_, -1);
  exit_ = other.exit_;
  return *this;
}

Process::~Process() { KillAndReap(); }

void Process::KillAndReap() {
  if (pidfd_ < 0) return;
  if (!exit_.has_value()) {
    SignalGroup(SIGKILL);
    Wait(absl::InfiniteDuration());
  }
  close(std::exchange(pidfd_, -1));
}

std::optional<ExitStatus> Process::Wait(absl::Duration timeout) {
  if (exit_.has_value() || pidfd_ < 0) return exit_;
  const absl::Time deadline = absl::Now() + timeout;
  pollfd poll_one{.fd = pidfd_, .events = POLLIN, .revents = 0};
  while (poll(&poll_one, 1, PollMs(std::max(deadline - absl::Now(), absl::ZeroDuration()))) < 0) {
    MOERL_CHECK(errno == EINTR);
  }
  siginfo_t info{};
  if (waitid(static_cast<idtype_t>(P_PIDFD), static_cast<id_t>(pidfd_), &info, WEXITED | WNOHANG) != 0 ||
      info.si_pid == 0) {
    return std::nullopt;
  }
  exit_.emplace();
  if (info.si_code == CLD_EXITED) {
    exit_->code = info.si_status;
  } else {
    exit_->signal = info.si_status;
  }
  return exit_;
}

void Process::Signal(int signal) {
  if (pidfd_ >= 0 && !exit_.has_value()) PidfdSendSignal(pidfd_, signal);
}

void Process::SignalGroup(int signal) {
  // Until the leader is reaped its id names the group.
  if (pidfd_ >= 0 && !exit_.has_value()) kill(-pid_, signal);
}

}  // namespace moerl
