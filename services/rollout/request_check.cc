#include "services/rollout/request_check.h"

#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/field_rules.h"
#include "libs/base/status_macros.h"
#include "libs/rpc/status.h"

namespace moerl::rollout {
namespace {

// "sampling.top_p: expected …" of the contract's rules, as a violation of that field.
absl::Status CheckContract(const v1::GenerateRequest& request) {
  absl::Status status = CheckRules(request);
  if (status.ok()) return status;
  const std::string message(status.message());
  const size_t colon = message.find(": ");
  if (colon == std::string::npos) return status;
  return rpc::InvalidField(message.substr(0, colon), message.substr(colon + 2));
}

template <class Ids>
absl::Status CheckIds(const std::string& field, const Ids& ids, int64_t vocab_size) {
  for (int i = 0; i < ids.size(); ++i) {
    if (ids[i] < vocab_size) continue;
    return rpc::InvalidField(
        absl::StrCat(field, "[", i, "]"),
        absl::StrCat("expected a token id from 0 to ", vocab_size - 1, ", the model's vocabulary, found ", ids[i]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckGenerateRequest(const v1::GenerateRequest& request, const model::ModelConfig& config) {
  MOERL_RETURN_IF_ERROR(CheckContract(request));
  if (!request.has_sampling()) return rpc::InvalidField("sampling.max_new_tokens", "required");
  MOERL_RETURN_IF_ERROR(CheckIds("prompt_token_ids", request.prompt_token_ids(), config.vocab_size));
  const v1::SamplingParams& sampling = request.sampling();
  MOERL_RETURN_IF_ERROR(CheckIds("sampling.stop_token_ids", sampling.stop_token_ids(), config.vocab_size));
  for (int i = 0; i < sampling.stop_sequences_size(); ++i) {
    MOERL_RETURN_IF_ERROR(CheckIds(absl::StrCat("sampling.stop_sequences[", i, "].token_ids"),
                                   sampling.stop_sequences(i).token_ids(), config.vocab_size));
  }
  const int64_t room = config.max_position - request.prompt_token_ids_size();
  if (room < 1) {
    return rpc::InvalidField("prompt_token_ids", absl::StrCat("expected 1 to ", config.max_position - 1,
                                                              " tokens, the context of the model less one, found ",
                                                              request.prompt_token_ids_size()));
  }
  if (sampling.max_new_tokens() > room) {
    return rpc::InvalidField("sampling.max_new_tokens",
                             absl::StrCat("expected 1 to ", room, ", what the prompt leaves of the context of ",
                                          config.max_position, ", found ", sampling.max_new_tokens()));
  }
  return absl::OkStatus();
}

}  // namespace moerl::rollout
