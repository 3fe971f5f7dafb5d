#ifndef MOERL_LIBS_MODEL_PACKED_RUN_H_
#define MOERL_LIBS_MODEL_PACKED_RUN_H_

#include <vector>

#include "libs/model/head.h"
#include "libs/model/training.h"
#include "libs/model/transformer.h"

namespace moerl::model {

// A packed batch going through the layers, private to the library: the forward that scoring and training share.

// What is derived from a batch once.
struct PackedPlan {
  std::vector<int32_t> tokens, positions;
  std::vector<int64_t> offsets;
  HeadRows head;
  std::vector<std::vector<int32_t>> replay;  // [MoE layers][T * top_k], -1 first: free; empty: all free
  int64_t num_tokens() const { return static_cast<int64_t>(tokens.size()); }
};
PackedPlan MakePackedPlan(const PackedBatch& batch, const ModelConfig& config);

// What backward keeps of one layer. With recomputation only `x`, the layer's input, and the routes and handle in `mlp`.
struct LayerSaved {
  tensor::Mat x;
  AttentionSaved attention;
  MlpSaved mlp;
};

enum class KeepForBackward { kNothing, kLayerInputs, kEverything };

// Embeds and runs all layers; x [T, hidden] is the residual stream before the final norm. `saved` has an entry a layer
// (with kNothing one entry serves them all). Router statistics and, when asked for, routes go to `result`, digests of x
// after each stage to `stage_digests` unless it is null.
absl::Status RunLayers(const Engine& engine, const PackedPlan& plan, const Rotary& rotary, KeepForBackward what,
                       Arena& keep, Arena& temp, std::vector<LayerSaved>& saved, tensor::Mat x, bool want_routes,
                       ForwardResult* result, std::vector<uint64_t>* stage_digests = nullptr);

// Attention over whole packed sequences.
void AttendPacked(const Engine& engine, absl::Span<const int64_t> offsets, tensor::ConstMat q, tensor::ConstMat k,
                  tensor::ConstMat v, tensor::Mat out, tensor::RowStats* stats);

// Result arrays of the right sizes, zeroed.
ForwardResult EmptyResult(const ModelConfig& config, int64_t num_tokens, bool entropy, bool values, bool routes);

// Forward only, on an engine that exists.
absl::StatusOr<ForwardResult> ScoreOn(const Engine& engine, const RopeFrequencies& rope, const PackedBatch& batch,
                                      const ScoreOptions& options, Arena& arena);

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_PACKED_RUN_H_
