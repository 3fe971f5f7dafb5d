#ifndef MOERL_LIBS_TENSOR_CPU_KERNEL_TABLE_H_
#define MOERL_LIBS_TENSOR_CPU_KERNEL_TABLE_H_

#include <cstdint>

#include "libs/tensor/backend.h"
#include "libs/tensor/cpu/combine_program.h"

// What one instruction set provides: single-threaded kernels on ranges of rows, columns or panels. The backend
// checks shapes and splits work; a kernel's bits never depend on how it was split.
namespace moerl::tensor {

// Packed weights are panels of this many outputs: [k][32] for fp32, [ceil(k/2)][32][2] for bf16, zero-padded.
inline constexpr int64_t kPanel = 32;
inline constexpr int64_t kLaneColumns = 16;        // column ranges start at multiples of this
inline constexpr int64_t kVocabularyBlock = 1024;  // multiple of kPanel
inline constexpr int64_t kMaxHeadDim = 512;
inline constexpr int kMaxExperts = 4096;

enum class Finish {
  kStore,  // y = sum (+ bias)
  kAdd,    // y = y + (sum (+ bias))
  kChain,  // the chain of multiply-adds starts from y; fp32 y, no bias
};

constexpr int64_t DepthStep(DType dtype) { return dtype == DType::kBf16 ? 2 : 1; }

// The bytes of a weight of later calls that may be fetched now: [next, end), of at least one of the call's panels.
// Addresses are only asked for, never read.
struct LaterWeight {
  const char *next, *end;
};

// y [m, n] from x [m, k] and packed w, n columns from the first panel on.
struct GemmCall {
  const void* x = nullptr;  // the type of w
  int64_t x_stride = 0;     // elements from one row to the next
  int64_t x_step = 0;       // elements from one k (fp32) or pair of k (bf16) to the next; DepthStep for plain rows
  const void* w = nullptr;
  int64_t panel_stride = 0;      // elements from one panel to the next
  const void* next_w = nullptr;  // the weight of the call that comes after, fetched during the last panels; null: none
  LaterWeight* later = nullptr;  // fetched meanwhile by products of many rows; null: none
  int64_t m = 0, n = 0, k = 0;
  void* y = nullptr;
  int64_t y_stride = 0;
  DType y_dtype = DType::kF32;
  const float* bias = nullptr;
  Finish finish = Finish::kStore;
};

struct AttentionCall {
  const ConstMat* q = nullptr;
  const KvCache* cache = nullptr;
  int64_t q_heads = 0;
  float scale = 1;
  const Mat* out = nullptr;
  RowStats* stats = nullptr;
};

struct AttentionBackwardCall {
  const ConstMat *q = nullptr, *k = nullptr, *v = nullptr, *out = nullptr, *dout = nullptr;
  const RowStats* stats = nullptr;
  int64_t q_heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  const Mat *dq = nullptr, *dk = nullptr, *dv = nullptr;
};

// The running state of a row's softmax over the vocabulary.
struct SoftmaxState {
  float max;
  float sum;       // of e^(z - max)
  float weighted;  // of e^(z - max) (z - max), for the entropy
};

struct KernelTable {
  const char* name;

  // gemm.h
  void (*gemm_f32)(const GemmCall& call);
  void (*gemm_bf16)(const GemmCall& call);
  // Rows [row_begin, row_begin + src.rows) of a weight into its forward panels; `panels` is the weight's group.
  void (*pack_rows)(const ConstMat& src, int64_t row_begin, DType dtype, void* panels);
  // The same rows into the panels of the transpose, whose k is `n` (all rows of the weight).
  void (*pack_transposed)(const ConstMat& src, int64_t row_begin, int64_t n, DType dtype, void* panels);
  // At most kPanel columns of x [tokens, columns] as one panel whose depth is the tokens, padded with zeros.
  void (*pack_tokens)(const ConstMat& x, DType dtype, void* panel);

  // rows.h
  void (*cast)(const ConstMat& x, const Mat& y, int64_t begin, int64_t end);
  void (*add)(const ConstMat& x, const Mat& y, int64_t begin, int64_t end);
  void (*scale)(float factor, const Mat& y, int64_t begin, int64_t end);
  void (*column_sum)(const ConstMat& x, float* sum, int64_t col_begin, int64_t col_end);
  void (*rms_norm)(const ConstMat& x, const float* gain, int64_t width, float eps, const Mat& y, float* inv_rms,
                   int64_t begin, int64_t end);
  void (*rms_norm_backward)(const ConstMat& dy, const ConstMat& x, const float* gain, int64_t width,
                            const float* inv_rms, bool add, const Mat& dx, int64_t begin, int64_t end);
  void (*rms_norm_gain_gradient)(const ConstMat& dy, const ConstMat& x, int64_t width, const float* inv_rms,
                                 float* dgain, int64_t col_begin, int64_t col_end);
  void (*rope)(const ConstMat& x, int64_t head_dim, const ConstMat& cos, const ConstMat& sin, bool inverse,
               const Mat& y, int64_t begin, int64_t end);
  void (*swiglu)(const ConstMat& gate_up, const Mat& y, int64_t begin, int64_t end);
  void (*swiglu_backward)(const ConstMat& dy, const ConstMat& gate_up, const Mat& dgate_up, int64_t begin, int64_t end);
  void (*sigmoid_gate)(const ConstMat& x, const ConstMat& gate, const Mat& y, int64_t begin, int64_t end);
  void (*sigmoid_gate_backward)(const ConstMat& dy, const ConstMat& x, const ConstMat& gate, const Mat& dx,
                                const Mat& dgate, int64_t begin, int64_t end);
  void (*adamw)(const AdamWOptions& options, const float* grad, float* master, float* m, float* v, int64_t begin,
                int64_t end);
  void (*exp_shifted)(const float* x, int64_t count, float shift, float* y);
  double (*sum_squares)(const float* x, int64_t count);

  // attention.h
  // Query rows of one chunk and key head; combinations (row, head of the group) [begin, end), row-major.
  void (*attention)(const AttentionCall& call, const SequenceChunk& chunk, int64_t kv_head, int64_t begin, int64_t end);
  void (*kv_write)(const ConstMat& k, const ConstMat& v, const SequenceChunk& chunk, const KvCache& cache,
                   int64_t kv_head);
  // One sequence (rows [begin, end)) and key head; scratch of AttentionBackwardScratch() floats.
  void (*attention_backward)(const AttentionBackwardCall& call, int64_t begin, int64_t end, int64_t kv_head,
                             float* scratch);

  // experts.h
  void (*router_scores)(const float* logits, int64_t experts, RouterKind kind, float* scores);
  void (*router_weights)(const float* logits, int64_t experts, RouterKind kind, const int32_t* ids, int top_k,
                         float* weights, float* probs);
  void (*router_backward)(const float* logits, int64_t experts, RouterKind kind, const int32_t* ids, int top_k,
                          const float* dweights, const float* dprobs, float* dlogits);
  // Leaf i of the program is weights[i] * rows[i].
  void (*combine_rows)(const CombineProgram& program, const void* const* rows, const float* weights, DType dtype,
                       int64_t cols, float* out);
  float (*dot)(const void* x, DType x_dtype, const void* y, DType y_dtype, int64_t cols);
  void (*scaled_row)(float factor, const void* x, DType x_dtype, void* y, DType y_dtype, int64_t cols);

  // vocabulary.h
  // z = logits / temperature in place, then the state over these n <= kVocabularyBlock columns as well.
  void (*softmax_block)(float* logits, int64_t n, float temperature, bool entropy, SoftmaxState* state);
  // dz[j] = -factor * p_j for z = logits / temperature (the target's + factor is the caller's), in dz's type.
  void (*softmax_block_backward)(const float* logits, int64_t n, float temperature, const RowStats& stats, float factor,
                                 float* dz);

  // limits.h: multiply-adds done in registers; a checksum of bytes read.
  double (*peak_f32)(int64_t steps);
  double (*peak_bf16)(int64_t steps);
  uint64_t (*read_bytes)(const void* data, int64_t bytes);
};

// Floats of scratch that attention_backward needs for a sequence of `rows`.
constexpr int64_t AttentionBackwardScratch(int64_t rows, int64_t group, int64_t head_dim) {
  const int64_t padded = (rows + kPageTokens - 1) / kPageTokens * kPageTokens;
  return padded * head_dim * (3 * group + 5) + padded * group + 2 * kPageTokens * kPageTokens;
}

// The best of this processor.
const KernelTable& BestKernels();

const KernelTable& PortableKernels();
#if defined(MOERL_HAVE_X86_KERNELS)
const KernelTable& Avx2Kernels();
const KernelTable& Avx512Kernels();
#endif

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_KERNEL_TABLE_H_
