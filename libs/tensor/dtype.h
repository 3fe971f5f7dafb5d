#ifndef MOERL_LIBS_TENSOR_DTYPE_H_
#define MOERL_LIBS_TENSOR_DTYPE_H_

#include <cstdint>
#include <cstring>

// Element types. bf16 is the upper half of an IEEE binary32; it is only stored, never computed with.
namespace moerl::tensor {

enum class DType : uint8_t { kF32, kBf16 };

constexpr int64_t SizeOf(DType dtype) { return dtype == DType::kF32 ? 4 : 2; }
constexpr const char* Name(DType dtype) { return dtype == DType::kF32 ? "fp32" : "bf16"; }

struct Bf16 {
  uint16_t bits;
};

inline float ToFloat(float value) { return value; }
inline float ToFloat(Bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof(result));
  return result;
}

// Rounds to nearest, ties to even; denormals are kept, a NaN stays a (quiet) NaN.
inline Bf16 ToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return Bf16{static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return Bf16{static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

inline float RoundToBf16(float value) { return ToFloat(ToBf16(value)); }

template <typename T>
inline constexpr DType kDTypeOf = DType::kF32;
template <>
inline constexpr DType kDTypeOf<Bf16> = DType::kBf16;

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_DTYPE_H_
