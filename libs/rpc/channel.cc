#include "libs/rpc/channel.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "libs/base/check.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/method_table.h"
#include "libs/rpc/trace.h"

namespace moerl::rpc {
namespace {

constexpr int kBackoffFirstMs = 100;
constexpr int kBackoffMaxMs = 3000;
constexpr int kConnectTimeoutMs = 5000;  // a refused attempt fails at once; this is for a host that is slow, or gone
constexpr int kAttemptsMax = 5;          // gRPC's own cap

// Retries unary calls only. Of a stream gRPC would send again what it had sent to a server that died, behind its
// caller's back; and gRPC 1.51 then leaves the caller of a bidirectional one waiting for ever. The throttle stops a
// fleet from retrying a dead server to death.
std::string ServiceConfig(int attempts_max) {
  std::string names;
  for (const MethodRule& rule : MethodTable()) {
    if (rule.kind != MethodKind::kUnary) continue;
    const std::pair<absl::string_view, absl::string_view> parts = absl::StrSplit(rule.method.substr(1), '/');
    absl::StrAppend(&names, names.empty() ? "" : ",", R"({"service":")", parts.first, R"(","method":")", parts.second,
                    R"("})");
  }
  const std::string retry = absl::StrCat(
      R"("methodConfig":[{"name":[)", names, R"(],"retryPolicy":{"maxAttempts":)", std::min(attempts_max, kAttemptsMax),
      R"(,"initialBackoff":"0.1s","maxBackoff":"2s","backoffMultiplier":2,"retryableStatusCodes":["UNAVAILABLE"]}}],)",
      R"("retryThrottling":{"maxTokens":100,"tokenRatio":0.5},)");
  return absl::StrCat("{", attempts_max > 1 ? retry : "", R"("loadBalancingConfig":[{"round_robin":{}}]})");
}

// gRPC 1.51 stops the threads that run reactions when the last channel or server that used them goes. A call keeps its
// channel until its own last reaction, so that this may happen on such a thread: it then waits for itself in vain, goes
// on, and finds its queue freed. A channel that is there for ever, and has used them, keeps them.
void KeepReactionThreads() {
  struct Kept {
    std::shared_ptr<grpc::Channel> channel = grpc::CreateChannel("", nullptr);  // every call on it fails at once
    grpc::GenericStub stub{channel};
    grpc::ClientContext context;
    grpc::ByteBuffer request{nullptr, 0};
    grpc::ByteBuffer response;
  };
  static auto* const kept = [] {
    auto* made = new Kept;
    made->stub.UnaryCall(&made->context, "/", grpc::StubOptions(), &made->request, &made->response,
                         [](const grpc::Status&) {});
    return made;
  }();
  MOERL_CHECK(kept->channel != nullptr);  // read, or the compiler drops the pointer, and leak checkers what it keeps
}

}  // namespace

absl::StatusOr<std::shared_ptr<grpc::Channel>> MakeChannel(const std::string& target, const ChannelOptions& options) {
  KeepReactionThreads();
  MOERL_ASSIGN_OR_RETURN(const auto credentials, MakeChannelCredentials(options.security, target));
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(options.limits.message_bytes_max);
  arguments.SetMaxSendMessageSize(options.limits.message_bytes_max);
  arguments.SetInt(GRPC_ARG_MAX_METADATA_SIZE, options.limits.metadata_bytes_max);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.limits.keepalive_time)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS,
                   static_cast<int>(absl::ToInt64Milliseconds(options.limits.keepalive_timeout)));
  arguments.SetInt(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kBackoffFirstMs);
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, kConnectTimeoutMs);  // what gRPC calls so
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kBackoffMaxMs);
  arguments.SetInt(GRPC_ARG_DNS_MIN_TIME_BETWEEN_RESOLUTIONS_MS, kBackoffMaxMs);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetServiceConfigJSON(ServiceConfig(options.attempts_max));
  return grpc::CreateCustomChannel(target, credentials, arguments);
}

std::unique_ptr<grpc::ClientContext> CallContext(absl::Duration timeout) {
  auto context = StreamContext();
  context->set_deadline(absl::ToChronoTime(absl::Now() + timeout));
  context->set_wait_for_ready(true);
  return context;
}

std::unique_ptr<grpc::ClientContext> StreamContext() {
  auto context = std::make_unique<grpc::ClientContext>();
  const std::string traceparent = FormatTraceparent(CurrentTraceId());
  if (!traceparent.empty()) context->AddMetadata(kTraceparent, traceparent);
  return context;
}

absl::Status WaitConnected(grpc::Channel& channel, const std::string& target, absl::Duration timeout) {
  if (channel.WaitForConnected(absl::ToChronoTime(absl::Now() + timeout))) return absl::OkStatus();
  return absl::DeadlineExceededError(
      absl::StrCat("cannot connect to ", target, " within ", absl::FormatDuration(timeout), "; is it running?"));
}

}  // namespace moerl::rpc
