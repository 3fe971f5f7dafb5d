#include "libs/ep/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

namespace moerl::ep {

uint8_t Fp8FromFloat(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return 0x7f;
  if (magnitude >= kFp8Max) return sign | 0x7e;
  if (magnitude < 0x1p-6f) {  // subnormal: multiples of 2^-9; adding 2^14 leaves those bits, rounded to even
    const float shifted = magnitude + 0x1p14f;
    uint32_t raw;
    std::memcpy(&raw, &shifted, sizeof(raw));
    return sign | static_cast<uint8_t>(raw & 0xf);
  }
  uint32_t raw = bits & 0x7fffffff;
  raw += 0x7ffff + (raw >> 20 & 1);  // keep 3 of 23 mantissa bits
  const uint32_t code = (raw >> 20) - ((127 - 7) << 3);
  return sign | static_cast<uint8_t>(std::min<uint32_t>(code, 0x7e));
}

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
  const size_t hidden = x.size();
  std::byte* scales = row + hidden;
  for (size_t begin = 0; begin < hidden; begin += kFp8Block) {
    const size_t end = std::min(hidden, begin + kFp8Block);
    float largest = 0;
    for (size_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
    const float scale = largest > 0 ? largest / kFp8Max : 1.0f;
    const float inverse = 1.0f / scale;
    for (size_t i = begin; i < end; ++i) row[i] = std::byte(Fp8FromFloat(x[i] * inverse));
    std::memcpy(scales + begin / kFp8Block * sizeof(float), &scale, sizeof(scale));
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
