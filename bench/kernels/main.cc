#include <cstdio>
#include <cstdlib>

#include "libs/tensor/kernel_bench.h"

// moerl-bench-kernels [SECONDS]: the CPU kernels beside this machine's limits, as JSON lines.
int main(int argc, char** argv) {
  const double seconds = argc > 1 ? std::atof(argv[1]) : 5.0;
  const auto lines = moerl::tensor::MeasureKernels(seconds);
  if (!lines.ok()) {
    std::fprintf(stderr, "%s\n", lines.status().ToString().c_str());
    return 1;
  }
  for (const moerl::Measurement& line : *lines) std::puts(moerl::ToJsonLine(line).c_str());
  return 0;
}
