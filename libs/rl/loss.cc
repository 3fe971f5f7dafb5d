#include "libs/rl/loss.h"

#include <vector>

#include "libs/rl/loss_cispo.h"
#include "libs/rl/loss_dppo.h"
#include "libs/rl/loss_gspo.h"
#include "libs/rl/loss_ppo_clip.h"

namespace moerl::rl {

std::span<const PolicyLoss> PolicyLosses() {
  static const std::vector<PolicyLoss>* const losses = new std::vector<PolicyLoss>{
      PpoClipLoss(),
      GspoLoss(),
      CispoLoss(),
      DppoLoss(),
  };
  return *losses;
}

const PolicyLoss* FindPolicyLoss(std::string_view name) {
  for (const PolicyLoss& loss : PolicyLosses()) {
    if (loss.name == name) return &loss;
  }
  return nullptr;
}

}  // namespace moerl::rl
