#include "libs/model/stages.h"

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"

namespace moerl::model {

std::string StageName(const ModelConfig& config, int64_t stage) {
  const int64_t num_stages = NumStages(config.num_layers);
  MOERL_CHECK(stage >= 0 && stage < num_stages);
  if (stage == 0) return "embedding";
  if (stage == num_stages - 2) return "final norm";
  if (stage == num_stages - 1) return "head";
  const int64_t layer = (stage - 1) / 2;
  const bool is_attention = stage % 2 == 1;
  const char* mlp = config.layer_has_experts[static_cast<size_t>(layer)] ? " experts" : " mlp";
  return absl::StrCat("layer ", layer, is_attention ? " attention" : mlp);
}

}  // namespace moerl::model
