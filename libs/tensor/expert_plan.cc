#include "libs/tensor/expert_plan.h"

#include "libs/base/check.h"

namespace moerl::tensor {

ExpertPlan MakeExpertPlan(absl::Span<const int32_t> ids, int top_k, int num_experts) {
  MOERL_CHECK(top_k >= 1 && ids.size() % top_k == 0);
  ExpertPlan plan;
  plan.offsets.assign(num_experts + 1, 0);
  for (const int32_t id : ids) {
    MOERL_CHECK(id < num_experts);
    if (id >= 0) ++plan.offsets[id + 1];
  }
  for (int e = 0; e < num_experts; ++e) plan.offsets[e + 1] += plan.offsets[e];

  plan.token_of_row.resize(plan.offsets.back());
  plan.row_of_slot.resize(ids.size());
  std::vector<int64_t> next(plan.offsets.begin(), plan.offsets.end() - 1);
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    plan.row_of_slot[slot] = ids[slot] < 0 ? -1 : static_cast<int32_t>(next[ids[slot]]++);
    if (ids[slot] >= 0) plan.token_of_row[plan.row_of_slot[slot]] = static_cast<int32_t>(slot / top_k);
  }
  return plan;
}

}  // namespace moerl::tensor
