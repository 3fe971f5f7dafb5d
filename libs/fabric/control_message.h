#ifndef MOERL_LIBS_FABRIC_CONTROL_MESSAGE_H_
#define MOERL_LIBS_FABRIC_CONTROL_MESSAGE_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libs/fabric/membership.h"

namespace moerl::fabric {

// Bytes of a datagram. Bounds a membership to about 400 ranks: a welcome carries all contacts.
inline constexpr size_t kControlBytesMax = 65000;

// A membership message as one datagram: fields little-endian, lists with their length in front, then an HMAC-SHA-256
// over cluster id and all bytes before, so that only who has the token is heard. Repeating an old datagram does no
// harm: the membership takes every message any number of times. RESOURCE_EXHAUSTED above kControlBytesMax.
absl::StatusOr<std::string> EncodeControl(const MembershipMessage& message, absl::string_view cluster_id,
                                          absl::string_view token);
// PERMISSION_DENIED: not of this cluster or without its token. DATA_LOSS: proven, but of another format.
absl::StatusOr<MembershipMessage> DecodeControl(absl::string_view datagram, absl::string_view cluster_id,
                                                absl::string_view token);

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_CONTROL_MESSAGE_H_
