#include "libs/tensor/tensor.h"

#include <sys/mman.h>

#include <cstdlib>

namespace moerl::tensor {
namespace {

constexpr int64_t kAlignment = 64;
constexpr int64_t kHugePage = int64_t{2} << 20;

// From four huge pages on memory asks for them: streams of weights then cross a page, where prefetching stops and an
// address must be looked up, 512 times less often.
void* AllocateHost(int64_t bytes) {
  const bool huge = bytes >= 4 * kHugePage;
  const int64_t alignment = huge ? kHugePage : kAlignment;
  const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* memory =
      std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded == 0 ? kAlignment : rounded));
  MOERL_CHECK(memory != nullptr);
  if (huge) madvise(memory, static_cast<size_t>(rounded), MADV_HUGEPAGE);  // a wish: without it all works, slower
  return memory;
}

int64_t Product(std::initializer_list<int64_t> shape) {
  int64_t product = 1;
  for (const int64_t dim : shape) {
    MOERL_CHECK(dim >= 0);
    MOERL_CHECK(!__builtin_mul_overflow(product, dim, &product));
  }
  return product;
}

}  // namespace

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape)
    : Tensor(dtype, shape, AllocateHost(Product(shape) * SizeOf(dtype)), std::free) {}

Tensor::Tensor(DType dtype, std::initializer_list<int64_t> shape, void* data, Deleter deleter)
    : dtype_(dtype), rank_(static_cast<int>(shape.size())), size_(Product(shape)), data_(data, deleter) {
  MOERL_CHECK(rank_ >= 1 && rank_ <= kMaxRank);
  int axis = 0;
  for (const int64_t dim : shape) shape_[axis++] = dim;
}

}  // namespace moerl::tensor
