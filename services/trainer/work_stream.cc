#include "services/trainer/work_stream.h"

#include "absl/strings/str_cat.h"

namespace moerl::trainer {
namespace {

template <typename Message>
SampleOfLease NameOf(const Message& message) {
  return {{static_cast<int64_t>(message.lease_id().epoch()), static_cast<int64_t>(message.lease_id().counter())},
          message.sample_index()};
}

}  // namespace

void WorkStream::Deliver(v1::WorkResponse response) {
  if (Send(std::move(response))) return;
  End(absl::ResourceExhaustedError(
      absl::StrCat("the worker does not read: ", kResponsesMax, " responses wait; connect again")));
}

void WorkStream::GiveBack(int64_t bytes) {
  unread_bytes_ -= bytes;
  const int64_t owed = owed_bytes_ += bytes;
  if (owed < kCreditStepBytes) return;
  owed_bytes_ -= owed;
  v1::WorkResponse response;
  response.mutable_credit()->set_num_bytes(static_cast<uint64_t>(owed));
  Deliver(std::move(response));
}

bool WorkStream::OnMessage(v1::WorkRequest& request) {
  const absl::Status status = Accept(request);
  if (!status.ok()) End(status);
  return status.ok();
}

absl::Status WorkStream::CheckHello(const v1::WorkHello& hello) const {
  if (!require_equal_numerics_ || hello.numerics_fingerprint() == numerics_fingerprint_) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("hello.numerics_fingerprint: this trainer computes with \"",
                                                    numerics_fingerprint_, "\", the worker with \"",
                                                    hello.numerics_fingerprint(),
                                                    "\"; use the same build and backend or set "
                                                    "trainer.require_equal_numerics: false"));
}

absl::Status WorkStream::Accept(const v1::WorkRequest& request) {
  if (request.has_hello() == has_hello_) {
    return absl::FailedPreconditionError("work: the first request, and only the first, is a hello");
  }
  if (request.has_hello()) {
    if (absl::Status status = CheckHello(request.hello()); !status.ok()) return status;
    has_hello_ = true;
  }
  if (request.has_trace_report()) {
    receiver_.mailbox().Post(
        [&receiver = receiver_, id = id_, report = request.trace_report()] { receiver.OnTraceReport(id, report); });
    return absl::OkStatus();
  }
  const bool costs_credit = request.has_progress() || request.has_finish();
  const int64_t bytes = costs_credit ? static_cast<int64_t>(request.ByteSizeLong()) : 0;
  if ((unread_bytes_ += bytes) > kCreditBytes) {
    return absl::ResourceExhaustedError("work: more progress and finish bytes than credit was given for");
  }
  absl::StatusOr<WorkerMessage> message = FromProto(request);
  if (message.ok()) {
    receiver_.mailbox().Post([self = shared_from_this(), message = *std::move(message), bytes]() mutable {
      self->receiver_.OnWorkMessage(self, std::move(message));
      if (bytes > 0) self->GiveBack(bytes);
    });
    return absl::OkStatus();
  }
  if (!costs_credit) return message.status();
  const SampleOfLease name = request.has_progress() ? NameOf(request.progress()) : NameOf(request.finish());
  receiver_.mailbox().Post([self = shared_from_this(), name, why = message.status(), bytes] {
    self->receiver_.OnMalformedWork(self, name.lease_id, name.sample, why);
    self->GiveBack(bytes);
  });
  return absl::OkStatus();
}

void WorkStream::OnOver() {
  receiver_.mailbox().Post([&receiver = receiver_, id = id_] { receiver.OnWorkOver(id); });
}

}  // namespace moerl::trainer
