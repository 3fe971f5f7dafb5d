#ifndef MOERL_LIBS_MODEL_TRANSFORMER_H_
#define MOERL_LIBS_MODEL_TRANSFORMER_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "libs/model/arena.h"
#include "libs/model/expert_exchange.h"
#include "libs/model/packed_model.h"

namespace moerl::model {

// The layers of the model, row by row: private to the library, shared by generation, scoring and training, so that all
// three run the same kernels in the same order. T rows (tokens of any sequences), hidden width C.

// What runs the layers: one weight set on one backend. Everything outlives the calls.
struct Engine {
  const ModelConfig& config;
  const PackedModel& model;
  tensor::Backend& backend;
  ExpertExchange& exchange;
  tensor::DType dtype;  // of GEMM inputs, keys and values
  Compute compute;
};

Engine MakeEngine(const Weights& weights, tensor::Backend& backend, ExpertExchange& exchange);

// cos and sin of the rows' positions.
struct Rotary {
  tensor::Mat cos, sin;
};
Rotary MakeRotary(const Engine& engine, absl::Span<const int32_t> positions,
                  absl::Span<const float> inverse_frequencies, float factor, Arena& arena);

// out [T, heads * D] from q, k, v; stats [T * heads] (or null) for backward. Packed or paged: the caller's.
using Attend = absl::FunctionRef<void(tensor::ConstMat q, tensor::ConstMat k, tensor::ConstMat v, tensor::Mat out,
                                      tensor::RowStats* stats)>;

// What backward needs of one attention block. `x` is a copy of the residual stream at the block's entry.
struct AttentionSaved {
  tensor::Mat x, inv_rms, h, qkv, q_inv_rms, k_inv_rms, clipped, q, k, v, out;
  tensor::RowStats* stats = nullptr;
};

// What backward needs of one MLP block. `rows` are the tokens this rank's experts received.
struct MlpSaved {
  bool wants_statistics = false;  // in: also compute probs and router_stats
  tensor::Mat x, inv_rms, h;
  tensor::Mat gate_up, act;                  // dense
  tensor::Mat logits, weights, probs;        // router: [T, E], [T, k], [T, E]
  tensor::RowStats* router_stats = nullptr;  // [T]
  std::vector<int32_t> ids;                  // [T, k]
  std::shared_ptr<const ExpertExchange::Handle> handle;
  std::vector<int64_t> offsets;
  tensor::Mat rows, row_weights, row_gate_up, row_act, row_out;
  tensor::Mat shared_gate_up, shared_act, shared_out, shared_gate;
};

// x += attention(x). With `saved`, keeps what backward needs in `keep`; temporaries come from `temp` (which may be the
// same).
void AttentionForward(const Engine& engine, int layer, const Rotary& rotary, Attend attend, tensor::Mat x, Arena& keep,
                      Arena& temp, AttentionSaved* saved);

// Where a row's experts come from.
enum class Routing {
  kFree,    // the router chooses
  kReplay,  // `saved->ids` come from elsewhere (kNoRoute's rows, marked -1 in the first entry, are chosen freely)
  kAgain,   // recomputation: ids, weights and handle of `saved` are those of the first forward; x is not updated
};

// x += mlp(x). `saved` is never null for a layer with experts: it receives ids and router statistics.
absl::Status MlpForward(const Engine& engine, int layer, Routing routing, bool keep_for_backward, tensor::Mat x,
                        Arena& keep, Arena& temp, MlpSaved* saved);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_TRANSFORMER_H_
