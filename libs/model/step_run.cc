#include "libs/model/step_run.h"

#include <algorithm>
#include <numeric>

#include "libs/base/status_macros.h"
#include "libs/model/router.h"

namespace moerl::model {

using tensor::ConstMat;
using tensor::DType;
using tensor::Mat;

namespace {

// Logits held at once, in elements.
constexpr int64_t kLogitsMax = int64_t{1} << 22;

void StoreRoutes(const ModelConfig& c, int moe_layer, const std::vector<int32_t>& ids, StepRows* rows) {
  const int64_t layers = c.num_moe_layers();
  for (int64_t row = 0; row < rows->num_rows; ++row) {
    for (int64_t j = 0; j < c.top_k; ++j) {
      rows->routes[(row * layers + moe_layer) * c.top_k + j] = static_cast<uint16_t>(ids[row * c.top_k + j]);
    }
  }
}

// Rows an expert from which on nearly every expert has some: 3 leave one of 20 without.
constexpr int64_t kRowsAnExpert = 3;

// Lets the products before a layer's experts fetch those from memory, where all will be read.
void AnnounceExperts(const Engine& e, int layer, int64_t num_rows) {
  const ModelConfig& c = e.config;
  if (!c.layer_has_experts[layer] || num_rows * c.top_k < kRowsAnExpert * c.num_experts) return;
  e.backend.WillRead(e.model.layers[layer].expert_gate_up);
  e.backend.WillRead(e.model.layers[layer].expert_down);
}

// Final hidden states of some rows, normalised.
Mat HeadInput(const Engine& e, const StepRows& rows, absl::Span<const int32_t> row_ids, Arena& arena) {
  const int64_t n = static_cast<int64_t>(row_ids.size());
  Mat x = arena.Take(DType::kF32, n, e.config.hidden_size), h = arena.Take(e.dtype, n, e.config.hidden_size);
  e.backend.GatherRows(rows.x, row_ids, x);
  e.backend.RmsNorm(x, e.model.final_norm, e.config.rms_norm_eps, h, nullptr);
  return h;
}

// Draws every sample of one row from its logits, which become z.
void DrawRow(const Engine& e, Mat logits, const tensor::RowStats& plain, const DrawRequest& request,
             DrawResult* result) {
  const SamplingParams& sampling = *request.sampling;
  const float divisor = sampling.divisor();
  tensor::RowStats stats = plain;
  float* values = logits.Row<float>(0);
  const absl::Span<float> z(values, static_cast<size_t>(logits.cols));
  std::vector<float> raw;
  if (sampling.filters()) {
    raw.assign(z.begin(), z.end());
    for (float& value : z) value /= divisor;
    result->kept = KeptIdsOf(z, sampling);
    const std::vector<int64_t> begin = {0, static_cast<int64_t>(result->kept.size())};
    const tensor::KeptIds kept{result->kept, begin};
    e.backend.LogitStats(ConstMat(raw.data(), 1, logits.cols), {divisor}, &kept, &stats);
  } else if (divisor != 1.0f) {
    for (float& value : z) value /= divisor;
  }
  for (const double u : request.uniforms) {
    const int32_t id = sampling.temperature > 0 ? DrawId(z, result->kept, stats.max, stats.log_sum, u) : GreedyId(z);
    result->ids.push_back(id);
    result->logprobs.push_back((z[id] - stats.max) - stats.log_sum);
  }
}

}  // namespace

absl::Status RunStep(const Engine& e, const RopeFrequencies& rope, absl::Span<const StepChunk> chunks, KvPool& pool,
                     bool want_routes, Arena& arena, StepRows* rows) {
  const ModelConfig& c = e.config;
  std::vector<int32_t> tokens, positions;
  std::vector<tensor::SequenceChunk> sequences;
  for (const StepChunk& chunk : chunks) {
    const int64_t begin = static_cast<int64_t>(tokens.size());
    rows->row_begin.push_back(begin);
    sequences.push_back({begin, chunk.count, chunk.first_position, chunk.pages->data()});
    tokens.insert(tokens.end(), chunk.tokens, chunk.tokens + chunk.count);
    for (int64_t i = 0; i < chunk.count; ++i) positions.push_back(static_cast<int32_t>(chunk.first_position + i));
  }
  rows->num_rows = static_cast<int64_t>(tokens.size());
  rows->x = arena.Take(DType::kF32, rows->num_rows, c.hidden_size);
  if (want_routes) rows->routes.resize(rows->num_rows * c.num_moe_layers() * c.top_k);
  const Rotary rotary = MakeRotary(e, positions, rope.inverse, rope.attention_factor, arena);
  if (rows->num_rows > 0) e.backend.Embed(e.model.embedding.mat(), tokens, rows->x);

  MlpSaved mlp;
  int moe_layer = 0;
  for (int layer = 0; layer < c.num_layers; ++layer) {
    const Arena::Mark mark = arena.mark();
    AnnounceExperts(e, layer, rows->num_rows);
    const tensor::KvCache cache = pool.layer(layer);
    const auto attend = [&](ConstMat q, ConstMat k, ConstMat v, Mat out, tensor::RowStats*) {
      e.backend.KvWrite(k, v, sequences, cache);
      e.backend.AttentionPaged(q, sequences, cache, AttentionScale(c), out);
    };
    AttentionForward(e, layer, rotary, attend, rows->x, arena, arena, nullptr);
    MOERL_RETURN_IF_ERROR(MlpForward(e, layer, Routing::kFree, false, rows->x, arena, arena, &mlp));
    if (c.layer_has_experts[layer]) {
      if (want_routes && rows->num_rows > 0) StoreRoutes(c, moe_layer, mlp.ids, rows);
      ++moe_layer;
    }
    arena.Rewind(mark);
  }
  return absl::OkStatus();
}

void DrawTokens(const Engine& e, const StepRows& rows, absl::Span<const DrawRequest> requests, Arena& arena,
                std::vector<DrawResult>* results) {
  results->assign(requests.size(), {});
  if (requests.empty()) return;
  const int64_t n = static_cast<int64_t>(requests.size()), vocab = e.config.vocab_size;
  const int64_t block = std::clamp<int64_t>(kLogitsMax / vocab, 1, n);
  std::vector<int32_t> row_ids;
  std::vector<float> divisors;
  for (const DrawRequest& request : requests) {
    row_ids.push_back(static_cast<int32_t>(request.row));
    divisors.push_back(request.sampling->divisor());
  }
  const Mat h = HeadInput(e, rows, row_ids, arena);
  AnnounceExperts(e, 0, n);  // of the step that comes
  Mat logits = arena.Take(DType::kF32, block, vocab);
  std::vector<tensor::RowStats> stats(block);
  for (int64_t begin = 0; begin < n; begin += block) {
    const int64_t count = std::min(block, n - begin);
    const Mat z = logits.Rows(0, count);
    e.backend.Gemm(h.Rows(begin, count), e.model.head, {}, z);
    e.backend.LogitStats(z, absl::MakeSpan(divisors).subspan(begin, count), nullptr, stats.data());
    for (int64_t i = 0; i < count; ++i) DrawRow(e, z.Rows(i, 1), stats[i], requests[begin + i], &(*results)[begin + i]);
  }
}

void RowLogProbs(const Engine& e, const StepRows& rows, int64_t row_begin, absl::Span<const int32_t> targets,
                 float temperature, Arena& arena, float* logprobs) {
  const size_t n = targets.size();
  if (n == 0) return;
  std::vector<int32_t> row_ids(n);
  std::iota(row_ids.begin(), row_ids.end(), static_cast<int32_t>(row_begin));
  const std::vector<float> temperatures(n, temperature);
  std::vector<tensor::RowStats> stats(n);
  const Mat h = HeadInput(e, rows, row_ids, arena);
  e.backend.LogProbs(h, e.model.head, targets, temperatures, nullptr, logprobs, stats.data(), nullptr);
}

}  // namespace moerl::model
