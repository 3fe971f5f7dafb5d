#include "libs/ep/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "libs/ep/row_kernel.h"

namespace moerl::ep {

namespace {

// Bits of floats, as signed numbers: without their sign they are ordered like the floats, and vectors compare them.
constexpr int32_t kMagnitude = 0x7fffffff;
constexpr int32_t kInfinity = 0x7f800000;
constexpr int32_t kMinNormalBits = 0x3c800000;  // of 2^-6

inline int32_t BitsOf(float value) {
  int32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

inline float FloatOf(int32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Without branches, so that loops over it are vectors. Too large a value becomes the largest code, 0x7e.
inline uint8_t Encode(float value) {
  const int32_t bits = BitsOf(value);
  const int32_t raw = bits & kMagnitude;
  // Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves those bits, rounded to even.
  const int32_t small = BitsOf(FloatOf(raw) + 0x1p14f) & 0xf;
  // Otherwise 3 of 23 mantissa bits are kept.
  const int32_t large = ((raw + 0x7ffff + (raw >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  const int32_t is_small = -(raw < kMinNormalBits), is_nan = -(raw > kInfinity);
  const int32_t magnitude = (small & is_small) | (std::min(large, 0x7e) & ~is_small);
  return static_cast<uint8_t>((0x7f & is_nan) | ((magnitude | (bits >> 24 & 0x80)) & ~is_nan));
}

MOERL_ROW_KERNEL void QuantizeBlock(const float* __restrict x, int n, uint8_t* __restrict codes, float* scale) {
  int32_t largest_bits = 0;
  for (int i = 0; i < n; ++i) {
    const int32_t raw = BitsOf(x[i]) & kMagnitude;
    const int32_t counted = raw > kInfinity ? 0 : raw;  // a NaN does not choose the scale
    largest_bits = largest_bits > counted ? largest_bits : counted;
  }
  const float largest = FloatOf(largest_bits);
  *scale = largest > 0 ? largest / kFp8Max : 1.0f;
  const float inverse = 1.0f / *scale;
  for (int i = 0; i < n; ++i) codes[i] = Encode(x[i] * inverse);
}

}  // namespace

uint8_t Fp8FromFloat(float value) { return Encode(value); }

float FloatFromFp8(uint8_t code) {
  static const std::array<float, 256> table = [] {
    std::array<float, 256> values;
    for (int i = 0; i < 256; ++i) {
      const int exponent = i >> 3 & 15, mantissa = i & 7;
      float value = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                  : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
      if ((i & 0x7f) == 0x7f) value = NAN;
      values[i] = (i & 0x80) != 0 ? -value : value;
    }
    return values;
  }();
  return table[code];
}

void QuantizeFp8(absl::Span<const float> x, std::byte* row) {
  const int hidden = static_cast<int>(x.size());
  for (int begin = 0; begin < hidden; begin += kFp8Block) {
    float scale;
    QuantizeBlock(x.data() + begin, std::min(kFp8Block, hidden - begin), reinterpret_cast<uint8_t*>(row) + begin,
                  &scale);
    std::memcpy(row + hidden + begin / kFp8Block * sizeof(float), &scale, sizeof(scale));
  }
}

void DequantizeFp8(const std::byte* row, absl::Span<float> x) {
  const size_t hidden = x.size();
  for (size_t i = 0; i < hidden; ++i) {
    float scale;
    std::memcpy(&scale, row + hidden + i / kFp8Block * sizeof(float), sizeof(scale));
    x[i] = FloatFromFp8(std::to_integer<uint8_t>(row[i])) * scale;
  }
}

}  // namespace moerl::ep
