#ifndef MOERL_LIBS_EP_RECORDS_H_
#define MOERL_LIBS_EP_RECORDS_H_

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "absl/types/span.h"

// What travels in the payloads: the same records between nodes (many in a part) and in rings (one an entry), so that
// forwarding is a copy. Little-endian; every record is a multiple of 8 bytes.
namespace moerl::ep {

// memcpy that takes the null of an empty vector.
inline void CopyBytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

constexpr size_t RoundUp8(size_t bytes) { return (bytes + 7) / 8 * 8; }

// A token on its way to its experts: header, weights f32 [num_ids], ids u16 [num_ids], pad to 8, payload, pad to 8.
// It carries all its ids, not only those of the destination: what is a maximal subtree depends on all of them.
struct RowRecord {
  uint64_t sequence;
  uint32_t row;
  uint16_t source;
  uint16_t num_ids;
};
static_assert(sizeof(RowRecord) == 16);

constexpr size_t RowMetaBytes(size_t num_ids) { return RoundUp8(sizeof(RowRecord) + num_ids * 6); }
constexpr size_t RowRecordBytes(size_t num_ids, size_t payload_bytes) {
  return RowMetaBytes(num_ids) + RoundUp8(payload_bytes);
}

// Tokens of one rank in one dispatch.
inline constexpr uint32_t kTokensMax = 1 << 24;

// A view of a row record in a buffer of the caller's; ids and weights are copied out (num_ids <= kTopKMax).
inline constexpr int kTopKMax = 64;
struct RowView {
  RowRecord header;
  float weights[kTopKMax];
  uint16_t ids[kTopKMax];
  const std::byte* payload = nullptr;
  size_t bytes = 0;  // of the whole record

  absl::Span<const uint16_t> id_span() const { return {ids, header.num_ids}; }
  // False when [data, data+available) does not hold a whole record with `payload_bytes` of payload and ascending ids of
  // `num_experts`.
  bool Parse(const std::byte* data, size_t available, size_t payload_bytes, int num_experts) {
    if (available < sizeof(RowRecord)) return false;
    std::memcpy(&header, data, sizeof(header));
    if (header.num_ids > kTopKMax) return false;
    bytes = RowRecordBytes(header.num_ids, payload_bytes);
    if (bytes > available) return false;
    std::memcpy(weights, data + sizeof(header), header.num_ids * sizeof(float));
    std::memcpy(ids, data + sizeof(header) + header.num_ids * sizeof(float), header.num_ids * sizeof(uint16_t));
    payload = data + RowMetaBytes(header.num_ids);
    for (int i = 1; i < header.num_ids; ++i) {
      if (ids[i - 1] >= ids[i]) return false;
    }
    return header.num_ids == 0 || ids[header.num_ids - 1] < num_experts;
  }
};

// Part of a token's sum on its way back: header, scalars f32 [num_scalars], pad to 8, the vector (bf16 when the
// interval covers wire_block experts, else fp32), pad to 8. A contributor (a rank to its proxy, a node to the source)
// sends one for each maximal subtree of the row that it holds, ascending; the scalars come with the first. It is
// through when its intervals cover all its ids of the row.
inline constexpr int kIntervalEndMax = 1 << 16;
struct PartialRecord {
  uint64_t sequence;
  uint32_t row;
  uint16_t source;  // whose row it is
  uint16_t begin;   // the interval is [begin, end), end 0 standing for kIntervalEndMax
  uint16_t end;
  uint8_t num_scalars;
  uint8_t is_bf16;
  uint32_t reserved;
};
static_assert(sizeof(PartialRecord) == 24);

constexpr size_t PartialMetaBytes(size_t num_scalars) { return RoundUp8(sizeof(PartialRecord) + num_scalars * 4); }
constexpr size_t PartialRecordBytes(size_t num_scalars, bool is_bf16, size_t hidden) {
  return PartialMetaBytes(num_scalars) + RoundUp8(hidden * (is_bf16 ? 2 : 4));
}

// Header of ROUTE's payload and of a control ring's count record; counts u32 follow.
struct RouteRecord {
  uint64_t sequence;
  uint32_t num_rows;   // rows that cross (ROUTE); unused in rings
  uint32_t row_bytes;  // of the payload of a row: both sides must agree
  uint16_t source;
  uint16_t is_ready;  // ring only: no counts, the sender of this record can take rows of this operation
  uint32_t num_counts;
};
static_assert(sizeof(RouteRecord) == 24);

}  // namespace moerl::ep

#endif  // MOERL_LIBS_EP_RECORDS_H_
