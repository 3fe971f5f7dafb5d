#ifndef MOERL_LIBS_TENSOR_EXP_CONSTANTS_H_
#define MOERL_LIBS_TENSOR_EXP_CONSTANTS_H_

// e^x = 2^n e^r, n = round(x log2 e), |r| <= ln(2)/2, e^r = 1 + r + r^2 P(r) with P minimax (Cephes).
namespace moerl::tensor::exp_constants {

inline constexpr float kLowest = -104.0f;  // below: 0
inline constexpr float kHighest = 89.0f;   // above: infinity
inline constexpr float kLog2E = 1.44269504f;
inline constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
inline constexpr float kLn2High = 0.693147182f;
inline constexpr float kLn2Low = -1.904654299e-9f;
inline constexpr float kP0 = 5.0000001201e-1f;
inline constexpr float kP1 = 1.6666665459e-1f;
inline constexpr float kP2 = 4.1665795894e-2f;
inline constexpr float kP3 = 8.3334519073e-3f;
inline constexpr float kP4 = 1.3981999507e-3f;
inline constexpr float kP5 = 1.9875691500e-4f;

}  // namespace moerl::tensor::exp_constants

#endif  // MOERL_LIBS_TENSOR_EXP_CONSTANTS_H_
