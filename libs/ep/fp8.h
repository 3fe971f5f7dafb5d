#ifndef MOERL_LIBS_EP_FP8_H_
#define MOERL_LIBS_EP_FP8_H_

#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"

namespace moerl::ep {

// e4m3 (1 sign, 4 exponent, 3 mantissa bits, bias 7, largest 448, no infinity; OCP 8-bit floating point, 2023) with one
// fp32 scale per block of 128: x is code * scale, scale = largest of the block / 448.
inline constexpr int kFp8Block = 128;
inline constexpr float kFp8Max = 448.0f;

constexpr size_t Fp8RowBytes(size_t hidden) { return hidden + 4 * ((hidden + kFp8Block - 1) / kFp8Block); }

// Nearest e4m3, ties to even; larger magnitudes than 448 saturate, a NaN is 0x7f.
uint8_t Fp8FromFloat(float value);
float FloatFromFp8(uint8_t code);

// row: Fp8RowBytes(x.size()) bytes, codes first, scales behind them. A row's bits depend on that row alone.
void QuantizeFp8(absl::Span<const float> x, std::byte* row);
void DequantizeFp8(const std::byte* row, absl::Span<float> x);

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_FP8_H_
