#ifndef MOERL_LIBS_MODEL_TRAINING_H_
#define MOERL_LIBS_MODEL_TRAINING_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "libs/model/batch.h"
#include "libs/model/expert_exchange.h"
#include "libs/model/weights.h"

namespace moerl::model {

struct ScoreOptions {
  int num_threads = 1;
  bool want_entropy = false;
  bool want_routes = false;
  ExpertExchange* exchange = nullptr;  // null: all experts are local
  // The k likeliest ids and log-probabilities after each prefix; see `top_ids`. 0: none.
  int top_n = 0;
  std::vector<int32_t>* top_ids = nullptr;     // [T, top_n] candidates for token t
  std::vector<float>* top_logprobs = nullptr;  // [T, top_n]
  // XXH3-64 of what each stage leaves (stages.h), all rows: [NumStages]. Not of a critic. Null: nothing is computed.
  std::vector<uint64_t>* stage_digests = nullptr;
};

// Forward only: log-probabilities of a batch under `weights` (a reference policy, `moerl logprobs`). Nothing is kept.
absl::StatusOr<ForwardResult> Score(const Weights& weights, const PackedBatch& batch, const ScoreOptions& options = {});

struct TrainerModelOptions {
  Compute compute = Compute::kBf16;
  int num_threads = 1;
  // Activations of a layer are dropped after its forward and recomputed (same bits) in backward, with saved routes and
  // handles. Kept without: T * L * bytes of a layer's activations (see ActivationBytes); with: T * L * hidden * 4.
  bool recompute = false;
  // A critic: the trunk's final norm feeds a scalar head [1, hidden], zero at first; no vocabulary head is trained.
  bool value_head = false;
  ExpertExchange* exchange = nullptr;  // null: all experts are local; must outlive the model
};

// Bytes of activations that Forward keeps for Backward for a batch of `num_tokens` tokens.
int64_t ActivationBytes(const ModelConfig& config, const TrainerModelOptions& options, int64_t num_tokens);

// dL/d(outputs of the last Forward). Empty vectors are zeros.
struct BackwardInput {
  std::vector<float> d_logprobs = {};  // [T]
  std::vector<float> d_entropy = {};   // [T]
  std::vector<float> d_values = {};    // [T], only with a value head
  float d_balance_loss =
      0.0f;               // for every MoE layer's balance_loss, e.g. aux_coef / (sequences of the step * MoE layers)
  float d_z_loss = 0.0f;  // likewise, e.g. z_coef / (tokens of the step * MoE layers)
};

// Decoupled weight decay (Loshchilov & Hutter, 2019) on matrices, not on norms, biases or the value head.
struct AdamWOptions {
  float learning_rate = 1e-6f;
  float beta1 = 0.9f, beta2 = 0.999f, epsilon = 1e-8f;
  float weight_decay = 0.0f;
  float max_grad_norm = 1.0f;  // <= 0: no clipping
};

// Loss-free load balancing (Wang et al., 2024, arXiv 2408.15664): the selection bias of expert e moves by
// rate * sign(mean load - load_e), layer by layer, once an update.
struct RouterBiasUpdate {
  float rate = 0.0f;                             // 0: the biases stay
  absl::Span<const int64_t> expert_tokens = {};  // [MoE layers, experts] of the update's whole batch, over all ranks
};

struct StepResult {
  double grad_norm = 0.0;       // before clipping
  bool skipped = false;         // a gradient was not finite: nothing changed
  std::string skipped_because;  // names the first such tensor
};

// The trainer's side of a model: fp32 masters and AdamW moments of every parameter (of the local experts), the packed
// weights in the compute type that forward and backward run on, and gradients that add up over micro-batches.
//
//   for each micro-batch: Forward, Backward;   reduce gradients over ranks;   ClipAndStep;   publish
//
// Gradients add up in the order of the calls; within one, token order is fixed: repeats are equal to the bit, with
// recomputation on or off and for any number of threads. Owned by one thread.
class TrainerModel {
 public:
  // Masters from tensors (fp32 or the compute type, as in a model directory), checked as Weights does. With a value
  // head, `value_head.weight` [1, hidden] is taken when there and zero otherwise.
  static absl::StatusOr<std::unique_ptr<TrainerModel>> Create(const ModelConfig& config,
                                                              absl::Span<const TensorView> tensors,
                                                              const TrainerModelOptions& options);
  ~TrainerModel();

  const ModelConfig& config() const;

  // Runs a micro-batch and keeps what Backward needs; a second Forward replaces the first.
  // INVALID_ARGUMENT names a bad field of the batch; other errors are the exchange's.
  absl::StatusOr<ForwardResult> Forward(const PackedBatch& batch);

  // Forward only, on the same weights; keeps nothing and leaves a pending Forward alone (old log-probabilities).
  absl::StatusOr<ForwardResult> Score(const PackedBatch& batch, const ScoreOptions& options = {});

  // Adds this micro-batch's gradients. FAILED_PRECONDITION without a pending Forward.
  absl::Status Backward(const BackwardInput& input);

  // The accumulated gradients, fp32, in the order of the parameter table: all that every rank holds alike, then this
  // rank's experts. For reduction over data-parallel ranks, in place, before ClipAndStep.
  absl::Span<float> replicated_gradients();
  absl::Span<float> expert_gradients();
  void ZeroGradients();

  // The gradient of one parameter by name, row-major; empty when there is none on this rank.
  absl::Span<const float> gradient(absl::string_view name) const;
  absl::Span<const float> master(absl::string_view name) const;

  // Sum of squares of each parameter's gradient, [all parameters of the table, then the value head], zero for experts
  // that are not local. With experts spread over ranks, add these up over ranks (replicated ones from one rank only)
  // and pass them to ClipAndStep, so that the norm is the same to the bit for every number of ranks.
  std::vector<double> GradientSquares() const;

  // One AdamW update with global-norm clipping, new packed weights, gradients back to zero. A gradient that is not
  // finite skips the update, says so, and leaves masters, moments and step count as they were (gradients are zeroed).
  // `squares` empty: GradientSquares() of this rank. Router biases move with `bias` and in no other way; a rate above 0
  // needs a model that has them.
  StepResult ClipAndStep(const AdamWOptions& options, absl::Span<const double> squares = {},
                         const RouterBiasUpdate& bias = {});

  // The current weights as the rollout would build them from what is published: the same bits.
  std::shared_ptr<const Weights> weights() const;

  // Calls `visit` for every tensor this rank publishes, in the order of the table, in the compute type, by Hugging Face
  // name: replicated ones and its experts. The view lives for the call. Stops at the first error.
  absl::Status ForEachTensor(const std::function<absl::Status(const TensorView&)>& visit) const;

  // Masters, moments, step count and value head as one safetensors file; RestoreState makes the model equal to the bit.
  // INVALID_ARGUMENT names what does not fit.
  absl::Status SaveState(const std::string& path) const;
  absl::Status RestoreState(const std::string& path);

  int64_t num_updates() const;

 private:
  class Impl;
  explicit TrainerModel(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_TRAINING_H_
