#include "libs/rpc/status.h"

#include <grpcpp/support/status.h>

#include <algorithm>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"

namespace moerl::rpc {
namespace {

constexpr absl::string_view kTypeUrlPrefix = "type.googleapis.com/";
constexpr absl::string_view kDomain = "moerl.v1";
constexpr size_t kMessageBytesMax = 1024;
constexpr size_t kDetailBytesMax = 6 * 1024;
constexpr size_t kViolationsMax = 16;

template <class Detail>
std::string TypeUrl() {
  return absl::StrCat(kTypeUrlPrefix, Detail::descriptor()->full_name());
}

template <class Detail>
void Attach(absl::Status& status, const Detail& detail) {
  status.SetPayload(TypeUrl<Detail>(), absl::Cord(detail.SerializeAsString()));
}

template <class Detail>
std::optional<Detail> Find(const absl::Status& status) {
  const auto payload = status.GetPayload(TypeUrl<Detail>());
  Detail detail;
  if (!payload || !detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

}  // namespace

absl::Status InvalidFields(std::vector<FieldViolation> violations) {
  google::rpc::BadRequest bad_request;
  std::string message;
  for (size_t i = 0; i < std::min(violations.size(), kViolationsMax); ++i) {
    auto* violation = bad_request.add_field_violations();
    violation->set_field(violations[i].field);
    violation->set_description(violations[i].description);
    absl::StrAppend(&message, i == 0 ? "" : "; ", violations[i].field, ": ", violations[i].description);
  }
  if (violations.size() > kViolationsMax)
    absl::StrAppend(&message, "; and ", violations.size() - kViolationsMax, " more");
  absl::Status status = absl::InvalidArgumentError(message);
  Attach(status, bad_request);
  return status;
}

absl::Status InvalidField(absl::string_view field, absl::string_view description) {
  return InvalidFields({{std::string(field), std::string(description)}});
}

absl::Status WithRetryDelay(absl::Status status, absl::Duration delay) {
  google::rpc::RetryInfo retry_info;
  const int64_t nanoseconds = std::max<int64_t>(0, absl::ToInt64Nanoseconds(delay));
  retry_info.mutable_retry_delay()->set_seconds(nanoseconds / 1'000'000'000);
  retry_info.mutable_retry_delay()->set_nanos(static_cast<int32_t>(nanoseconds % 1'000'000'000));
  Attach(status, retry_info);
  return status;
}

absl::Status WithReason(absl::Status status, const ErrorReason& reason) {
  google::rpc::ErrorInfo error_info;
  error_info.set_reason(reason.reason);
  error_info.set_domain(std::string(kDomain));
  for (const auto& [key, value] : reason.metadata) (*error_info.mutable_metadata())[key] = value;
  Attach(status, error_info);
  return status;
}

std::vector<FieldViolation> FieldViolations(const absl::Status& status) {
  std::vector<FieldViolation> violations;
  const auto bad_request = Find<google::rpc::BadRequest>(status);
  if (!bad_request) return violations;
  for (const auto& violation : bad_request->field_violations()) {
    violations.push_back({violation.field(), violation.description()});
  }
  return violations;
}

std::optional<absl::Duration> RetryDelay(const absl::Status& status) {
  const auto retry_info = Find<google::rpc::RetryInfo>(status);
  if (!retry_info) return std::nullopt;
  return absl::Seconds(retry_info->retry_delay().seconds()) + absl::Nanoseconds(retry_info->retry_delay().nanos());
}

std::optional<ErrorReason> Reason(const absl::Status& status) {
  const auto error_info = Find<google::rpc::ErrorInfo>(status);
  if (!error_info) return std::nullopt;
  return ErrorReason{error_info->reason(), {error_info->metadata().begin(), error_info->metadata().end()}};
}

namespace {

// At most `bytes_max` bytes, cut between two characters: details beside half of one could not be parsed.
absl::string_view Cut(absl::string_view text, size_t bytes_max) {
  if (text.size() <= bytes_max) return text;
  while (bytes_max > 0 && (static_cast<unsigned char>(text[bytes_max]) & 0xc0) == 0x80) --bytes_max;
  return text.substr(0, bytes_max);
}

}  // namespace

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::string message(Cut(status.message(), kMessageBytesMax));
  google::rpc::Status wire;
  wire.set_code(static_cast<int>(status.code()));
  wire.set_message(message);
  status.ForEachPayload([&wire](absl::string_view type_url, const absl::Cord& payload) {
    auto* detail = wire.add_details();
    detail->set_type_url(std::string(type_url));
    detail->set_value(std::string(payload));
  });
  const bool carries_details = wire.details_size() > 0 && wire.ByteSizeLong() <= kDetailBytesMax;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), message,
                      carries_details ? wire.SerializeAsString() : std::string());
}

absl::Status FromGrpc(const grpc::Status& status, absl::string_view what) {
  if (status.ok()) return absl::OkStatus();
  const auto code = static_cast<absl::StatusCode>(status.error_code());
  const std::string reason = status.error_message().empty() ? absl::StatusCodeToString(code) : status.error_message();
  absl::Status result(code, what.empty() ? reason : absl::StrCat(what, ": ", reason));
  google::rpc::Status wire;
  if (!status.error_details().empty() && wire.ParseFromString(status.error_details())) {
    for (const auto& detail : wire.details()) result.SetPayload(detail.type_url(), absl::Cord(detail.value()));
  }
  return result;
}

}  // namespace moerl::rpc
