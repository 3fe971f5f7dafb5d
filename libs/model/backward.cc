#include "libs/model/backward.h"

#include <cmath>

#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "libs/model/router.h"

namespace moerl::model {

using tensor::Backend;
using tensor::ConstMat;
using tensor::DType;
using tensor::Mat;
using tensor::PackedWeight;

namespace {

// Through y = x Wᵀ + b: dW += dyᵀ x, db += sum dy, dx = dy W (added to dx with `add`).
void LinearBackward(const Engine& e, ConstMat dy, ConstMat x, const PackedWeight& w, Mat dw, float* db, bool add,
                    Mat dx) {
  e.backend.WeightGrad(dy, x, e.dtype, dw);
  if (db != nullptr) e.backend.ColumnSum(dy, db);
  e.backend.Gemm(dy, w, {.transposed = true, .add = add}, dx);
}

// Where a projection was clamped its gradient is zero.
void MaskClipped(ConstMat clipped, float limit, Mat d) {
  for (int64_t row = 0; row < d.rows; ++row) {
    const float* value = clipped.Row<float>(row);
    float* gradient = d.Row<float>(row);
    for (int64_t i = 0; i < d.cols; ++i) {
      if (std::fabs(value[i]) >= limit) gradient[i] = 0.0f;
    }
  }
}

// Through down(swiglu(gate_up(x))): dx += (or =).
struct DenseRoles {
  Role gate, gate_bias, down, down_bias;
};
void DenseBackward(const Engine& e, int layer, const DenseRoles& roles, bool bias, const PackedWeight& gate_up,
                   const PackedWeight& down, ConstMat dy, ConstMat x, ConstMat saved_gate_up, ConstMat saved_act,
                   bool add, const Gradients& g, Mat dx, Arena& temp) {
  Mat d_act = temp.Take(DType::kF32, dy.rows, down.k), d_gate_up = temp.Take(DType::kF32, dy.rows, gate_up.n);
  LinearBackward(e, dy, saved_act, down, g.Matrix(roles.down, layer, -1, down.n, down.k),
                 bias ? g.At(roles.down_bias, layer) : nullptr, false, d_act);
  e.backend.SwiGluBackward(d_act, saved_gate_up, d_gate_up);
  LinearBackward(e, d_gate_up, x, gate_up, g.Matrix(roles.gate, layer, -1, gate_up.n, gate_up.k),
                 bias ? g.At(roles.gate_bias, layer) : nullptr, add, dx);
}

// Through the experts of this rank: from the rows' output gradients (unweighted) to their input and weight gradients.
void ExpertsBackward(const Engine& e, int layer_index, const MlpSaved& saved, ConstMat d_out, const Gradients& g,
                     Mat d_rows, Mat d_weights, Arena& temp) {
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const int64_t rows = d_out.rows, local = static_cast<int64_t>(e.model.local_experts.size());
  const int first = e.model.local_experts.front();
  Mat dy = temp.Take(DType::kF32, rows, c.hidden_size);
  // One "expert" a row: the weighting of the combine tree's leaf.
  std::vector<int32_t> ids(rows, 0), identity(rows);
  for (int64_t i = 0; i < rows; ++i) identity[i] = static_cast<int32_t>(i);
  e.backend.CombineBackward(d_out, saved.row_out, {ids, identity, 1, 1, 0}, saved.row_weights, dy, d_weights);

  Mat d_act = temp.Take(DType::kF32, rows, c.moe_intermediate_size);
  Mat d_gate_up = temp.Take(DType::kF32, rows, 2 * c.moe_intermediate_size);
  e.backend.GroupedWeightGrad(
      dy, saved.row_act, saved.offsets, e.dtype,
      g.Matrix(Role::kExpertDown, layer_index, first, local * c.hidden_size, c.moe_intermediate_size));
  e.backend.GroupedGemm(dy, saved.offsets, layer.expert_down, {.transposed = true}, d_act);
  e.backend.SwiGluBackward(d_act, saved.row_gate_up, d_gate_up);
  e.backend.GroupedWeightGrad(
      d_gate_up, saved.rows, saved.offsets, e.dtype,
      g.Matrix(Role::kExpertGate, layer_index, first, local * 2 * c.moe_intermediate_size, c.hidden_size));
  e.backend.GroupedGemm(d_gate_up, saved.offsets, layer.expert_gate_up, {.transposed = true}, d_rows);
}

absl::Status MoeBackward(const Engine& e, int layer_index, const MlpSaved& saved, ConstMat d_probs,
                         ConstMat d_logits_extra, const Gradients& g, ConstMat dx, Mat dh, Arena& temp) {
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const int64_t rows = dx.rows;
  Mat d_out = temp.Take(e.dtype, rows, c.hidden_size);
  if (rows > 0) e.backend.Cast(dx, d_out);
  MOERL_ASSIGN_OR_RETURN(const ExpertExchange::ExpertBatch batch,
                         e.exchange.DispatchAgain(saved.handle, d_out.data, e.compute));
  Mat d_rows = temp.Take(DType::kF32, batch.num_rows, c.hidden_size);
  Mat d_row_weights = temp.Take(DType::kF32, batch.num_rows, 1);
  if (batch.num_rows > 0) {
    ExpertsBackward(e, layer_index, saved, ConstMat(batch.x, e.dtype, batch.num_rows, c.hidden_size, c.hidden_size), g,
                    d_rows, d_row_weights, temp);
  }
  Mat d_weights = temp.Take(DType::kF32, rows, c.top_k);
  MOERL_RETURN_IF_ERROR(e.exchange.CombineGrad(*saved.handle, static_cast<const float*>(d_rows.data),
                                               static_cast<const float*>(d_row_weights.data),
                                               static_cast<float*>(dh.data), static_cast<float*>(d_weights.data)));
  if (rows == 0) return absl::OkStatus();

  if (c.routed_scaling_factor != 1.0f) e.backend.Scale(c.routed_scaling_factor, d_weights);
  Mat d_logits = temp.Take(DType::kF32, rows, c.num_experts);
  e.backend.RouterBackward(saved.logits, RouterKindOf(c), static_cast<int>(c.top_k), saved.ids, d_weights, d_probs,
                           d_logits);
  if (d_logits_extra.data != nullptr) e.backend.Add(d_logits_extra, d_logits);
  LinearBackward(e, d_logits, saved.h, layer.router,
                 g.Matrix(Role::kRouter, layer_index, -1, c.num_experts, c.hidden_size), nullptr, true, dh);
  if (c.shared_expert_intermediate_size == 0) return absl::OkStatus();

  ConstMat d_shared = dx;
  if (c.gates_shared_expert) {
    Mat d_ungated = temp.Take(DType::kF32, rows, c.hidden_size), d_gate = temp.Take(DType::kF32, rows, 1);
    e.backend.SigmoidGateBackward(dx, saved.shared_out, saved.shared_gate, d_ungated, d_gate);
    LinearBackward(e, d_gate, saved.h, layer.shared_router,
                   g.Matrix(Role::kSharedRouter, layer_index, -1, 1, c.hidden_size), nullptr, true, dh);
    d_shared = d_ungated;
  }
  DenseBackward(e, layer_index, {Role::kSharedGate, Role::kGateBias, Role::kSharedDown, Role::kDownBias}, false,
                layer.shared_gate_up, layer.shared_down, d_shared, saved.h, saved.shared_gate_up, saved.shared_act,
                true, g, dh, temp);
  return absl::OkStatus();
}

}  // namespace

float* Gradients::At(Role role, int layer, int expert) const {
  const int index = table_.Find(role, layer, expert);
  MOERL_CHECK(index >= 0 && offsets_[index] >= 0);
  return data_ + offsets_[index];
}

void AttentionBackward(const Engine& e, int layer_index, const Rotary& rotary, absl::Span<const int64_t> offsets,
                       const AttentionSaved& saved, const Gradients& g, Mat dx, Arena& temp) {
  if (dx.rows == 0) return;
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const int64_t rows = dx.rows, q = c.q_size(), kv = c.kv_size();
  Backend& b = e.backend;

  Mat d_out = temp.Take(DType::kF32, rows, q), d_qkv = temp.Take(DType::kF32, rows, q + 2 * kv);
  LinearBackward(e, dx, saved.out, layer.o, g.Matrix(Role::kO, layer_index, -1, c.hidden_size, q),
                 c.o_bias ? g.At(Role::kOBias, layer_index) : nullptr, false, d_out);
  const Mat dq = d_qkv.Cols(0, q), dk = d_qkv.Cols(q, kv), dv = d_qkv.Cols(q + kv, kv);
  b.AttentionPackedBackward(saved.q, saved.k, saved.v, offsets, c.head_dim, AttentionScale(c), saved.out, saved.stats,
                            d_out, dq, dk, dv);
  b.Rope(dq, c.head_dim, rotary.cos, rotary.sin, true, dq);
  b.Rope(dk, c.head_dim, rotary.cos, rotary.sin, true, dk);
  if (c.clip_qkv) MaskClipped(saved.clipped, *c.clip_qkv, d_qkv);
  if (c.qk_norm != QkNorm::kNone) {
    b.RmsNormBackward(dq, saved.qkv.Cols(0, q), layer.q_norm, saved.q_inv_rms.Row<float>(0), false, dq,
                      g.At(Role::kQNorm, layer_index));
    b.RmsNormBackward(dk, saved.qkv.Cols(q, kv), layer.k_norm, saved.k_inv_rms.Row<float>(0), false, dk,
                      g.At(Role::kKNorm, layer_index));
  }
  Mat dh = temp.Take(DType::kF32, rows, c.hidden_size);
  LinearBackward(e, d_qkv, saved.h, layer.qkv, g.Matrix(Role::kQ, layer_index, -1, q + 2 * kv, c.hidden_size),
                 c.qkv_bias ? g.At(Role::kQBias, layer_index) : nullptr, false, dh);
  b.RmsNormBackward(dh, saved.x, layer.attention_norm, saved.inv_rms.Row<float>(0), true, dx,
                    g.At(Role::kAttentionNorm, layer_index));
}

absl::Status MlpBackward(const Engine& e, int layer_index, const MlpSaved& saved, ConstMat d_probs,
                         ConstMat d_logits_extra, const Gradients& g, Mat dx, Arena& temp) {
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const bool moe = c.layer_has_experts[layer_index];
  if (dx.rows == 0 && !moe) return absl::OkStatus();
  Mat dh = temp.Take(DType::kF32, dx.rows, c.hidden_size);
  if (moe) {
    MOERL_RETURN_IF_ERROR(MoeBackward(e, layer_index, saved, d_probs, d_logits_extra, g, dx, dh, temp));
    if (dx.rows == 0) return absl::OkStatus();
  } else {
    DenseBackward(e, layer_index, {Role::kGate, Role::kGateBias, Role::kDown, Role::kDownBias}, c.mlp_bias,
                  layer.gate_up, layer.down, dx, saved.h, saved.gate_up, saved.act, false, g, dh, temp);
  }
  e.backend.RmsNormBackward(dh, saved.x, layer.mlp_norm, saved.inv_rms.Row<float>(0), true, dx,
                            g.At(Role::kMlpNorm, layer_index));
  return absl::OkStatus();
}

}  // namespace moerl::model
