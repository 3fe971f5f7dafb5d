#ifndef MOERL_LIBS_TENSOR_CPU_SIMD_AVX512_H_
#define MOERL_LIBS_TENSOR_CPU_SIMD_AVX512_H_

#include <immintrin.h>

#include "libs/tensor/cpu/lanes.h"

// Sixteen fp32 lanes in one register. See lanes.h for what every path must define.
namespace moerl::tensor::avx512 {

#define MOERL_INLINE static inline __attribute__((always_inline))

inline constexpr int kTileRows = 8;  // 8 rows x 32 columns: 16 accumulators of 32 registers
inline constexpr int kAccumulators = 16;

struct F32x16 {
  __m512 v;
};

MOERL_INLINE __mmask16 FirstLanes(Tail tail) { return static_cast<__mmask16>((1u << tail.count) - 1); }

MOERL_INLINE F32x16 Set1(float x) { return {_mm512_set1_ps(x)}; }
MOERL_INLINE F32x16 Zero() { return {_mm512_setzero_ps()}; }
MOERL_INLINE F32x16 Load(const float* p, Full) { return {_mm512_loadu_ps(p)}; }
MOERL_INLINE F32x16 Load(const float* p, Tail tail) { return {_mm512_maskz_loadu_ps(FirstLanes(tail), p)}; }
MOERL_INLINE void Store(F32x16 a, float* p, Full) { _mm512_storeu_ps(p, a.v); }
MOERL_INLINE void Store(F32x16 a, float* p, Tail tail) { _mm512_mask_storeu_ps(p, FirstLanes(tail), a.v); }

MOERL_INLINE F32x16 Widen(__m256i halves) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16))};
}
MOERL_INLINE F32x16 Load(const Bf16* p, Full) { return Widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
MOERL_INLINE F32x16 Load(const Bf16* p, Tail tail) { return Widen(_mm256_maskz_loadu_epi16(FirstLanes(tail), p)); }

// In integers: the instruction VCVTNEPS2BF16 would flush denormals.
MOERL_INLINE __m256i Narrow(F32x16 a) {
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  const __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_blend_epi32(is_nan, rounded, quiet), 16));
}
MOERL_INLINE void Store(F32x16 a, Bf16* p, Full) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), Narrow(a)); }
MOERL_INLINE void Store(F32x16 a, Bf16* p, Tail tail) { _mm256_mask_storeu_epi16(p, FirstLanes(tail), Narrow(a)); }

MOERL_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm512_add_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm512_div_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 Sqrt(F32x16 a) { return {_mm512_sqrt_ps(a.v)}; }
MOERL_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
MOERL_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm512_max_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm512_min_ps(a.v, b.v)}; }
MOERL_INLINE F32x16 KeepLanes(F32x16 a, int count, float fill) {
  return {_mm512_mask_blend_ps(FirstLanes(Tail{count}), _mm512_set1_ps(fill), a.v)};
}
MOERL_INLINE F32x16 NanOr(F32x16 x, F32x16 otherwise) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q), otherwise.v, x.v)};
}

MOERL_INLINE F32x16 PowerOfTwo(__m512i e) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(e, _mm512_set1_epi32(127)), 23))};
}
MOERL_INLINE void SplitPower(F32x16 shifted, float round, F32x16* low, F32x16* high) {
  const __m512i e = _mm512_sub_epi32(_mm512_castps_si512(shifted.v), _mm512_castps_si512(_mm512_set1_ps(round)));
  const __m512i half = _mm512_srai_epi32(e, 1);
  *low = PowerOfTwo(half);
  *high = PowerOfTwo(_mm512_sub_epi32(e, half));
}

// Lane l + 8 is added to lane l, then l + 4, l + 2, l + 1.
MOERL_INLINE float SumTree(F32x16 a) {
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
MOERL_INLINE float MaxTree(F32x16 a) {
  const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

MOERL_INLINE void StorePairs(F32x16 even, F32x16 odd, Bf16* p) {
  const __m512i low = _mm512_cvtepu16_epi32(Narrow(even));
  const __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32(Narrow(odd)), 16);
  _mm512_storeu_si512(p, _mm512_or_si512(low, high));
}

// Four rounds of swapping halves: words, pairs, fours and eights.
MOERL_INLINE void TransposeWords(F32x16 (&rows)[16]) {
  __m512 a[16], b[16];
  for (int i = 0; i < 16; i += 2) {
    a[i] = _mm512_unpacklo_ps(rows[i].v, rows[i + 1].v);
    a[i + 1] = _mm512_unpackhi_ps(rows[i].v, rows[i + 1].v);
  }
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  // b[4 q + c] holds, in its 128-bit part p, column 4 p + c of rows 4 q .. 4 q + 3.
  for (int c = 0; c < 4; ++c) {
    a[c] = _mm512_shuffle_f32x4(b[c], b[4 + c], 0x88);
    a[4 + c] = _mm512_shuffle_f32x4(b[c], b[4 + c], 0xdd);
    a[8 + c] = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0x88);
    a[12 + c] = _mm512_shuffle_f32x4(b[8 + c], b[12 + c], 0xdd);
  }
  for (int c = 0; c < 4; ++c) {
    rows[c].v = _mm512_shuffle_f32x4(a[c], a[8 + c], 0x88);
    rows[8 + c].v = _mm512_shuffle_f32x4(a[c], a[8 + c], 0xdd);
    rows[4 + c].v = _mm512_shuffle_f32x4(a[4 + c], a[12 + c], 0x88);
    rows[12 + c].v = _mm512_shuffle_f32x4(a[4 + c], a[12 + c], 0xdd);
  }
}

// Sixteen pairs of bf16.
struct Pairs {
  __m512i v;
};
MOERL_INLINE Pairs LoadPairs(const Bf16* p) { return {_mm512_loadu_si512(p)}; }
MOERL_INLINE Pairs Set1Pair(const Bf16* p) {
  int pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return {_mm512_set1_epi32(pair)};
}
MOERL_INLINE F32x16 DotPairs(F32x16 acc, Pairs x, Pairs w) {
  return {_mm512_dpbf16_ps(acc.v, reinterpret_cast<__m512bh>(x.v), reinterpret_cast<__m512bh>(w.v))};
}

// VDPBF16PS flushes denormals whatever MXCSR says.
inline constexpr bool kPairsFlushThemselves = true;
struct FlushDenormals {};

}  // namespace moerl::tensor::avx512

#endif  // MOERL_LIBS_TENSOR_CPU_SIMD_AVX512_H_
