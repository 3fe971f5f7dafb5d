#include "libs/collective/fabric_collective.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <thread>

#include "libs/fabric/chaos_transport.h"
#include "libs/fabric/in_process_fabric.h"

namespace moerl::collective {
namespace {

struct Shape {
  std::vector<int> node_of;
  bool has_chaos;
};

class FabricCollectiveTest : public testing::TestWithParam<Shape> {
 protected:
  // Runs `body` on a thread for each rank.
  void OnEveryRank(const std::function<void(Collective&)>& body, fabric::Hub::Options hub_options = {}) {
    const Shape& shape = GetParam();
    fabric::InProcessFabric fabric({.node_of = shape.node_of});
    if (shape.has_chaos) {
      fabric.set_decorator([](int rank, std::unique_ptr<fabric::Transport> base) {
        fabric::ChaosTransport::Options options;
        options.seed = rank + 1;
        options.hold_percent = 20;
        return std::make_unique<fabric::ChaosTransport>(std::move(base), options);
      });
    }
    hub_options.progress_thread = shape.node_of.front() != shape.node_of.back();
    hub_options.spin = absl::ZeroDuration();
    std::vector<std::unique_ptr<fabric::Hub>> hubs;
    for (int rank = 0; rank < fabric.size(); ++rank) {
      hubs.push_back(std::make_unique<fabric::Hub>(fabric.Open(rank), hub_options));
    }
    std::vector<std::thread> threads;
    for (int rank = 0; rank < fabric.size(); ++rank) {
      threads.emplace_back([&, rank] {
        auto collective = FabricCollective::Create(hubs[rank].get(), {.chunk_bytes = 256, .slots = 2});
        ASSERT_TRUE(collective.ok()) << collective.status();
        body(**collective);
        ASSERT_TRUE((*collective)->Barrier().ok());
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

std::vector<float> DataOf(int rank, int64_t count) {
  std::mt19937 random(rank * 77 + 5);
  std::vector<float> data(count);
  for (float& value : data) value = static_cast<float>(static_cast<int32_t>(random())) * 1e-7f;
  return data;
}

std::vector<float> SumInRankOrder(int size, int64_t count) {
  std::vector<float> sum = DataOf(0, count);
  for (int rank = 1; rank < size; ++rank) {
    const std::vector<float> x = DataOf(rank, count);
    for (int64_t i = 0; i < count; ++i) sum[i] = sum[i] + x[i];
  }
  return sum;
}

TEST_P(FabricCollectiveTest, AllReduceAddsInTheOrderOfRanksToTheBit) {
  OnEveryRank([](Collective& c) {
    for (const int64_t count : {1, 7, 64, 1000, 5001}) {
      std::vector<float> data = DataOf(c.rank(), count);
      ASSERT_TRUE(c.AllReduce(Element::kFloat, Reduction::kSum, data.data(), count).ok());
      EXPECT_EQ(std::memcmp(data.data(), SumInRankOrder(c.size(), count).data(), count * sizeof(float)), 0) << count;
    }
  });
}

TEST_P(FabricCollectiveTest, ReduceScatterGivesEachRankItsSegment) {
  OnEveryRank([](Collective& c) {
    for (const int64_t count : {1, 10, 3001}) {
      const std::vector<float> data = DataOf(c.rank(), count);
      const Segment own = SegmentOf(count, c.rank(), c.size());
      std::vector<float> out(own.end - own.begin + 1, -1.0f);
      ASSERT_TRUE(c.ReduceScatter(Element::kFloat, Reduction::kSum, data.data(), count, out.data()).ok());
      const std::vector<float> want = SumInRankOrder(c.size(), count);
      for (int64_t i = own.begin; i < own.end; ++i) ASSERT_EQ(out[i - own.begin], want[i]);
      EXPECT_EQ(out.back(), -1.0f);
    }
  });
}

TEST_P(FabricCollectiveTest, MaximumAndIntegersWork) {
  OnEveryRank([](Collective& c) {
    int64_t most = c.rank() * 10;
    ASSERT_TRUE(c.AllReduce(Element::kInt64, Reduction::kMax, &most, 1).ok());
    EXPECT_EQ(most, (c.size() - 1) * 10);
    double sums[2] = {0.5, static_cast<double>(c.rank())};
    ASSERT_TRUE(c.AllReduce(Element::kDouble, Reduction::kSum, sums, 2).ok());
    EXPECT_EQ(sums[0], 0.5 * c.size());
    EXPECT_EQ(sums[1], c.size() * (c.size() - 1) / 2);
  });
}

TEST_P(FabricCollectiveTest, AllGatherTakesBlocksOfAnySize) {
  OnEveryRank([](Collective& c) {
    std::vector<int64_t> bytes;
    for (int rank = 0; rank < c.size(); ++rank) bytes.push_back(rank == 1 ? 0 : 100 + 700 * rank);
    const std::vector<char> mine(bytes[c.rank()], static_cast<char>('a' + c.rank()));
    std::vector<char> all(std::accumulate(bytes.begin(), bytes.end(), int64_t{0}));
    ASSERT_TRUE(c.AllGather(mine.data(), bytes, all.data()).ok());
    size_t at = 0;
    for (int rank = 0; rank < c.size(); ++rank) {
      for (int64_t i = 0; i < bytes[rank]; ++i) ASSERT_EQ(all[at++], 'a' + rank);
    }
  });
}

TEST_P(FabricCollectiveTest, AllToAllGivesEveryRankItsBlock) {
  OnEveryRank([](Collective& c) {
    const auto bytes = [](int from, int to) { return int64_t{(from * 7 + to * 3) % 5 * 123}; };
    std::vector<int64_t> send_bytes, recv_bytes;
    std::vector<char> send;
    for (int peer = 0; peer < c.size(); ++peer) {
      send_bytes.push_back(bytes(c.rank(), peer));
      recv_bytes.push_back(bytes(peer, c.rank()));
      send.insert(send.end(), send_bytes.back(), static_cast<char>('a' + 5 * c.rank() + peer));
    }
    std::vector<char> recv(std::accumulate(recv_bytes.begin(), recv_bytes.end(), int64_t{0}));
    ASSERT_TRUE(c.AllToAll(send.data(), send_bytes, recv.data(), recv_bytes).ok());
    size_t at = 0;
    for (int peer = 0; peer < c.size(); ++peer) {
      for (int64_t i = 0; i < recv_bytes[peer]; ++i)
        ASSERT_EQ(recv[at++], static_cast<char>('a' + 5 * peer + c.rank()));
    }
  });
}

TEST_P(FabricCollectiveTest, BroadcastComesFromAnyRoot) {
  OnEveryRank([](Collective& c) {
    for (int root = 0; root < c.size(); ++root) {
      std::vector<float> data = DataOf(c.rank(), 999);
      ASSERT_TRUE(c.Broadcast(root, data.data(), 999 * sizeof(float)).ok());
      EXPECT_EQ(data, DataOf(root, 999));
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Shapes, FabricCollectiveTest,
                         testing::Values(Shape{{0}, false}, Shape{{0, 0}, false}, Shape{{0, 1}, false},
                                         Shape{{0, 0, 1, 1}, true}, Shape{{0, 1, 1, 2, 2}, true}),
                         [](const testing::TestParamInfo<Shape>& info) {
                           std::string name = info.param.has_chaos ? "Chaos" : "Plain";
                           for (const int node : info.param.node_of) name += std::to_string(node);
                           return name;
                         });

TEST(FabricCollective, NamesTheRankThatDoesNotCome) {
  fabric::InProcessFabric fabric({.node_of = {0, 0}});
  fabric::Hub::Options options;
  options.timeout = absl::Milliseconds(200);
  fabric::Hub a(fabric.Open(0), options), b(fabric.Open(1), options);
  absl::StatusOr<std::unique_ptr<FabricCollective>> on_b;
  std::thread other([&] { on_b = FabricCollective::Create(&b, {}); });
  auto on_a = FabricCollective::Create(&a, {});
  other.join();
  ASSERT_TRUE(on_a.ok() && on_b.ok());
  float value = 1;
  const absl::Status status = (*on_a)->AllReduce(Element::kFloat, Reduction::kSum, &value, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_NE(status.message().find("all-reduce 1 on rank 0"), std::string::npos) << status;
  EXPECT_NE(status.message().find("0 received from rank 1"), std::string::npos) << status;
}

}  // namespace
}  // namespace moerl::collective
