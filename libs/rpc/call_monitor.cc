#include "libs/rpc/call_monitor.h"

#include <grpc/grpc.h>
#include <grpcpp/alarm.h>
#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include <map>
#include <string>
#include <utility>

#include "libs/base/log.h"
#include "libs/rpc/method_metrics.h"
#include "libs/rpc/method_table.h"
#include "libs/rpc/trace.h"

namespace moerl::rpc {
namespace {

using grpc::experimental::InterceptionHookPoints;
using grpc::experimental::Interceptor;
using grpc::experimental::InterceptorBatchMethods;
using grpc::experimental::ServerRpcInfo;

absl::string_view TypeName(ServerRpcInfo::Type type) {
  switch (type) {
    case ServerRpcInfo::Type::UNARY:
      return "unary";
    case ServerRpcInfo::Type::CLIENT_STREAMING:
      return "client_stream";
    case ServerRpcInfo::Type::SERVER_STREAMING:
      return "server_stream";
    case ServerRpcInfo::Type::BIDI_STREAMING:
      return "bidi_stream";
  }
  return "unknown";
}

// Ends a call that has no deadline of its own. The alarm may fire while the call ends, so both share the call.
class DeadlineCap {
 public:
  DeadlineCap(grpc_call* call, absl::Time deadline) : shared_(std::make_shared<Shared>()) {
    grpc_call_ref(call);
    shared_->call = call;
    alarm_.Set(absl::ToChronoTime(deadline), [shared = shared_](bool fired) {
      absl::MutexLock lock(&shared->mutex);
      if (!fired || shared->call == nullptr) return;
      grpc_call_cancel_with_status(shared->call, GRPC_STATUS_DEADLINE_EXCEEDED,
                                   "the call had no deadline and ran longer than the server allows", nullptr);
    });
  }

  ~DeadlineCap() {
    grpc_call* call;
    {
      absl::MutexLock lock(&shared_->mutex);
      call = std::exchange(shared_->call, nullptr);
    }
    alarm_.Cancel();
    grpc_call_unref(call);
  }

 private:
  struct Shared {
    absl::Mutex mutex;
    grpc_call* call ABSL_GUARDED_BY(mutex) = nullptr;
  };
  std::shared_ptr<Shared> shared_;
  grpc::Alarm alarm_;
};

// One call, from its metadata to the end of its context.
class MonitoredCall final : public Interceptor {
 public:
  MonitoredCall(std::shared_ptr<CallMonitor> monitor, ServerRpcInfo* info)
      : monitor_(std::move(monitor)),
        info_(info),
        method_(info->method()),
        is_frame_(IsFrameMethod(method_)),
        is_counted_(!is_frame_ && !IsSubscription(method_)),
        metrics_(MethodMetrics::Of(method_, TypeName(info->type()))),
        started_(absl::Now()) {
    metrics_.started.Add();
    if (is_counted_) monitor_->AddRunning(1);
  }

  ~MonitoredCall() override {
    if (is_counted_) monitor_->AddRunning(-1);
    metrics_.handled(code_).Add();
    metrics_.handling_seconds.Observe(absl::ToDoubleSeconds(absl::Now() - started_));
    if (num_received_ > 0) metrics_.received.Add(static_cast<double>(num_received_));
    if (num_sent_ > 0) metrics_.sent.Add(static_cast<double>(num_sent_));
    const LogLevel level = is_frame_ ? LogLevel::kDebug : LogLevel::kInfo;
    if (!IsLogged(level)) return;
    const ScopedTraceId trace(trace_id_);
    Log(level, "call",
        {{"method", method_},
         {"code", std::string(CodeName(code_))},
         {"seconds", absl::ToDoubleSeconds(absl::Now() - started_)},
         {"peer", peer_},
         {"messages_received", num_received_},
         {"messages_sent", num_sent_},
         {"reason", reason_}});
  }

  void Intercept(InterceptorBatchMethods* methods) override {
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_INITIAL_METADATA)) {
      Begin(*methods->GetRecvInitialMetadata());
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::POST_RECV_MESSAGE) &&
        methods->GetRecvMessage() != nullptr) {
      ++num_received_;
    }
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_MESSAGE)) ++num_sent_;
    if (methods->QueryInterceptionHookPoint(InterceptionHookPoints::PRE_SEND_STATUS)) {
      const grpc::Status status = methods->GetSendStatus();
      code_ = status.error_code();
      reason_ = status.error_message();
    }
    methods->Proceed();
  }

 private:
  static bool IsSubscription(absl::string_view method) {
    const MethodRule* rule = FindMethod(method);
    return rule != nullptr && rule->kind == MethodKind::kSubscription;
  }

  void Begin(const std::multimap<grpc::string_ref, grpc::string_ref>& metadata) {
    if (const auto parent = metadata.find(kTraceparent); parent != metadata.end()) {
      trace_id_ = TraceIdOf(absl::string_view(parent->second.data(), parent->second.size()));
    }
    grpc::ServerContextBase* context = info_->server_context();
    peer_ = context->peer();
    if (info_->type() != ServerRpcInfo::Type::UNARY) return;
    const absl::Time cap = started_ + monitor_->unary_deadline_max();
    if (absl::FromChrono(context->deadline()) > cap) cap_.emplace(context->c_call(), cap);
  }

  const std::shared_ptr<CallMonitor> monitor_;
  ServerRpcInfo* const info_;  // outlives this
  const std::string method_;
  const bool is_frame_;
  const bool is_counted_;
  MethodMetrics& metrics_;
  const absl::Time started_;
  std::string peer_;
  std::string trace_id_;
  std::optional<DeadlineCap> cap_;
  // A call that never sent a status was cancelled.
  grpc::StatusCode code_ = grpc::StatusCode::CANCELLED;
  std::string reason_;
  // Reads and writes of a stream may be seen at the same time, each counter by one of them only.
  int64_t num_received_ = 0;
  int64_t num_sent_ = 0;
};

class Factory final : public grpc::experimental::ServerInterceptorFactoryInterface {
 public:
  explicit Factory(std::shared_ptr<CallMonitor> monitor) : monitor_(std::move(monitor)) {}
  Interceptor* CreateServerInterceptor(ServerRpcInfo* info) override { return new MonitoredCall(monitor_, info); }

 private:
  const std::shared_ptr<CallMonitor> monitor_;
};

}  // namespace

std::unique_ptr<grpc::experimental::ServerInterceptorFactoryInterface> CallMonitor::MakeFactory() {
  return std::make_unique<Factory>(shared_from_this());
}

void CallMonitor::AddRunning(int difference) {
  absl::MutexLock lock(&mutex_);
  num_running_ += difference;
}

int CallMonitor::WaitIdle(absl::Time deadline) {
  absl::MutexLock lock(&mutex_);
  const auto is_idle = [this]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return num_running_ == 0; };
  mutex_.AwaitWithDeadline(absl::Condition(&is_idle), deadline);
  return num_running_;
}

}  // namespace moerl::rpc
