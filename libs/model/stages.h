#ifndef MOERL_LIBS_MODEL_STAGES_H_
#define MOERL_LIBS_MODEL_STAGES_H_

#include <cstdint>
#include <string>

#include "libs/model/config.h"

namespace moerl::model {

// A forward pass in stages, in the order of computation: the embedding, attention and MLP of each layer, the final
// norm, the head. Two machines that should agree to the bit and do not are compared stage by stage: the first one whose
// digests differ (ScoreOptions::stage_digests) is where they part.
constexpr int64_t NumStages(int64_t num_layers) { return 1 + 2 * num_layers + 2; }

// "embedding", "layer 3 attention", "layer 3 experts" ("layer 3 mlp" where it is dense), "final norm", "head". `stage`
// is in [0, NumStages(config.num_layers)).
std::string StageName(const ModelConfig& config, int64_t stage);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_STAGES_H_
