#ifndef MOERL_LIBS_TENSOR_CPU_SIMD_PORTABLE_H_
#define MOERL_LIBS_TENSOR_CPU_SIMD_PORTABLE_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "libs/tensor/cpu/lanes.h"

// The definition of the sixteen lanes, in plain C++: the other paths give the same bits.
namespace moerl::tensor::portable {

// Left to the compiler here: forced, sixteen lanes in a loop everywhere take it minutes.
#define MOERL_INLINE static inline

// A register tile is at most kTileRows rows by 32 columns, and at most kAccumulators F32x16.
inline constexpr int kTileRows = 1;  // small tiles: this path is for checking, not for speed
inline constexpr int kAccumulators = 2;

struct F32x16 {
  float v[16];
};

template <typename F>
MOERL_INLINE F32x16 Each(F f) {
  F32x16 r;
#pragma GCC unroll 1
  for (int l = 0; l < 16; ++l) r.v[l] = f(l);
  return r;
}
MOERL_INLINE uint32_t Bits(float x) { return __builtin_bit_cast(uint32_t, x); }
MOERL_INLINE float FromBits(uint32_t bits) { return __builtin_bit_cast(float, bits); }
MOERL_INLINE float Widen1(Bf16 x) { return FromBits(static_cast<uint32_t>(x.bits) << 16); }
MOERL_INLINE Bf16 Narrow1(float x) {  // to nearest, ties to even
  const uint32_t bits = Bits(x);
  const uint32_t rounded = x != x ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  return Bf16{static_cast<uint16_t>(rounded >> 16)};
}

MOERL_INLINE F32x16 Set1(float x) {
  return Each([&](int) { return x; });
}
MOERL_INLINE F32x16 Zero() { return Set1(0.0f); }
template <typename Lanes>
MOERL_INLINE F32x16 Load(const float* p, Lanes lanes) {
  return Each([&](int l) { return l < lanes.count ? p[l] : 0.0f; });
}
template <typename Lanes>
MOERL_INLINE F32x16 Load(const Bf16* p, Lanes lanes) {
  return Each([&](int l) { return l < lanes.count ? Widen1(p[l]) : 0.0f; });
}
template <typename Lanes>
MOERL_INLINE void Store(F32x16 a, float* p, Lanes lanes) {
  for (int l = 0; l < lanes.count; ++l) p[l] = a.v[l];
}
template <typename Lanes>
MOERL_INLINE void Store(F32x16 a, Bf16* p, Lanes lanes) {
  for (int l = 0; l < lanes.count; ++l) p[l] = Narrow1(a.v[l]);
}

MOERL_INLINE F32x16 Add(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] + b.v[l]; });
}
MOERL_INLINE F32x16 Sub(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] - b.v[l]; });
}
MOERL_INLINE F32x16 Mul(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] * b.v[l]; });
}
MOERL_INLINE F32x16 Div(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] / b.v[l]; });
}
MOERL_INLINE F32x16 Sqrt(F32x16 a) {
  return Each([&](int l) { return __builtin_sqrtf(a.v[l]); });
}
// a * b + c, rounded once.
MOERL_INLINE F32x16 Fma(F32x16 a, F32x16 b, F32x16 c) {
  return Each([&](int l) { return __builtin_fmaf(a.v[l], b.v[l], c.v[l]); });
}
// The second operand where either is NaN or both are zero.
MOERL_INLINE F32x16 Max(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] > b.v[l] ? a.v[l] : b.v[l]; });
}
MOERL_INLINE F32x16 Min(F32x16 a, F32x16 b) {
  return Each([&](int l) { return a.v[l] < b.v[l] ? a.v[l] : b.v[l]; });
}
// The first `count` lanes of a (0 .. 16), `fill` in the others.
MOERL_INLINE F32x16 KeepLanes(F32x16 a, int count, float fill) {
  return Each([&](int l) { return l < count ? a.v[l] : fill; });
}
// x where it is NaN, else `otherwise`.
MOERL_INLINE F32x16 NanOr(F32x16 x, F32x16 otherwise) {
  return Each([&](int l) { return x.v[l] != x.v[l] ? x.v[l] : otherwise.v[l]; });
}
// For shifted = round + n with |n| < 256: low = 2^floor(n/2), high = 2^(n - floor(n/2)).
MOERL_INLINE void SplitPower(F32x16 shifted, float round, F32x16* low, F32x16* high) {
  for (int l = 0; l < 16; ++l) {
    const int32_t e = static_cast<int32_t>(Bits(shifted.v[l]) - Bits(round));
    const int32_t half = e >> 1;
    low->v[l] = FromBits(static_cast<uint32_t>(half + 127) << 23);
    high->v[l] = FromBits(static_cast<uint32_t>(e - half + 127) << 23);
  }
}
// Lane l + 8 is added to lane l, then l + 4, l + 2, l + 1.
MOERL_INLINE float SumTree(F32x16 a) {
  for (int step = 8; step >= 1; step /= 2) {
    for (int l = 0; l < step; ++l) a.v[l] = a.v[l] + a.v[l + step];
  }
  return a.v[0];
}
MOERL_INLINE float MaxTree(F32x16 a) {
  for (int step = 8; step >= 1; step /= 2) {
    for (int l = 0; l < step; ++l) a.v[l] = a.v[l] > a.v[l + step] ? a.v[l] : a.v[l + step];
  }
  return a.v[0];
}

// The bf16 pairs (even[l], odd[l]), rounded.
MOERL_INLINE void StorePairs(F32x16 even, F32x16 odd, Bf16* p) {
  for (int l = 0; l < 16; ++l) {
    p[2 * l] = Narrow1(even.v[l]);
    p[2 * l + 1] = Narrow1(odd.v[l]);
  }
}
// 16 x 16 words, moved without looking at their values.
MOERL_INLINE void TransposeWords(F32x16 (&rows)[16]) {
  for (int r = 0; r < 16; ++r) {
    for (int l = 0; l < r; ++l) {
      const uint32_t word = Bits(rows[r].v[l]);
      rows[r].v[l] = FromBits(Bits(rows[l].v[r]));
      rows[l].v[r] = FromBits(word);
    }
  }
}

// Sixteen pairs of bf16. DotPairs: acc + x_odd w_odd, then + x_even w_even, each one fused multiply-add with
// denormal inputs and results flushed to zero, as VDPBF16PS computes; needs a FlushDenormals in scope.
struct Pairs {
  F32x16 even, odd;
};
MOERL_INLINE Pairs LoadPairs(const Bf16* p) {
  return {Each([&](int l) { return Widen1(p[2 * l]); }), Each([&](int l) { return Widen1(p[2 * l + 1]); })};
}
MOERL_INLINE Pairs Set1Pair(const Bf16* p) { return {Set1(Widen1(p[0])), Set1(Widen1(p[1]))}; }
MOERL_INLINE F32x16 DotPairs(F32x16 acc, Pairs x, Pairs w) { return Fma(x.even, w.even, Fma(x.odd, w.odd, acc)); }

inline constexpr bool kPairsFlushThemselves = false;

// Sets the processor to flush denormals while in scope: around the chains of a bf16 tile, never in fp32 code.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }  // FTZ | DAZ
  ~FlushDenormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushDenormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(saved_ | (uint64_t{1} << 24)));  // FZ
  }
  ~FlushDenormals() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
#error "moerl: no way known to flush denormals on this processor; add it to simd_portable.h"
#endif
};

}  // namespace moerl::tensor::portable

#endif  // MOERL_LIBS_TENSOR_CPU_SIMD_PORTABLE_H_
