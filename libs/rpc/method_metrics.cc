#include "libs/rpc/method_metrics.h"

#include <map>
#include <memory>
#include <utility>

#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "absl/synchronization/mutex.h"
#include "libs/rpc/method_table.h"

namespace moerl::rpc {
namespace {

Counter& Find(absl::string_view name, absl::string_view help, const std::string& service, const std::string& method,
              const std::string& type) {
  return GetCounter(name, help, {{"grpc_service", service}, {"grpc_method", method}, {"grpc_type", type}});
}

}  // namespace

absl::string_view CodeName(grpc::StatusCode code) {
  static constexpr absl::string_view kNames[] = {
      "OK",       "Canceled",       "Unknown",          "InvalidArgument",   "DeadlineExceeded",
      "NotFound", "AlreadyExists",  "PermissionDenied", "ResourceExhausted", "FailedPrecondition",
      "Aborted",  "OutOfRange",     "Unimplemented",    "Internal",          "Unavailable",
      "DataLoss", "Unauthenticated"};
  const auto index = static_cast<size_t>(code);
  return index < std::size(kNames) ? kNames[index] : "Unknown";
}

MethodMetrics& MethodMetrics::Of(absl::string_view method, absl::string_view type) {
  static absl::Mutex mutex(absl::kConstInit);
  static auto& all = *new std::map<std::pair<std::string, std::string>, std::unique_ptr<MethodMetrics>>;
  const bool is_known = IsFrameMethod(method) || FindMethod(method) != nullptr;
  absl::MutexLock lock(&mutex);
  auto& entry = all[{is_known ? std::string(method) : "/other/other", std::string(type)}];
  if (entry == nullptr) {
    const std::pair<std::string, std::string> names =
        absl::StrSplit(absl::StripPrefix(is_known ? method : "/other/other", "/"), absl::MaxSplits('/', 1));
    entry.reset(new MethodMetrics(names.first, names.second, std::string(type)));
  }
  return *entry;
}

MethodMetrics::MethodMetrics(std::string service, std::string method, std::string type)
    : started(Find("grpc_server_started_total", "Calls begun.", service, method, type)),
      received(Find("grpc_server_msg_received_total", "Messages received.", service, method, type)),
      sent(Find("grpc_server_msg_sent_total", "Messages sent.", service, method, type)),
      handling_seconds(GetHistogram("grpc_server_handling_seconds", "Time from the first byte of a call to its end.",
                                    SecondsBounds(),
                                    {{"grpc_service", service}, {"grpc_method", method}, {"grpc_type", type}})),
      service_(std::move(service)),
      method_(std::move(method)),
      type_(std::move(type)) {}

Counter& MethodMetrics::handled(grpc::StatusCode code) {
  std::atomic<Counter*>& slot = handled_[std::min(static_cast<size_t>(code), kNumCodes - 1)];
  Counter* counter = slot.load(std::memory_order_acquire);
  if (counter == nullptr) {
    counter = &GetCounter(
        "grpc_server_handled_total", "Calls ended, by status code.",
        {{"grpc_service", service_}, {"grpc_method", method_}, {"grpc_type", type_}, {"grpc_code", CodeName(code)}});
    slot.store(counter, std::memory_order_release);
  }
  return *counter;
}

}  // namespace moerl::rpc
