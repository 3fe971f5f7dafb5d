#ifndef MOERL_LIBS_MODEL_EP_EXCHANGE_H_
#define MOERL_LIBS_MODEL_EP_EXCHANGE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "libs/ep/buffer.h"
#include "libs/model/expert_exchange.h"

namespace moerl::model {

// The exchange of a model whose experts are spread over the ranks of `group`, which outlives it. Collective: every rank
// makes its own, with the same configuration, compute type and map. `map` places the experts (ep::ExpertMap::Aligned:
// as the combine tree splits, the fewest bytes). INVALID_ARGUMENT for a map of another number of experts
// or that leaves a rank without any.
absl::StatusOr<std::unique_ptr<ExpertExchange>> MakeEpExchange(const ModelConfig& config, Compute compute,
                                                               ep::Group* group, ep::ExpertMap map);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_EP_EXCHANGE_H_
