#include "libs/ep/all_to_all.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "libs/base/status_macros.h"
#include "libs/ep/combine_tree.h"

namespace moerl::ep {
namespace {

std::vector<int64_t> Times(const std::vector<int64_t>& rows, size_t bytes) {
  std::vector<int64_t> product;
  for (const int64_t n : rows) product.push_back(n * static_cast<int64_t>(bytes));
  return product;
}

}  // namespace

absl::StatusOr<AllToAll::Dispatched> AllToAll::Dispatch(const DispatchInput& input) {
  const int size = collective_.size();
  Dispatched d;
  d.num_tokens = input.num_tokens;
  d.row_bytes = static_cast<size_t>(hidden_) * (input.type == RowType::kFp32 ? 4 : 2);
  const size_t record_bytes = d.row_bytes + sizeof(float);  // the row and its weight

  // Rows for each rank, by (expert, token): the receiver then only has to merge its sources.
  std::vector<int64_t> counts(map_.num_experts());
  std::vector<std::byte> send;
  d.send_rows.resize(size);
  for (int to = 0; to < size; ++to) {
    for (const int expert : map_.experts_of_rank(to)) {
      for (int64_t slot = 0; slot < input.num_tokens * input.top_k; ++slot) {
        if (input.topk_ids[slot] != expert) continue;
        const float weight = input.weights == nullptr ? 1.0f : input.weights[slot];
        const int32_t token = static_cast<int32_t>(slot / input.top_k);
        d.sent.push_back({token, expert, weight});
        send.resize(send.size() + record_bytes);
        std::byte* record = send.data() + send.size() - record_bytes;
        std::memcpy(record, static_cast<const std::byte*>(input.x) + token * d.row_bytes, d.row_bytes);
        std::memcpy(record + d.row_bytes, &weight, sizeof(weight));
        ++counts[expert];
        ++d.send_rows[to];
      }
    }
  }

  // all_counts[source * experts + expert]
  const size_t experts = counts.size();
  std::vector<int64_t> all_counts(size * experts), block(size, static_cast<int64_t>(experts * sizeof(int64_t)));
  MOERL_RETURN_IF_ERROR(collective_.AllGather(counts.data(), block, all_counts.data()));
  const std::vector<int>& mine = map_.experts_of_rank(collective_.rank());
  d.recv_rows.resize(size);
  d.offsets.resize(mine.size() + 1);
  for (size_t e = 0; e < mine.size(); ++e) {
    d.offsets[e] = d.num_rows;
    for (int source = 0; source < size; ++source) {
      d.recv_rows[source] += all_counts[source * experts + mine[e]];
      d.num_rows += all_counts[source * experts + mine[e]];
    }
  }
  d.offsets[mine.size()] = d.num_rows;

  std::vector<std::byte> recv(d.num_rows * record_bytes);
  MOERL_RETURN_IF_ERROR(collective_.AllToAll(send.data(), Times(d.send_rows, record_bytes), recv.data(),
                                             Times(d.recv_rows, record_bytes)));
  d.x.resize(d.num_rows * d.row_bytes);
  d.weights.resize(d.num_rows);
  int64_t arrived = 0;
  for (int source = 0; source < size; ++source) {
    for (size_t e = 0; e < mine.size(); ++e) {
      int64_t row = d.offsets[e];
      for (int before = 0; before < source; ++before) row += all_counts[before * experts + mine[e]];
      for (int64_t i = all_counts[source * experts + mine[e]]; i > 0; --i, ++row, ++arrived) {
        const std::byte* record = recv.data() + arrived * record_bytes;
        std::memcpy(d.x.data() + row * d.row_bytes, record, d.row_bytes);
        std::memcpy(&d.weights[row], record + d.row_bytes, sizeof(float));
        d.arrival.push_back(row);
      }
    }
  }
  return d;
}

absl::Status AllToAll::Combine(const Dispatched& d, const float* y, int wire_block, float* out) {
  const size_t bytes = static_cast<size_t>(hidden_) * sizeof(float);
  std::vector<float> send(d.num_rows * hidden_), recv(d.sent.size() * hidden_);
  for (int64_t i = 0; i < d.num_rows; ++i) std::memcpy(send.data() + i * hidden_, y + d.arrival[i] * hidden_, bytes);
  MOERL_RETURN_IF_ERROR(
      collective_.AllToAll(send.data(), Times(d.recv_rows, bytes), recv.data(), Times(d.send_rows, bytes)));
  std::vector<std::vector<TreeItem>> items(d.num_tokens);
  for (size_t i = 0; i < d.sent.size(); ++i) {
    TreeItem item;
    item.begin = d.sent[i].expert;
    item.end = item.begin + 1;
    item.fp32 = recv.data() + i * hidden_;
    item.weight = d.sent[i].weight;
    items[d.sent[i].token].push_back(item);
  }
  for (int64_t token = 0; token < d.num_tokens; ++token) {
    std::vector<TreeItem>& of_token = items[token];
    std::sort(of_token.begin(), of_token.end(), [](const TreeItem& a, const TreeItem& b) { return a.begin < b.begin; });
    float* sum = out + token * hidden_;
    if (of_token.empty()) {
      std::fill_n(sum, hidden_, 0.0f);
    } else {
      ReduceTree(0, map_.num_experts(), of_token, wire_block, hidden_, sum);
    }
  }
  return absl::OkStatus();
}

}  // namespace moerl::ep
