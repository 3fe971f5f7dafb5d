#include "libs/tensor/math.h"

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <limits>

#include "libs/base/check.h"
#include "libs/tensor/cpu/kernel_table.h"
#include "libs/tensor/exp_constants.h"

// Exp is the scalar twin of cpu/vector_math.h, operation by operation. Log and SinCos work in double, where the
// truncation of the series is far below fp32's half ulp.
namespace moerl::tensor {

float Exp(float x) {
  using namespace exp_constants;  // NOLINT: a table of named coefficients
  if (x != x) return x;
  const float clamped = std::fmin(std::fmax(x, kLowest), kHighest);
  const float shifted = std::fma(clamped, kLog2E, kRound);
  const float n = shifted - kRound;
  float r = std::fma(n, -kLn2High, clamped);
  r = std::fma(n, -kLn2Low, r);
  float p = kP5;
  for (const float coefficient : {kP4, kP3, kP2, kP1, kP0}) p = std::fma(p, r, coefficient);
  p = std::fma(p, r * r, r) + 1.0f;
  // 2^n in two factors, so that denormal results are rounded once.
  const int32_t exponent = static_cast<int32_t>(n);
  const int32_t half = exponent >> 1;
  const auto power = [](int32_t e) {
    const uint32_t bits = static_cast<uint32_t>(e + 127) << 23;
    float value;
    std::memcpy(&value, &bits, sizeof(value));
    return value;
  };
  return p * power(half) * power(exponent - half);
}

void ExpShifted(const float* x, int64_t count, float shift, float* y) { BestKernels().exp_shifted(x, count, shift, y); }

// log x = e ln 2 + 2 atanh((m - 1) / (m + 1)) for x = m 2^e, sqrt(1/2) <= m < sqrt(2).
float Log(float x) {
  if (x != x || x < 0) return std::numeric_limits<float>::quiet_NaN();
  if (x == 0) return -std::numeric_limits<float>::infinity();
  if (x == std::numeric_limits<float>::infinity()) return x;
  int e;
  double m = std::frexp(static_cast<double>(x), &e);
  if (m < 0.70710678118654752) {
    m *= 2;
    --e;
  }
  const double s = (m - 1) / (m + 1);
  const double s2 = s * s;
  double series = 1.0 / 19;
  for (int k = 17; k >= 1; k -= 2) series = series * s2 + 1.0 / k;
  return static_cast<float>(e * 0.69314718055994531 + 2 * s * series);
}

void SinCos(float x, float* sin, float* cos) {
  MOERL_CHECK(std::fabs(x) <= 1 << 20);
  // pi/2 in two parts, the first of 33 bits: its product with q < 2^20 is exact.
  constexpr double kPiHalfHigh = 1.57079632673412561417e+00;
  constexpr double kPiHalfLow = 6.07710050650619224932e-11;
  const double q = std::nearbyint(x * 0.63661977236758134);
  const double r = (x - q * kPiHalfHigh) - q * kPiHalfLow;
  const double r2 = r * r;
  double s = 1, c = 1;  // Taylor, innermost factor first, to r^15 and r^16
  for (int k = 14; k >= 2; k -= 2) s = 1 - r2 / (k * (k + 1)) * s;
  for (int k = 15; k >= 1; k -= 2) c = 1 - r2 / (k * (k + 1)) * c;
  s *= r;
  switch (static_cast<int64_t>(q) & 3) {
    case 0:
      *sin = static_cast<float>(s), *cos = static_cast<float>(c);
      break;
    case 1:
      *sin = static_cast<float>(c), *cos = static_cast<float>(-s);
      break;
    case 2:
      *sin = static_cast<float>(-s), *cos = static_cast<float>(-c);
      break;
    default:
      *sin = static_cast<float>(-c), *cos = static_cast<float>(s);
      break;
  }
}

}  // namespace moerl::tensor
