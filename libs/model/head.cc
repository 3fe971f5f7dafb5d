#include "libs/model/head.h"

#include <algorithm>
#include <cmath>

#include "libs/tensor/math.h"

namespace moerl::model {

using tensor::ConstMat;
using tensor::DType;
using tensor::KeptIds;
using tensor::Mat;
using tensor::RowStats;

namespace {

// Rows of logits held at once where the gradient of the entropy needs them.
constexpr int64_t kLogitRows = 64;

// A run of head rows that share one form of the kernels: all plain, or all with kept sets.
struct Part {
  int64_t begin, size;
  bool kept;
};

std::vector<Part> Parts(const HeadRows& rows) {
  std::vector<Part> parts;
  if (rows.num_plain > 0) parts.push_back({0, rows.num_plain, false});
  if (rows.num_plain < rows.size()) parts.push_back({rows.num_plain, rows.size() - rows.num_plain, true});
  return parts;
}

// d z of one row, z being its tempered logits: from L = g * log p(target) + f * entropy,
//   dL/dz_j = g * (1[j = target] - p_j) - f * p_j * (log p_j + entropy)
// then divided by the temperature; zero outside the kept set.
void LogitGradient(absl::Span<float> logits, absl::Span<const int32_t> kept, int32_t target, float temperature,
                   const RowStats& stats, float entropy, float g, float f) {
  const auto gradient = [&](float logit, bool is_target) {
    const float logp = (logit / temperature - stats.max) - stats.log_sum;
    const float p = tensor::Exp(logp);
    const float entropy_part = p > 0 ? f * p * (logp + entropy) : 0.0f;
    return (g * ((is_target ? 1.0f : 0.0f) - p) - entropy_part) / temperature;
  };
  if (kept.empty()) {
    for (size_t j = 0; j < logits.size(); ++j) logits[j] = gradient(logits[j], static_cast<int32_t>(j) == target);
    return;
  }
  std::vector<float> values(kept.size());
  for (size_t i = 0; i < kept.size(); ++i) values[i] = gradient(logits[kept[i]], kept[i] == target);
  std::fill(logits.begin(), logits.end(), 0.0f);
  for (size_t i = 0; i < kept.size(); ++i) logits[kept[i]] = values[i];
}

// dh and dW of a part through explicit logits, a few rows at a time.
void EntropyBackward(const Engine& e, const HeadRows& rows, const HeadSaved& saved, const Part& part,
                     absl::Span<const float> g, absl::Span<const float> f, Mat d_head, Mat dh, Arena& temp) {
  const int64_t vocab = e.config.vocab_size;
  Mat logits = temp.Take(DType::kF32, std::min(part.size, kLogitRows), vocab);
  for (int64_t begin = part.begin; begin < part.begin + part.size; begin += kLogitRows) {
    const int64_t count = std::min(kLogitRows, part.begin + part.size - begin);
    const Mat z = logits.Rows(0, count);
    e.backend.Gemm(saved.h.Rows(begin, count), e.model.head, {}, z);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = begin + i, kept_row = row - rows.num_plain;
      absl::Span<const int32_t> kept;
      if (part.kept) {
        const int64_t from = rows.kept_begin[kept_row];
        kept = absl::MakeSpan(rows.kept_ids).subspan(from, rows.kept_begin[kept_row + 1] - from);
      }
      LogitGradient({z.Row<float>(i), static_cast<size_t>(vocab)}, kept, rows.target[row], rows.temperature[row],
                    saved.stats[row], saved.entropy[row], g[row], f[row]);
    }
    e.backend.Gemm(z, e.model.head, {.transposed = true}, dh.Rows(begin, count));
    e.backend.WeightGrad(z, saved.h.Rows(begin, count), e.dtype, d_head);
  }
}

}  // namespace

HeadRows MakeHeadRows(const PackedBatch& batch) {
  HeadRows out;
  std::vector<int64_t> kept_tokens;
  std::vector<int64_t> sequence_of_kept;
  const auto add = [&](int64_t token, int64_t sequence) {
    out.row.push_back(static_cast<int32_t>(token - 1));
    out.token.push_back(token);
    out.target.push_back(batch.tokens[token]);
    const float t = batch.temperature.empty() ? 1.0f : batch.temperature[sequence];
    out.temperature.push_back(t > 0 ? t : 1.0f);
  };
  for (int64_t s = 0; s < batch.num_sequences(); ++s) {
    for (int64_t t = batch.offsets[s] + 1; t < batch.offsets[s + 1]; ++t) {
      if (!batch.wanted.empty() && batch.wanted[t] == 0) continue;
      if (!batch.kept_offsets.empty() && batch.kept_offsets[t] < batch.kept_offsets[t + 1]) {
        kept_tokens.push_back(t);
        sequence_of_kept.push_back(s);
      } else {
        add(t, s);
      }
    }
  }
  out.num_plain = out.size();
  out.kept_begin.push_back(0);
  for (size_t i = 0; i < kept_tokens.size(); ++i) {
    const int64_t t = kept_tokens[i];
    add(t, sequence_of_kept[i]);
    out.kept_ids.insert(out.kept_ids.end(), batch.kept_ids.begin() + batch.kept_offsets[t],
                        batch.kept_ids.begin() + batch.kept_offsets[t + 1]);
    out.kept_begin.push_back(static_cast<int64_t>(out.kept_ids.size()));
  }
  return out;
}

void HeadForward(const Engine& e, const HeadRows& rows, ConstMat x, bool want_entropy, Arena& keep, HeadSaved* saved,
                 ForwardResult* result) {
  const int64_t n = rows.size(), hidden = e.config.hidden_size;
  if (n == 0) return;
  saved->x = keep.Take(DType::kF32, n, hidden);
  saved->inv_rms = keep.Take(DType::kF32, n, 1);
  saved->h = keep.Take(e.dtype, n, hidden);
  saved->stats.resize(n);
  saved->entropy.assign(want_entropy ? n : 0, 0.0f);
  e.backend.GatherRows(x, rows.row, saved->x);
  e.backend.RmsNorm(saved->x, e.model.final_norm, e.config.rms_norm_eps, saved->h, saved->inv_rms.Row<float>(0));
  std::vector<float> logprobs(n);
  for (const Part& part : Parts(rows)) {
    const KeptIds kept{rows.kept_ids, rows.kept_begin};
    e.backend.LogProbs(
        saved->h.Rows(part.begin, part.size), e.model.head, absl::MakeSpan(rows.target).subspan(part.begin, part.size),
        absl::MakeSpan(rows.temperature).subspan(part.begin, part.size), part.kept ? &kept : nullptr,
        &logprobs[part.begin], &saved->stats[part.begin], want_entropy ? &saved->entropy[part.begin] : nullptr);
  }
  for (int64_t i = 0; i < n; ++i) {
    result->logprobs[rows.token[i]] = logprobs[i];
    if (want_entropy) result->entropy[rows.token[i]] = saved->entropy[i];
  }
}

void HeadBackward(const Engine& e, const HeadRows& rows, const HeadSaved& saved, absl::Span<const float> d_logprobs,
                  absl::Span<const float> d_entropy, Mat d_head, float* d_final_norm, Mat dx, Arena& temp) {
  const int64_t n = rows.size(), hidden = e.config.hidden_size;
  if (n == 0) return;
  std::vector<float> g(n, 0.0f), f(n, 0.0f);
  for (int64_t i = 0; i < n; ++i) {
    if (!d_logprobs.empty()) g[i] = d_logprobs[rows.token[i]];
    if (!d_entropy.empty()) f[i] = d_entropy[rows.token[i]];
  }
  Mat dh = temp.Take(DType::kF32, n, hidden);
  for (const Part& part : Parts(rows)) {
    const KeptIds kept{rows.kept_ids, rows.kept_begin};
    if (!d_entropy.empty()) {
      EntropyBackward(e, rows, saved, part, g, f, d_head, dh, temp);
      continue;
    }
    e.backend.LogProbsBackward(
        saved.h.Rows(part.begin, part.size), e.model.head, absl::MakeSpan(rows.target).subspan(part.begin, part.size),
        absl::MakeSpan(rows.temperature).subspan(part.begin, part.size), part.kept ? &kept : nullptr,
        &saved.stats[part.begin], &g[part.begin], dh.Rows(part.begin, part.size), d_head);
  }
  Mat dx_rows = temp.Take(DType::kF32, n, hidden);
  e.backend.RmsNormBackward(dh, saved.x, e.model.final_norm, saved.inv_rms.Row<float>(0), false, dx_rows, d_final_norm);
  for (int64_t i = 0; i < n; ++i) {
    e.backend.Add(dx_rows.Rows(i, 1), dx.Rows(rows.row[i], 1));
  }
}

void ValueForward(const Engine& e, ConstMat x, Arena& keep, ValueSaved* saved, ForwardResult* result) {
  if (x.rows == 0) return;
  Mat h = keep.Take(e.dtype, x.rows, x.cols), values = keep.Take(DType::kF32, x.rows, 1);
  float* inv_rms = nullptr;
  if (saved != nullptr) {
    saved->x = keep.Take(DType::kF32, x.rows, x.cols);
    e.backend.Cast(x, saved->x);
    saved->inv_rms = keep.Take(DType::kF32, x.rows, 1);
    saved->h = h;
    inv_rms = saved->inv_rms.Row<float>(0);
  }
  e.backend.RmsNorm(x, e.model.final_norm, e.config.rms_norm_eps, h, inv_rms);
  e.backend.Gemm(h, e.model.value_head, {}, values);
  e.backend.CopyToHost(values.data, x.rows * static_cast<int64_t>(sizeof(float)), result->values.data());
}

void ValueBackward(const Engine& e, const ValueSaved& saved, absl::Span<const float> d_values, Mat d_head,
                   float* d_final_norm, Mat dx, Arena& temp) {
  if (dx.rows == 0 || d_values.empty()) return;
  Mat d = temp.Take(DType::kF32, dx.rows, 1), dh = temp.Take(DType::kF32, dx.rows, dx.cols);
  e.backend.CopyFromHost(d_values.data(), dx.rows * static_cast<int64_t>(sizeof(float)), d.data);
  e.backend.WeightGrad(d, saved.h, e.dtype, d_head);
  e.backend.Gemm(d, e.model.value_head, {.transposed = true}, dh);
  e.backend.RmsNormBackward(dh, saved.x, e.model.final_norm, saved.inv_rms.Row<float>(0), true, dx, d_final_norm);
}

}  // namespace moerl::model
