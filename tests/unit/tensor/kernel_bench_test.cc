#include "libs/tensor/kernel_bench.h"

#include <set>

#include "gtest/gtest.h"

namespace moerl::tensor {
namespace {

// Speed itself is not tested here: other programs run on the machine. That figures exist and are sane is.
TEST(KernelBench, MeasuresEveryKernelBesideItsLimit) {
  const auto lines = MeasureKernels(1.0);
  ASSERT_TRUE(lines.ok());
  std::set<std::string> names;
  for (const Measurement& line : *lines) {
    EXPECT_TRUE(names.insert(line.name).second) << line.name << " twice";
    EXPECT_GT(line.value, 0) << line.name;
    EXPECT_EQ(line.ratio.has_value(), !line.reference.empty()) << line.name;
    if (line.reference.empty()) continue;
    EXPECT_TRUE(names.count(line.reference)) << line.reference << " is not in the run";
  }
  for (const char* name : {"gemm_bf16_m8", "gemm_bf16_m64", "gemm_bf16_m512", "gemm_bf16_m1_streamed",
                           "grouped_gemm_bf16_m64_8_experts", "attention_t1024"}) {
    EXPECT_TRUE(names.count(name)) << name;
  }
}

}  // namespace
}  // namespace moerl::tensor
