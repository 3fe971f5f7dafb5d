#include "libs/model/transformer.h"

#include <algorithm>
#include <cstring>

#include "libs/base/status_macros.h"
#include "libs/model/backend.h"
#include "libs/model/router.h"

namespace moerl::model {

using tensor::Backend;
using tensor::ConstMat;
using tensor::DType;
using tensor::Mat;
using tensor::PackedWeight;

namespace {

const float* BiasOrNull(const std::vector<float>& bias) { return bias.empty() ? nullptr : bias.data(); }

void Clamp(Mat x, float limit) {
  for (int64_t row = 0; row < x.rows; ++row) {
    float* values = x.Row<float>(row);
    for (int64_t i = 0; i < x.cols; ++i) values[i] = std::min(std::max(values[i], -limit), limit);
  }
}

// Queries and keys after QK-norm and clipping, before RoPE, in place of their columns of qkv [T, Q + 2 KV]. The columns
// as projected stay in saved->qkv when backward needs them.
Mat NormAndClip(const Engine& e, const PackedLayer& layer, Mat qkv, Arena& keep, Arena& temp, AttentionSaved* saved) {
  const ModelConfig& c = e.config;
  const int64_t rows = qkv.rows, q = c.q_size(), kv = c.kv_size();
  if (c.qk_norm == QkNorm::kNone && !c.clip_qkv) return qkv;
  Mat out = qkv;
  if (saved != nullptr) {
    saved->qkv = qkv;
    out = (c.clip_qkv ? keep : temp).Take(DType::kF32, rows, qkv.cols);
    e.backend.Cast(qkv, out);
    saved->clipped = out;
  }
  if (c.qk_norm != QkNorm::kNone) {
    const bool full = c.qk_norm == QkNorm::kFull;
    float* q_inv = nullptr;
    float* k_inv = nullptr;
    if (saved != nullptr) {
      saved->q_inv_rms = keep.Take(DType::kF32, rows, full ? 1 : c.num_heads);
      saved->k_inv_rms = keep.Take(DType::kF32, rows, full ? 1 : c.num_kv_heads);
      q_inv = saved->q_inv_rms.Row<float>(0);
      k_inv = saved->k_inv_rms.Row<float>(0);
    }
    e.backend.RmsNorm(qkv.Cols(0, q), layer.q_norm, c.rms_norm_eps, out.Cols(0, q), q_inv);
    e.backend.RmsNorm(qkv.Cols(q, kv), layer.k_norm, c.rms_norm_eps, out.Cols(q, kv), k_inv);
  }
  if (c.clip_qkv) Clamp(out, *c.clip_qkv);
  return out;
}

// y = down(swiglu(gate_up(x))) of one dense MLP, into or onto y.
struct DenseMlp {
  Mat gate_up, act;
};
DenseMlp RunDense(const Engine& e, const PackedWeight& gate_up, const float* gate_up_bias, const PackedWeight& down,
                  const float* down_bias, bool add, ConstMat x, Mat y, Arena& arena) {
  DenseMlp out{arena.Take(DType::kF32, x.rows, gate_up.n), arena.Take(e.dtype, x.rows, down.k)};
  e.backend.Gemm(x, gate_up, {.bias = gate_up_bias}, out.gate_up);
  e.backend.SwiGlu(out.gate_up, out.act);
  e.backend.Gemm(out.act, down, {.bias = down_bias, .add = add}, y);
  return out;
}

void RunRouter(const Engine& e, const PackedLayer& layer, Routing routing, ConstMat h, Arena& keep, MlpSaved* saved) {
  const ModelConfig& c = e.config;
  const int64_t rows = h.rows;
  const int top_k = static_cast<int>(c.top_k);
  const tensor::RouterKind kind = RouterKindOf(c);
  const float* bias = BiasOrNull(layer.router_bias);
  saved->logits = keep.Take(DType::kF32, rows, c.num_experts);
  saved->weights = keep.Take(DType::kF32, rows, c.top_k);
  saved->probs = saved->wants_statistics ? keep.Take(DType::kF32, rows, c.num_experts) : Mat();
  e.backend.Gemm(h, layer.router, {}, saved->logits);
  if (saved->wants_statistics) {
    saved->router_stats = static_cast<tensor::RowStats*>(keep.Take(DType::kF32, rows, 2).data);
    e.backend.LogitStats(saved->logits, {}, nullptr, saved->router_stats);
  }
  if (routing == Routing::kFree) {
    saved->ids.resize(rows * top_k);
    e.backend.RouterSelect(saved->logits, kind, top_k, bias, absl::MakeSpan(saved->ids));
  } else if (routing == Routing::kReplay) {
    std::vector<int32_t> chosen(rows * top_k);
    e.backend.RouterSelect(saved->logits, kind, top_k, bias, absl::MakeSpan(chosen));
    for (int64_t t = 0; t < rows; ++t) {
      if (saved->ids[t * top_k] < 0) std::copy_n(&chosen[t * top_k], top_k, &saved->ids[t * top_k]);
    }
  }
  e.backend.RouterWeights(saved->logits, kind, top_k, saved->ids, saved->weights, saved->probs);
  if (c.routed_scaling_factor != 1.0f) e.backend.Scale(c.routed_scaling_factor, saved->weights);
}

// The experts of this rank over the rows that came in.
void RunExperts(const Engine& e, const PackedLayer& layer, const ExpertExchange::ExpertBatch& batch,
                bool keep_for_backward, Arena& arena, MlpSaved* saved) {
  const ModelConfig& c = e.config;
  const ConstMat rows(batch.x, e.dtype, batch.num_rows, c.hidden_size, c.hidden_size);
  saved->handle = batch.handle;
  saved->offsets.assign(batch.offsets.begin(), batch.offsets.end());
  saved->row_gate_up = arena.Take(DType::kF32, rows.rows, 2 * c.moe_intermediate_size);
  saved->row_act = arena.Take(e.dtype, rows.rows, c.moe_intermediate_size);
  saved->row_out = arena.Take(DType::kF32, rows.rows, c.hidden_size);
  if (keep_for_backward) {
    saved->rows = arena.Take(e.dtype, rows.rows, c.hidden_size);
    saved->row_weights = arena.Take(DType::kF32, rows.rows, 1);
    if (rows.rows > 0) {
      e.backend.Cast(rows, saved->rows);
      e.backend.CopyFromHost(batch.weights.data(), rows.rows * sizeof(float), saved->row_weights.data);
    }
  }
  if (rows.rows == 0) return;
  e.backend.GroupedGemm(rows, saved->offsets, layer.expert_gate_up, {}, saved->row_gate_up);
  e.backend.SwiGlu(saved->row_gate_up, saved->row_act);
  e.backend.GroupedGemm(saved->row_act, saved->offsets, layer.expert_down, {}, saved->row_out);
}

absl::Status RunMoe(const Engine& e, const PackedLayer& layer, Routing routing, bool keep_for_backward, ConstMat h,
                    Mat x, Arena& keep, Arena& temp, MlpSaved* saved) {
  const ModelConfig& c = e.config;
  const int64_t rows = h.rows;
  const bool again = routing == Routing::kAgain;
  if (rows > 0) RunRouter(e, layer, routing, h, keep, saved);
  auto batch = again ? e.exchange.DispatchAgain(saved->handle, h.data, e.compute)
                     : e.exchange.Dispatch(h.data, e.compute, rows, saved->ids.data(),
                                           rows > 0 ? saved->weights.Row<float>(0) : nullptr);
  if (!batch.ok()) return batch.status();
  RunExperts(e, layer, *batch, keep_for_backward, keep, saved);
  Mat out;
  if (!again) {
    out = temp.Take(DType::kF32, rows, c.hidden_size);
    MOERL_RETURN_IF_ERROR(e.exchange.Combine(*saved->handle, static_cast<const float*>(saved->row_out.data),
                                             static_cast<float*>(out.data)));
  }
  if (rows == 0) return absl::OkStatus();
  if (c.shared_expert_intermediate_size > 0) {
    saved->shared_out = keep.Take(DType::kF32, rows, c.hidden_size);
    const DenseMlp dense =
        RunDense(e, layer.shared_gate_up, nullptr, layer.shared_down, nullptr, false, h, saved->shared_out, keep);
    saved->shared_gate_up = dense.gate_up;
    saved->shared_act = dense.act;
    if (c.gates_shared_expert) {
      saved->shared_gate = keep.Take(DType::kF32, rows, 1);
      e.backend.Gemm(h, layer.shared_router, {}, saved->shared_gate);
    }
    if (!again && !c.gates_shared_expert) e.backend.Add(saved->shared_out, out);
    if (!again && c.gates_shared_expert) {
      Mat gated = temp.Take(DType::kF32, rows, c.hidden_size);
      e.backend.SigmoidGate(saved->shared_out, saved->shared_gate, gated);
      e.backend.Add(gated, out);
    }
  }
  if (!again) e.backend.Add(out, x);
  return absl::OkStatus();
}

}  // namespace

Engine MakeEngine(const Weights& weights, Backend& backend, ExpertExchange& exchange) {
  const Compute compute = weights.options().compute;
  return {weights.config(), weights.packed(), backend, exchange, DTypeOf(compute), compute};
}

Rotary MakeRotary(const Engine& engine, absl::Span<const int32_t> positions,
                  absl::Span<const float> inverse_frequencies, float factor, Arena& arena) {
  const int64_t rows = static_cast<int64_t>(positions.size()), half = engine.config.rotary_dim() / 2;
  Rotary out{arena.Take(DType::kF32, rows, half), arena.Take(DType::kF32, rows, half)};
  if (rows > 0) engine.backend.RopeTable(positions, inverse_frequencies, factor, out.cos, out.sin);
  return out;
}

void AttentionForward(const Engine& e, int layer_index, const Rotary& rotary, Attend attend, Mat x, Arena& keep,
                      Arena& temp, AttentionSaved* saved) {
  if (x.rows == 0) return;
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const int64_t rows = x.rows, q_size = c.q_size(), kv_size = c.kv_size();
  Backend& b = e.backend;

  Mat h = keep.Take(e.dtype, rows, c.hidden_size);
  float* inv_rms = nullptr;
  if (saved != nullptr) {
    saved->x = keep.Take(DType::kF32, rows, c.hidden_size);
    b.Cast(x, saved->x);
    saved->inv_rms = keep.Take(DType::kF32, rows, 1);
    inv_rms = saved->inv_rms.Row<float>(0);
    saved->h = h;
  }
  b.RmsNorm(x, layer.attention_norm, c.rms_norm_eps, h, inv_rms);

  const bool needs_qkv = c.qk_norm != QkNorm::kNone || c.clip_qkv;
  Mat qkv = (saved != nullptr && needs_qkv ? keep : temp).Take(DType::kF32, rows, q_size + 2 * kv_size);
  b.Gemm(h, layer.qkv, {.bias = BiasOrNull(layer.qkv_bias)}, qkv);
  const Mat ready = NormAndClip(e, layer, qkv, keep, temp, saved);

  Mat q = keep.Take(e.dtype, rows, q_size), k = keep.Take(e.dtype, rows, kv_size),
      v = keep.Take(e.dtype, rows, kv_size);
  b.Rope(ready.Cols(0, q_size), c.head_dim, rotary.cos, rotary.sin, false, q);
  b.Rope(ready.Cols(q_size, kv_size), c.head_dim, rotary.cos, rotary.sin, false, k);
  b.Cast(ready.Cols(q_size + kv_size, kv_size), v);

  Mat out = keep.Take(e.dtype, rows, q_size);
  tensor::RowStats* stats = nullptr;
  if (saved != nullptr) {
    static_assert(sizeof(tensor::RowStats) == 2 * sizeof(float));
    stats = static_cast<tensor::RowStats*>(keep.Take(DType::kF32, rows, 2 * c.num_heads).data);
    saved->stats = stats;
    saved->q = q;
    saved->k = k;
    saved->v = v;
    saved->out = out;
  }
  attend(q, k, v, out, stats);
  b.Gemm(out, layer.o, {.bias = BiasOrNull(layer.o_bias), .add = true}, x);
}

absl::Status MlpForward(const Engine& e, int layer_index, Routing routing, bool keep_for_backward, Mat x, Arena& keep,
                        Arena& temp, MlpSaved* saved) {
  const ModelConfig& c = e.config;
  const PackedLayer& layer = e.model.layers[layer_index];
  const int64_t rows = x.rows;
  const bool moe = c.layer_has_experts[layer_index];
  if (rows == 0 && !moe) return absl::OkStatus();

  Mat h = keep.Take(e.dtype, rows, c.hidden_size);
  if (rows > 0) {
    float* inv_rms = nullptr;
    if (keep_for_backward) {
      saved->x = keep.Take(DType::kF32, rows, c.hidden_size);
      e.backend.Cast(x, saved->x);
      saved->inv_rms = keep.Take(DType::kF32, rows, 1);
      inv_rms = saved->inv_rms.Row<float>(0);
      saved->h = h;
    }
    e.backend.RmsNorm(x, layer.mlp_norm, c.rms_norm_eps, h, inv_rms);
  }
  if (moe) return RunMoe(e, layer, routing, keep_for_backward, h, x, keep, temp, saved);

  const DenseMlp dense =
      RunDense(e, layer.gate_up, BiasOrNull(layer.gate_up_bias), layer.down, BiasOrNull(layer.down_bias),
               /*add=*/true, h, x, keep);
  saved->gate_up = dense.gate_up;
  saved->act = dense.act;
  return absl::OkStatus();
}

}  // namespace moerl::model
