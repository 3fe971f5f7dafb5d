#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "libs/base/check.h"
#include "libs/tensor/cpu/backend_impl.h"
#include "libs/tensor/math.h"

// Memory, splitting, and the kernels that work row by row.
namespace moerl::tensor {
namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kNormChunk = 1 << 16;  // elements summed in one piece by SumSquares

bool SameShape(const ConstMat& a, const ConstMat& b) { return a.rows == b.rows && a.cols == b.cols; }

}  // namespace

void CpuBackend::Share(int64_t tasks, double total_cost, absl::FunctionRef<void(int64_t, int)> task) {
  if (total_cost < kHandOffNs) {
    for (int64_t i = 0; i < tasks; ++i) task(i, 0);
  } else {
    pool_.Run(tasks, task);
  }
}

void CpuBackend::Split(int64_t count, int64_t grain, double cost, absl::FunctionRef<void(int64_t, int64_t)> work) {
  if (count <= 0) return;
  const double total = static_cast<double>(count) * cost;
  if (pool_.num_threads() == 1 || total < kHandOffNs) return work(0, count);
  const int64_t grains = (count + grain - 1) / grain;
  const int64_t wanted = pool_.num_threads() * kTasksPerThread;
  const int64_t step = (grains + wanted - 1) / wanted * grain;
  pool_.Run((count + step - 1) / step,
            [&](int64_t task, int) { work(task * step, std::min(count, (task + 1) * step)); });
}

void* CpuBackend::Scratch(int slot, int64_t bytes) {
  Tensor& memory = scratch_[slot + kNumSharedSlots];
  if (memory.bytes() < bytes) {
    memory = Tensor();  // free first
    memory = Tensor(DType::kF32, {(bytes + 3) / 4});
  }
  return memory.raw();
}

ConstMat CpuBackend::InComputeType(ConstMat x, DType dtype) {
  if (x.dtype == dtype) return x;
  const Mat converted(Scratch(kConvertSlot, x.rows * x.cols * SizeOf(dtype)), dtype, x.rows, x.cols, x.cols);
  Cast(x, converted);
  return converted;
}

Tensor CpuBackend::NewTensor(DType dtype, std::initializer_list<int64_t> shape) { return Tensor(dtype, shape); }
void CpuBackend::CopyFromHost(const void* host, int64_t bytes, void* memory) { std::memcpy(memory, host, bytes); }
void CpuBackend::CopyToHost(const void* memory, int64_t bytes, void* host) { std::memcpy(host, memory, bytes); }

void CpuBackend::Zero(Mat y) {
  for (int64_t t = 0; t < y.rows; ++t) std::memset(y.RowBytes(t), 0, y.cols * SizeOf(y.dtype));
}

void CpuBackend::Cast(ConstMat x, Mat y) {
  MOERL_CHECK(SameShape(x, y));
  Split(x.rows, 1, x.cols * 0.1, [&](int64_t begin, int64_t end) { k_.cast(x, y, begin, end); });
}

void CpuBackend::Add(ConstMat x, Mat y) {
  MOERL_CHECK(SameShape(x, y) && y.dtype == DType::kF32);
  Split(x.rows, 1, x.cols * 0.1, [&](int64_t begin, int64_t end) { k_.add(x, y, begin, end); });
}

void CpuBackend::Scale(float factor, Mat y) {
  MOERL_CHECK(y.dtype == DType::kF32);
  Split(y.rows, 1, y.cols * 0.1, [&](int64_t begin, int64_t end) { k_.scale(factor, y, begin, end); });
}

void CpuBackend::ColumnSum(ConstMat x, float* sum) {
  Split(x.cols, kLaneColumns, x.rows * 0.1, [&](int64_t begin, int64_t end) { k_.column_sum(x, sum, begin, end); });
}

void CpuBackend::RmsNorm(ConstMat x, absl::Span<const float> gain, float eps, Mat y, float* inv_rms) {
  const int64_t width = static_cast<int64_t>(gain.size());
  MOERL_CHECK(SameShape(x, y) && width > 0 && x.cols % width == 0);
  Split(x.rows, 1, x.cols * 0.2,
        [&](int64_t begin, int64_t end) { k_.rms_norm(x, gain.data(), width, eps, y, inv_rms, begin, end); });
}

void CpuBackend::RmsNormBackward(ConstMat dy, ConstMat x, absl::Span<const float> gain, const float* inv_rms,
                                 bool add_dx, Mat dx, float* dgain) {
  const int64_t width = static_cast<int64_t>(gain.size());
  MOERL_CHECK(SameShape(dy, x) && SameShape(dx, x) && width > 0 && x.cols % width == 0);
  MOERL_CHECK(!add_dx || dx.dtype == DType::kF32);
  // The gain's gradient first: dx may be dy.
  Split(width, kLaneColumns, static_cast<double>(x.rows * (x.cols / width)) * 0.2,
        [&](int64_t begin, int64_t end) { k_.rms_norm_gain_gradient(dy, x, width, inv_rms, dgain, begin, end); });
  Split(x.rows, 1, x.cols * 0.3, [&](int64_t begin, int64_t end) {
    k_.rms_norm_backward(dy, x, gain.data(), width, inv_rms, add_dx, dx, begin, end);
  });
}

void CpuBackend::RopeTable(absl::Span<const int32_t> positions, absl::Span<const float> inv_freq, float scaling,
                           Mat cos, Mat sin) {
  const int64_t half = static_cast<int64_t>(inv_freq.size());
  MOERL_CHECK(SameShape(cos, sin) && cos.cols == half && cos.rows == static_cast<int64_t>(positions.size()));
  Split(cos.rows, 1, half * 30.0, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      float* c = cos.Row<float>(t);
      float* s = sin.Row<float>(t);
      for (int64_t i = 0; i < half; ++i) {
        SinCos(static_cast<float>(positions[t]) * inv_freq[i], &s[i], &c[i]);
        c[i] *= scaling;
        s[i] *= scaling;
      }
    }
  });
}

void CpuBackend::Rope(ConstMat x, int64_t head_dim, ConstMat cos, ConstMat sin, bool inverse, Mat y) {
  MOERL_CHECK(SameShape(x, y) && SameShape(cos, sin) && cos.rows == x.rows && x.cols % head_dim == 0);
  MOERL_CHECK(2 * cos.cols <= head_dim && cos.dtype == DType::kF32 && sin.dtype == DType::kF32);
  Split(x.rows, 1, x.cols * 0.2,
        [&](int64_t begin, int64_t end) { k_.rope(x, head_dim, cos, sin, inverse, y, begin, end); });
}

void CpuBackend::SwiGlu(ConstMat gate_up, Mat y) {
  MOERL_CHECK(gate_up.rows == y.rows && gate_up.cols == 2 * y.cols);
  Split(y.rows, 1, y.cols * 0.7, [&](int64_t begin, int64_t end) { k_.swiglu(gate_up, y, begin, end); });
}

void CpuBackend::SwiGluBackward(ConstMat dy, ConstMat gate_up, Mat dgate_up) {
  MOERL_CHECK(SameShape(gate_up, dgate_up) && gate_up.rows == dy.rows && gate_up.cols == 2 * dy.cols);
  Split(dy.rows, 1, dy.cols * 1.0,
        [&](int64_t begin, int64_t end) { k_.swiglu_backward(dy, gate_up, dgate_up, begin, end); });
}

void CpuBackend::SigmoidGate(ConstMat x, ConstMat gate, Mat y) {
  MOERL_CHECK(SameShape(x, y) && gate.rows == x.rows && gate.cols == 1 && gate.dtype == DType::kF32);
  Split(x.rows, 1, x.cols * 0.1, [&](int64_t begin, int64_t end) { k_.sigmoid_gate(x, gate, y, begin, end); });
}

void CpuBackend::SigmoidGateBackward(ConstMat dy, ConstMat x, ConstMat gate, Mat dx, Mat dgate) {
  MOERL_CHECK(SameShape(dy, x) && SameShape(dx, x) && SameShape(gate, dgate) && gate.rows == x.rows);
  MOERL_CHECK(gate.cols == 1 && gate.dtype == DType::kF32 && dgate.dtype == DType::kF32);
  Split(x.rows, 1, x.cols * 0.2,
        [&](int64_t begin, int64_t end) { k_.sigmoid_gate_backward(dy, x, gate, dx, dgate, begin, end); });
}

void CpuBackend::AdamW(const AdamWOptions& options, const float* grad, int64_t count, float* master, float* m,
                       float* v) {
  MOERL_CHECK(options.step >= 1);
  Split(count, 1024, 1.0, [&](int64_t begin, int64_t end) { k_.adamw(options, grad, master, m, v, begin, end); });
}

double CpuBackend::SumSquares(const float* x, int64_t count) {
  const int64_t chunks = (count + kNormChunk - 1) / kNormChunk;
  std::vector<double> sums(chunks);
  Share(chunks, static_cast<double>(count) * 0.2, [&](int64_t i, int) {
    sums[i] = k_.sum_squares(x + i * kNormChunk, std::min(kNormChunk, count - i * kNormChunk));
  });
  double sum = 0;
  for (const double chunk : sums) sum += chunk;
  return sum;
}

}  // namespace moerl::tensor
