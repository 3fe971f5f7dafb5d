#ifndef MOERL_LIBS_TENSOR_TENSOR_H_
#define MOERL_LIBS_TENSOR_TENSOR_H_

#include <array>
#include <cstdint>
#include <initializer_list>
#include <memory>

#include "libs/base/check.h"
#include "libs/tensor/dtype.h"

// Owning tensors and the matrix views that kernels take.
namespace moerl::tensor {

// A view of a row-major matrix: `rows` rows of `cols` contiguous elements, `stride` elements apart.
// Owns nothing; the memory must outlive it. Cheap to copy.
struct ConstMat {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  ConstMat() = default;
  ConstMat(const void* data, DType dtype, int64_t rows, int64_t cols, int64_t stride)
      : data(data), dtype(dtype), rows(rows), cols(cols), stride(stride) {}
  ConstMat(const float* data, int64_t rows, int64_t cols) : ConstMat(data, DType::kF32, rows, cols, cols) {}
  ConstMat(const Bf16* data, int64_t rows, int64_t cols) : ConstMat(data, DType::kBf16, rows, cols, cols) {}

  template <typename T>
  const T* Row(int64_t row) const {
    MOERL_CHECK(dtype == kDTypeOf<T>);
    return static_cast<const T*>(data) + row * stride;
  }
  const char* RowBytes(int64_t row) const { return static_cast<const char*>(data) + row * stride * SizeOf(dtype); }
  ConstMat Rows(int64_t begin, int64_t count) const { return {RowBytes(begin), dtype, count, cols, stride}; }
  ConstMat Cols(int64_t begin, int64_t count) const {
    return {RowBytes(0) + begin * SizeOf(dtype), dtype, rows, count, stride};
  }
};

struct Mat {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t stride = 0;

  Mat() = default;
  Mat(void* data, DType dtype, int64_t rows, int64_t cols, int64_t stride)
      : data(data), dtype(dtype), rows(rows), cols(cols), stride(stride) {}
  Mat(float* data, int64_t rows, int64_t cols) : Mat(data, DType::kF32, rows, cols, cols) {}
  Mat(Bf16* data, int64_t rows, int64_t cols) : Mat(data, DType::kBf16, rows, cols, cols) {}
  operator ConstMat() const { return {data, dtype, rows, cols, stride}; }  // NOLINT: a view of the same memory

  template <typename T>
  T* Row(int64_t row) const {
    MOERL_CHECK(dtype == kDTypeOf<T>);
    return static_cast<T*>(data) + row * stride;
  }
  char* RowBytes(int64_t row) const { return static_cast<char*>(data) + row * stride * SizeOf(dtype); }
  Mat Rows(int64_t begin, int64_t count) const { return {RowBytes(begin), dtype, count, cols, stride}; }
  Mat Cols(int64_t begin, int64_t count) const {
    return {RowBytes(0) + begin * SizeOf(dtype), dtype, rows, count, stride};
  }
};

// A dense, row-major tensor of up to four dimensions that owns its memory, aligned to 64 bytes. Move-only.
// The default allocation is host memory with undefined contents; Backend::NewTensor allocates where that
// backend's kernels read.
class Tensor {
 public:
  static constexpr int kMaxRank = 4;
  using Deleter = void (*)(void*);

  Tensor() = default;
  Tensor(DType dtype, std::initializer_list<int64_t> shape);
  // Takes ownership of `data` (SizeOf(dtype) times the product of `shape` bytes), freed with `deleter`.
  Tensor(DType dtype, std::initializer_list<int64_t> shape, void* data, Deleter deleter);

  DType dtype() const { return dtype_; }
  int rank() const { return rank_; }
  int64_t dim(int axis) const { return shape_[axis]; }
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * SizeOf(dtype_); }
  bool empty() const { return size_ == 0; }
  void* raw() { return data_.get(); }
  const void* raw() const { return data_.get(); }

  template <typename T = float>
  T* data() {
    MOERL_CHECK(dtype_ == kDTypeOf<T>);
    return static_cast<T*>(data_.get());
  }
  template <typename T = float>
  const T* data() const {
    MOERL_CHECK(dtype_ == kDTypeOf<T>);
    return static_cast<const T*>(data_.get());
  }

  // The tensor as a matrix: the last dimension is the row, all others are its rows.
  Mat mat() { return {data_.get(), dtype_, rows(), cols(), cols()}; }
  ConstMat mat() const { return {data_.get(), dtype_, rows(), cols(), cols()}; }

 private:
  int64_t cols() const { return rank_ == 0 ? 0 : shape_[rank_ - 1]; }
  int64_t rows() const { return cols() == 0 ? 0 : size_ / cols(); }

  DType dtype_ = DType::kF32;
  int rank_ = 0;
  std::array<int64_t, kMaxRank> shape_{};
  int64_t size_ = 0;
  std::unique_ptr<void, Deleter> data_{nullptr, +[](void*) {}};
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_TENSOR_H_
