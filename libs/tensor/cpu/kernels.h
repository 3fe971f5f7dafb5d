// One instruction set's kernels. The including .cc defines MOERL_ISA (the namespace), includes that path's
// simd_*.h first, and is compiled with its flags.
#include <type_traits>

#include "libs/tensor/cpu/kernel_table.h"
#include "libs/tensor/exp_constants.h"
// In this order: each uses the ones before.
// clang-format off
#include "libs/tensor/cpu/kernels_gemm.h"
#include "libs/tensor/cpu/kernels_pack.h"
#include "libs/tensor/cpu/kernels_rows.h"
#include "libs/tensor/cpu/kernels_attention.h"
#include "libs/tensor/cpu/kernels_experts.h"
#include "libs/tensor/cpu/kernels_vocabulary.h"
#include "libs/tensor/cpu/kernels_limits.h"
// clang-format on

namespace moerl::tensor::MOERL_ISA {

static KernelTable MakeTable(const char* name) {
  KernelTable t{};
  t.name = name;
  t.gemm_f32 = GemmF32;
  t.gemm_bf16 = GemmBf16;
  t.pack_rows = PackRows;
  t.pack_transposed = PackTransposed;
  t.pack_tokens = PackTokens;
  t.cast = Cast;
  t.add = AddRows;
  t.scale = ScaleRows;
  t.column_sum = ColumnSum;
  t.rms_norm = RmsNorm;
  t.rms_norm_backward = RmsNormBackward;
  t.rms_norm_gain_gradient = RmsNormGainGradient;
  t.rope = Rope;
  t.swiglu = SwiGlu;
  t.swiglu_backward = SwiGluBackward;
  t.sigmoid_gate = SigmoidGate;
  t.sigmoid_gate_backward = SigmoidGateBackward;
  t.adamw = AdamW;
  t.exp_shifted = ExpShifted;
  t.sum_squares = SumSquares;
  t.attention = Attention;
  t.kv_write = KvWrite;
  t.attention_backward = AttentionBackward;
  t.router_scores = RouterScores;
  t.router_weights = RouterWeights;
  t.router_backward = RouterBackward;
  t.combine_rows = CombineRows;
  t.dot = Dot;
  t.scaled_row = ScaledRow;
  t.softmax_block = SoftmaxBlock;
  t.softmax_block_backward = SoftmaxBlockBackward;
  t.peak_f32 = PeakF32;
  t.peak_bf16 = PeakBf16;
  t.read_bytes = ReadBytes;
  return t;
}

}  // namespace moerl::tensor::MOERL_ISA
