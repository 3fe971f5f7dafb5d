// Starts N ranks of this machine as processes; each sends its tokens to their experts and gets them back added up.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "libs/ep/buffer.h"
#include "libs/fabric/cluster.h"
#include "libs/fabric/socket.h"

namespace ep = moerl::ep;
namespace fabric = moerl::fabric;

namespace {

constexpr int kHidden = 256, kExperts = 8, kTokens = 16, kTopK = 2;

absl::Status RunRank(const std::string& address, int rank, int num_ranks) {
  fabric::ClusterOptions options;
  options.bootstrap.address = address;
  options.bootstrap.rank = rank;
  options.bootstrap.num_ranks = num_ranks;
  options.bootstrap.cluster_id = "ep_standalone";
  options.bootstrap.token = "shared by all ranks, from a file";
  absl::StatusOr<fabric::JoinedCluster> cluster = fabric::JoinCluster(options);
  if (!cluster.ok()) return cluster.status();
  ep::Group group(std::move(cluster->endpoint), {});
  absl::StatusOr<ep::ExpertMap> map = ep::ExpertMap::Aligned(group.membership(), kExperts);
  if (!map.ok()) return map.status();
  ep::BufferOptions buffer_options;
  buffer_options.hidden = kHidden;
  buffer_options.top_k_max = kTopK;
  absl::StatusOr<std::unique_ptr<ep::Buffer>> buffer = ep::Buffer::Create(&group, *map, buffer_options);
  if (!buffer.ok()) return buffer.status();

  // Token t of this rank is all ones and goes to experts t and t + 1, half of it each.
  const std::vector<float> x(kTokens * kHidden, 1.0f), weights(kTokens * kTopK, 0.5f);
  std::vector<int32_t> ids;
  for (int t = 0; t < kTokens; ++t) ids.insert(ids.end(), {t % kExperts, (t + 1) % kExperts});
  ep::DispatchInput input;
  input.x = x.data();
  input.num_tokens = kTokens;
  input.top_k = kTopK;
  input.topk_ids = ids.data();
  input.weights = weights.data();
  absl::StatusOr<ep::Dispatched> dispatched = (*buffer)->Dispatch(input);
  if (!dispatched.ok()) return dispatched.status();

  // Expert e multiplies by e.
  std::vector<float> y(dispatched->num_rows * kHidden);
  const std::vector<int>& mine = map->experts_of_rank(rank);
  for (size_t e = 0; e < mine.size(); ++e) {
    for (int64_t i = dispatched->offsets[e] * kHidden; i < dispatched->offsets[e + 1] * kHidden; ++i) {
      y[i] = static_cast<float>(mine[e]) * reinterpret_cast<const float*>(dispatched->x)[i];
    }
  }
  std::vector<float> out(x.size());
  ep::CombineInput combine;
  combine.handle = dispatched->handle;
  combine.rows = y.data();
  combine.out = out.data();
  if (absl::Status status = (*buffer)->Combine(combine); !status.ok()) return status;
  for (int t = 0; t < kTokens; ++t) {
    const float want = 0.5f * static_cast<float>(t % kExperts) + 0.5f * static_cast<float>((t + 1) % kExperts);
    if (out[t * kHidden] != want) return absl::DataLossError("a wrong sum");
  }
  std::printf("rank %d of %d: %lld rows for %zu experts, %d tokens back\n", rank, num_ranks,
              static_cast<long long>(dispatched->num_rows), mine.size(), kTokens);
  return (*buffer)->Close();
}

}  // namespace

int main(int argc, char** argv) {
  const int num_ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  std::string address = "127.0.0.1:";
  {
    absl::StatusOr<fabric::FileDescriptor> listener = fabric::Listen("127.0.0.1:0");
    if (!listener.ok()) return 1;
    address += std::to_string(*fabric::BoundPort(*listener));
  }
  for (int rank = 0; rank < num_ranks; ++rank) {
    if (fork() != 0) continue;
    const absl::Status status = RunRank(address, rank, num_ranks);
    if (!status.ok()) std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
    std::fflush(stdout);
    _exit(status.ok() ? 0 : 1);
  }
  bool all_ok = true;
  for (int i = 0; i < num_ranks; ++i) {
    int status = 0;
    wait(&status);
    all_ok &= status == 0;
  }
  return all_ok ? 0 : 1;
}
