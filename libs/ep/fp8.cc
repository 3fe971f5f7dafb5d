#include "libs/ep/fp8.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "libs/ep/row_kernel.h"

namespace moerl::ep {

namespace {

constexpr uint32_t kMagnitude = 0x7fffffff;
constexpr uint32_t kInfinity = 0x7f800000;

// Without branches, so that loops over it are vectors.
inline uint8_t Encode(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t raw = bits & kMagnitude;
  float magnitude;
  std::memcpy(&magnitude, &raw, sizeof(raw));
  // Below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves those bits, rounded to even.
  const float shifted = magnitude + 0x1p14f;
  uint32_t small;
  std::memcpy(&small, &shifted, sizeof(small));
  // Otherwise 3 of 23 mantissa bits are kept.
  const uint32_t large = ((raw + 0x7ffff + (raw >> 20 & 1)) >> 20) - ((127 - 7) << 3);
  uint32_t code = magnitude < 0x1p-6f ? small & 0xf : large;
  code = magnitude >= kFp8Max ? 0x7e : code < 0x7e ? code : 0x7e;
  code = raw > kInfinity ? 0x7f : code | (bits >> 24 & 0x80);
  return static_cast<uint8_t>(code);
}

MOERL_ROW_KERNEL void QuantizeBlock(const float* __restrict x, int n, uint8_t* __restrict codes, float* scale) {
  uint32_t largest_bits = 0;
  for (int i = 0; i < n; ++i) {
    uint32_t bits;
    std::memcpy(&bits, &x[i], sizeof(bits));
    bits &= kMagnitude;
    bits = bits > kInfinity ? 0 : bits;  // a NaN does not choose the scale
    largest_bits = largest_bits > bits ? largest_bits : bits;
  }
  float largest;
  std::memcpy(&largest, &largest_bits, sizeof(largest));
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
