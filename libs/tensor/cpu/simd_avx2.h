#ifndef MOERL_LIBS_TENSOR_CPU_SIMD_AVX2_H_
#define MOERL_LIBS_TENSOR_CPU_SIMD_AVX2_H_

#include <immintrin.h>

#include "libs/tensor/cpu/lanes.h"

// Sixteen fp32 lanes in two registers. See lanes.h for what every path must define.
namespace moerl::tensor::avx2 {

#define MOERL_INLINE static inline __attribute__((always_inline))

inline constexpr int kTileRows = 3;  // 3 rows x 32 columns: 12 accumulators of 16 registers
inline constexpr int kAccumulators = 6;

struct F32x16 {
  __m256 lo, hi;
};

MOERL_INLINE F32x16 Set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
MOERL_INLINE F32x16 Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }

MOERL_INLINE __m256i MaskOf(int count, int first_lane) {
  const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(count - first_lane), lane);
}
MOERL_INLINE F32x16 Load(const float* p, Full) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
MOERL_INLINE F32x16 Load(const float* p, Tail tail) {
  return {_mm256_maskload_ps(p, MaskOf(tail.count, 0)), _mm256_maskload_ps(p + 8, MaskOf(tail.count, 8))};
}
MOERL_INLINE void Store(F32x16 a, float* p, Full) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
MOERL_INLINE void Store(F32x16 a, float* p, Tail tail) {
  _mm256_maskstore_ps(p, MaskOf(tail.count, 0), a.lo);
  _mm256_maskstore_ps(p + 8, MaskOf(tail.count, 8), a.hi);
}

MOERL_INLINE __m256 Widen8(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
MOERL_INLINE F32x16 Load(const Bf16* p, Full) {
  return {Widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          Widen8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
MOERL_INLINE F32x16 Load(const Bf16* p, Tail tail) {
  Bf16 all[16] = {};
  __builtin_memcpy(all, p, sizeof(Bf16) * static_cast<unsigned>(tail.count));
  return Load(all, Full{});
}

MOERL_INLINE __m128i Narrow8(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  const __m256i upper = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
}
MOERL_INLINE void Store(F32x16 a, Bf16* p, Full) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), Narrow8(a.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), Narrow8(a.hi));
}
MOERL_INLINE void Store(F32x16 a, Bf16* p, Tail tail) {
  Bf16 all[16];
  Store(a, all, Full{});
  __builtin_memcpy(p, all, sizeof(Bf16) * static_cast<unsigned>(tail.count));
}

MOERL_INLINE F32x16 Add(F32x16 a, F32x16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 Sub(F32x16 a, F32x16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 Mul(F32x16 a, F32x16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 Div(F32x16 a, F32x16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 Sqrt(F32x16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
MOERL_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
MOERL_INLINE F32x16 Max(F32x16 a, F32x16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 Min(F32x16 a, F32x16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
MOERL_INLINE F32x16 KeepLanes(F32x16 a, int count, float fill) {
  const __m256 f = _mm256_set1_ps(fill);
  return {_mm256_blendv_ps(f, a.lo, _mm256_castsi256_ps(MaskOf(count, 0))),
          _mm256_blendv_ps(f, a.hi, _mm256_castsi256_ps(MaskOf(count, 8)))};
}
MOERL_INLINE F32x16 NanOr(F32x16 x, F32x16 otherwise) {
  return {_mm256_blendv_ps(otherwise.lo, x.lo, _mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q)),
          _mm256_blendv_ps(otherwise.hi, x.hi, _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q))};
}

MOERL_INLINE __m256 PowerOfTwo(__m256i e) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(e, _mm256_set1_epi32(127)), 23));
}
MOERL_INLINE void SplitPower8(__m256 shifted, float round, __m256* low, __m256* high) {
  const __m256i e = _mm256_sub_epi32(_mm256_castps_si256(shifted), _mm256_castps_si256(_mm256_set1_ps(round)));
  const __m256i half = _mm256_srai_epi32(e, 1);
  *low = PowerOfTwo(half);
  *high = PowerOfTwo(_mm256_sub_epi32(e, half));
}
MOERL_INLINE void SplitPower(F32x16 shifted, float round, F32x16* low, F32x16* high) {
  SplitPower8(shifted.lo, round, &low->lo, &high->lo);
  SplitPower8(shifted.hi, round, &low->hi, &high->hi);
}

// Lane l + 8 is added to lane l, then l + 4, l + 2, l + 1.
MOERL_INLINE float SumTree(F32x16 a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
MOERL_INLINE float MaxTree(F32x16 a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

MOERL_INLINE void StorePairs8(__m256 even, __m256 odd, Bf16* p) {
  const __m256i high = _mm256_slli_epi32(_mm256_cvtepu16_epi32(Narrow8(odd)), 16);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_or_si256(_mm256_cvtepu16_epi32(Narrow8(even)), high));
}
MOERL_INLINE void StorePairs(F32x16 even, F32x16 odd, Bf16* p) {
  StorePairs8(even.lo, odd.lo, p);
  StorePairs8(even.hi, odd.hi, p + 16);
}

MOERL_INLINE void Transpose8(__m256 (&r)[8]) {
  __m256 a[8], b[8];
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
  for (int c = 0; c < 4; ++c) {
    r[c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
    r[4 + c] = _mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
  }
}
MOERL_INLINE void TransposeWords(F32x16 (&rows)[16]) {
  __m256 quarter[2][2][8];  // [row half][column half]
  for (int i = 0; i < 16; ++i) {
    quarter[i / 8][0][i % 8] = rows[i].lo;
    quarter[i / 8][1][i % 8] = rows[i].hi;
  }
  for (auto& half : quarter) {
    for (auto& eight : half) Transpose8(eight);
  }
  for (int i = 0; i < 16; ++i) rows[i] = {quarter[0][i / 8][i % 8], quarter[1][i / 8][i % 8]};
}

// Sixteen pairs of bf16, kept packed: the even element is the lower half of 32 bits.
struct Pairs {
  __m256i lo, hi;
};
MOERL_INLINE Pairs LoadPairs(const Bf16* p) {
  const __m256i* q = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
MOERL_INLINE Pairs Set1Pair(const Bf16* p) {
  int pair;
  __builtin_memcpy(&pair, p, sizeof(pair));
  return {_mm256_set1_epi32(pair), _mm256_set1_epi32(pair)};
}
MOERL_INLINE __m256 Even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
MOERL_INLINE __m256 Odd(__m256i pairs) {
  return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
MOERL_INLINE __m256 DotPairs8(__m256 acc, __m256i x, __m256i w) {
  return _mm256_fmadd_ps(Even(x), Even(w), _mm256_fmadd_ps(Odd(x), Odd(w), acc));
}
MOERL_INLINE F32x16 DotPairs(F32x16 acc, Pairs x, Pairs w) {
  return {DotPairs8(acc.lo, x.lo, w.lo), DotPairs8(acc.hi, x.hi, w.hi)};
}

inline constexpr bool kPairsFlushThemselves = false;

class FlushDenormals {
 public:
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ | DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
};

}  // namespace moerl::tensor::avx2

#endif  // MOERL_LIBS_TENSOR_CPU_SIMD_AVX2_H_
