// One cluster's life with its ranks as threads of this process, from the first epoch over a joiner to a rank that
// leaves.
#include <gtest/gtest.h>

#include <functional>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/barrier.h"
#include "absl/time/clock.h"
#include "libs/fabric/cluster.h"

namespace moerl::fabric {
namespace {

ClusterOptions Options(const std::string& address, int rank, int num_ranks) {
  ClusterOptions options;
  options.bootstrap = {.address = address,
                       .rank = rank,
                       .num_ranks = num_ranks,
                       .cluster_id = "reform",
                       .token = "a token of sixteen bytes or more",
                       .timeout = absl::Seconds(20)};
  options.provider = "net";
  options.node = absl::StrCat("node ", rank % 2);
  return options;
}

// What the members say to each other in `epoch`, joined; empty: they cannot.
std::string Talk(Endpoint& endpoint, const std::string& mine) {
  const auto all = endpoint.exchange->AllGather("talk", mine, absl::Seconds(10));
  std::string joined;
  if (all.ok()) {
    for (const std::string& part : *all) joined += part;
  }
  return joined;
}

bool Await(const std::function<bool()>& holds) {
  const absl::Time deadline = absl::Now() + absl::Seconds(20);
  while (!holds() && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(5));
  return holds();
}

// Rank `self` of three; rank 1 leaves at the end.
void LiveAsMember(const std::string& address, int self, std::vector<std::string>* addresses, absl::Barrier* has_begun) {
  absl::StatusOr<JoinedCluster> joined = JoinCluster(Options(address, self, 3));
  if (self == 0 && joined.ok()) *addresses = joined->cluster->control_addresses();
  if (joined.ok()) {
    EXPECT_EQ(Talk(joined->endpoint, absl::StrCat(self)), "012");
    joined->cluster->SetFinished(10 + static_cast<uint64_t>(self));
  }
  if (has_begun->Block()) delete has_begun;  // from here on the joiner may end the epoch
  ASSERT_TRUE(joined.ok()) << joined.status();
  Cluster& cluster = *joined->cluster;
  Endpoint endpoint = std::move(joined->endpoint);
  const uint64_t first = endpoint.transport->membership().epoch;
  ASSERT_TRUE(Await([&] { return cluster.num_joiners() > 0 || endpoint.watch->HasEnded(nullptr); }));
  absl::StatusOr<JoinedEpoch> next = cluster.Reform(absl::Seconds(20));
  ASSERT_TRUE(next.ok()) << next.status();
  endpoint = std::move(next->endpoint);
  EXPECT_EQ(next->finished, 10u);
  EXPECT_EQ(endpoint.transport->membership().epoch, first + 1);
  EXPECT_EQ(endpoint.transport->membership().self, self);
  EXPECT_EQ(Talk(endpoint, absl::StrCat(self)), "012j");
  if (self == 1) return;

  std::string reason;
  ASSERT_TRUE(Await([&] { return endpoint.watch->state(1, &reason) == PeerState::kLost; }));
  EXPECT_NE(reason, "");
  next = cluster.Reform(absl::Seconds(20));
  ASSERT_TRUE(next.ok()) << next.status();
  endpoint = std::move(next->endpoint);
  EXPECT_EQ(endpoint.transport->membership().epoch, first + 2);
  EXPECT_EQ(Talk(endpoint, absl::StrCat(self)), "02j");
}

void LiveAsJoiner(const std::vector<std::string>& addresses) {
  absl::StatusOr<JoinedCluster> joined = JoinRunningCluster(Options("", 3, 4), addresses);
  ASSERT_TRUE(joined.ok()) << joined.status();
  EXPECT_EQ(joined->finished, 10u);
  EXPECT_EQ(joined->endpoint.transport->membership().self, 3);
  EXPECT_EQ(Talk(joined->endpoint, "j"), "012j");
  ASSERT_TRUE(Await([&] { return joined->endpoint.watch->state(1, nullptr) == PeerState::kLost; }));
  absl::StatusOr<JoinedEpoch> next = joined->cluster->Reform(absl::Seconds(20));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->endpoint.transport->membership().self, 2);
  EXPECT_EQ(Talk(next->endpoint, "j"), "02j");
}

TEST(Reform, TakesAJoinerInAndLeavesOutWhoLeft) {
  const std::string address = absl::StrCat("127.0.0.1:", *BoundPort(*Listen("127.0.0.1:0")));
  std::vector<std::string> addresses;
  auto* has_begun = new absl::Barrier(4);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < 3; ++rank)
    ranks.emplace_back([&, rank] { LiveAsMember(address, rank, &addresses, has_begun); });
  ranks.emplace_back([&] {
    if (has_begun->Block()) delete has_begun;
    LiveAsJoiner(addresses);
  });
  for (std::thread& rank : ranks) rank.join();
}

TEST(Reform, OfALoneRankBeginsANewEpoch) {
  ClusterOptions options = Options("127.0.0.1:1", 0, 1);
  options.provider = "auto";
  absl::StatusOr<JoinedCluster> joined = JoinCluster(options);
  ASSERT_TRUE(joined.ok()) << joined.status();
  const absl::StatusOr<JoinedEpoch> next = joined->cluster->Reform(absl::Seconds(10));
  ASSERT_TRUE(next.ok()) << next.status();
  EXPECT_EQ(next->endpoint.transport->membership().epoch, joined->endpoint.transport->membership().epoch + 1);
}

TEST(Reform, WithoutAnybodyThereAJoinerIsToldSo) {
  ClusterOptions options = Options("", 0, 1);
  options.bootstrap.timeout = absl::Milliseconds(300);
  const absl::Status status = JoinRunningCluster(options, {"127.0.0.1:9"}).status();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
}

}  // namespace
}  // namespace moerl::fabric
