// moerl run: starts weight_sync, the trainer's ranks and the rollout servers as processes of this machine and watches
// over them until the run is done.
#include <poll.h>
#include <sys/signalfd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <filesystem>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "libs/base/check.h"
#include "libs/base/config.h"
#include "libs/base/machine.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/program.h"
#include "tools/moerl/commands.h"
#include "tools/moerl/display.h"
#include "tools/moerl/log_tail.h"
#include "tools/moerl/resumed_config.h"
#include "tools/moerl/run_directory.h"
#include "tools/moerl/run_plan.h"
#include "tools/moerl/supervision.h"
#include "tools/moerl/trainer_watch.h"

namespace moerl {
namespace {

constexpr char kUsage[] =
    "usage: moerl run CONFIG [--resume] [--set a.b=VALUE]…\n"
    "Trains as CONFIG says, in the run directory runs/<name>: its logs are in logs/, its metrics in metrics.jsonl, "
    "the\n"
    "trained model in model/. Ctrl-C stops it so that --resume continues it; a second one stops it at once.\n"
    "--resume goes on with what the run was started with; --set changes that where it stays the same training.";
constexpr absl::Duration kUpdateInterval = absl::Milliseconds(500);
// What the drain of a program may take beyond its own grace.
constexpr absl::Duration kDrainSlack = absl::Seconds(3);
// Of a program that could not be started, as shells have it.
constexpr int kExitNeverStarted = 127;
// With less left on its disk a run is about to stand still: said once.
constexpr uint64_t kDiskBytesLow = 64 << 20;

// Signals as readable events; blocked for every thread started later.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&signals_);
    sigaddset(&signals_, SIGINT);
    sigaddset(&signals_, SIGTERM);
    sigaddset(&signals_, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &signals_, nullptr);
    fd_ = signalfd(-1, &signals_, SFD_CLOEXEC | SFD_NONBLOCK);
    MOERL_CHECK(fd_ >= 0);
  }
  ~StopSignals() { close(fd_); }
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  int fd() const { return fd_; }
  // 0 when none has come.
  int Take() {
    signalfd_siginfo info;
    return read(fd_, &info, sizeof(info)) == sizeof(info) ? static_cast<int>(info.ssi_signo) : 0;
  }

 private:
  sigset_t signals_;
  int fd_ = -1;
};

// The loop that carries out what Supervision decides.
class Runner {
 public:
  Runner(const RunPlan& plan, std::string directory, const SupervisionLimits& limits, TrainerWatch& watch,
         Display& display)
      : plan_(plan),
        directory_(std::move(directory)),
        supervision_(plan.groups, limits),
        watch_(watch),
        display_(display) {
    for (const auto& group : plan_.members) {
      processes_.emplace_back(group.size());
      log_begins_.emplace_back(group.size());
    }
  }

  // Returns the exit code of `moerl run`.
  int Run(StopSignals& signals) {
    Apply(supervision_.Begin(absl::Now()));
    ReportNeverStarted();
    while (!exit_code_.has_value()) {
      WaitForEvent(signals);
      if (const int signal = signals.Take(); signal != 0) {
        display_.Notice("stopping; again to stop at once");
        Apply(supervision_.Stop(128 + signal, "stopped", absl::Now()));
      }
      ReapEnded();
      Apply(supervision_.OnTime(absl::Now()));
      ReportNeverStarted();
      ShowWhenDue();
    }
    display_.Update(watch_.Status(), watch_.Rows());
    return *exit_code_;
  }

  const std::string& why() const { return why_; }

 private:
  void WaitForEvent(const StopSignals& signals) {
    std::vector<pollfd> polls = {{.fd = signals.fd(), .events = POLLIN, .revents = 0}};
    for (const auto& group : processes_) {
      for (const auto& process : group) {
        if (process.has_value()) polls.push_back({.fd = process->pidfd(), .events = POLLIN, .revents = 0});
      }
    }
    const absl::Duration wait = std::min(supervision_.WakeTime(), next_update_) - absl::Now();
    poll(polls.data(), polls.size(), static_cast<int>(std::max<int64_t>(0, absl::ToInt64Milliseconds(wait) + 1)));
  }

  void ReapEnded() {
    for (size_t group = 0; group < processes_.size(); ++group) {
      for (size_t member = 0; member < processes_[group].size(); ++member) {
        std::optional<Process>& process = processes_[group][member];
        if (!process.has_value()) continue;
        const std::optional<ExitStatus> status = process->Wait(absl::ZeroDuration());
        if (!status.has_value()) continue;
        process.reset();
        const std::string& log_file = plan_.members[group][member].log_file;
        Apply(supervision_.OnExit(static_cast<int>(group), static_cast<int>(member), *status, absl::Now(),
                                  LastWords(*PosixEnv(), log_file, log_begins_[group][member])));
      }
    }
  }

  void Apply(const Actions& actions) {
    for (const Action& action : actions) {
      std::optional<Process>& process = processes_[action.group][action.member];  // empty: it could not be started
      switch (action.kind) {
        case Action::Kind::kStart:
          Start(action);
          break;
        case Action::Kind::kTerminate:
          if (process.has_value()) process->Signal(SIGTERM);
          break;
        case Action::Kind::kKill:
          if (process.has_value()) process->SignalGroup(SIGKILL);
          break;
        case Action::Kind::kNotice:
          display_.Notice(action.text);
          break;
        case Action::Kind::kFinish:
          exit_code_ = action.exit_code;
          why_ = action.text;
          break;
      }
    }
  }

  void Start(const Action& action) {
    const MemberPlan& member = plan_.members[action.group][action.member];
    log_begins_[action.group][action.member] = PosixEnv()->FileSize(member.log_file).value_or(0);
    absl::StatusOr<Process> process = Process::Start({.command = member.command, .log_file = member.log_file});
    if (process.ok()) {
      processes_[action.group][action.member].emplace(*std::move(process));
      return;
    }
    never_started_.push_back({action.group, action.member, std::string(process.status().message())});
  }

  // Not told from Start: what follows may be to kill members whose own start is still among the actions at hand.
  void ReportNeverStarted() {
    for (const NeverStarted& member : std::exchange(never_started_, {})) {
      ExitStatus status;
      status.code = kExitNeverStarted;
      Apply(supervision_.OnExit(member.group, member.member, status, absl::Now(), member.why));
    }
  }

  void ShowWhenDue() {
    if (absl::Now() < next_update_) return;
    next_update_ = absl::Now() + kUpdateInterval;
    display_.Update(watch_.Status(), watch_.Rows());
    WarnOfFullDisk();
  }

  // A program that finds the disk full waits for room, and its log may be on the same disk.
  void WarnOfFullDisk() {
    const absl::StatusOr<uint64_t> free_bytes = PosixEnv()->FreeBytes(directory_);
    const bool is_low = free_bytes.ok() && *free_bytes < kDiskBytesLow;
    if (is_low && !is_disk_low_) {
      display_.Notice(absl::StrCat("only ", *free_bytes >> 20, " MiB are free on the disk of ", directory_,
                                   "; make room: a full disk makes the run wait"));
    }
    is_disk_low_ = is_low;
  }

  struct NeverStarted {
    int group;
    int member;
    std::string why;
  };

  const RunPlan& plan_;
  const std::string directory_;
  Supervision supervision_;
  TrainerWatch& watch_;
  Display& display_;
  std::vector<std::vector<std::optional<Process>>> processes_;
  std::vector<NeverStarted> never_started_;
  std::vector<std::vector<uint64_t>> log_begins_;  // sizes of the log files when the processes were started
  bool is_disk_low_ = false;
  absl::Time next_update_ = absl::InfinitePast();
  std::optional<int> exit_code_;
  std::string why_;
};

// Ranks of one run know each other by a secret, made once.
absl::Status MakeToken(const RunDirectory& directory, v1::Config& config) {
  if (!config.fabric().token_file().empty()) return absl::OkStatus();
  const std::string path = TokenFile(directory.path());
  config.mutable_fabric()->set_token_file(path);
  if (PosixEnv()->Exists(path)) return absl::OkStatus();
  std::random_device random;
  std::string token;
  for (int i = 0; i < 8; ++i) absl::StrAppendFormat(&token, "%08x", random());
  const mode_t before = umask(0077);  // it is nobody else's to read, at no moment
  absl::Status written = PosixEnv()->WriteFileDurably(path, token + "\n");
  umask(before);
  return written;
}

// The configuration of a run that goes on, even if it was killed before it began.
absl::StatusOr<v1::Config> TakeUp(Env& env, const RunDirectory& directory, const ResumeRequest& request) {
  const absl::StatusOr<std::string> stored = env.ReadFile(directory.At("config.yaml"));
  if (!stored.ok()) {
    return absl::Status(stored.status().code(),
                        absl::StrCat("run: what it was started with cannot be read: ", stored.status().message(),
                                     "; copy config.yaml of the newest directory in checkpoints/ there"));
  }
  MOERL_ASSIGN_OR_RETURN(ResumedConfig resumed, ResumeConfig(*stored, request));
  for (const std::string& notice : resumed.notices) std::puts(notice.c_str());
  std::fflush(stdout);
  return std::move(resumed.config);
}

absl::StatusOr<int> RunConfigured(ResumeRequest request, bool is_resume) {
  StopSignals signals;
  std::signal(SIGPIPE,
              SIG_IGN);  // Ctrl-C ends the tee that this writes to as well; the run is still to be stopped well
  Env& env = *PosixEnv();
  MOERL_ASSIGN_OR_RETURN(const RunDirectory directory, RunDirectory::Open(env, is_resume, request.config));
  v1::Config config = request.config;
  if (is_resume) {
    MOERL_ASSIGN_OR_RETURN(config, TakeUp(env, directory, request));
  }
  MOERL_RETURN_IF_ERROR(MakeToken(directory, config));
  MOERL_ASSIGN_OR_RETURN(const std::vector<int> ports, FreePorts(NumPorts(config)));
  const std::string programs = std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
  const RunPlan plan = PlanRun(config, {programs, directory.path(), AllowedCores()}, ports);
  MOERL_RETURN_IF_ERROR(env.WriteFileDurably(directory.At("endpoints.json"), EndpointsJson(plan)));

  MOERL_ASSIGN_OR_RETURN(auto channel,
                         rpc::MakeChannel(plan.trainer_address(), rpc::ChannelOptionsOf(config.server())));
  MOERL_RETURN_IF_ERROR(env.WriteFileDurably(directory.At("config.yaml"), FormatConfig(config)));
  TrainerWatch watch(channel, /*after_step=*/0);
  Display display(config.name(), config.trainer().num_steps());
  display.Notice(absl::StrCat("run directory ", directory.path()));
  SupervisionLimits limits;
  limits.stop_grace = absl::Milliseconds(config.server().drain_grace_ms()) + kDrainSlack;
  Runner runner(plan, directory.path(), limits, watch, display);
  const int exit_code = runner.Run(signals);
  if (exit_code == 0) {
    display.Conclude(absl::StrCat("done; the model is in ", directory.At("model")));
  } else if (exit_code > 128) {
    display.Conclude(absl::StrCat("stopped; continue with --resume (", directory.path(), ")"));
  } else {
    display.Conclude(absl::StrCat("failed: ", runner.why(), "; see ", directory.At("logs")));
  }
  return exit_code;
}

}  // namespace

int RunRun(const Arguments& arguments) {
  Flags flags("run", arguments);
  if (flags.Switch("help")) {
    std::puts(kUsage);
    return 0;
  }
  const bool is_resume = flags.Switch("resume");
  const std::vector<std::string> overrides = flags.Strings("set");
  if (absl::Status status = flags.Finish(1, 1); !status.ok()) return UsageError(status);
  ResumeRequest request = {.file = flags.positional()[0], .overrides = overrides, .config = {}};
  if (absl::Status status = LoadConfig(request.file, overrides, request.config); !status.ok())
    return UsageError(status);
  const absl::StatusOr<int> exit_code = RunConfigured(std::move(request), is_resume);
  return exit_code.ok() ? *exit_code : Failure(exit_code.status());
}

}  // namespace moerl
