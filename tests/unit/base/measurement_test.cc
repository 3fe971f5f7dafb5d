#include "libs/base/measurement.h"

#include <limits>

#include "gtest/gtest.h"

namespace moerl {
namespace {

TEST(Measurement, IsOneJsonLineWithNullForWhatIsAbsent) {
  EXPECT_EQ(
      ToJsonLine({"gemm", 230.5, "GFLOP/s", "peak", 0.95, 0.9, true}),
      R"({"name":"gemm","value":230.5,"unit":"GFLOP/s","reference":"peak","ratio":0.95,"goal":0.9,"better":"higher"})");
  EXPECT_EQ(ToJsonLine({"a\"b", 3, "ms", "", {}, {}, false}),
            R"({"name":"a\"b","value":3,"unit":"ms","reference":null,"ratio":null,"goal":null,"better":"lower"})");
}

TEST(Measurement, NeverWritesWhatJsonHasNoWordFor) {
  const Measurement m{
      "x", std::numeric_limits<double>::infinity(), "s", "", std::numeric_limits<double>::quiet_NaN(), {}, true};
  EXPECT_EQ(ToJsonLine(m),
            R"({"name":"x","value":null,"unit":"s","reference":null,"ratio":null,"goal":null,"better":"higher"})");
}

}  // namespace
}  // namespace moerl
