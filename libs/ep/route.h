#ifndef MOERL_LIBS_EP_ROUTE_H_
#define MOERL_LIBS_EP_ROUTE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/types/span.h"

namespace moerl::ep {

// Rows of one source with the expert ids of each, in ascending row order.
struct RowList {
  std::vector<uint32_t> row;          // the source's row number
  std::vector<uint32_t> first_id{0};  // [rows + 1] into ids
  std::vector<uint16_t> ids;          // ascending within a row

  size_t size() const { return row.size(); }
  absl::Span<const uint16_t> ids_of(size_t i) const {
    return absl::MakeConstSpan(ids).subspan(first_id[i], first_id[i + 1] - first_id[i]);
  }
};

// Where one rank's part of a dispatch went. Written while the dispatch runs, immutable afterwards, shared by whoever
// needs it: combine, a repeated dispatch along the same routes, backward.
struct Route {
  // This rank's own tokens. Masked entries (-1) are left out.
  int num_tokens = 0;
  int top_k = 0;
  RowList own;                     // all tokens, also those without any expert
  std::vector<uint8_t> choice;     // parallel to own.ids: which of the token's top_k it was
  std::vector<float> own_weights;  // parallel to own.ids

  // Rows this rank received, sorted by (local expert, source, source row).
  std::vector<uint32_t> counts;    // [sources * local experts]
  std::vector<int64_t> offsets;    // [local experts + 1]
  std::vector<float> row_weights;  // [rows]
  struct Received : RowList {
    std::vector<uint32_t> output;  // parallel to ids: the row it became here, kElsewhere for other ranks' experts
  };
  static constexpr uint32_t kElsewhere = 0xffffffff;
  std::vector<Received> received;  // by source

  // Rows this rank forwarded, one list for each of Topology::in_peers().
  std::vector<RowList> proxied;

  // The order in which partials move: (row, source), the same at both ends of a ring.
  struct Move {
    uint32_t row;
    int source;
    uint32_t index;  // in received[source] (emit), in own or proxied (merge)
  };
  std::vector<std::vector<Move>> emit;  // by local index of the proxy they go to
  std::vector<Move> merge;

  int64_t num_rows() const { return offsets.empty() ? 0 : offsets.back(); }
};

// What Dispatch hands out and Combine takes.
using Handle = std::shared_ptr<const Route>;

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_ROUTE_H_
