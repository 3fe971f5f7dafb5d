#include "libs/rl/loss.h"

#include <vector>

namespace moerl::rl {

// Each in its file, loss_<name>.cc.
PolicyLoss PpoClipLoss();
PolicyLoss GspoLoss();
PolicyLoss CispoLoss();
PolicyLoss DppoLoss();

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
