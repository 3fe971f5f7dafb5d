#include <algorithm>
#include <limits>
#include <vector>

#include "libs/base/check.h"
#include "libs/tensor/cpu/backend_impl.h"
#include "libs/tensor/math.h"

// Embedding, and log-probabilities over the vocabulary in blocks of logits that are never all kept.
namespace moerl::tensor {
namespace {

constexpr int64_t kRowsForward = 64;            // rows whose logits one thread holds, a block at a time
constexpr int64_t kGradientElements = 8 << 20;  // logit gradients held at once in backward
constexpr double kNsPerMultiplyAdd = 0.01;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

float TemperatureOf(absl::Span<const float> temperatures, int64_t row) {
  return temperatures.empty() ? 1.0f : temperatures[row];
}

absl::Span<const int32_t> KeptOf(const KeptIds& kept, int64_t row) {
  return kept.ids.subspan(kept.begin[row], kept.begin[row + 1] - kept.begin[row]);
}

void CheckKept(const KeptIds* kept, int64_t rows, int64_t vocabulary) {
  if (kept == nullptr) return;
  MOERL_CHECK(static_cast<int64_t>(kept->begin.size()) == rows + 1);
  for (int64_t t = 0; t < rows; ++t) {
    int32_t last = -1;
    for (const int32_t id : KeptOf(*kept, t)) {
      MOERL_CHECK(id > last && id < vocabulary);
      last = id;
    }
    MOERL_CHECK(last >= 0);
  }
}

RowStats Finished(const SoftmaxState& state) { return {state.max, Log(state.sum)}; }

// -sum p log p = log sum - sum e^(z - max) (z - max) / sum.
float EntropyOf(const SoftmaxState& state) { return Log(state.sum) - state.weighted / state.sum; }

// One row's softmax over `count` logits (all, or the kept ones in ascending id), walked in the same blocks.
SoftmaxState StateOf(const KernelTable& kernels, const float* logits, int64_t count, float temperature, bool entropy) {
  SoftmaxState state{-kInfinity, 0, 0};
  float block[kVocabularyBlock];  // the kernel works in place
  for (int64_t at = 0; at < count; at += kVocabularyBlock) {
    const int64_t size = std::min(kVocabularyBlock, count - at);
    std::copy_n(logits + at, size, block);
    kernels.softmax_block(block, size, temperature, entropy, &state);
  }
  return state;
}

// The GEMM of rows x with the vocabulary block that begins at `id`.
GemmCall LogitsCall(ConstMat x, const PackedWeight& head, int64_t id, int64_t count, float* logits,
                    int64_t logits_stride) {
  const int64_t depth = head.dtype == DType::kBf16 ? (head.k + 1) / 2 * 2 : head.k;
  GemmCall c;
  c.x = x.data;
  c.x_stride = x.stride;
  c.x_step = DepthStep(head.dtype);
  c.panel_stride = depth * kPanel;
  c.w = static_cast<const char*>(head.forward.raw()) + id / kPanel * c.panel_stride * SizeOf(head.dtype);
  c.m = x.rows;
  c.n = count;
  c.k = head.k;
  c.y = logits;
  c.y_stride = logits_stride;
  return c;
}

// Zeros what is not kept of ids [id, id + count).
void ClearOthers(absl::Span<const int32_t> ids, int64_t id, int64_t count, float* row) {
  auto at = std::lower_bound(ids.begin(), ids.end(), static_cast<int32_t>(id));
  for (int64_t j = 0; j < count; ++j) {
    if (at != ids.end() && *at == id + j) {
      ++at;
    } else {
      row[j] = 0;
    }
  }
}

}  // namespace

void CpuBackend::Embed(ConstMat table, absl::Span<const int32_t> ids, Mat y) { GatherRows(table, ids, y); }

void CpuBackend::EmbedBackward(ConstMat dy, absl::Span<const int32_t> ids, Mat dtable) {
  MOERL_CHECK(dy.rows == static_cast<int64_t>(ids.size()) && dy.cols == dtable.cols && dtable.dtype == DType::kF32);
  for (const int32_t id : ids) MOERL_CHECK(id >= 0 && id < dtable.rows);
  // Columns are split, never tokens.
  Split(dy.cols, kLaneColumns, static_cast<double>(dy.rows) * 0.2, [&](int64_t begin, int64_t end) {
    for (int64_t t = 0; t < dy.rows; ++t) {
      k_.add(dy.Rows(t, 1).Cols(begin, end - begin), dtable.Rows(ids[t], 1).Cols(begin, end - begin), 0, 1);
    }
  });
}

void CpuBackend::LogProbs(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                          absl::Span<const float> temperatures, const KeptIds* kept, float* logprobs, RowStats* stats,
                          float* entropy) {
  MOERL_CHECK(head.groups == 1 && h.cols == head.k && h.rows == static_cast<int64_t>(targets.size()));
  MOERL_CHECK(temperatures.empty() || static_cast<int64_t>(temperatures.size()) == h.rows);
  CheckKept(kept, h.rows, head.n);
  for (const int32_t id : targets) MOERL_CHECK(id >= 0 && id < head.n);
  h = InComputeType(h, head.dtype);
  const auto gemm = head.dtype == DType::kBf16 ? k_.gemm_bf16 : k_.gemm_f32;

  const int64_t per_thread = (h.rows + pool_.num_threads() - 1) / pool_.num_threads();
  const int64_t step = std::clamp<int64_t>((per_thread + 7) / 8 * 8, 8, kRowsForward);
  const double cost = static_cast<double>(h.rows * head.n) * static_cast<double>(head.k) * kNsPerMultiplyAdd;
  Share((h.rows + step - 1) / step, cost, [&](int64_t task, int thread) {
    const int64_t begin = task * step, rows = std::min(step, h.rows - begin);
    float* logits = static_cast<float*>(Scratch(thread, rows * kVocabularyBlock * static_cast<int64_t>(sizeof(float))));
    std::vector<SoftmaxState> states(rows, SoftmaxState{-kInfinity, 0, 0});
    std::vector<float> chosen(rows);
    std::vector<std::vector<float>> kept_logits(kept == nullptr ? 0 : rows);
    for (int64_t id = 0; id < head.n; id += kVocabularyBlock) {
      const int64_t count = std::min(kVocabularyBlock, head.n - id);
      gemm(LogitsCall(h.Rows(begin, rows), head, id, count, logits, kVocabularyBlock));
      for (int64_t r = 0; r < rows; ++r) {
        float* row = logits + r * kVocabularyBlock;
        const int64_t t = begin + r;
        if (targets[t] >= id && targets[t] < id + count) chosen[r] = row[targets[t] - id];
        if (kept == nullptr) {
          k_.softmax_block(row, count, TemperatureOf(temperatures, t), entropy != nullptr, &states[r]);
        } else {
          const absl::Span<const int32_t> ids = KeptOf(*kept, t);
          auto at = std::lower_bound(ids.begin(), ids.end(), static_cast<int32_t>(id));
          for (; at != ids.end() && *at < id + count; ++at) kept_logits[r].push_back(row[*at - id]);
        }
      }
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t t = begin + r;
      const float temperature = TemperatureOf(temperatures, t);
      if (kept != nullptr) {
        const int64_t count = static_cast<int64_t>(kept_logits[r].size());
        states[r] = StateOf(k_, kept_logits[r].data(), count, temperature, entropy != nullptr);
      }
      stats[t] = Finished(states[r]);
      logprobs[t] = (chosen[r] / temperature - stats[t].max) - stats[t].log_sum;
      if (entropy != nullptr) entropy[t] = EntropyOf(states[r]);
    }
  });
}

void CpuBackend::LogitStats(ConstMat logits, absl::Span<const float> temperatures, const KeptIds* kept,
                            RowStats* stats) {
  MOERL_CHECK(logits.dtype == DType::kF32);
  MOERL_CHECK(temperatures.empty() || static_cast<int64_t>(temperatures.size()) == logits.rows);
  CheckKept(kept, logits.rows, logits.cols);
  Split(logits.rows, 1, static_cast<double>(logits.cols) * 0.5, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* row = logits.Row<float>(t);
      const float temperature = TemperatureOf(temperatures, t);
      if (kept == nullptr) {
        stats[t] = Finished(StateOf(k_, row, logits.cols, temperature, false));
        continue;
      }
      std::vector<float> chosen;
      for (const int32_t id : KeptOf(*kept, t)) chosen.push_back(row[id]);
      stats[t] = Finished(StateOf(k_, chosen.data(), static_cast<int64_t>(chosen.size()), temperature, false));
    }
  });
}

// d log p_target / d logit_j = ([j = target] - p_j) / temperature. Rows go in runs of an even number (bf16 adds
// tokens in pairs); their logit gradients are kept, in the compute type, for two GEMMs.
void CpuBackend::LogProbsBackward(ConstMat h, const PackedWeight& head, absl::Span<const int32_t> targets,
                                  absl::Span<const float> temperatures, const KeptIds* kept, const RowStats* stats,
                                  const float* dlogprobs, Mat dh, Mat dhead) {
  MOERL_CHECK(head.groups == 1 && h.cols == head.k && h.rows == static_cast<int64_t>(targets.size()));
  MOERL_CHECK(dh.rows == h.rows && dh.cols == h.cols && dhead.rows == head.n && dhead.cols == head.k);
  CheckKept(kept, h.rows, head.n);
  h = InComputeType(h, head.dtype);
  const auto gemm = head.dtype == DType::kBf16 ? k_.gemm_bf16 : k_.gemm_f32;

  const int64_t run = std::clamp<int64_t>(kGradientElements / head.n / 2 * 2, 64, 1024);
  const int64_t held = std::min(run, h.rows);
  void* memory = Scratch(kLogitGradientSlot, held * head.n * SizeOf(head.dtype));
  const Mat gradients(memory, head.dtype, held, head.n, head.n);
  const int64_t blocks = (head.n + kVocabularyBlock - 1) / kVocabularyBlock;
  for (int64_t begin = 0; begin < h.rows; begin += run) {
    const int64_t rows = std::min(run, h.rows - begin);
    const ConstMat run_h = h.Rows(begin, rows);
    const Mat dlogits = gradients.Rows(0, rows);
    const double cost = static_cast<double>(rows * head.n) * static_cast<double>(head.k) * kNsPerMultiplyAdd;
    Share(blocks, cost, [&](int64_t block, int thread) {
      const int64_t id = block * kVocabularyBlock, count = std::min(kVocabularyBlock, head.n - id);
      float* logits =
          static_cast<float*>(Scratch(thread, rows * kVocabularyBlock * static_cast<int64_t>(sizeof(float))));
      gemm(LogitsCall(run_h, head, id, count, logits, kVocabularyBlock));
      for (int64_t r = 0; r < rows; ++r) {
        const int64_t t = begin + r;
        float* row = logits + r * kVocabularyBlock;
        const float factor = dlogprobs[t] / TemperatureOf(temperatures, t);
        k_.softmax_block_backward(row, count, TemperatureOf(temperatures, t), stats[t], factor, row);
        if (kept != nullptr) ClearOthers(KeptOf(*kept, t), id, count, row);
        if (targets[t] >= id && targets[t] < id + count) row[targets[t] - id] += factor;
      }
      k_.cast(ConstMat(logits, DType::kF32, rows, count, kVocabularyBlock), dlogits.Cols(id, count), 0, rows);
    });
    WeightGrad(dlogits, run_h, head.dtype, dhead);
    GemmOptions options;
    options.transposed = true;
    Gemm(dlogits, head, options, dh.Rows(begin, rows));
  }
}

}  // namespace moerl::tensor
