#ifndef MOERL_LIBS_MODEL_MODEL_BENCH_H_
#define MOERL_LIBS_MODEL_MODEL_BENCH_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "libs/base/measurement.h"
#include "libs/model/config.h"

namespace moerl::model {

// The model that benchmarks and their peers agree on: a Qwen3-MoE of about 115 M parameters (hidden 512, 8 layers, 32
// experts top-4 of width 256, vocabulary 8192).
ModelConfig BenchConfig();

struct ModelBenchOptions {
  int num_threads = 1;
  int repeats = 5;              // medians are of this many
  int64_t train_sequences = 8;  // of train_length tokens each, one optimiser step
  int64_t train_length = 256;
  int64_t new_tokens = 64;  // of each generated sample
  std::string only;         // measures only lines whose name has this in it; empty: all
};

// Training (forward, backward, AdamW) in tokens/s, fp32 and bf16, beside the machine's multiply-add peak; generation in
// tokens/s at 1, 8 and 32 sequences, bf16, beside max(bytes touched / read bandwidth, FLOPs / peak). The limits are
// measured in the same run on one thread and scaled by the thread count. CPU time of the one thread, wall time of
// several; medians.
absl::StatusOr<std::vector<Measurement>> MeasureModel(const ModelBenchOptions& options);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_MODEL_BENCH_H_
