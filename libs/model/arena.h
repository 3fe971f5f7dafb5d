#ifndef MOERL_LIBS_MODEL_ARENA_H_
#define MOERL_LIBS_MODEL_ARENA_H_

#include <algorithm>
#include <cstdint>
#include <vector>

#include "libs/tensor/backend.h"

namespace moerl::model {

// Backend memory that is given out from the front and taken back all at once, so that a step of a small model does not
// visit the heap. Grows by whole blocks; Reset merges them. Contents are undefined. Thread-compatible.
class Arena {
 public:
  explicit Arena(tensor::Backend& backend) : backend_(backend) {}

  tensor::Mat Take(tensor::DType dtype, int64_t rows, int64_t cols) {
    const int64_t bytes = (rows * cols * tensor::SizeOf(dtype) + kAlignment - 1) / kAlignment * kAlignment;
    while (block_ < blocks_.size() && used_ + bytes > blocks_[block_].bytes()) {
      ++block_;
      used_ = 0;
    }
    if (block_ == blocks_.size()) {
      total_ += std::max({bytes, kBlockBytesMin, total_});
      blocks_.push_back(backend_.NewTensor(tensor::DType::kF32, {(total_ - held_) / 4}));
      held_ = total_;
      used_ = 0;
    }
    char* data = static_cast<char*>(blocks_[block_].raw()) + used_;
    used_ += bytes;
    return {data, dtype, rows, cols, cols};
  }

  // A place to rewind to: everything taken since is given back.
  struct Mark {
    size_t block = 0;
    int64_t used = 0;
  };
  Mark mark() const { return {block_, used_}; }
  void Rewind(Mark mark) {
    block_ = mark.block;
    used_ = mark.used;
  }

  // Gives everything back. Several blocks become one that is as large as all of them.
  void Reset() {
    if (blocks_.size() > 1) {
      blocks_.clear();
      blocks_.push_back(backend_.NewTensor(tensor::DType::kF32, {held_ / 4}));
    }
    Rewind({});
  }

 private:
  static constexpr int64_t kAlignment = 64;
  static constexpr int64_t kBlockBytesMin = int64_t{1} << 20;

  tensor::Backend& backend_;
  std::vector<tensor::Tensor> blocks_;
  size_t block_ = 0;
  int64_t used_ = 0, held_ = 0, total_ = 0;
};

}  // namespace moerl::model

#endif  // MOERL_LIBS_MODEL_ARENA_H_
