#ifndef MOERL_LIBS_TENSOR_CPU_BACKEND_IMPL_H_
#define MOERL_LIBS_TENSOR_CPU_BACKEND_IMPL_H_

#include <array>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "libs/tensor/backend.h"
#include "libs/tensor/cpu/coming_weights.h"
#include "libs/tensor/cpu/kernel_table.h"
#include "libs/tensor/threads.h"

// The CPU backend: checks shapes, splits rows, columns or panels among threads, calls one kernel table.
// Implemented by subject in backend_*.cc.
namespace moerl::tensor {

inline constexpr double kHandOffNs = 20'000;  // below this, waking another thread costs more than it saves

class CpuBackend final : public Backend {
 public:
  CpuBackend(const KernelTable& kernels, int num_threads) : k_(kernels), pool_(num_threads) {
    scratch_.resize(kNumSharedSlots + num_threads);
  }

  std::string name() const override { return "cpu"; }

  Tensor NewTensor(DType dtype, std::initializer_list<int64_t> shape) override;
  void CopyFromHost(const void* host, int64_t bytes, void* memory) override;
  void CopyToHost(const void* memory, int64_t bytes, void* host) override;

  void Zero(Mat y) override;
  void Cast(ConstMat x, Mat y) override;
  void Add(ConstMat x, Mat y) override;
  void Scale(float factor, Mat y) override;

  PackedWeight NewPacked(DType dtype, int64_t groups, int64_t n, int64_t k, bool with_transposed) override;
  void Pack(ConstMat src, int64_t group, int64_t row_begin, PackedWeight* w) override;
  void Gemm(ConstMat x, const PackedWeight& w, const GemmOptions& options, Mat y) override;
  void GroupedGemm(ConstMat x, absl::Span<const int64_t> offsets, const PackedWeight& w, const GemmOptions& options,
                   Mat y) override;
  void WillRead(const PackedWeight& w) override;
  void WeightGrad(ConstMat dy, ConstMat x, DType compute, Mat dw) override;
  void GroupedWeightGrad(ConstMat dy, ConstMat x, absl::Span<const int64_t> offsets, DType compute, Mat dw) override;
  void ColumnSum(ConstMat x, float* sum) override;

  void RmsNorm(ConstMat x, absl::Span<const float> gain, float eps, Mat y, float* inv_rms) override;
  void RmsNormBackward(ConstMat dy, ConstMat x, absl::Span<const float> gain, const float* inv_rms, bool add_dx, Mat dx,
                       float* dgain) override;
  void RopeTable(absl::Span<const int32_t> positions, absl::Span<const float> inv_freq, float scaling, Mat cos,
                 Mat sin) override;
  void Rope(ConstMat x, int64_t head_dim, ConstMat cos, ConstMat sin, bool inverse, Mat y) override;

  void KvWrite(ConstMat k, ConstMat v, absl::Span<const SequenceChunk> chunks, const KvCache& cache) override;
  void AttentionPaged(ConstMat q, absl::Span<const SequenceChunk> chunks, const KvCache& cache, float scale,
                      Mat out) override;
  void AttentionPacked(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets, int64_t head_dim,
                       float scale, Mat out, RowStats* stats) override;
  void AttentionPackedBackward(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets, int64_t head_dim,
                               float scale, ConstMat out, const RowStats* stats, ConstMat dout, Mat dq, Mat dk,
                               Mat dv) override;

  void RouterSelect(ConstMat logits, RouterKind kind, int top_k, const float* bias, absl::Span<int32_t> ids) override;
  void RouterWeights(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids, Mat weights,
                     Mat probs) override;
  void RouterBackward(ConstMat logits, RouterKind kind, int top_k, absl::Span<const int32_t> ids, ConstMat dweights,
                      ConstMat dprobs, Mat dlogits) override;
  void GatherRows(ConstMat x, absl::Span<const int32_t> row_ids, Mat y) override;
  void Combine(ConstMat x, const CombinePlan& plan, ConstMat weights, Mat out) override;
  void CombineBackward(ConstMat dout, ConstMat x, const CombinePlan& plan, ConstMat weights, Mat dx,
                       Mat dweights) override;
  void SwiGlu(ConstMat gate_up, Mat y) override;
  void SwiGluBackward(ConstMat dy, ConstMat gate_up, Mat dgate_up) override;
  void SigmoidGate(ConstMat x, ConstMat gate, Mat y) override;
  void SigmoidGateBackward(ConstMat dy, ConstMat x, ConstMat gate, Mat dx, Mat dgate) override;

  void Embed(ConstMat table, absl::Span<const int32_t> ids, Mat y) override;
  void EmbedBackward(ConstMat dy, absl::Span<const int32_t> ids, Mat dtable) override;
  void LogProbs(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                absl::Span<const float> temperatures, const KeptIds* kept, float* logprobs, RowStats* stats,
                float* entropy) override;
  void LogProbsBackward(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                        absl::Span<const float> temperatures, const KeptIds* kept, const RowStats* stats,
                        const float* dlogprobs, Mat dh, Mat dhead) override;
  void LogitStats(ConstMat logits, absl::Span<const float> temperatures, const KeptIds* kept, RowStats* stats) override;

  void AdamW(const AdamWOptions& options, const float* grad, int64_t count, float* master, float* m, float* v) override;
  double SumSquares(const float* x, int64_t count) override;

 private:
  // Runs work(begin, end) over [0, count) in ranges whose ends are multiples of `grain`. `cost` is about the
  // nanoseconds of one item: work too small for a hand-off stays on the calling thread.
  void Split(int64_t count, int64_t grain, double cost, absl::FunctionRef<void(int64_t begin, int64_t end)> work);
  // Runs task(i, thread) for all i, on the calling thread alone when `total_cost` ns are too few.
  void Share(int64_t tasks, double total_cost, absl::FunctionRef<void(int64_t task, int thread)> task);

  // Memory that lives until the next call with the same slot: a thread's number, or one of the shared slots.
  // Contents undefined.
  enum SharedSlot : int { kConvertSlot = -1, kWeightGradSlot = -2, kPagesSlot = -3, kLogitGradientSlot = -4 };
  static constexpr int kNumSharedSlots = 4;
  void* Scratch(int slot, int64_t bytes);

  void RunGemms(DType dtype, absl::Span<const GemmCall> calls);

  // Rows in the type of the weights: themselves, or converted in kConvertSlot.
  ConstMat InComputeType(ConstMat x, DType dtype);

  void Attend(ConstMat q, absl::Span<const SequenceChunk> chunks, const KvCache& cache, float scale, Mat out,
              RowStats* stats);

  const KernelTable& k_;
  ThreadPool pool_;
  std::vector<Tensor> scratch_;
  ComingWeights coming_;
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_BACKEND_IMPL_H_
