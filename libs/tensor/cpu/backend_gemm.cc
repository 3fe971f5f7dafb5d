#include <algorithm>
#include <cstring>
#include <vector>

#include "libs/base/check.h"
#include "libs/tensor/cpu/backend_impl.h"

// GEMM, grouped GEMM and weight gradients: one micro-kernel, three ways to feed it.
namespace moerl::tensor {
namespace {

// Nanoseconds of a multiply-add on one core, from the measured 200 GFLOP/s (bf16) and 100 (fp32).
double NsPerMultiplyAdd(DType dtype) { return dtype == DType::kBf16 ? 0.01 : 0.02; }

constexpr int64_t kRowsPerTask = 64;  // rows of a task when rows are split: a multiple of every tile height
constexpr int64_t kTasksPerThread = 4;

int64_t PaddedDepth(DType dtype, int64_t k) { return dtype == DType::kBf16 ? (k + 1) / 2 * 2 : k; }
int64_t NumPanels(int64_t n) { return (n + kPanel - 1) / kPanel; }

// One packed matrix of [n, k].
struct Panels {
  const char* data = nullptr;
  DType dtype = DType::kF32;
  int64_t n = 0, k = 0;
  int64_t stride() const { return PaddedDepth(dtype, k) * kPanel; }
  int64_t bytes() const { return NumPanels(n) * stride() * SizeOf(dtype); }
};

Panels Side(const PackedWeight& w, bool transposed, int64_t group) {
  Panels p{nullptr, w.dtype, transposed ? w.k : w.n, transposed ? w.n : w.k};
  const Tensor& memory = transposed ? w.transposed : w.forward;
  MOERL_CHECK(!memory.empty());
  p.data = static_cast<const char*>(memory.raw()) + group * p.bytes();
  return p;
}

// The part of a call that is rows [row, row + rows) and panels from `panel` on.
GemmCall Part(const GemmCall& whole, DType dtype, int64_t row, int64_t rows, int64_t panel, int64_t panels) {
  GemmCall part = whole;
  const int64_t column = panel * kPanel;
  part.x = static_cast<const char*>(whole.x) + row * whole.x_stride * SizeOf(dtype);
  part.w = static_cast<const char*>(whole.w) + panel * whole.panel_stride * SizeOf(dtype);
  part.y = static_cast<char*>(whole.y) + (row * whole.y_stride + column) * SizeOf(whole.y_dtype);
  part.m = rows;
  part.n = std::min(whole.n - column, panels * kPanel);
  if (whole.bias != nullptr) part.bias = whole.bias + column;
  return part;
}

// How calls are cut into tasks: by panels first, by rows too when panels are few.
struct Cut {
  int64_t rows;    // a task
  int64_t panels;  // a task
};

Cut CutFor(int64_t m, int64_t n, int64_t tasks_wanted) {
  const int64_t panels = NumPanels(n);
  const int64_t panel_tasks = std::min(panels, tasks_wanted);
  const int64_t row_tasks = std::min((m + kRowsPerTask - 1) / kRowsPerTask, tasks_wanted / panel_tasks);
  Cut cut;
  cut.panels = (panels + panel_tasks - 1) / panel_tasks;
  if (m <= 2) cut.panels = (cut.panels + 3) / 4 * 4;  // one row runs best four panels at a time
  cut.rows = (m / std::max<int64_t>(row_tasks, 1) + kRowsPerTask) / kRowsPerTask * kRowsPerTask;
  return cut;
}

}  // namespace

// Runs calls[i] (same type and depth), sharing all their tiles among the threads.
void CpuBackend::RunGemms(DType dtype, absl::Span<const GemmCall> calls) {
  const auto kernel = dtype == DType::kBf16 ? k_.gemm_bf16 : k_.gemm_f32;
  double cost = 0;
  for (const GemmCall& c : calls) {
    cost += static_cast<double>(c.m) * static_cast<double>(c.n) * static_cast<double>(c.k) * NsPerMultiplyAdd(dtype);
    cost += static_cast<double>(c.n) * static_cast<double>(c.k) * 0.05;  // reading the weight
  }
  if (pool_.num_threads() == 1 || cost < kHandOffNs) {
    for (size_t i = 0; i < calls.size(); ++i) {
      GemmCall c = calls[i];
      if (i + 1 < calls.size()) c.next_w = calls[i + 1].w;
      const int64_t panel_bytes = c.panel_stride * SizeOf(dtype);
      c.later = coming_.During(c.w, NumPanels(c.n) * panel_bytes, panel_bytes);
      kernel(c);
    }
    return;
  }
  const int64_t wanted = pool_.num_threads() * kTasksPerThread;
  const int64_t wanted_each = std::max<int64_t>(1, wanted / static_cast<int64_t>(calls.size()));
  std::vector<GemmCall> tasks;
  for (const GemmCall& c : calls) {
    if (c.m == 0 || c.n == 0) continue;
    const Cut cut = CutFor(c.m, c.n, wanted_each);
    for (int64_t panel = 0; panel * kPanel < c.n; panel += cut.panels) {
      for (int64_t row = 0; row < c.m; row += cut.rows) {
        tasks.push_back(Part(c, dtype, row, std::min(cut.rows, c.m - row), panel, cut.panels));
      }
    }
  }
  pool_.Run(static_cast<int64_t>(tasks.size()), [&](int64_t i, int) { kernel(tasks[i]); });
}

PackedWeight CpuBackend::NewPacked(DType dtype, int64_t groups, int64_t n, int64_t k, bool with_transposed) {
  PackedWeight w{dtype, groups, n, k, {}, {}};
  const auto zeros = [&](const Panels& one) {
    Tensor memory(dtype, {groups * one.bytes() / SizeOf(dtype)});
    std::memset(memory.raw(), 0, memory.bytes());
    return memory;
  };
  w.forward = zeros(Panels{nullptr, dtype, n, k});
  if (with_transposed) w.transposed = zeros(Panels{nullptr, dtype, k, n});
  return w;
}

void CpuBackend::Pack(ConstMat src, int64_t group, int64_t row_begin, PackedWeight* w) {
  MOERL_CHECK(src.cols == w->k && row_begin >= 0 && row_begin + src.rows <= w->n);
  MOERL_CHECK(group >= 0 && group < w->groups);
  char* forward = const_cast<char*>(Side(*w, false, group).data);
  // Ranges of rows never share an element; ranges of columns are ranges of the transpose's rows.
  Split(src.rows, kPanel, src.cols * 0.5, [&](int64_t begin, int64_t end) {
    k_.pack_rows(src.Rows(begin, end - begin), row_begin + begin, w->dtype, forward);
  });
  if (w->transposed.empty()) return;
  const Panels transposed = Side(*w, true, group);
  Split(src.cols, kPanel, src.rows * 0.5, [&](int64_t begin, int64_t end) {
    char* panels = const_cast<char*>(transposed.data) + begin / kPanel * transposed.stride() * SizeOf(w->dtype);
    k_.pack_transposed(src.Cols(begin, end - begin), row_begin, w->n, w->dtype, panels);
  });
}

void CpuBackend::Gemm(ConstMat x, const PackedWeight& w, const GemmOptions& options, Mat y) {
  MOERL_CHECK(w.groups == 1);
  const int64_t offsets[] = {0, x.rows};
  GroupedGemm(x, offsets, w, options, y);
}

void CpuBackend::GroupedGemm(ConstMat x, absl::Span<const int64_t> offsets, const PackedWeight& w,
                             const GemmOptions& options, Mat y) {
  MOERL_CHECK(static_cast<int64_t>(offsets.size()) == w.groups + 1);
  MOERL_CHECK(offsets.front() == 0 && offsets.back() == x.rows && y.rows == x.rows);
  MOERL_CHECK(x.cols == (options.transposed ? w.n : w.k) && y.cols == (options.transposed ? w.k : w.n));
  MOERL_CHECK(!options.add || y.dtype == DType::kF32);
  x = InComputeType(x, w.dtype);

  std::vector<GemmCall> calls;
  for (int64_t g = 0; g < w.groups; ++g) {
    MOERL_CHECK(offsets[g] <= offsets[g + 1]);
    if (offsets[g] == offsets[g + 1]) continue;
    const Panels p = Side(w, options.transposed, g);
    GemmCall c;
    c.x = x.RowBytes(offsets[g]);
    c.x_stride = x.stride;
    c.x_step = DepthStep(w.dtype);
    c.w = p.data;
    c.panel_stride = p.stride();
    c.m = offsets[g + 1] - offsets[g];
    c.n = p.n;
    c.k = p.k;
    c.y = y.RowBytes(offsets[g]);
    c.y_stride = y.stride;
    c.y_dtype = y.dtype;
    c.bias = options.bias;
    c.finish = options.add ? Finish::kAdd : Finish::kStore;
    calls.push_back(c);
  }
  RunGemms(w.dtype, calls);
  if (!options.transposed) coming_.Done(w.forward.raw());
}

void CpuBackend::WillRead(const PackedWeight& w) { coming_.Add(w.forward.raw(), w.forward.bytes()); }

void CpuBackend::WeightGrad(ConstMat dy, ConstMat x, DType compute, Mat dw) {
  const int64_t offsets[] = {0, x.rows};
  GroupedWeightGrad(dy, x, offsets, compute, dw);
}

// dw = dyᵀ x with tokens as the depth: both operands become panels over tokens, x's panels as the weight and dy's
// as rows that are read down a panel. The chain starts from dw, so that a later call goes on where one ended.
void CpuBackend::GroupedWeightGrad(ConstMat dy, ConstMat x, absl::Span<const int64_t> offsets, DType compute, Mat dw) {
  const int64_t groups = static_cast<int64_t>(offsets.size()) - 1;
  MOERL_CHECK(groups >= 1 && offsets.front() == 0 && offsets.back() == x.rows && dy.rows == x.rows);
  MOERL_CHECK(dw.dtype == DType::kF32 && dw.rows == groups * dy.cols && dw.cols == x.cols);

  // 1. Where each group's panels go; depths are padded to even for bf16 pairs.
  struct Group {
    int64_t begin, tokens, padded, at;  // `at`: padded tokens of the groups before
  };
  std::vector<Group> work;
  int64_t padded_tokens = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t tokens = offsets[g + 1] - offsets[g];
    MOERL_CHECK(tokens >= 0);
    work.push_back({offsets[g], tokens, PaddedDepth(compute, tokens), padded_tokens});
    padded_tokens += work.back().padded;
  }
  const int64_t dy_panels = NumPanels(dy.cols), x_panels = NumPanels(x.cols), panels = dy_panels + x_panels;
  const int64_t size = SizeOf(compute);
  char* memory = static_cast<char*>(Scratch(kWeightGradSlot, padded_tokens * panels * kPanel * size));
  const auto panel_of = [&](const Group& g, int64_t panel) {
    return memory + (g.at * panels + panel * g.padded) * kPanel * size;
  };

  // 2. Pack; panels [0, dy_panels) are dy's.
  const double pack_cost = static_cast<double>(x.rows) * static_cast<double>(dy.cols + x.cols) * 0.1;
  Share(groups * panels, pack_cost, [&](int64_t task, int) {
    const Group& g = work[task / panels];
    if (g.tokens == 0) return;
    const int64_t panel = task % panels;
    const ConstMat& source = panel < dy_panels ? dy : x;
    const int64_t column = (panel < dy_panels ? panel : panel - dy_panels) * kPanel;
    k_.pack_tokens(source.Rows(g.begin, g.tokens).Cols(column, std::min(kPanel, source.cols - column)), compute,
                   panel_of(g, panel));
  });

  // 3. One GEMM for each panel of dy, that is for 32 rows of dw.
  std::vector<GemmCall> calls;
  for (int64_t i = 0; i < groups; ++i) {
    const Group& g = work[i];
    if (g.tokens == 0) continue;
    for (int64_t panel = 0; panel < dy_panels; ++panel) {
      GemmCall c;
      c.x = panel_of(g, panel);
      c.x_stride = DepthStep(compute);
      c.x_step = DepthStep(compute) * kPanel;
      c.w = panel_of(g, dy_panels);
      c.panel_stride = g.padded * kPanel;
      c.m = std::min(kPanel, dy.cols - panel * kPanel);
      c.n = x.cols;
      c.k = g.padded;
      c.y = dw.RowBytes(i * dy.cols + panel * kPanel);
      c.y_stride = dw.stride;
      c.finish = Finish::kChain;
      calls.push_back(c);
    }
  }
  RunGemms(compute, calls);
}

}  // namespace moerl::tensor
