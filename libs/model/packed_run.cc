#include "libs/model/packed_run.h"

#include <xxhash.h>

#include <algorithm>
#include <numeric>

#include "libs/base/status_macros.h"
#include "libs/model/backend.h"
#include "libs/model/router.h"

namespace moerl::model {

using tensor::ConstMat;
using tensor::DType;
using tensor::Mat;

namespace {

// Rows of logits held at once where the likeliest tokens are wanted.
constexpr int64_t kTopRows = 64;

void StoreRoutes(const ModelConfig& c, int moe_layer, const std::vector<int32_t>& ids, ForwardResult* result) {
  const int64_t layers = c.num_moe_layers(), rows = static_cast<int64_t>(ids.size()) / c.top_k;
  for (int64_t t = 0; t < rows; ++t) {
    for (int64_t j = 0; j < c.top_k; ++j) {
      result->routes[(t * layers + moe_layer) * c.top_k + j] = static_cast<uint16_t>(ids[t * c.top_k + j]);
    }
  }
}

// The likeliest continuations at every wanted token.
void StoreTop(const Engine& e, const HeadRows& rows, const HeadSaved& head, const ScoreOptions& options,
              int64_t num_tokens, Arena& temp) {
  const int64_t vocab = e.config.vocab_size, n = std::min<int64_t>(options.top_n, vocab);
  options.top_ids->assign(num_tokens * options.top_n, -1);
  options.top_logprobs->assign(num_tokens * options.top_n, 0.0f);
  Mat logits = temp.Take(DType::kF32, std::min(rows.size(), kTopRows), vocab);
  std::vector<int32_t> order(vocab);
  for (int64_t begin = 0; begin < rows.size(); begin += kTopRows) {
    const int64_t count = std::min(kTopRows, rows.size() - begin);
    e.backend.Gemm(head.h.Rows(begin, count), e.model.head, {}, logits.Rows(0, count));
    for (int64_t i = 0; i < count; ++i) {
      const float* z = logits.Row<float>(i);
      const int64_t row = begin + i, out = rows.token[row] * options.top_n;
      std::iota(order.begin(), order.end(), 0);
      std::partial_sort(order.begin(), order.begin() + n, order.end(),
                        [z](int32_t a, int32_t b) { return z[a] != z[b] ? z[a] > z[b] : a < b; });
      for (int64_t j = 0; j < n; ++j) {
        (*options.top_ids)[out + j] = order[j];
        (*options.top_logprobs)[out + j] =
            (z[order[j]] / rows.temperature[row] - head.stats[row].max) - head.stats[row].log_sum;
      }
    }
  }
}

uint64_t DigestOf(const Engine& e, ConstMat x) {
  const int64_t row_bytes = x.cols * SizeOf(x.dtype);
  std::string bytes(static_cast<size_t>(x.rows * row_bytes), '\0');
  for (int64_t row = 0; row < x.rows; ++row) e.backend.CopyToHost(x.RowBytes(row), row_bytes, &bytes[row * row_bytes]);
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace

PackedPlan MakePackedPlan(const PackedBatch& batch, const ModelConfig& config) {
  PackedPlan plan;
  plan.tokens = batch.tokens;
  plan.offsets = batch.offsets.empty() ? std::vector<int64_t>{0} : batch.offsets;
  plan.positions.resize(batch.tokens.size());
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    std::iota(plan.positions.begin() + batch.offsets[s], plan.positions.begin() + batch.offsets[s + 1], 0);
  }
  plan.head = MakeHeadRows(batch);
  if (batch.routes.empty()) return plan;
  const int64_t layers = config.num_moe_layers(), k = config.top_k;
  plan.replay.assign(layers, std::vector<int32_t>(batch.num_tokens() * k));
  for (int64_t t = 0; t < batch.num_tokens(); ++t) {
    for (int64_t layer = 0; layer < layers; ++layer) {
      const uint16_t* from = &batch.routes[(t * layers + layer) * k];
      int32_t* to = &plan.replay[layer][t * k];
      if (from[0] == kNoRoute) {
        to[0] = -1;
        continue;
      }
      std::copy_n(from, k, to);
      std::sort(to, to + k);
    }
  }
  return plan;
}

void AttendPacked(const Engine& e, absl::Span<const int64_t> offsets, ConstMat q, ConstMat k, ConstMat v, Mat out,
                  tensor::RowStats* stats) {
  e.backend.AttentionPacked(q, k, v, offsets, e.config.head_dim, AttentionScale(e.config), out, stats);
}

ForwardResult EmptyResult(const ModelConfig& c, int64_t num_tokens, bool entropy, bool values, bool routes) {
  ForwardResult result;
  const int64_t layers = c.num_moe_layers();
  result.logprobs.assign(values ? 0 : num_tokens, 0.0f);
  result.entropy.assign(entropy && !values ? num_tokens : 0, 0.0f);
  result.values.assign(values ? num_tokens : 0, 0.0f);
  result.expert_tokens.assign(layers * c.num_experts, 0);
  result.balance_loss.assign(layers, 0.0);
  result.z_loss.assign(layers, 0.0);
  result.routes.assign(routes ? num_tokens * layers * c.top_k : 0, kNoRoute);
  return result;
}

absl::Status RunLayers(const Engine& e, const PackedPlan& plan, const Rotary& rotary, KeepForBackward what, Arena& keep,
                       Arena& temp, std::vector<LayerSaved>& saved, Mat x, bool want_routes, ForwardResult* result,
                       std::vector<uint64_t>* stage_digests) {
  const ModelConfig& c = e.config;
  const bool everything = what == KeepForBackward::kEverything;
  saved.resize(what == KeepForBackward::kNothing ? 1 : c.num_layers);
  if (x.rows > 0) e.backend.Embed(e.model.embedding.mat(), plan.tokens, x);
  const auto note_stage = [&] {
    if (stage_digests != nullptr) stage_digests->push_back(DigestOf(e, x));
  };
  note_stage();
  const auto attend = [&](ConstMat q, ConstMat k, ConstMat v, Mat out, tensor::RowStats* stats) {
    AttendPacked(e, plan.offsets, q, k, v, out, stats);
  };
  int moe_layer = 0;
  for (int layer = 0; layer < c.num_layers; ++layer) {
    const Arena::Mark mark = temp.mark();
    LayerSaved& s = saved[what == KeepForBackward::kNothing ? 0 : layer];
    Arena& layer_keep = everything ? keep : temp;
    if (what == KeepForBackward::kLayerInputs) {
      s.x = keep.Take(DType::kF32, x.rows, x.cols);
      if (x.rows > 0) e.backend.Cast(x, s.x);
    }
    AttentionForward(e, layer, rotary, attend, x, layer_keep, temp, everything ? &s.attention : nullptr);
    note_stage();
    s.mlp.wants_statistics = true;
    const bool moe = c.layer_has_experts[layer], replay = moe && !plan.replay.empty();
    if (replay) s.mlp.ids = plan.replay[moe_layer];
    MOERL_RETURN_IF_ERROR(
        MlpForward(e, layer, replay ? Routing::kReplay : Routing::kFree, everything, x, layer_keep, temp, &s.mlp));
    note_stage();
    if (moe) {
      AddRouterStatistics(c, moe_layer, plan.offsets, s.mlp, result);
      if (want_routes && x.rows > 0) StoreRoutes(c, moe_layer, s.mlp.ids, result);
      ++moe_layer;
    }
    temp.Rewind(mark);
  }
  return absl::OkStatus();
}

absl::StatusOr<ForwardResult> ScoreOn(const Engine& e, const RopeFrequencies& rope, const PackedBatch& batch,
                                      const ScoreOptions& options, Arena& arena) {
  const ModelConfig& c = e.config;
  MOERL_RETURN_IF_ERROR(ValidateBatch(batch, c));
  const bool critic = e.model.value_head.n > 0;
  const PackedPlan plan = MakePackedPlan(batch, c);
  const int64_t rows = plan.num_tokens();
  ForwardResult result = EmptyResult(c, rows, options.want_entropy, critic, options.want_routes);
  arena.Reset();
  const Rotary rotary = MakeRotary(e, plan.positions, rope.inverse, rope.attention_factor, arena);
  Mat x = arena.Take(DType::kF32, rows, c.hidden_size);
  std::vector<LayerSaved> saved;
  if (options.stage_digests != nullptr) options.stage_digests->clear();
  MOERL_RETURN_IF_ERROR(RunLayers(e, plan, rotary, KeepForBackward::kNothing, arena, arena, saved, x,
                                  options.want_routes, &result, options.stage_digests));
  if (critic) {
    ValueForward(e, x, arena, nullptr, &result);
    return result;
  }
  HeadSaved head;
  HeadForward(e, plan.head, x, options.want_entropy, arena, &head, &result);
  if (options.top_n > 0) StoreTop(e, plan.head, head, options, rows, arena);
  if (options.stage_digests != nullptr) {
    options.stage_digests->push_back(DigestOf(e, head.h));
    options.stage_digests->push_back(XXH3_64bits(result.logprobs.data(), result.logprobs.size() * sizeof(float)));
  }
  return result;
}

absl::StatusOr<ForwardResult> Score(const Weights& weights, const PackedBatch& batch, const ScoreOptions& options) {
  MOERL_ASSIGN_OR_RETURN(const std::unique_ptr<tensor::Backend> backend, NewModelBackend(options.num_threads));
  const std::unique_ptr<ExpertExchange> local =
      MakeLocalExchange(weights.config(), weights.options().compute, backend.get());
  const Engine engine = MakeEngine(weights, *backend, options.exchange != nullptr ? *options.exchange : *local);
  Arena arena(*backend);
  return ScoreOn(engine, ComputeRopeFrequencies(weights.config()), batch, options, arena);
}

}  // namespace moerl::model
