#include "libs/tensor/math.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "libs/tensor/dtype.h"

namespace moerl::tensor {
namespace {

// Distance of a float from the exact value, in units of the float's last place.
double Ulps(float got, double exact) {
  const float nearest = static_cast<float>(exact);
  const float ulp = std::nextafter(std::fabs(nearest), std::numeric_limits<float>::infinity()) - std::fabs(nearest);
  return std::fabs(got - exact) / ulp;
}

TEST(Math, ExpIsWithinOneUlpOverItsWholeRange) {
  for (float x = -103.9f; x < 88.7f; x += 0.00731f) ASSERT_LE(Ulps(Exp(x), std::exp(double{x})), 1.0) << x;
}

TEST(Math, ExpKeepsTheSpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Exp(0.0f), 1.0f);
  EXPECT_EQ(Exp(-0.0f), 1.0f);
  EXPECT_EQ(Exp(inf), inf);
  EXPECT_EQ(Exp(100.0f), inf);
  EXPECT_EQ(Exp(-inf), 0.0f);
  EXPECT_TRUE(std::isnan(Exp(std::numeric_limits<float>::quiet_NaN())));
  EXPECT_GT(Exp(-100.0f), 0.0f) << "denormals are not flushed";
}

TEST(Math, ExpShiftedGivesTheBitsOfExp) {
  std::vector<float> x, y;
  for (float v = -120; v < 100; v += 0.0137f) x.push_back(v);
  for (const float v : {0.0f, -0.0f, std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::infinity(),
                        std::numeric_limits<float>::quiet_NaN()}) {
    x.push_back(v);
  }
  y.resize(x.size());
  ExpShifted(x.data(), static_cast<int64_t>(x.size()), 1.25f, y.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const float want = Exp(x[i] - 1.25f);
    ASSERT_EQ(std::memcmp(&y[i], &want, sizeof(want)), 0) << x[i];
  }
}

TEST(Math, LogIsWithinOneUlp) {
  for (float x = 1e-44f; x < 1e38f; x = x * 1.0137f + 1e-45f) ASSERT_LE(Ulps(Log(x), std::log(double{x})), 0.51) << x;
  for (float x = 0.9f; x < 1.1f; x += 1e-5f) ASSERT_LE(Ulps(Log(x), std::log(double{x})), 0.51) << x;
}

TEST(Math, LogKeepsTheSpecialValues) {
  const float inf = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Log(1.0f), 0.0f);
  EXPECT_EQ(Log(0.0f), -inf);
  EXPECT_EQ(Log(inf), inf);
  EXPECT_TRUE(std::isnan(Log(-1.0f)));
}

TEST(Math, SinCosIsWithinOneUlpUpToAMillionRadians) {
  for (float x = 0; x < 1048576.0f; x += x < 100 ? 0.0137f : 17.31f) {
    float s, c;
    SinCos(x, &s, &c);
    ASSERT_LE(Ulps(s, std::sin(double{x})), 0.6) << x;
    ASSERT_LE(Ulps(c, std::cos(double{x})), 0.6) << x;
  }
}

TEST(Math, Bf16RoundsToNearestEven) {
  EXPECT_EQ(ToBf16(1.0f + 1.0f / 256).bits, 0x3f80) << "a tie goes to the even neighbour below";
  EXPECT_EQ(ToBf16(1.0f + 3.0f / 256).bits, 0x3f82) << "a tie goes to the even neighbour above";
  EXPECT_EQ(ToBf16(1.0f + 1.0f / 256 + 1e-6f).bits, 0x3f81);
  EXPECT_EQ(ToBf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_TRUE(std::isnan(RoundToBf16(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace moerl::tensor
