#ifndef MOERL_LIBS_TENSOR_MATH_H_
#define MOERL_LIBS_TENSOR_MATH_H_

#include <cstdint>

// Elementary functions with the same bits on every machine: only IEEE operations in a written order.
namespace moerl::tensor {

// e^x, at most 1 ulp off; the vector kernels give the same bits. Overflows to infinity, underflows through
// the denormals to 0, NaN stays NaN.
float Exp(float x);

// y[i] = Exp(x[i] - shift), to the bit, sixteen at a time on the best path of this processor. y may be x.
void ExpShifted(const float* x, int64_t count, float shift, float* y);

// Natural logarithm, correctly rounded but for rare cases of 1 ulp. Log(0) = -inf, Log(x < 0) = NaN.
float Log(float x);

// sin and cos of the fp32 angle, |x| <= 2^20, at most 1 ulp off.
void SinCos(float x, float* sin, float* cos);

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_MATH_H_
