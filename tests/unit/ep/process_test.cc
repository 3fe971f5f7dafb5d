// Dispatch and combine between real processes, over every provider of this machine.
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <limits>
#include <random>

#include "absl/strings/str_cat.h"
#include "libs/collective/fabric_collective.h"
#include "libs/ep/buffer.h"
#include "libs/fabric/cluster.h"
#include "libs/fabric/socket.h"
#include "tests/time_scale.h"
#include "tests/unit/ep/oracle.h"

namespace moerl::ep {
namespace {

struct Layout {
  const char* provider;
  std::vector<int> node_of;
  int num_shapes;
};

// What every rank can draw by itself: the tokens of all ranks in one shape.
struct Shape {
  int hidden, top_k, num_experts, wire_block;
  std::vector<int> owner;
  struct Tokens {
    int count = 0;
    std::vector<float> x, weights;
    std::vector<int32_t> ids;
  };
  std::vector<Tokens> of_rank;

  Shape(uint64_t seed, int ranks) {
    std::mt19937_64 random(seed);
    const auto draw = [&](int low, int high) { return low + static_cast<int>(random() % (high - low + 1)); };
    constexpr int kHidden[] = {16, 24, 136, 1000, 7168, 16384};
    hidden = kHidden[seed % 6];
    num_experts = draw(1, 40);
    top_k = seed % 5 == 0 ? std::min(draw(9, 64), num_experts) : draw(1, std::min(8, num_experts));
    wire_block = seed % 2 == 0 ? kNoWireBlock : std::max(1, num_experts / 8);
    for (int e = 0; e < num_experts; ++e) owner.push_back(seed % 3 == 0 ? draw(0, ranks - 1) : e * ranks / num_experts);
    for (int rank = 0; rank < ranks; ++rank) {
      Tokens tokens;
      tokens.count = random() % 4 == 0 ? 0 : draw(1, hidden > 2000 ? 6 : 40);
      for (int t = 0; t < tokens.count; ++t) {
        std::vector<int32_t> all(num_experts);
        for (int e = 0; e < num_experts; ++e) all[e] = e;
        std::shuffle(all.begin(), all.end(), random);
        for (int j = 0; j < top_k; ++j) {
          tokens.ids.push_back(random() % 8 == 0 ? -1 : all[j]);
          tokens.weights.push_back(static_cast<float>(draw(-1000, 1000)) * 0.0013f);
        }
        for (int i = 0; i < hidden; ++i) tokens.x.push_back(static_cast<float>(draw(-9999, 9999)) * 0.00071f);
      }
      of_rank.push_back(std::move(tokens));
    }
  }
};

float ExpertOf(int expert, float x) { return x * (0.37f * static_cast<float>(expert) + 1.0f); }

absl::Status Wrong(std::string what) { return absl::DataLossError(what); }

absl::Status CheckRows(const Shape& shape, const Buffer& buffer, int rank, const Dispatched& d) {
  const std::vector<int>& experts = buffer.map().experts_of_rank(rank);
  int64_t row = 0;
  for (const int expert : experts) {
    for (const Shape::Tokens& tokens : shape.of_rank) {
      for (size_t slot = 0; slot < tokens.ids.size(); ++slot) {
        if (tokens.ids[slot] != expert) continue;
        const size_t t = slot / shape.top_k, bytes = shape.hidden * sizeof(float);
        if (row == d.num_rows) return Wrong("rows are missing");
        if (std::memcmp(d.x + row * d.row_bytes, tokens.x.data() + t * shape.hidden, bytes) != 0) return Wrong("a row");
        if (d.weights[row++] != tokens.weights[slot]) return Wrong("a weight");
      }
    }
  }
  return row == d.num_rows ? absl::OkStatus() : Wrong("rows too many");
}

absl::Status RunShape(Group& group, uint64_t seed) {
  const Shape shape(seed, group.size());
  const Shape::Tokens& mine = shape.of_rank[group.rank()];
  BufferOptions options;
  options.hidden = shape.hidden;
  options.top_k_max = shape.top_k;
  if (seed % 2 == 0) options.rows_slots = options.part_slots = options.ring_entries = 1;
  auto buffer = Buffer::Create(&group, *ExpertMap::Create(group.membership(), shape.owner), options);
  if (!buffer.ok()) return buffer.status();
  for (int round = 0; round < 2; ++round) {
    const auto d = (*buffer)->Dispatch(
        {mine.x.data(), RowType::kFp32, false, mine.count, shape.top_k, mine.ids.data(), mine.weights.data()});
    if (!d.ok()) return d.status();
    if (absl::Status status = CheckRows(shape, **buffer, group.rank(), *d); !status.ok()) return status;
    std::vector<float> y(d->num_rows * shape.hidden), scalars(d->num_rows), out(mine.x.size()),
        back(mine.ids.size(), -1.0f);
    const std::vector<int>& experts = (*buffer)->map().experts_of_rank(group.rank());
    for (size_t e = 0; e < experts.size(); ++e) {
      for (int64_t row = d->offsets[e]; row < d->offsets[e + 1]; ++row) {
        const float* x = reinterpret_cast<const float*>(d->x + row * d->row_bytes);
        for (int i = 0; i < shape.hidden; ++i) y[row * shape.hidden + i] = ExpertOf(experts[e], x[i]);
        scalars[row] = x[0] + static_cast<float>(experts[e]);
      }
    }
    CombineInput combine;
    combine.handle = d->handle;
    combine.rows = y.data();
    combine.wire_block = shape.wire_block;
    combine.has_scalars = true;
    combine.scalars = scalars.data();
    combine.out = out.data();
    combine.scalars_out = back.data();
    if (absl::Status status = (*buffer)->Combine(combine); !status.ok()) return status;
    for (int t = 0; t < mine.count; ++t) {
      std::vector<std::vector<float>> ys;
      std::vector<oracle::Leaf> leaves;
      for (int j = 0; j < shape.top_k; ++j) {
        const int slot = t * shape.top_k + j, expert = mine.ids[slot];
        const float want = expert < 0 ? 0.0f : mine.x[t * shape.hidden] + static_cast<float>(expert);
        if (back[slot] != want) return Wrong("a scalar");
        if (expert < 0) continue;
        ys.emplace_back();
        for (int i = 0; i < shape.hidden; ++i) ys.back().push_back(ExpertOf(expert, mine.x[t * shape.hidden + i]));
        leaves.push_back({expert, mine.weights[slot], nullptr});
      }
      for (size_t i = 0; i < leaves.size(); ++i) leaves[i].y = ys[i].data();
      for (int i = 0; i < shape.hidden; i += std::max(1, shape.hidden / 100)) {
        const float want = oracle::Sum(0, shape.num_experts, leaves, shape.wire_block, i).value_or(0.0f);
        if (std::memcmp(&out[t * shape.hidden + i], &want, sizeof(want)) != 0) return Wrong("a sum");
      }
    }
    // Backward: the same rows along the kept routes.
    const auto again = (*buffer)->Dispatch(d->handle, mine.x.data(), RowType::kFp32);
    if (!again.ok()) return again.status();
    if (absl::Status status = CheckRows(shape, **buffer, group.rank(), *again); !status.ok()) return status;
  }
  return (*buffer)->Close();
}

// A group without work costs less than 1 % of a core, heartbeats included: in the cheapest of three seconds, since what
// other programs do to the caches is charged to us.
absl::Status CheckIdle() {
  const auto used_ms = [] {
    rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) * 1e3 +
           (usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-3;
  };
  absl::SleepFor(absl::Milliseconds(200));
  double idle_ms = std::numeric_limits<double>::infinity();
  for (int second = 0; second < 3; ++second) {
    const double before = used_ms();
    absl::SleepFor(absl::Seconds(1));
    idle_ms = std::min(idle_ms, used_ms() - before);
  }
  if (idle_ms >= 10 * TimeScale())
    return Wrong(absl::StrCat("idle, yet ", idle_ms, " ms of processor time in the cheapest of three seconds"));
  return absl::OkStatus();
}

absl::Status RunRank(const Layout& layout, const std::string& address, int rank) {
  fabric::ClusterOptions options;
  options.bootstrap = {.address = address,
                       .rank = rank,
                       .num_ranks = static_cast<int>(layout.node_of.size()),
                       .cluster_id = "ep",
                       .token = "a token of sixteen bytes or more",
                       .timeout = absl::Seconds(30)};
  options.provider = layout.provider;
  options.node = absl::StrCat("node ", layout.node_of[rank]);
  absl::StatusOr<fabric::JoinedCluster> cluster = fabric::JoinCluster(options);
  if (!cluster.ok()) return cluster.status();
  Group group(std::move(cluster->endpoint), {});
  auto collective = collective::FabricCollective::Create(&group.hub(), {});
  if (!collective.ok()) return collective.status();
  for (int shape = 0; shape < layout.num_shapes; ++shape) {
    const absl::Status status = RunShape(group, shape);
    if (!status.ok()) return absl::Status(status.code(), absl::StrCat("shape ", shape, ": ", status.message()));
    std::vector<float> sum(1000, static_cast<float>(rank + shape));
    const absl::Status reduced = (*collective)
                                     ->AllReduce(collective::Element::kFloat, collective::Reduction::kSum, sum.data(),
                                                 static_cast<int64_t>(sum.size()));
    if (!reduced.ok()) return reduced;
    const int n = group.size();
    if (sum[999] != static_cast<float>(n * (n - 1) / 2 + n * shape)) return Wrong("an all-reduce");
  }
  if (absl::Status status = (*collective)->Barrier(); !status.ok()) return status;
  return CheckIdle();
}

class Processes : public testing::TestWithParam<Layout> {};

TEST_P(Processes, MatchTheSerialOracle) {
  const Layout& layout = GetParam();
  const std::string address = absl::StrCat("127.0.0.1:", *fabric::BoundPort(*fabric::Listen("127.0.0.1:0")));
  std::vector<pid_t> children;
  for (size_t rank = 0; rank < layout.node_of.size(); ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      const absl::Status status = RunRank(layout, address, static_cast<int>(rank));
      if (!status.ok()) fprintf(stderr, "rank %zu: %s\n", rank, status.ToString().c_str());
      _exit(status.ok() ? 0 : 1);
    }
    children.push_back(pid);
  }
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    EXPECT_EQ(status, 0);
  }
}

INSTANTIATE_TEST_SUITE_P(Layouts, Processes,
                         testing::Values(Layout{"shm", {0, 0}, 20}, Layout{"net", {0, 1}, 25},
                                         Layout{"net", {0, 0, 1, 1}, 20}, Layout{"tcp", {0, 1, 1}, 10}),
                         [](const testing::TestParamInfo<Layout>& info) {
                           std::string name = info.param.provider;
                           for (const int node : info.param.node_of) name += std::to_string(node);
                           return name;
                         });

}  // namespace
}  // namespace moerl::ep
