// What this processor can do at most, for benchmarks. Included once by each instruction set.
namespace moerl::tensor::MOERL_ISA {

// 16 independent chains of multiply-adds on registers; returns how many were done.
static double PeakF32(int64_t steps) {
  F32x16 acc[kAccumulators];
  float sum = 0;
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) acc[a] = Set1(static_cast<float>(a));
  const F32x16 x = Set1(0.999f), w = Set1(1e-3f);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int a = 0; a < kAccumulators; ++a) acc[a] = Fma(acc[a], x, w);
  }
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) sum += SumTree(acc[a]);
  asm volatile("" : : "m"(sum));  // the sum is used
  return static_cast<double>(steps) * kAccumulators * kLanes;
}

static double PeakBf16(int64_t steps) {
  F32x16 acc[kAccumulators];
  float sum = 0;
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) acc[a] = Set1(static_cast<float>(a));
  alignas(64) Bf16 ones[2 * kLanes];
  for (Bf16& one : ones) one.bits = 0x3f80;
  const Pairs x = LoadPairs(ones), w = Set1Pair(ones);
  for (int64_t i = 0; i < steps; ++i) {
#pragma GCC unroll 16
    for (int a = 0; a < kAccumulators; ++a) acc[a] = DotPairs(acc[a], x, w);
  }
#pragma GCC unroll 16
  for (int a = 0; a < kAccumulators; ++a) sum += SumTree(acc[a]);
  asm volatile("" : : "m"(sum));  // the sum is used
  return static_cast<double>(steps) * kAccumulators * kLanes * 2;
}

// Reads every byte (a multiple of 256) in four streams, as fast as memory gives them.
static uint64_t ReadBytes(const void* data, int64_t bytes) {
  const int64_t part = bytes / 4 / 64 * 16;  // floats of a stream
  const float* p = static_cast<const float*>(data);
  F32x16 acc[4] = {Zero(), Zero(), Zero(), Zero()};
  for (int64_t i = 0; i + kLanes <= part; i += kLanes) {
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) acc[s] = Max(acc[s], Load(p + s * part + i, Full{}));
  }
  float max = 0;
  for (const F32x16& a : acc) max += MaxTree(a);
  return __builtin_bit_cast(uint32_t, max);
}

}  // namespace moerl::tensor::MOERL_ISA
