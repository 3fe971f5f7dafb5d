#ifndef MOERL_LIBS_EP_ALL_TO_ALL_H_
#define MOERL_LIBS_EP_ALL_TO_ALL_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/collective/collective.h"
#include "libs/ep/buffer.h"
#include "libs/ep/expert_map.h"

namespace moerl::ep {

// The plain way: every (token, expert) pair is a row of its own, sent straight to the expert's rank and back, whatever
// else goes there. The reference that Buffer is compared with, in results (they are the same bits) and in bytes.
class AllToAll {
 public:
  struct Dispatched {
    int64_t num_rows = 0;
    size_t row_bytes = 0;
    std::vector<std::byte> x;      // [num_rows, row_bytes], sorted by (local expert, source rank, source row)
    std::vector<int64_t> offsets;  // [local experts + 1]
    std::vector<float> weights;    // [num_rows]
    // How to go back.
    std::vector<int64_t> arrival;               // [num_rows] place of the i-th row received in the order above
    std::vector<int64_t> send_rows, recv_rows;  // by rank
    struct Sent {
      int32_t token, expert;
      float weight;
    };
    std::vector<Sent> sent;
    int64_t num_tokens = 0;
  };

  // Both outlive it; every rank makes the same.
  AllToAll(collective::Collective* collective, const ExpertMap* map, int hidden)
      : collective_(*collective), map_(*map), hidden_(hidden) {}

  // Collective, as Buffer::Dispatch; `to_fp8` is not served.
  absl::StatusOr<Dispatched> Dispatch(const DispatchInput& input);
  // Collective: out[t] = tree sum of weight * y (y [num_rows, hidden] fp32) over the token's experts.
  absl::Status Combine(const Dispatched& dispatched, const float* y, int wire_block, float* out);

 private:
  collective::Collective& collective_;
  const ExpertMap& map_;
  const int hidden_;
};

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_ALL_TO_ALL_H_
