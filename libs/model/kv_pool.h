#ifndef MOERL_LIBS_MODEL_KV_POOL_H_
#define MOERL_LIBS_MODEL_KV_POOL_H_

#include <vector>

#include "absl/types/span.h"
#include "libs/model/generator.h"
#include "libs/tensor/backend.h"

namespace moerl::model {

// The pages of a generator's KV cache, private to the library. A page holds kPagePositions positions of every layer and
// counts who uses it; it carries the weight version its keys and values were computed with. Not thread-safe.
class KvPool {
 public:
  KvPool(const ModelConfig& config, tensor::DType dtype, int64_t num_pages, bool poison, tensor::Backend& backend);

  int64_t num_pages() const { return static_cast<int64_t>(users_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_used() const { return num_pages() - num_free(); }

  // A page with one user, contents undefined. There must be a free one.
  int32_t Allocate(Version version);
  void Share(int32_t page) { ++users_[page]; }
  // Takes away one user; the last one frees the page.
  void Release(int32_t page);
  // A page of one's own with the same contents. There must be a free one.
  int32_t Copy(int32_t page);

  Version version(int32_t page) const { return version_[page]; }
  tensor::KvCache layer(int index) const;

 private:
  tensor::Mat Bytes(int32_t page);
  void Poison(int32_t page);

  tensor::Backend& backend_;
  tensor::DType dtype_;
  int64_t kv_heads_, head_dim_, layer_bytes_, page_bytes_;
  bool poison_;
  tensor::Tensor memory_;
  std::vector<int32_t> free_, users_;
  std::vector<Version> version_;
};

// Pages that hold `positions` positions.
inline int64_t PagesFor(int64_t positions) { return (positions + kPagePositions - 1) / kPagePositions; }

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_KV_POOL_H_
