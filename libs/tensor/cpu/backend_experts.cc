#include <algorithm>
#include <vector>

#include "libs/base/check.h"
#include "libs/tensor/cpu/backend_impl.h"

// Routing, rows to experts and back.
namespace moerl::tensor {
namespace {

constexpr double kNsPerScore = 2;

// The top_k largest scores, ties to the lowest id, ids ascending. Top_k distinct ids whatever the scores are.
void SelectLargest(const float* scores, const float* bias, int num_experts, int top_k, int32_t* ids) {
  const auto score = [&](int e) { return bias == nullptr ? scores[e] : scores[e] + bias[e]; };
  bool taken[kMaxExperts] = {};
  for (int i = 0; i < top_k; ++i) {
    int best = -1;
    for (int e = 0; e < num_experts; ++e) {
      if (!taken[e] && (best < 0 || score(e) > score(best))) best = e;
    }
    taken[best] = true;
  }
  for (int e = 0; e < num_experts; ++e) {
    if (taken[e]) *ids++ = e;
  }
}

void CheckRouting(ConstMat logits, int top_k, size_t num_ids) {
  MOERL_CHECK(logits.dtype == DType::kF32 && logits.cols <= kMaxExperts);
  MOERL_CHECK(top_k >= 1 && top_k <= kMaxTopK && top_k <= logits.cols);
  MOERL_CHECK(num_ids == static_cast<size_t>(logits.rows * top_k));
}

// A token's experts, ascending by id: rows[i] and weights[i] belong to ids[i].
struct Leaves {
  int count = 0;
  int32_t ids[kMaxTopK];
  int slots[kMaxTopK];
};

Leaves LeavesOf(const CombinePlan& plan, int64_t token) {
  Leaves leaves;
  const int32_t* ids = plan.ids.data() + token * plan.top_k;
  for (int i = 0; i < plan.top_k; ++i) {
    if (ids[i] < 0) continue;
    int at = leaves.count++;
    for (; at > 0 && leaves.ids[at - 1] > ids[i]; --at) {
      leaves.ids[at] = leaves.ids[at - 1];
      leaves.slots[at] = leaves.slots[at - 1];
    }
    leaves.ids[at] = ids[i];
    leaves.slots[at] = i;
  }
  return leaves;
}

int64_t CheckPlan(const CombinePlan& plan) {
  MOERL_CHECK(plan.top_k >= 1 && plan.top_k <= kMaxTopK && plan.ids.size() == plan.row_of_slot.size());
  MOERL_CHECK(plan.ids.size() % plan.top_k == 0);
  return static_cast<int64_t>(plan.ids.size()) / plan.top_k;
}

}  // namespace

void CpuBackend::RouterSelect(ConstMat logits, RouterKind kind, int top_k, const float* bias, absl::Span<int32_t> ids) {
  CheckRouting(logits, top_k, ids.size());
  const int num_experts = static_cast<int>(logits.cols);
  Split(logits.rows, 1, num_experts * kNsPerScore + num_experts * top_k, [&](int64_t begin, int64_t end) {
    float scores[kMaxExperts];
    for (int64_t t = begin; t < end; ++t) {
      k_.router_scores(logits.Row<float>(t), num_experts, kind, scores);
      SelectLargest(scores, bias, num_experts, top_k, ids.data() + t * top_k);
    }
  });
}

void CpuBackend::RouterWeights(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids, Mat weights,
                               Mat probs) {
  CheckRouting(logits, top_k, ids.size());
  MOERL_CHECK(weights.rows == logits.rows && weights.cols == top_k);
  MOERL_CHECK(probs.data == nullptr || (probs.rows == logits.rows && probs.cols == logits.cols));
  for (const int32_t id : ids) MOERL_CHECK(id < logits.cols);
  Split(logits.rows, 1, logits.cols * kNsPerScore, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      k_.router_weights(logits.Row<float>(t), logits.cols, kind, ids.data() + t * top_k, top_k, weights.Row<float>(t),
                        probs.data == nullptr ? nullptr : probs.Row<float>(t));
    }
  });
}

void CpuBackend::RouterBackward(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids,
                                ConstMat dweights, ConstMat dprobs, Mat dlogits) {
  CheckRouting(logits, top_k, ids.size());
  MOERL_CHECK(dweights.rows == logits.rows && dweights.cols == top_k);
  MOERL_CHECK(dlogits.rows == logits.rows && dlogits.cols == logits.cols);
  Split(logits.rows, 1, logits.cols * 2 * kNsPerScore, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      k_.router_backward(logits.Row<float>(t), logits.cols, kind, ids.data() + t * top_k, top_k, dweights.Row<float>(t),
                         dprobs.data == nullptr ? nullptr : dprobs.Row<float>(t), dlogits.Row<float>(t));
    }
  });
}

void CpuBackend::GatherRows(ConstMat x, absl::Span<const int32_t> row_ids, Mat y) {
  MOERL_CHECK(y.rows == static_cast<int64_t>(row_ids.size()) && y.cols == x.cols);
  for (const int32_t id : row_ids) MOERL_CHECK(id >= 0 && id < x.rows);
  Split(y.rows, 1, x.cols * 0.1, [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) k_.cast(x.Rows(row_ids[r], 1), y.Rows(r, 1), 0, 1);
  });
}

void CpuBackend::Combine(ConstMat x, const CombinePlan& plan, ConstMat weights, Mat out) {
  const int64_t tokens = CheckPlan(plan);
  MOERL_CHECK(out.rows == tokens && out.cols == x.cols && out.dtype == DType::kF32);
  MOERL_CHECK(weights.data == nullptr || (weights.rows == tokens && weights.cols == plan.top_k));
  Split(tokens, 1, static_cast<double>(x.cols) * plan.top_k * 0.2, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const Leaves leaves = LeavesOf(plan, t);
      const void* rows[kMaxTopK];
      float leaf_weights[kMaxTopK];
      for (int i = 0; i < leaves.count; ++i) {
        const int64_t row = plan.row_of_slot[t * plan.top_k + leaves.slots[i]];
        MOERL_CHECK(row >= 0 && row < x.rows);
        rows[i] = x.RowBytes(row);
        leaf_weights[i] = weights.data == nullptr ? 1.0f : weights.Row<float>(t)[leaves.slots[i]];
      }
      const CombineProgram program = MakeCombineProgram(leaves.ids, leaves.count, plan.num_experts, plan.wire_block);
      k_.combine_rows(program, rows, leaf_weights, x.dtype, x.cols, out.Row<float>(t));
    }
  });
}

void CpuBackend::CombineBackward(ConstMat dout, ConstMat x, const CombinePlan& plan, ConstMat weights, Mat dx,
                                 Mat dweights) {
  const int64_t tokens = CheckPlan(plan);
  MOERL_CHECK(dout.rows == tokens && dout.cols == x.cols);
  MOERL_CHECK(dx.data == nullptr || (dx.rows == x.rows && dx.cols == x.cols));
  MOERL_CHECK(dweights.data == nullptr || (dweights.rows == tokens && dweights.cols == plan.top_k));
  Split(tokens, 1, static_cast<double>(x.cols) * plan.top_k * 0.3, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      for (int i = 0; i < plan.top_k; ++i) {
        const int64_t slot = t * plan.top_k + i;
        const bool is_absent = plan.ids[slot] < 0;
        if (is_absent && dweights.data != nullptr) dweights.Row<float>(t)[i] = 0;
        if (is_absent) continue;
        const int64_t row = plan.row_of_slot[slot];
        MOERL_CHECK(row >= 0 && row < x.rows);
        if (dx.data != nullptr) {
          const float weight = weights.data == nullptr ? 1.0f : weights.Row<float>(t)[i];
          k_.scaled_row(weight, dout.RowBytes(t), dout.dtype, dx.RowBytes(row), dx.dtype, x.cols);
        }
        if (dweights.data != nullptr) {
          dweights.Row<float>(t)[i] = k_.dot(dout.RowBytes(t), dout.dtype, x.RowBytes(row), x.dtype, x.cols);
        }
      }
    }
  });
}

}  // namespace moerl::tensor
