#ifndef MOERL_LIBS_MODEL_EXPERT_EXCHANGE_H_
#define MOERL_LIBS_MODEL_EXPERT_EXCHANGE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/model/config.h"

namespace moerl::tensor {
class Backend;
}

namespace moerl::model {

// The seam between the model and expert parallelism: token rows go to the ranks that hold their experts and come back
// added up. The model applies a layer's experts as
//
//   batch = Dispatch(x, ids, weights)          rows sorted by (expert, source rank, source row)
//   y     = experts of this rank over batch    grouped GEMM
//   out   = Combine(batch.handle, y)           out[t] = sum over the combine tree of weights[t,j] * y[row of (t,
//   ids[t,j])]
//
// and backward as the same two moves with the cached handle, the other way round. Every member of the group makes the
// same calls in the same order, with zero tokens where it has no work; results do not depend on the number of ranks, to
// the bit. LocalExchange (one rank) is the oracle. Thread-compatible; one forward may be in flight per exchange, any
// number of handles may be alive. Errors are the transport's (UNAVAILABLE names the lost rank); the local one has none.
class ExpertExchange {
 public:
  virtual ~ExpertExchange() = default;

  // Where the rows of one Dispatch went; kept alive for as long as backward may need it.
  class Handle {
   public:
    virtual ~Handle() = default;
  };

  struct ExpertBatch {
    const void* x = nullptr;  // [num_rows, hidden], the type that was dispatched
    int64_t num_rows = 0;
    absl::Span<const int64_t> offsets;  // [num_local_experts + 1]: rows of local expert i are offsets[i]..offsets[i+1]
    absl::Span<const float> weights;    // [num_rows] routing weight of each row
    std::shared_ptr<const Handle> handle;
  };

  // Experts that live on this rank, ascending; the same for every layer.
  virtual absl::Span<const int32_t> local_experts() const = 0;
  virtual int num_ranks() const = 0;

  // Collective. x is [num_tokens, hidden] in `type`; topk_ids [num_tokens, top_k] (distinct within a row), weights
  // alike. The returned memory belongs to the exchange and is valid until the next Dispatch or DispatchAgain.
  virtual absl::StatusOr<ExpertBatch> Dispatch(const void* x, Compute type, int64_t num_tokens, const int32_t* topk_ids,
                                               const float* weights) = 0;

  // Collective. y is [num_rows, hidden] fp32, not yet weighted; out is [num_tokens, hidden] fp32, overwritten.
  virtual absl::Status Combine(const Handle& handle, const float* y, float* out) = 0;

  // Collective. Sends x [num_tokens, hidden] (in `type`) along the routes of an earlier Dispatch; rows and weights come
  // in the same order. For backward (the gradient of Combine's output) and for recomputation.
  virtual absl::StatusOr<ExpertBatch> DispatchAgain(const std::shared_ptr<const Handle>& handle, const void* x,
                                                    Compute type) = 0;

  // Collective. dx_rows [num_rows, hidden] fp32 come back added up over the combine tree without weights, into
  // dx [num_tokens, hidden]; d_weight_rows [num_rows] come back unsummed, into d_weights [num_tokens, top_k].
  virtual absl::Status CombineGrad(const Handle& handle, const float* dx_rows, const float* d_weight_rows, float* dx,
                                   float* d_weights) = 0;
};

// Everything on one rank: rows are gathered and added up in place with the kernels of `backend`, which must outlive the
// exchange. `compute` decides where the combine tree rounds to bf16.
std::unique_ptr<ExpertExchange> MakeLocalExchange(const ModelConfig& config, Compute compute, tensor::Backend* backend);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_EXPERT_EXCHANGE_H_
