#ifndef MOERL_LIBS_TENSOR_BACKEND_H_
#define MOERL_LIBS_TENSOR_BACKEND_H_

#include <cstdint>
#include <initializer_list>
#include <string>

#include "absl/types/span.h"
#include "libs/tensor/dtype.h"
#include "libs/tensor/kv_cache.h"
#include "libs/tensor/packed_weight.h"
#include "libs/tensor/tensor.h"

// The kernels of a transformer with experts, forward and backward, behind one interface.
//
// The row rule. A row of any forward kernel's output depends only on that row's inputs and the weights, bit for
// bit: never on the other rows, the row's place, the number of threads, or which of the forms of attention
// computed it. Backward kernels add over tokens in ascending order and never split that sum among threads.
//
// Memory. Mat, float* and RowStats* are memory of this backend (NewTensor); integer spans are plans in host
// memory. Views must stay valid until the call returns. Rows of a Mat are contiguous; outputs must not overlap
// inputs unless a kernel says "in place".
// Types. Where a kernel takes fp32 or bf16, it computes in fp32 and rounds bf16 outputs to nearest even.
// Shapes that do not fit are programmer errors and abort. Thread-compatible: one call at a time.
// Letters: T rows (tokens), C columns (hidden), H heads, D head size, E experts, V vocabulary.
namespace moerl::tensor {

// Changes whenever any kernel's bits change; part of the numerics fingerprint.
inline constexpr int kKernelRevision = 1;

// A row's softmax denominator, kept for the log-probability and for backward:
// log p_j = (z_j - max) - log_sum.
struct RowStats {
  float max = 0;
  float log_sum = 0;
};

struct GemmOptions {
  bool transposed = false;      // y [M, k] = x [M, n] · W instead of y [M, n] = x [M, k] · Wᵀ
  const float* bias = nullptr;  // [columns of y], added after the sum
  bool add = false;             // y += result, rounded once more after the sum, instead of y = result
};

// How router logits z [E] become the weights of the chosen experts.
enum class RouterKind {
  kSoftmaxTopK,            // p = softmax(z); the top_k largest p as they are                   (OLMoE, Qwen2-MoE)
  kSoftmaxTopKNormalised,  // the same divided by their sum, added in ascending expert id       (norm_topk_prob)
  kTopKSoftmax,            // the top_k largest z, softmax over them in ascending expert id     (Mixtral)
  kSigmoidTopK,            // s = sigmoid(z); the top_k largest s + bias, s as they are         (DeepSeek-V3, GLM-4.5)
  kSigmoidTopKNormalised,  // the same divided by (their sum in ascending expert id + 1e-20)    (norm_topk_prob)
};

struct AdamWOptions {  // Loshchilov & Hutter, 2019
  float lr = 0;
  float beta1 = 0.9f;
  float beta2 = 0.999f;
  float eps = 1e-8f;
  float weight_decay = 0;
  int64_t step = 1;      // from 1, for bias correction
  float grad_scale = 1;  // multiplies the gradient first (clipping)
};

// What the expert outputs of a batch belong to; see Combine.
struct CombinePlan {
  absl::Span<const int32_t> ids;          // [T, top_k] expert ids in any order, -1 for none
  absl::Span<const int32_t> row_of_slot;  // [T, top_k] row of the expert output, ignored where the id is -1
  int top_k = 0;
  int num_experts = 0;
  int wire_block = 0;  // tree nodes that cover at least this many experts are rounded to bf16; 0: none
};

// The ids kept by top-k or top-p sampling, ascending, row after row: row t has ids[begin[t]] .. ids[begin[t+1]-1].
struct KeptIds {
  absl::Span<const int32_t> ids;
  absl::Span<const int64_t> begin;  // [T + 1]
};

class Backend {
 public:
  virtual ~Backend() = default;

  // "cpu", "cuda": what the numerics fingerprint calls it.
  virtual std::string name() const = 0;

  // ---- memory -------------------------------------------------------------------------------------------
  virtual Tensor NewTensor(DType dtype, std::initializer_list<int64_t> shape) = 0;  // contents undefined
  virtual void CopyFromHost(const void* host, int64_t bytes, void* memory) = 0;
  virtual void CopyToHost(const void* memory, int64_t bytes, void* host) = 0;

  // ---- elementwise --------------------------------------------------------------------------------------
  virtual void Zero(Mat y) = 0;
  virtual void Cast(ConstMat x, Mat y) = 0;     // y = x, in y's type
  virtual void Add(ConstMat x, Mat y) = 0;      // y += x; y fp32
  virtual void Scale(float factor, Mat y) = 0;  // y *= factor; y fp32

  // ---- GEMM ---------------------------------------------------------------------------------------------
  // Weights for compute type `dtype`, zero. `with_transposed` also keeps W for input gradients.
  virtual PackedWeight NewPacked(DType dtype, int64_t groups, int64_t n, int64_t k, bool with_transposed) = 0;

  // Writes src [rows, k] (fp32 or bf16, rounded to nearest even where needed) as rows row_begin .. of matrix
  // `group`, in every layout that w has. Several sources may share one weight (q, k, v; gate, up).
  virtual void Pack(ConstMat src, int64_t group, int64_t row_begin, PackedWeight* w) = 0;

  // y = x Wᵀ (or x W, see GemmOptions) with the only group of w. x is [M, k], fp32 or bf16; fp32 rows are rounded to
  // bf16 first when w is bf16. Every output is one chain of fused multiply-adds over k in ascending order from
  // 0 (fp32), or of pairs (2i+1, 2i) with denormals flushed, as AVX-512 VDPBF16PS does (bf16).
  virtual void Gemm(ConstMat x, const PackedWeight& w, const GemmOptions& options, Mat y) = 0;

  // Rows offsets[g] .. offsets[g+1]-1 of x by matrix g; offsets has w.groups + 1 entries from 0 to x.rows.
  virtual void GroupedGemm(ConstMat x, absl::Span<const int64_t> offsets, const PackedWeight& w,
                           const GemmOptions& options, Mat y) = 0;

  // A hint: the forward layout of w will be read whole, after the weights announced before it. Products of several rows
  // wait for arithmetic, not for memory: they fetch what comes meanwhile. It costs bandwidth, so announce a group of
  // experts only where nearly all of them will have rows. Bits do not depend on it. The CPU follows it on one thread.
  virtual void WillRead(const PackedWeight& w) = 0;

  // dw [n, k] += dyᵀ [n, T] · x [T, k], fp32, each element one chain over tokens that starts from dw. Both
  // inputs are used in `compute` precision (rounded first when it is bf16).
  virtual void WeightGrad(ConstMat dy, ConstMat x, DType compute, Mat dw) = 0;

  // The same for every group; dw is [groups * n, k].
  virtual void GroupedWeightGrad(ConstMat dy, ConstMat x, absl::Span<const int64_t> offsets, DType compute, Mat dw) = 0;

  // sum[c] += x[t, c] over t ascending (bias gradients).
  virtual void ColumnSum(ConstMat x, float* sum) = 0;

  // ---- norms and positions ------------------------------------------------------------------------------
  // y[t,:] = gain * (x[t,:] * inv), inv = 1 / sqrt(mean(x[t,:]^2) + eps)           (Zhang & Sennrich, 2019)
  // gain is [C]. x and y are [T, C], or [T, H*C]: then each of the H pieces is normalised alone (QK-norm).
  // inv_rms [T*H] receives inv for backward; may be null. In place allowed.
  virtual void RmsNorm(ConstMat x, absl::Span<const float> gain, float eps, Mat y, float* inv_rms) = 0;

  // dx = gradient (dx += with add_dx; dx fp32 or, without add_dx, bf16; dx may be dy), dgain[c] += over t.
  virtual void RmsNormBackward(ConstMat dy, ConstMat x, absl::Span<const float> gain, const float* inv_rms, bool add_dx,
                               Mat dx, float* dgain) = 0;

  // cos, sin [T, R/2] of positions[t] * inv_freq[i], angle in fp32 as transformers has it, times `scaling`.
  virtual void RopeTable(absl::Span<const int32_t> positions, absl::Span<const float> inv_freq, float scaling, Mat cos,
                         Mat sin) = 0;

  // Rotates the first R of every D columns of x [T, H*D] in halves (i with i + R/2)   (Su et al., 2021);
  // the rest is copied. `inverse` turns back: the backward of the forward. In place allowed.
  virtual void Rope(ConstMat x, int64_t head_dim, ConstMat cos, ConstMat sin, bool inverse, Mat y) = 0;

  // ---- attention ----------------------------------------------------------------------------------------
  // Query head h reads key head h / (Hq / Hkv). Row at position p attends to positions 0..p, in blocks of 64
  // from 0 with a running (max, sum) (Milakov & Gimelshein, 2018); masked keys are skipped, never multiplied by 0.
  // All three forms give the same bits where q and the stored k and v are the same.

  // Writes k, v [T, Hkv*D] (fp32 or bf16) of every chunk into its pages.
  virtual void KvWrite(ConstMat k, ConstMat v, absl::Span<const SequenceChunk> chunks, const KvCache& cache) = 0;

  // out [T, Hq*D] for rows whose keys, their own included, are in the cache. Prefill chunks and decode rows
  // may be mixed.
  virtual void AttentionPaged(ConstMat q, absl::Span<const SequenceChunk> chunks, const KvCache& cache, float scale,
                              Mat out) = 0;

  // Whole sequences packed one after another: sequence s has rows offsets[s] .. offsets[s+1]-1, positions from
  // 0. k and v have the type the cache would have. stats [T*Hq] is for backward; may be null.
  virtual void AttentionPacked(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets, int64_t head_dim,
                               float scale, Mat out, RowStats* stats) = 0;

  // dq [T, Hq*D], dk, dv [T, Hkv*D] (fp32 or bf16) from the saved out and stats (Dao et al., 2022).
  virtual void AttentionPackedBackward(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets,
                                       int64_t head_dim, float scale, ConstMat out, const RowStats* stats,
                                       ConstMat dout, Mat dq, Mat dk, Mat dv) = 0;

  // ---- experts ------------------------------------------------------------------------------------------
  // ids [T, top_k] ascending in each row: the experts with the largest score + bias, ties to the lowest id. The
  // score is p for the softmax kinds, z for kTopKSoftmax, s for the sigmoid kinds. bias [E] may be null (it chooses, it
  // never weighs). logits are fp32.
  virtual void RouterSelect(ConstMat logits, RouterKind kind, int top_k, const float* bias,
                            absl::Span<int32_t> ids) = 0;

  // weights [T, top_k] of given ids (chosen here or replayed from a rollout; -1 gives weight 0), and
  // probs [T, E] when its data is not null: softmax(logits), for the sigmoid kinds s / sum s (the load-balance loss).
  virtual void RouterWeights(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids, Mat weights,
                             Mat probs) = 0;

  // dlogits [T, E] from dweights [T, top_k] and, where its data is not null, dprobs [T, E]. Overwrites.
  virtual void RouterBackward(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids,
                              ConstMat dweights, ConstMat dprobs, Mat dlogits) = 0;

  // y[r,:] = x[row_ids[r],:], in y's type.
  virtual void GatherRows(ConstMat x, absl::Span<const int32_t> row_ids, Mat y) = 0;

  // out[t,:] (fp32) = the sum of weights[t,i] * x[row_of_slot[t,i],:] over a binary tree whose leaves are the
  // expert ids in order and which splits [a, b) at a + ceil((b - a) / 2); an absent expert is skipped. A null
  // `weights.data` weighs by 1: with it this is also the backward of GatherRows by token. A token without
  // experts gets zeros.
  virtual void Combine(ConstMat x, const CombinePlan& plan, ConstMat weights, Mat out) = 0;

  // dx[row,:] = weights[t,i] * dout[t,:], dweights[t,i] = dout[t,:] · x[row,:] (roundings count as identity);
  // either output may have null data.
  virtual void CombineBackward(ConstMat dout, ConstMat x, const CombinePlan& plan, ConstMat weights, Mat dx,
                               Mat dweights) = 0;

  // y [T, F] = silu(g) * u for gate_up [T, 2F] = (g | u)                                     (Shazeer, 2020)
  virtual void SwiGlu(ConstMat gate_up, Mat y) = 0;
  virtual void SwiGluBackward(ConstMat dy, ConstMat gate_up, Mat dgate_up) = 0;

  // y[t,:] = sigmoid(gate[t]) * x[t,:]; gate is [T, 1] fp32 (shared expert of Qwen2-MoE).
  virtual void SigmoidGate(ConstMat x, ConstMat gate, Mat y) = 0;
  virtual void SigmoidGateBackward(ConstMat dy, ConstMat x, ConstMat gate, Mat dx, Mat dgate) = 0;

  // ---- vocabulary ---------------------------------------------------------------------------------------
  // y[t,:] = table[ids[t],:];  dtable[ids[t],:] += dy[t,:] over t ascending, fp32.
  virtual void Embed(ConstMat table, absl::Span<const int32_t> ids, Mat y) = 0;
  virtual void EmbedBackward(ConstMat dy, absl::Span<const int32_t> ids, Mat dtable) = 0;

  // Log-probabilities of targets under softmax(z), z = (h · Wᵀ) / temperature, in vocabulary blocks of 1,024
  // with a running (max, sum) from id 0. Never holds more than a block of logits for 64 rows a thread.
  //   h             [T, C]  final hidden states
  //   head          [V, C]  packed, of one group
  //   targets       [T]     ids below V; with `kept` one of the row's kept ids
  //   temperatures  [T] or empty (1); greedy samples pass 1
  //   kept          null for the whole vocabulary
  //   logprobs      [T], stats [T] (for backward), entropy [T] or null: -sum p log p in nats
  virtual void LogProbs(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                        absl::Span<const float> temperatures, const KeptIds* kept, float* logprobs, RowStats* stats,
                        float* entropy) = 0;

  // dh [T, C] fp32 (overwritten) and dhead [V, C] fp32 += from dlogprobs [T]; head needs its transposed layout.
  virtual void LogProbsBackward(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                                absl::Span<const float> temperatures, const KeptIds* kept, const RowStats* stats,
                                const float* dlogprobs, Mat dh, Mat dhead) = 0;

  // stats [T] of whole rows of logits [T, V] (fp32, before temperature), as LogProbs computes them: the sampler's
  // log p of id j is (logits[j] / temperature - max) - log_sum, to the bit what LogProbs gives.
  virtual void LogitStats(ConstMat logits, absl::Span<const float> temperatures, const KeptIds* kept,
                          RowStats* stats) = 0;

  // ---- optimiser ----------------------------------------------------------------------------------------
  // One AdamW update of `count` fp32 elements; decay is decoupled: master -= lr * weight_decay * master.
  virtual void AdamW(const AdamWOptions& options, const float* grad, int64_t count, float* master, float* m,
                     float* v) = 0;

  // Sum of squares in double, in a fixed order; not finite exactly when an element is not.
  virtual double SumSquares(const float* x, int64_t count) = 0;
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_BACKEND_H_
