#include <algorithm>
#include <numeric>
#include <vector>

#include "libs/base/check.h"
#include "libs/tensor/cpu/backend_impl.h"
#include "libs/tensor/math.h"

// Attention: work is shared out by sequence, key head and range of query rows.
namespace moerl::tensor {
namespace {

constexpr int64_t kQueriesPerTask = 64;
constexpr double kNsPerMultiplyAdd = 0.03;

// Chunks and page tables of whole sequences whose pages follow one another.
struct PackedPlan {
  std::vector<SequenceChunk> chunks;
  std::vector<int32_t> pages;
};

PackedPlan PlanPacked(absl::Span<const int64_t> offsets) {
  PackedPlan plan;
  int64_t num_pages = 0;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    num_pages += (offsets[s + 1] - offsets[s] + kPageTokens - 1) / kPageTokens;
  }
  plan.pages.resize(num_pages);
  std::iota(plan.pages.begin(), plan.pages.end(), 0);
  const int32_t* next = plan.pages.data();
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const int64_t rows = offsets[s + 1] - offsets[s];
    MOERL_CHECK(rows >= 0);
    if (rows == 0) continue;
    plan.chunks.push_back({offsets[s], rows, 0, next});
    next += (rows + kPageTokens - 1) / kPageTokens;
  }
  return plan;
}

}  // namespace

void CpuBackend::KvWrite(ConstMat k, ConstMat v, absl::Span<const SequenceChunk> chunks, const KvCache& cache) {
  MOERL_CHECK(k.cols == cache.kv_heads * cache.head_dim && v.cols == k.cols && k.rows == v.rows && k.dtype == v.dtype);
  MOERL_CHECK(cache.page_stride_bytes >= KvPageBytes(cache.dtype, cache.kv_heads, cache.head_dim));
  const int64_t tasks = static_cast<int64_t>(chunks.size()) * cache.kv_heads;
  Share(tasks, static_cast<double>(k.rows * k.cols) * 1.0,
        [&](int64_t task, int) { k_.kv_write(k, v, chunks[task / cache.kv_heads], cache, task % cache.kv_heads); });
}

void CpuBackend::Attend(ConstMat q, absl::Span<const SequenceChunk> chunks, const KvCache& cache, float scale, Mat out,
                        RowStats* stats) {
  MOERL_CHECK(cache.head_dim >= 1 && cache.head_dim <= kMaxHeadDim && q.cols % cache.head_dim == 0);
  MOERL_CHECK(q.rows == out.rows && q.cols == out.cols);
  AttentionCall call;
  call.q = &q;
  call.cache = &cache;
  call.q_heads = q.cols / cache.head_dim;
  call.scale = scale;
  call.out = &out;
  call.stats = stats;
  MOERL_CHECK(cache.kv_heads >= 1 && call.q_heads % cache.kv_heads == 0);
  const int64_t group = call.q_heads / cache.kv_heads;

  struct Task {
    const SequenceChunk* chunk;
    int64_t kv_head, begin, end;
  };
  std::vector<Task> tasks;
  double cost = 0;
  for (const SequenceChunk& chunk : chunks) {
    MOERL_CHECK(chunk.row_begin >= 0 && chunk.row_begin + chunk.rows <= q.rows && chunk.first_position >= 0);
    cost += static_cast<double>(chunk.rows) * static_cast<double>(chunk.first_position + chunk.rows) *
            static_cast<double>(q.cols) * 2 * kNsPerMultiplyAdd;
    for (int64_t h = 0; h < cache.kv_heads; ++h) {
      for (int64_t at = 0; at < chunk.rows * group; at += kQueriesPerTask) {
        tasks.push_back({&chunk, h, at, std::min(at + kQueriesPerTask, chunk.rows * group)});
      }
    }
  }
  Share(static_cast<int64_t>(tasks.size()), cost, [&](int64_t i, int) {
    const Task& t = tasks[i];
    k_.attention(call, *t.chunk, t.kv_head, t.begin, t.end);
  });
}

void CpuBackend::AttentionPaged(ConstMat q, absl::Span<const SequenceChunk> chunks, const KvCache& cache, float scale,
                                Mat out) {
  Attend(q, chunks, cache, scale, out, nullptr);
}

// The packed form writes the keys and values into pages of its own and runs the paged form: one order, one code.
void CpuBackend::AttentionPacked(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets,
                                 int64_t head_dim, float scale, Mat out, RowStats* stats) {
  MOERL_CHECK(!offsets.empty() && offsets.front() == 0 && offsets.back() == q.rows && k.cols % head_dim == 0);
  const PackedPlan plan = PlanPacked(offsets);
  KvCache cache;
  cache.dtype = k.dtype;
  cache.kv_heads = k.cols / head_dim;
  cache.head_dim = head_dim;
  cache.page_stride_bytes = (KvPageBytes(k.dtype, cache.kv_heads, head_dim) + 63) / 64 * 64;
  cache.base = Scratch(kPagesSlot, static_cast<int64_t>(plan.pages.size()) * cache.page_stride_bytes);
  KvWrite(k, v, plan.chunks, cache);
  Attend(q, plan.chunks, cache, scale, out, stats);
  if (stats == nullptr) return;
  const int64_t count = q.rows * (q.cols / head_dim);
  for (int64_t i = 0; i < count; ++i) stats[i].log_sum = Log(stats[i].log_sum);
}

void CpuBackend::AttentionPackedBackward(ConstMat q, ConstMat k, ConstMat v, absl::Span<const int64_t> offsets,
                                         int64_t head_dim, float scale, ConstMat out, const RowStats* stats,
                                         ConstMat dout, Mat dq, Mat dk, Mat dv) {
  MOERL_CHECK(!offsets.empty() && offsets.front() == 0 && offsets.back() == q.rows);
  MOERL_CHECK(head_dim >= 1 && head_dim <= kMaxHeadDim && q.cols % head_dim == 0 && k.cols % head_dim == 0);
  MOERL_CHECK(v.cols == k.cols && out.cols == q.cols && dout.cols == q.cols && dq.cols == q.cols);
  MOERL_CHECK(dk.cols == k.cols && dv.cols == k.cols && k.dtype == v.dtype);
  AttentionBackwardCall call;
  call.q = &q, call.k = &k, call.v = &v, call.out = &out, call.dout = &dout;
  call.stats = stats;
  call.q_heads = q.cols / head_dim;
  call.kv_heads = k.cols / head_dim;
  call.head_dim = head_dim;
  call.scale = scale;
  call.dq = &dq, call.dk = &dk, call.dv = &dv;
  MOERL_CHECK(call.q_heads % call.kv_heads == 0);

  double cost = 0;
  for (size_t s = 0; s + 1 < offsets.size(); ++s) {
    const double rows = static_cast<double>(offsets[s + 1] - offsets[s]);
    cost += rows * (rows + kPageTokens) / 2 * static_cast<double>(q.cols) * 5 * kNsPerMultiplyAdd;
  }
  const int64_t sequences = static_cast<int64_t>(offsets.size()) - 1;
  Share(sequences * call.kv_heads, cost, [&](int64_t task, int thread) {
    const int64_t begin = offsets[task / call.kv_heads], end = offsets[task / call.kv_heads + 1];
    if (begin == end) return;
    const int64_t floats = AttentionBackwardScratch(end - begin, call.q_heads / call.kv_heads, head_dim);
    float* scratch = static_cast<float*>(Scratch(thread, floats * static_cast<int64_t>(sizeof(float))));
    k_.attention_backward(call, begin, end, task % call.kv_heads, scratch);
  });
}

}  // namespace moerl::tensor
