#ifndef MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_CLIENT_H_
#define MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_CLIENT_H_

#include <memory>
#include <string>

#include "absl/time/time.h"
#include "libs/rl/environment.h"

namespace grpc {
class Channel;
}

namespace moerl {

// An environment that somebody serves as moerl.v1.EnvironmentService. Calls block their thread, at most for `timeout`.
// `channel` must not retry (ChannelOptions::attempts_max 1): a retry that ran out of time would look like a verifier's.
//
// UNAVAILABLE (the environment is down, ending or busy) is what the interface says: try again. A deadline that passes
// is Failure kVerifierTimeout, any other error kVerifierError with the environment's own message.
std::unique_ptr<rl::Environment> MakeEnvironmentClient(std::shared_ptr<grpc::Channel> channel, absl::Duration timeout);

}  // namespace moerl

#endif  // MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_CLIENT_H_
