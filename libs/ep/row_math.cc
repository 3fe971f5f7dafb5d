#include "libs/ep/row_math.h"

#include "libs/ep/row_kernel.h"

namespace moerl::ep {

MOERL_ROW_KERNEL void Scale(const float* __restrict x, float weight, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = weight * x[i];
}

MOERL_ROW_KERNEL void Scale(const uint16_t* __restrict x, float weight, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = weight * FloatFromBf16(x[i]);
}

MOERL_ROW_KERNEL void AddScaled(const float* __restrict x, float weight, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = out[i] + weight * x[i];
}

MOERL_ROW_KERNEL void AddScaled(const uint16_t* __restrict x, float weight, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = out[i] + weight * FloatFromBf16(x[i]);
}

MOERL_ROW_KERNEL void Add(const float* __restrict x, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = out[i] + x[i];
}

MOERL_ROW_KERNEL void RoundToBf16(int n, float* __restrict x) {
  for (int i = 0; i < n; ++i) x[i] = FloatFromBf16(Bf16FromFloat(x[i]));
}

MOERL_ROW_KERNEL void ToBf16(const float* __restrict x, int n, uint16_t* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = Bf16FromFloat(x[i]);
}

MOERL_ROW_KERNEL void FromBf16(const uint16_t* __restrict x, int n, float* __restrict out) {
  for (int i = 0; i < n; ++i) out[i] = FloatFromBf16(x[i]);
}

}  // namespace moerl::ep
