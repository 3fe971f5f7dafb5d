#ifndef MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_SERVICE_H_
#define MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_SERVICE_H_

#include <grpcpp/impl/service_type.h>

#include <memory>

#include "libs/rl/environment.h"

namespace moerl {

// Serves `environment`, whose calls must be quick (the built-in tasks are): they run on gRPC's threads.
// A Failure is answered as the status that a caller turns back into it: DEADLINE_EXCEEDED or INVALID_ARGUMENT.
std::unique_ptr<grpc::Service> MakeEnvironmentService(std::shared_ptr<rl::Environment> environment);

}  // namespace moerl

#endif  // MOERL_LIBS_ENVIRONMENT_ENVIRONMENT_SERVICE_H_
