#include "libs/tensor/kernel_bench.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <functional>
#include <memory>
#include <string>

#include "absl/strings/str_cat.h"
#include "libs/base/status_macros.h"
#include "libs/tensor/cpu/cpu_backend.h"
#include "libs/tensor/cpu/kernel_table.h"

namespace moerl::tensor {
namespace {

constexpr int64_t kStreamedBytes = int64_t{128} << 20;  // beyond every cache
constexpr int kMeasurements = 16;                       // about; each gets its share of the seconds

double CpuSeconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Seconds of one call in each of many windows of a few milliseconds, ascending.
std::vector<double> SecondsOfCall(double budget, const std::function<void()>& call) {
  constexpr double kWindow = 0.002;
  call();
  std::vector<double> windows;
  double spent = 0;
  do {
    int64_t calls = 0;
    double elapsed = 0;
    const double start = CpuSeconds();
    do {
      call();
      ++calls;
      elapsed = CpuSeconds() - start;
    } while (elapsed < kWindow);
    windows.push_back(elapsed / static_cast<double>(calls));
    spent += elapsed;
  } while (spent < budget);
  std::sort(windows.begin(), windows.end());
  return windows;
}

double BestSeconds(double budget, const std::function<void()>& call) { return SecondsOfCall(budget, call).front(); }

// Small values of both signs; benchmarks must not meet denormals or infinities.
Tensor Filled(DType dtype, int64_t rows, int64_t cols) {
  Tensor t(dtype, {rows, cols});
  uint32_t state = 12345;
  for (int64_t i = 0; i < t.size(); ++i) {
    state = state * 1664525u + 1013904223u;
    const float value = (static_cast<float>(state >> 8) / 8388608.0f - 1.0f) * 0.1f;
    if (dtype == DType::kF32) {
      t.data<float>()[i] = value;
    } else {
      t.data<Bf16>()[i] = ToBf16(value);
    }
  }
  return t;
}

class KernelBench {
 public:
  KernelBench(std::unique_ptr<Backend> backend, double budget) : backend_(std::move(backend)), budget_(budget) {}

  std::vector<Measurement> Run() {
    for (const DType dtype : {DType::kBf16, DType::kF32}) {
      (dtype == DType::kBf16 ? peak_bf16_ : peak_fp32_) = PeakGflops(dtype);
      for (const int64_t rows : {8, 64, 512}) Gemm(dtype, rows);
    }
    Decode();
    Grouped();
    WeightGradient();
    Vocabulary();
    Attention();
    return std::move(lines_);
  }

 private:
  // Multiply-adds on registers only, for this instruction set.
  double PeakGflops(DType dtype) {
    const KernelTable& kernels = BestKernels();
    constexpr int64_t kSteps = 20000;
    double multiply_adds = 0;
    const double seconds = BestSeconds(
        budget_, [&] { multiply_adds = dtype == DType::kBf16 ? kernels.peak_bf16(kSteps) : kernels.peak_f32(kSteps); });
    const double gflops = 2 * multiply_adds / seconds * 1e-9;
    lines_.push_back({absl::StrCat("peak_", Name(dtype)), gflops, "GFLOP/s", "", {}, {}, true});
    return gflops;
  }

  void Add(const std::string& name, double flops, double seconds, const std::string& reference, double reference_gflops,
           std::optional<double> goal) {
    const double gflops = flops / seconds * 1e-9;
    lines_.push_back({name, gflops, "GFLOP/s", reference, gflops / reference_gflops, goal, true});
  }

  PackedWeight Weight(DType dtype, int64_t groups, int64_t n, int64_t k, bool with_transposed) {
    PackedWeight w = backend_->NewPacked(dtype, groups, n, k, with_transposed);
    const Tensor values = Filled(dtype, n, k);
    for (int64_t g = 0; g < groups; ++g) backend_->Pack(values.mat(), g, 0, &w);
    return w;
  }

  void Gemm(DType dtype, int64_t rows) {
    constexpr int64_t kSize = 1024;
    const Tensor x = Filled(dtype, rows, kSize);
    const PackedWeight w = Weight(dtype, 1, kSize, kSize, false);
    Tensor y(DType::kF32, {rows, kSize});
    const double seconds = BestSeconds(budget_, [&] { backend_->Gemm(x.mat(), w, {}, y.mat()); });
    Add(absl::StrCat("gemm_", Name(dtype), "_m", rows), 2.0 * static_cast<double>(rows * kSize * kSize), seconds,
        absl::StrCat("peak_", Name(dtype)), dtype == DType::kBf16 ? peak_bf16_ : peak_fp32_, 0.90);
  }

  // One row by a weight that no cache holds, beside a plain sum over the same bytes.
  void Decode() {
    constexpr int64_t kSize = 2048;
    const int64_t layers = kStreamedBytes / (kSize * kSize * SizeOf(DType::kBf16));
    const PackedWeight w = Weight(DType::kBf16, layers, kSize, kSize, false);
    const Tensor x = Filled(DType::kBf16, layers, kSize);
    Tensor y(DType::kF32, {layers, kSize});
    std::vector<int64_t> offsets;
    for (int64_t g = 0; g <= layers; ++g) offsets.push_back(g);
    const double bytes = static_cast<double>(w.forward.bytes());
    const KernelTable& kernels = BestKernels();
    double reading = 1e30, decoding = 1e30;
    for (int round = 0; round < 5; ++round) {  // in turn: bandwidth is shared with the neighbours of the moment
      reading = std::min(
          reading, BestSeconds(budget_ / 5, [&] { sink_ = kernels.read_bytes(w.forward.raw(), w.forward.bytes()); }));
      decoding = std::min(decoding,
                          BestSeconds(budget_ / 5, [&] { backend_->GroupedGemm(x.mat(), offsets, w, {}, y.mat()); }));
    }
    lines_.push_back({"read_bandwidth", bytes / reading * 1e-9, "GB/s", "", {}, {}, true});
    lines_.push_back(
        {"gemm_bf16_m1_streamed", bytes / decoding * 1e-9, "GB/s", "read_bandwidth", reading / decoding, 0.80, true});
  }

  void Grouped() {
    constexpr int64_t kSize = 512, kRows = 64, kExperts = 8;
    const Tensor x = Filled(DType::kBf16, kRows, kSize);
    Tensor y(DType::kF32, {kRows, kSize});
    const PackedWeight dense = Weight(DType::kBf16, 1, kSize, kSize, false);
    const PackedWeight experts = Weight(DType::kBf16, kExperts, kSize, kSize, false);
    const std::vector<int64_t> offsets = {0, 3, 17, 24, 24, 33, 45, 52, 64};  // ragged, one expert without rows
    const double flops = 2.0 * static_cast<double>(kRows * kSize * kSize);
    const double dense_seconds = BestSeconds(budget_, [&] { backend_->Gemm(x.mat(), dense, {}, y.mat()); });
    const double seconds = BestSeconds(budget_, [&] { backend_->GroupedGemm(x.mat(), offsets, experts, {}, y.mat()); });
    Add("gemm_bf16_m64_512", flops, dense_seconds, "peak_bf16", peak_bf16_, {});
    Add("grouped_gemm_bf16_m64_8_experts", flops, seconds, "gemm_bf16_m64_512", flops / dense_seconds * 1e-9, 0.80);
  }

  void WeightGradient() {
    constexpr int64_t kSize = 512, kRows = 512;
    const Tensor dy = Filled(DType::kBf16, kRows, kSize), x = Filled(DType::kBf16, kRows, kSize);
    Tensor dw(DType::kF32, {kSize, kSize});
    backend_->Zero(dw.mat());
    const double seconds =
        BestSeconds(budget_, [&] { backend_->WeightGrad(dy.mat(), x.mat(), DType::kBf16, dw.mat()); });
    Add("weight_gradient_bf16", 2.0 * static_cast<double>(kRows * kSize * kSize), seconds, "peak_bf16", peak_bf16_, {});
  }

  void Vocabulary() {
    constexpr int64_t kRows = 128, kWords = 8192, kSize = 512;
    const Tensor h = Filled(DType::kBf16, kRows, kSize);
    const PackedWeight head = Weight(DType::kBf16, 1, kWords, kSize, true);
    const std::vector<int32_t> targets(kRows, 17);
    const std::vector<float> gradient(kRows, 1.0f);
    std::vector<float> logprobs(kRows);
    std::vector<RowStats> stats(kRows);
    Tensor dh(DType::kF32, {kRows, kSize}), dhead(DType::kF32, {kWords, kSize});
    backend_->Zero(dhead.mat());
    const double flops = 2.0 * static_cast<double>(kRows * kWords * kSize);
    const double forward = BestSeconds(budget_, [&] {
      backend_->LogProbs(h.mat(), head, targets, {}, nullptr, logprobs.data(), stats.data(), nullptr);
    });
    const double backward = BestSeconds(budget_, [&] {
      backend_->LogProbsBackward(h.mat(), head, targets, {}, nullptr, stats.data(), gradient.data(), dh.mat(),
                                 dhead.mat());
    });
    Add("logprobs_bf16_v8192", flops, forward, "peak_bf16", peak_bf16_, {});
    Add("logprobs_backward_bf16_v8192", 3 * flops, backward, "peak_bf16", peak_bf16_, {});
  }

  // Attention multiplies in fp32 whatever the type of the cache.
  void Attention() {
    constexpr int64_t kTokens = 1024, kHeads = 8, kKvHeads = 2, kHeadDim = 64;
    const Tensor q = Filled(DType::kBf16, kTokens, kHeads * kHeadDim),
                 k = Filled(DType::kBf16, kTokens, kKvHeads * kHeadDim),
                 v = Filled(DType::kBf16, kTokens, kKvHeads * kHeadDim);
    Tensor out(DType::kBf16, {kTokens, kHeads * kHeadDim}), dq(DType::kF32, {kTokens, kHeads * kHeadDim}),
        dk(DType::kF32, {kTokens, kKvHeads * kHeadDim}), dv(DType::kF32, {kTokens, kKvHeads * kHeadDim});
    const std::vector<int64_t> offsets = {0, kTokens};
    std::vector<RowStats> stats(kTokens * kHeads);
    const double flops = 4.0 * kHeads * kHeadDim * static_cast<double>(kTokens * (kTokens + 1) / 2);
    const double forward = BestSeconds(budget_, [&] {
      backend_->AttentionPacked(q.mat(), k.mat(), v.mat(), offsets, kHeadDim, 0.125f, out.mat(), stats.data());
    });
    const double backward = BestSeconds(budget_, [&] {
      backend_->AttentionPackedBackward(q.mat(), k.mat(), v.mat(), offsets, kHeadDim, 0.125f, out.mat(), stats.data(),
                                        q.mat(), dq.mat(), dk.mat(), dv.mat());
    });
    Add("attention_t1024", flops, forward, "peak_fp32", peak_fp32_, {});
    Add("attention_backward_t1024", 2.5 * flops, backward, "peak_fp32", peak_fp32_, {});
  }

  std::unique_ptr<Backend> backend_;
  double budget_;  // seconds of one measurement
  double peak_bf16_ = 0, peak_fp32_ = 0;
  volatile uint64_t sink_ = 0;
  std::vector<Measurement> lines_;
};

}  // namespace

absl::StatusOr<std::vector<Measurement>> MeasureKernels(double seconds) {
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, NewCpuBackend({}));
  return KernelBench(std::move(backend), std::max(seconds, 1.0) / kMeasurements).Run();
}

absl::StatusOr<Measurement> MeasureGemm(const GemmShape& shape, double seconds) {
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Backend> backend, NewCpuBackend({}));
  const Tensor x = Filled(shape.dtype, shape.rows, shape.depth),
               values = Filled(shape.dtype, shape.columns, shape.depth);
  PackedWeight w = backend->NewPacked(shape.dtype, 1, shape.columns, shape.depth, false);
  backend->Pack(values.mat(), 0, 0, &w);
  Tensor y(DType::kF32, {shape.rows, shape.columns});
  const auto windows = SecondsOfCall(seconds, [&] { backend->Gemm(x.mat(), w, {}, y.mat()); });
  const double flops = 2.0 * static_cast<double>(shape.rows * shape.columns * shape.depth);
  return Measurement{absl::StrCat("gemm_", Name(shape.dtype), "_", shape.rows, "x", shape.columns, "x", shape.depth),
                     flops / windows[windows.size() / 2] * 1e-9,
                     "GFLOP/s",
                     "",
                     {},
                     {},
                     true};
}

}  // namespace moerl::tensor
