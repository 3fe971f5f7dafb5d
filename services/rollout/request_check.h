#ifndef MOERL_SERVICES_ROLLOUT_REQUEST_CHECK_H_
#define MOERL_SERVICES_ROLLOUT_REQUEST_CHECK_H_

#include "absl/status/status.h"
#include "libs/model/config.h"
#include "moerl/v1/rollout.pb.h"

namespace moerl::rollout {

// Whether this model can generate from `request`. INVALID_ARGUMENT with google.rpc.BadRequest names the field, what was
// found and what is legal: the ranges of the contract, ids below the vocabulary size, prompt and new tokens within the
// context.
absl::Status CheckGenerateRequest(const v1::GenerateRequest& request, const model::ModelConfig& config);

}  // namespace moerl::rollout

#endif  // MOERL_SERVICES_ROLLOUT_REQUEST_CHECK_H_
