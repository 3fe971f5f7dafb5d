#ifndef MOERL_LIBS_TENSOR_KV_CACHE_H_
#define MOERL_LIBS_TENSOR_KV_CACHE_H_

#include <cstdint>

#include "libs/tensor/dtype.h"

namespace moerl::tensor {

// Attention walks keys in blocks of this many positions from position 0; a page of the KV cache is one block.
inline constexpr int64_t kPageTokens = 64;

// One layer's view of a paged KV cache. Page p of this layer is at base + p * page_stride_bytes and holds the
// keys and values of kPageTokens consecutive positions of one sequence. The layout inside a page is the
// backend's: only KvWrite and attention look inside, a whole page may be copied (copy on write) with memcpy.
struct KvCache {
  void* base = nullptr;
  int64_t page_stride_bytes = 0;  // multiple of 64, at least KvPageBytes
  DType dtype = DType::kF32;      // keys and values are rounded to this type when written
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
};

// Bytes of one page of one layer, a multiple of 64.
constexpr int64_t KvPageBytes(DType dtype, int64_t kv_heads, int64_t head_dim) {
  return 2 * kv_heads * head_dim * kPageTokens * SizeOf(dtype);
}

// Consecutive new positions of one sequence: rows row_begin .. row_begin + rows - 1 of the batch are its
// positions first_position, first_position + 1, ... A prefill chunk has many rows, a decode step one.
struct SequenceChunk {
  int64_t row_begin = 0;
  int64_t rows = 0;
  int64_t first_position = 0;
  const int32_t* pages = nullptr;  // page of positions 64 i .. 64 i + 63 at pages[i]; host memory
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_KV_CACHE_H_
