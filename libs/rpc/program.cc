#include "libs/rpc/program.h"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "libs/base/check.h"
#include "libs/base/config.h"
#include "libs/base/crash_signals.h"
#include "libs/base/failpoint.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"

namespace moerl::rpc {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitBadUsage = 2;
constexpr absl::Duration kDrainSlack = absl::Seconds(2);
// Open files besides connections: the store, the ledger, shared memory, the libraries.
constexpr rlim_t kOtherFiles = 1024;

[[noreturn]] void Exit(int code, const std::string& line) {
  std::fprintf(code == 0 ? stdout : stderr, "%s\n", line.c_str());
  std::exit(code);
}

struct Arguments {
  std::string config;
  std::vector<std::string> overrides;
};

Arguments Parse(int argc, char** argv, const ProgramInfo& info) {
  const std::string usage = absl::StrCat("usage: ", info.name, " --config FILE [--set path.to.field=value]...");
  Arguments arguments;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (argument == "--help") Exit(0, usage);
    if (argument == "--version") Exit(0, absl::StrCat(info.name, " ", MOERL_VERSION));
    const size_t equals = argument.find('=');
    const std::string option = argument.substr(0, equals);
    if (option != "--config" && option != "--set") {
      Exit(kExitBadUsage, absl::StrCat(info.name, ": unknown argument '", argument, "'; ", usage));
    }
    if (equals == std::string::npos && i + 1 == argc) {
      Exit(kExitBadUsage, absl::StrCat(info.name, ": ", argument, " needs a value; ", usage));
    }
    const std::string value = equals == std::string::npos ? argv[++i] : argument.substr(equals + 1);
    if (option == "--config") arguments.config = value;
    if (option == "--set") arguments.overrides.push_back(value);
  }
  if (arguments.config.empty()) Exit(kExitBadUsage, absl::StrCat(info.name, ": no configuration; ", usage));
  return arguments;
}

// Debian's absl is a debug build, whose mutexes record the order in which they are taken to report deadlocks: a third
// of a server's work. That is for our debug and sanitizer builds, which test under it.
void StopRecordingLockOrder() {
#ifdef NDEBUG
  absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore);
#endif
}

// All threads started later inherit the mask, so that only WatchSignals sees these.
sigset_t StopSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  return signals;
}

void RaiseOpenFiles(rlim_t wanted) {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted) return;
  limit.rlim_cur = std::min(wanted, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur < wanted) {
    LogWarning("fewer open files allowed than server.connections_max may need; raise ulimit -n",
               {{"allowed", limit.rlim_cur}, {"wanted", wanted}});
  }
}

void ArmConfiguredFailpoints(const ProgramInfo& info, const std::string& failpoints) {
  if (failpoints.empty()) return;
  if (const absl::Status status = ArmFailpoints(failpoints); !status.ok()) {
    Exit(kExitBadUsage, absl::StrCat(info.name, ": config: server.", std::string(status.message())));
  }
  LogWarning("failpoints are armed", {{"failpoints", failpoints}});
}

Security SecurityOf(const v1::ServerConfig& config) {
  Security security;
  security.insecure = config.insecure();
  if (config.has_tls()) {
    security.tls = TlsFiles{.certificate = config.tls().certificate_file(),
                            .private_key = config.tls().key_file(),
                            .authority = config.tls().ca_file()};
    if (!config.tls().domain().empty()) security.trust_domain = config.tls().domain();
  }
  return security;
}

[[noreturn]] void EndLateDrain(int exit_code) {
  LogWarning("the drain did not end in time: ending at once");
  _exit(exit_code == 0 ? kExitFailure : exit_code);
}

LogLevel LevelOf(v1::LogLevel level) {
  switch (level) {
    case v1::LOG_LEVEL_DEBUG:
      return LogLevel::kDebug;
    case v1::LOG_LEVEL_WARNING:
      return LogLevel::kWarning;
    case v1::LOG_LEVEL_ERROR:
      return LogLevel::kError;
    default:
      return LogLevel::kInfo;
  }
}

}  // namespace

ChannelOptions ChannelOptionsOf(const v1::ServerConfig& server) {
  WireLimits limits;
  limits.message_bytes_max = static_cast<int>(server.message_bytes_max());
  limits.keepalive_time = absl::Milliseconds(server.keepalive_ms());
  return {.security = SecurityOf(server), .limits = limits};
}

void ExitUnstarted(absl::string_view what, const absl::Status& why) {
  LogError(what, {{"reason", why.ToString()}});
  const bool is_refused =
      absl::IsInvalidArgument(why) || absl::IsNotFound(why) || absl::IsPermissionDenied(why) || absl::IsDataLoss(why);
  std::_Exit(is_refused ? kExitBadUsage : kExitFailure);  // other threads run already
}

std::unique_ptr<Program> Program::Start(int argc, char** argv, const ProgramInfo& info) {
  DropInfinipathHandlers();
  const sigset_t signals = StopSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  StopRecordingLockOrder();
  const Arguments arguments = Parse(argc, argv, info);
  auto program = std::unique_ptr<Program>(new Program());
  if (absl::Status status = LoadConfig(arguments.config, arguments.overrides, program->config_); !status.ok()) {
    Exit(kExitBadUsage, absl::StrCat(info.name, ": ", std::string(status.message())));
  }
  const v1::ServerConfig& server = program->config_.server();
  InitLogging({.program = info.name, .level = LevelOf(server.log_level())});
  ArmConfiguredFailpoints(info, server.failpoints());
  RaiseOpenFiles(server.connections_max() + kOtherFiles);

  program->channel_options_ = ChannelOptionsOf(server);
  program->server_options_ = {
      .address = server.listen_address().empty() ? absl::StrCat("127.0.0.1:", info.port) : server.listen_address(),
      .security = program->channel_options_.security,
      .limits = program->channel_options_.limits,
      .unary_deadline_max = absl::Milliseconds(server.deadline_ms_max()),
      .connections_max = static_cast<int>(server.connections_max())};
  const std::string metrics_address = server.metrics_address().empty() ? absl::StrCat("127.0.0.1:", info.metrics_port)
                                                                       : std::string(server.metrics_address());
  if (absl::Status status = ServeMetrics(metrics_address); !status.ok()) {
    LogError("cannot serve metrics", {{"reason", std::string(status.message())}});
    std::exit(kExitFailure);
  }
  LogInfo("serving metrics",
          {{"address", absl::StrCat(metrics_address.substr(0, metrics_address.rfind(':')), ":", MetricsPort())}});
  std::thread([raw = program.get()] { raw->WatchSignals(); }).detach();
  return program;
}

Program::~Program() = default;

Server& Program::Serve(const std::vector<grpc::Service*>& services) {
  MOERL_CHECK(server_ == nullptr);
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Start(server_options_, services);
  if (!server.ok()) ExitUnstarted("cannot serve", server.status());
  server_ = *std::move(server);
  LogInfo("serving", {{"address", server_->address()}});
  return *server_;
}

void Program::RequestStop(int exit_code) {
  absl::MutexLock lock(&mutex_);
  if (std::exchange(is_stopping_, true)) return;
  exit_code_ = exit_code;
}

int Program::Finish(const std::function<void(absl::Time)>& drain) {
  int exit_code = 0;
  {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(&is_stopping_));
    exit_code = exit_code_;
  }
  const absl::Time deadline = absl::Now() + absl::Milliseconds(config_.server().drain_grace_ms());
  LogInfo("draining", {{"grace_ms", config_.server().drain_grace_ms()}});
  absl::Notification is_drained;
  std::thread watchdog([&] {
    if (!is_drained.WaitForNotificationWithDeadline(deadline + kDrainSlack)) EndLateDrain(exit_code);
  });
  if (server_ != nullptr) server_->BeginDrain();
  if (drain) drain(deadline);
  const int num_cancelled = server_ == nullptr ? 0 : server_->Shutdown(deadline);
  is_drained.Notify();
  watchdog.join();
  LogInfo("stopped", {{"exit_code", exit_code}, {"calls_cancelled", num_cancelled}});
  return exit_code;
}

// Runs on its own thread until the process ends.
void Program::WatchSignals() {
  const sigset_t signals = StopSignals();
  int signal = 0;
  sigwait(&signals, &signal);
  LogInfo("signal", {{"signal", signal}});
  const int grace_ms = config_.server().drain_grace_ms();
  RequestStop(0);
  const absl::Time end = absl::Now() + absl::Milliseconds(grace_ms) + kDrainSlack;
  int second = -1;
  do {  // SIGCONT and a leak checker's ptrace end a wait early
    const timespec wait = absl::ToTimespec(std::max(absl::ZeroDuration(), end - absl::Now()));
    second = sigtimedwait(&signals, nullptr, &wait);
  } while (second < 0 && errno == EINTR);
  if (second < 0) EndLateDrain(0);
  LogWarning("second signal: ending at once");
  _exit(128 + second);
}

}  // namespace moerl::rpc
