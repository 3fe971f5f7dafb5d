#include "libs/rpc/server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/resource_quota.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include <utility>

#include "absl/base/call_once.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/call_monitor.h"
#include "libs/rpc/listener.h"
#include "libs/rpc/status.h"

namespace moerl::rpc {
namespace {

constexpr const char* kReady = "ready";

int Milliseconds(absl::Duration duration) { return static_cast<int>(absl::ToInt64Milliseconds(duration)); }

// What gRPC itself has to say (a refused handshake, a port in use) goes to our log.
void LogFromGrpc(gpr_log_func_args* event) {
  const LogLevel level = event->severity == GPR_LOG_SEVERITY_ERROR ? LogLevel::kWarning : LogLevel::kDebug;
  Log(level, "grpc", {{"reason", event->message}, {"file", event->file}, {"line", event->line}});
}

void PrepareProcess() {
  static absl::once_flag once;
  absl::call_once(once, [] {
    gpr_set_log_function(LogFromGrpc);
    grpc::EnableDefaultHealthCheckService(true);
    grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  });
}

void ApplyLimits(const ServerOptions& options, grpc::ServerBuilder& builder) {
  const WireLimits& limits = options.limits;
  builder.SetMaxReceiveMessageSize(limits.message_bytes_max);
  builder.SetMaxSendMessageSize(limits.message_bytes_max);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, limits.metadata_bytes_max);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(limits.keepalive_time));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(limits.keepalive_timeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  // Half of what channels send, so that a late ping behind an early one is no offence.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(limits.keepalive_time) / 2);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, options.streams_per_connection_max);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, Milliseconds(options.connection_age_max));
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS, Milliseconds(options.connection_idle_max));
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(options.handshake_timeout));
  grpc::ResourceQuota quota("moerl");
  quota.Resize(static_cast<size_t>(options.buffer_bytes_max));
  builder.SetResourceQuota(quota);
}

// "0.0.0.0:0" bound to 7400 is "127.0.0.1:7400" to a client on this machine.
std::string DialAddress(const std::string& listen_address, int port) {
  const std::string host = listen_address.substr(0, listen_address.rfind(':'));
  if (host == "0.0.0.0" || host == "[::]") return absl::StrCat("127.0.0.1:", port);
  return absl::StrCat(host, ":", port);
}

// What a scrape shows of the health service's "ready".
void ShowReady(bool is_ready) {
  static Gauge& ready = GetGauge("moerl_server_ready", "1 while this program accepts work.");
  ready.Set(is_ready ? 1 : 0);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Start(const ServerOptions& options,
                                                      const std::vector<grpc::Service*>& services) {
  PrepareProcess();
  MOERL_ASSIGN_OR_RETURN(const auto credentials, MakeServerCredentials(options.security, options.address));
  if (options.security.insecure) {
    LogWarning("server.insecure is true: no TLS, every caller has every role", {{"address", options.address}});
  }
  auto server = std::unique_ptr<Server>(new Server());
  server->drain_retry_delay_ = options.drain_retry_delay;
  server->monitor_ = std::make_shared<CallMonitor>(options.unary_deadline_max);

  grpc::ServerBuilder builder;
  ApplyLimits(options, builder);
  std::vector<std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface>> interceptors;
  interceptors.push_back(server->monitor_->MakeFactory());
  builder.experimental().SetInterceptorCreators(std::move(interceptors));
  MOERL_ASSIGN_OR_RETURN(server->listener_, Listener::Bind(options.address));
  auto acceptor = builder.experimental().AddExternalConnectionAcceptor(
      grpc::ServerBuilder::experimental_type::ExternalConnectionType::FROM_FD, credentials);
  for (grpc::Service* service : services) builder.RegisterService(service);
  server->server_ = builder.BuildAndStart();
  if (server->server_ == nullptr) return absl::InternalError("gRPC did not start; its log says why");
  server->port_ = server->listener_->port();
  server->address_ = DialAddress(options.address, server->port_);
  server->server_->GetHealthCheckService()->SetServingStatus(kReady, false);
  ShowReady(false);
  server->listener_->Start(std::move(acceptor), DescriptorMax(options.connections_max));
  return server;
}

Server::~Server() { Shutdown(absl::Now()); }

void Server::SetReady(bool is_ready) {
  absl::MutexLock lock(&mutex_);
  if (is_draining() || is_shut_down_) return;
  server_->GetHealthCheckService()->SetServingStatus(kReady, is_ready);
  ShowReady(is_ready);
}

absl::Status Server::Admit() const {
  if (!is_draining()) return absl::OkStatus();
  return WithRetryDelay(absl::UnavailableError("this server is draining; call another one, or this one later"),
                        drain_retry_delay_);
}

void Server::OnDrain(std::function<void()> callback) {
  {
    absl::MutexLock lock(&mutex_);
    if (!is_draining()) {
      on_drain_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void Server::BeginDrain() {
  std::vector<std::function<void()>> callbacks;
  {
    absl::MutexLock lock(&mutex_);
    if (is_draining() || is_shut_down_) return;
    server_->GetHealthCheckService()->SetServingStatus(kReady, false);
    ShowReady(false);
    is_draining_.store(true, std::memory_order_release);
    callbacks.swap(on_drain_);
  }
  for (const auto& callback : callbacks) callback();
}

int Server::Shutdown(absl::Time deadline) {
  if (server_ == nullptr) return 0;
  BeginDrain();
  {
    absl::MutexLock lock(&mutex_);
    if (std::exchange(is_shut_down_, true)) return 0;
  }
  const int num_cancelled = monitor_->WaitIdle(deadline);
  listener_.reset();
  server_->Shutdown(std::chrono::system_clock::now());
  server_->Wait();
  return num_cancelled;
}

}  // namespace moerl::rpc
