#ifndef MOERL_LIBS_RPC_PROGRAM_H_
#define MOERL_LIBS_RPC_PROGRAM_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/server.h"
#include "moerl/v1/config.pb.h"

// What the main() of every service shares.
//
//   int main(int argc, char** argv) {
//     auto program = rpc::Program::Start(argc, argv, {.name = "moerl-rollout", .port = 7400, .metrics_port = 8400});
//     Service service(program->config());
//     rpc::Server& server = program->Serve({&service});
//     service.Run(server);                        // starts its threads; server.SetReady(true) once it can work
//     return program->Finish([&](absl::Time deadline) { service.Drain(deadline); });
//   }
//
// Exit codes: 0 ended as asked; 1 could not start or ended by an error; 2 bad arguments or configuration;
// 128 + n a second signal n.
namespace moerl::rpc {

struct ProgramInfo {
  std::string name = {};  // of the binary, as it appears in logs
  int port = 0;           // default ports, when the configuration gives no address
  int metrics_port = 0;
};

// How a program with this configuration calls others: TLS, keepalive, bounds.
ChannelOptions ChannelOptionsOf(const v1::ServerConfig& server);

// Ends a program that cannot start, with one line in the log: with 2 when what its configuration names is wrong,
// missing or damaged (INVALID_ARGUMENT, NOT_FOUND, PERMISSION_DENIED, DATA_LOSS), so that it is not started again,
// otherwise with 1.
[[noreturn]] void ExitUnstarted(absl::string_view what, const absl::Status& why);

class Program {
 public:
  // Blocks SIGTERM and SIGINT for this and all later threads, parses
  //   --config FILE  --set path.to.field=value …  (or --config=FILE, --set=…)  --help  --version
  // sets up logging, raises the limit of open files to what server.connections_max needs, and serves /metrics.
  // On bad arguments or configuration prints one line and exits with 2; first thing in main, before any thread.
  static std::unique_ptr<Program> Start(int argc, char** argv, const ProgramInfo& info);
  ~Program();

  const v1::Config& config() const { return config_; }
  // How this program's channels are made (TLS, keepalive, bounds as in the configuration).
  const ChannelOptions& channel_options() const { return channel_options_; }

  // Serves on server.listen_address until Finish. Ends the program as ExitUnstarted does when that fails.
  Server& Serve(const std::vector<grpc::Service*>& services);

  // Makes Finish return `exit_code`, as if a signal had come. Any thread; the first one counts.
  void RequestStop(int exit_code);

  // Waits for SIGTERM, SIGINT or RequestStop; then, within server.drain_grace_ms in all: "ready" goes NOT_SERVING and
  // new work is refused (Server::BeginDrain), `drain(deadline)` finishes or hands back what this program does on its
  // own, running calls end, the server stops. Returns the exit code. A second signal ends the process at once, and so
  // does a drain that is still not over two seconds after the deadline (with the code asked for, 1 instead of 0).
  int Finish(const std::function<void(absl::Time deadline)>& drain = {});

 private:
  Program() = default;
  void WatchSignals();

  v1::Config config_;
  ChannelOptions channel_options_;
  ServerOptions server_options_;
  std::unique_ptr<Server> server_;
  absl::Mutex mutex_;
  bool is_stopping_ ABSL_GUARDED_BY(mutex_) = false;
  int exit_code_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_PROGRAM_H_
