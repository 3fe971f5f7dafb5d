// moerl bench: measures what this build reaches on this machine, as JSON lines.
#include <cstdio>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/model/model_bench.h"
#include "libs/tensor/kernel_bench.h"
#include "tools/moerl/commands.h"

namespace moerl {
namespace {

void Print(const std::vector<Measurement>& lines, bool json) {
  for (const Measurement& line : lines) {
    if (json) {
      std::puts(ToJsonLine(line).c_str());
      continue;
    }
    std::printf("%-28s %12.6g %-9s", line.name.c_str(), line.value, line.unit.c_str());
    if (line.ratio) std::printf(" %5.2f of %s", *line.ratio, line.reference.c_str());
    if (line.goal) std::printf(" (goal %.2f)", *line.goal);
    std::printf("\n");
  }
  std::fflush(stdout);
}

absl::Status BenchModel(double kernel_seconds, const model::ModelBenchOptions& options, bool json) {
  if (options.only.empty()) {
    MOERL_ASSIGN_OR_RETURN(const std::vector<Measurement> kernels, tensor::MeasureKernels(kernel_seconds));
    Print(kernels, json);
  }
  MOERL_ASSIGN_OR_RETURN(const std::vector<Measurement> lines, model::MeasureModel(options));
  Print(lines, json);
  return absl::OkStatus();
}

absl::Status BenchGemm(double seconds, const tensor::GemmShape& shape, bool json) {
  MOERL_ASSIGN_OR_RETURN(const Measurement line, tensor::MeasureGemm(shape, seconds));
  Print({line}, json);
  return absl::OkStatus();
}

}  // namespace

int RunBench(const Arguments& arguments) {
  Flags flags("bench", arguments);
  if (flags.Switch("help")) {
    std::puts(
        "usage: moerl bench model [--json] [--threads N] [--repeats N] [--kernel-seconds S] [--only NAME]\n"
        "       moerl bench gemm --rows M --columns N --depth K [--compute fp32|bf16] [--kernel-seconds S] [--json]\n"
        "model: kernels, training and generation beside this machine's limits; --only keeps to those of training\n"
        "and generation whose name has NAME in it. gemm: one shape on one thread.");
    return 0;
  }
  const bool json = flags.Switch("json");
  model::ModelBenchOptions options;
  options.num_threads = static_cast<int>(flags.Integer("threads", options.num_threads, 1, 1024));
  options.repeats = static_cast<int>(flags.Integer("repeats", options.repeats, 1, 1000));
  options.only = flags.String("only", "");
  const double seconds = flags.Real("kernel-seconds", 5.0, 0.01, 3600.0);
  tensor::GemmShape shape;
  shape.rows = flags.Integer("rows", 64, 1, 1 << 20);
  shape.columns = flags.Integer("columns", 512, 1, 1 << 20);
  shape.depth = flags.Integer("depth", 512, 1, 1 << 20);
  const auto compute = model::ParseCompute(flags.String("compute", "bf16"));
  if (absl::Status status = flags.Finish(1, 1); !status.ok()) return UsageError(status);
  if (!compute.ok()) return UsageError(compute.status());
  shape.dtype = *compute == model::Compute::kBf16 ? tensor::DType::kBf16 : tensor::DType::kF32;
  absl::Status status;
  if (flags.positional()[0] == "model") {
    status = BenchModel(seconds, options, json);
  } else if (flags.positional()[0] == "gemm") {
    status = BenchGemm(seconds, shape, json);
  } else {
    return UsageError(absl::InvalidArgumentError(
        absl::StrCat("bench: expected \"model\" or \"gemm\", found \"", flags.positional()[0], "\"")));
  }
  return status.ok() ? 0 : Failure(status);
}

}  // namespace moerl
