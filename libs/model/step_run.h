#ifndef MOERL_LIBS_MODEL_STEP_RUN_H_
#define MOERL_LIBS_MODEL_STEP_RUN_H_

#include <vector>

#include "libs/model/kv_pool.h"
#include "libs/model/sampling.h"
#include "libs/model/transformer.h"

namespace moerl::model {

// One step's rows through the layers and the vocabulary, private to the library.

// Consecutive new positions of one sequence.
struct StepChunk {
  const int32_t* tokens = nullptr;
  int64_t count = 0, first_position = 0;
  const std::vector<int32_t>* pages = nullptr;
};

// The rows of a step after the last layer, and what was asked for on the way.
struct StepRows {
  std::vector<int64_t> row_begin;  // of each chunk
  int64_t num_rows = 0;
  tensor::Mat x;                 // [rows, hidden] residual stream before the final norm
  std::vector<uint16_t> routes;  // [rows, MoE layers, top_k] when asked for
};

// Writes the chunks' keys and values into their pages and runs all layers. With no chunks, takes part in the exchange.
absl::Status RunStep(const Engine& engine, const RopeFrequencies& rope, absl::Span<const StepChunk> chunks,
                     KvPool& pool, bool want_routes, Arena& arena, StepRows* rows);

// A row whose next token is wanted: one draw for each sample that continues from it (several right after a shared
// prompt).
struct DrawRequest {
  int64_t row = 0;
  const SamplingParams* sampling = nullptr;
  std::vector<double> uniforms;  // one a sample
};
struct DrawResult {
  std::vector<int32_t> ids;
  std::vector<float> logprobs;
  std::vector<int32_t> kept;  // ascending, shared by all draws of the row; empty without filters
};
void DrawTokens(const Engine& engine, const StepRows& rows, absl::Span<const DrawRequest> requests, Arena& arena,
                std::vector<DrawResult>* results);

// Log-probabilities of given next tokens after rows [row_begin, row_begin + targets.size()).
void RowLogProbs(const Engine& engine, const StepRows& rows, int64_t row_begin, absl::Span<const int32_t> targets,
                 float temperature, Arena& arena, float* logprobs);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_STEP_RUN_H_
