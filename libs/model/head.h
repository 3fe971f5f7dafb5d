#ifndef MOERL_LIBS_MODEL_HEAD_H_
#define MOERL_LIBS_MODEL_HEAD_H_

#include <vector>

#include "libs/model/arena.h"
#include "libs/model/batch.h"
#include "libs/model/transformer.h"

namespace moerl::model {

// The end of the model, private to the library: final norm and vocabulary for the rows whose log-probabilities are
// wanted.

// Row i of the head's input is residual row `row[i]`, and predicts `target[i]`, the token at `token[i]`. Rows that keep
// the whole vocabulary come first (`num_plain` of them), those with a kept set after them.
struct HeadRows {
  std::vector<int32_t> row, target;
  std::vector<int64_t> token;
  std::vector<float> temperature;
  int64_t num_plain = 0;
  std::vector<int32_t> kept_ids;
  std::vector<int64_t> kept_begin;  // of the rows after num_plain

  int64_t size() const { return static_cast<int64_t>(row.size()); }
};
HeadRows MakeHeadRows(const PackedBatch& batch);

// What backward needs; x is the gathered residual rows.
struct HeadSaved {
  tensor::Mat x, inv_rms, h;
  std::vector<tensor::RowStats> stats;
  std::vector<float> entropy;  // empty when not asked for
};

// Log-probabilities (and entropies) of the wanted tokens, into result's arrays by token.
void HeadForward(const Engine& engine, const HeadRows& rows, tensor::ConstMat x, bool want_entropy, Arena& keep,
                 HeadSaved* saved, ForwardResult* result);

// dx [T, hidden] += the gradient through the wanted rows, from d_logprobs and d_entropy by token (either may be empty).
void HeadBackward(const Engine& engine, const HeadRows& rows, const HeadSaved& saved,
                  absl::Span<const float> d_logprobs, absl::Span<const float> d_entropy, tensor::Mat d_head,
                  float* d_final_norm, tensor::Mat dx, Arena& temp);

// The critic's head over every row of x [T, hidden]: values into result, h and what backward needs into saved (may be
// null).
struct ValueSaved {
  tensor::Mat x, inv_rms, h;
};
void ValueForward(const Engine& engine, tensor::ConstMat x, Arena& keep, ValueSaved* saved, ForwardResult* result);

// dx [T, hidden] += the gradient from d_values [T].
void ValueBackward(const Engine& engine, const ValueSaved& saved, absl::Span<const float> d_values, tensor::Mat d_head,
                   float* d_final_norm, tensor::Mat dx, Arena& temp);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_HEAD_H_
