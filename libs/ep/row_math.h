#ifndef MOERL_LIBS_EP_ROW_MATH_H_
#define MOERL_LIBS_EP_ROW_MATH_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

// The arithmetic of rows: elementwise, one rounding an operation, the same bits on every processor.
namespace moerl::ep {

// bf16 is the upper half of an fp32. Rounds to nearest, ties to even; a NaN stays a quiet NaN.
inline uint16_t Bf16FromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40u : rounded);
}
inline float FloatFromBf16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

// x, out: [n], not overlapping.
void Scale(const float* x, float weight, int n, float* out);      // out = weight * x
void Scale(const uint16_t* x, float weight, int n, float* out);   // bf16 x
void AddScaled(const float* x, float weight, int n, float* out);  // out = out + (weight * x)
void AddScaled(const uint16_t* x, float weight, int n, float* out);
void Add(const float* x, int n, float* out);  // out = out + x
void RoundToBf16(int n, float* x);            // in place
void ToBf16(const float* x, int n, uint16_t* out);
void FromBf16(const uint16_t* x, int n, float* out);

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_ROW_MATH_H_
