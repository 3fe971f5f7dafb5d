#ifndef MOERL_LIBS_TENSOR_EXPERT_PLAN_H_
#define MOERL_LIBS_TENSOR_EXPERT_PLAN_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"

// Which row of the experts' input belongs to which token, when all experts are on this rank.
namespace moerl::tensor {

// Rows are sorted by (expert, token).
struct ExpertPlan {
  std::vector<int32_t> token_of_row;  // [rows]         the token a row copies
  std::vector<int32_t> row_of_slot;   // [tokens*top_k] the row of a (token, choice), -1 where the id is -1
  std::vector<int64_t> offsets;       // [experts+1]    rows of expert e are offsets[e] .. offsets[e+1]-1
};

// ids [tokens, top_k]: expert ids below num_experts, -1 for none, no expert twice in a row.
ExpertPlan MakeExpertPlan(absl::Span<const int32_t> ids, int top_k, int num_experts);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_EXPERT_PLAN_H_
