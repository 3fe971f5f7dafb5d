#ifndef MOERL_LIBS_EXPERIENCE_WORK_PROTO_H_
#define MOERL_LIBS_EXPERIENCE_WORK_PROTO_H_

// Between the plain messages of work.h and proto/moerl/v1/experience.proto. Functions are pure; any thread.
// From the wire: INVALID_ARGUMENT names the field whose value or length does not fit.

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/experience/work.h"
#include "moerl/v1/experience.pb.h"
#include "moerl/v1/trajectory.pb.h"

namespace moerl {

VersionName VersionFromProto(const v1::VersionName& from);
v1::VersionName VersionToProto(VersionName from);
std::vector<Fork> ForksFromProto(const google::protobuf::RepeatedPtrField<v1::Fork>& from);
void ForksToProto(const std::vector<Fork>& from, google::protobuf::RepeatedPtrField<v1::Fork>* to);

// Lists of unequal length are an error, except `trainable` (empty: all 1) and lists that were not recorded.
absl::StatusOr<rl::TokenRun> TokensFromProto(const v1::TokenSpan& from);
// `route_bytes` is the width of one routed expert id: 1 or 2, 0 without routes.
void TokensToProto(const rl::TokenRun& from, int route_bytes, v1::TokenSpan* to);

// The worker's side of the stream.
v1::WorkRequest ToProto(const WorkerMessage& message, int route_bytes);
absl::StatusOr<TrainerMessage> FromProto(const v1::WorkResponse& response);  // UNIMPLEMENTED for credit and forks

// The trainer's side. A Lease gets its prompt, task, sampling parameters and run seed from the caller.
v1::WorkResponse ToProto(const TrainerMessage& message, int route_bytes);
absl::StatusOr<WorkerMessage> FromProto(const v1::WorkRequest& request);

}  // namespace moerl

#endif  // MOERL_LIBS_EXPERIENCE_WORK_PROTO_H_
