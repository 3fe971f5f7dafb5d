#ifndef MOERL_LIBS_TENSOR_CPU_COMING_WEIGHTS_H_
#define MOERL_LIBS_TENSOR_CPU_COMING_WEIGHTS_H_

#include <algorithm>
#include <cstdint>
#include <deque>

#include "libs/tensor/cpu/kernel_table.h"

namespace moerl::tensor {

// The weights that later products will read, in that order, and how far each has been fetched: what a product that is
// short of arithmetic, not of bandwidth, may ask for meanwhile. Addresses only; the weights may be gone by now.
class ComingWeights {
 public:
  void Add(const void* data, int64_t bytes) {
    const char* begin = static_cast<const char*>(data);
    for (const Weight& w : weights_) {
      if (w.begin == begin) return;
    }
    if (weights_.size() == kWeightsMax) weights_.pop_front();
    weights_.push_back({begin, begin + bytes, {begin, begin}});
  }

  // What a call that is about to read [data, data + bytes) may fetch, at least `least` bytes; null: nothing.
  LaterWeight* During(const void* data, int64_t bytes, int64_t least) {
    const char* read_begin = static_cast<const char*>(data);
    const char* read_end = read_begin + bytes;
    for (Weight& w : weights_) {
      const bool is_read = w.begin <= read_begin && read_begin < w.end;
      if (is_read) w.fetch.next = std::max(w.fetch.next, read_end);
      const int64_t left = w.end - (is_read ? read_end : w.begin);
      w.fetch.end = w.end - std::max<int64_t>(left - kFetchedBytesMax, 0);
      if (w.fetch.end - w.fetch.next >= least) return &w.fetch;
    }
    return nullptr;
  }

  // The weight at `data` has been read; so have those that were to be read before it, or never will be.
  void Done(const void* data) {
    const auto is_it = [&](const Weight& w) { return w.begin == data; };
    const auto it = std::find_if(weights_.begin(), weights_.end(), is_it);
    if (it != weights_.end()) weights_.erase(weights_.begin(), it + 1);
  }

 private:
  static constexpr size_t kWeightsMax = 8;
  // Of one weight, beyond what is being read: two weights leave half of a 32 MB third-level cache to the rest.
  static constexpr int64_t kFetchedBytesMax = int64_t{8} << 20;

  struct Weight {
    const char *begin, *end;
    LaterWeight fetch;
  };
  std::deque<Weight> weights_;
};

}  // namespace moerl::tensor

#endif  // MOERL_LIBS_TENSOR_CPU_COMING_WEIGHTS_H_
