// The real fabric between processes of this machine: bootstrap, shared memory, providers, failure detector.
#include "libs/fabric/cluster.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <functional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "libs/fabric/libfabric_transport.h"
#include "libs/fabric/spsc_ring.h"

namespace moerl::fabric {
namespace {

using ::testing::HasSubstr;

std::string FreeAddress() {
  const absl::StatusOr<FileDescriptor> listener = Listen("127.0.0.1:0");
  return absl::StrCat("127.0.0.1:", *BoundPort(*listener));
}

ClusterOptions Options(const std::string& address, int rank, int num_ranks) {
  ClusterOptions options;
  options.bootstrap = {.address = address,
                       .rank = rank,
                       .num_ranks = num_ranks,
                       .cluster_id = "test",
                       .token = "a token of sixteen bytes or more",
                       .timeout = absl::Seconds(20)};
  return options;
}

// Runs `body` as every rank, each in a process of its own; the exit codes by rank (0 is success).
std::vector<int> RunRanks(int num_ranks, const std::function<int(int rank)>& body) {
  std::vector<pid_t> children;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) _exit(body(rank));
    children.push_back(pid);
  }
  std::vector<int> codes;
  for (const pid_t pid : children) {
    int status = 0;
    waitpid(pid, &status, 0);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status));
  }
  return codes;
}

int Fail(const absl::Status& status) {
  fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return 1;
}

TEST(Cluster, RanksOfOneNodePassMessagesThroughRings) {
  const std::string address = FreeAddress();
  const std::vector<int> codes = RunRanks(3, [&](int rank) {
    absl::StatusOr<JoinedCluster> cluster = JoinCluster(Options(address, rank, 3));
    if (!cluster.ok()) return Fail(cluster.status());
    if (cluster->provider != "shm" || cluster->endpoint.transport->membership().size() != 3) return 2;
    constexpr size_t kEntries = 4, kBytes = 64;
    NodeMemory& memory = *cluster->endpoint.node_memory;
    const int next = (rank + 1) % 3, previous = (rank + 2) % 3;
    // Odd ranks map in the other order: nobody waits for anybody.
    std::array<SpscRing, 2> rings;
    for (int i = 0; i < 2; ++i) {
      const bool out = (i == 0) == (rank % 2 == 0);
      auto block = memory.Map(out ? rank : previous, out ? next : rank, "ring", SpscRing::Bytes(kEntries, kBytes));
      if (!block.ok()) return Fail(block.status());
      rings[out ? 0 : 1] = SpscRing(*block, kEntries, kBytes);
    }
    // A number goes round, a thousand times; a rank sleeps until its bell rings.
    for (uint64_t round = 0; round < 1000; ++round) {
      const auto send = [&](uint64_t value) {
        std::byte* slot = rings[0].Reserve();
        memcpy(slot, &value, sizeof(value));
        rings[0].Publish(sizeof(value));
        memory.Notify(next);
      };
      if (rank == 0) send(3 * round);
      const absl::Time deadline = absl::Now() + absl::Seconds(20);
      while (rings[1].Front().data() == nullptr) {
        if (absl::Now() > deadline) return 3;
        cluster->endpoint.transport->Wait(absl::Seconds(1));
      }
      uint64_t value = 0;
      memcpy(&value, rings[1].Front().data(), sizeof(value));
      rings[1].Pop();
      const uint64_t expected = 3 * round + (rank == 0 ? 2 : rank - 1);
      if (value != expected) return 4;
      if (rank != 0) send(value + 1);
    }
    return 0;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

TEST(Cluster, MemoryOfDifferentSizesIsRefused) {
  const std::string address = FreeAddress();
  const std::vector<int> codes = RunRanks(2, [&](int rank) {
    absl::StatusOr<JoinedCluster> cluster = JoinCluster(Options(address, rank, 2));
    if (!cluster.ok()) return Fail(cluster.status());
    const bool refused = absl::IsFailedPrecondition(
        cluster->endpoint.node_memory->Map(0, 1, "block", rank == 0 ? 4096 : 65536).status());
    const auto all = cluster->endpoint.exchange->AllGather("done", refused ? "1" : "0", absl::Seconds(10));
    return all.ok() && (*all)[0] != (*all)[1] ? 0 : 5;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

class Providers : public ::testing::TestWithParam<const char*> {};

TEST_P(Providers, WritesWithImmediatesArriveWholeOnOtherNodes) {
  const std::string address = FreeAddress();
  const std::vector<int> codes = RunRanks(2, [&](int rank) {
    ClusterOptions options = Options(address, rank, 2);
    options.node = absl::StrCat("node ", rank);
    options.provider = GetParam();
    absl::StatusOr<JoinedCluster> cluster = JoinCluster(options);
    if (!cluster.ok()) return Fail(cluster.status());
    Transport& transport = *cluster->endpoint.transport;
    constexpr size_t kBytes = 100'000, kWrites = 32;
    std::vector<std::byte> source(kBytes * kWrites), target(kBytes * kWrites);
    for (size_t i = 0; i < source.size(); ++i) source[i] = static_cast<std::byte>((i * 7 + i / 251 + rank) & 0xff);
    absl::StatusOr<Region> from = transport.Register(source.data(), source.size());
    absl::StatusOr<Region> to = transport.Register(target.data(), target.size());
    if (!from.ok() || !to.ok()) return Fail(from.ok() ? to.status() : from.status());
    const std::string mine(reinterpret_cast<const char*>(&to->remote), sizeof(to->remote));
    const auto regions = cluster->endpoint.exchange->AllGather("regions", mine, absl::Seconds(10));
    if (!regions.ok()) return Fail(regions.status());
    RemoteRegion remote;
    memcpy(&remote, (*regions)[1 - rank].data(), sizeof(remote));

    std::vector<bool> arrived(kWrites), sent(kWrites);
    size_t posted = 0, num_arrived = 0, num_sent = 0;
    const absl::Time deadline = absl::Now() + absl::Seconds(20);
    while (num_arrived < kWrites || num_sent < kWrites) {
      if (absl::Now() > deadline) return 6;
      if (posted < kWrites && transport.Write({.peer = 1 - rank,
                                               .region = from->id,
                                               .source = source.data() + posted * kBytes,
                                               .to = remote,
                                               .to_offset = posted * kBytes,
                                               .bytes = kBytes,
                                               .immediate = static_cast<uint32_t>(posted | 0xabcd0000u),
                                               .context = posted})) {
        ++posted;
      }
      std::array<Event, 8> events;
      const size_t count = transport.Poll(absl::MakeSpan(events));
      for (size_t i = 0; i < count; ++i) {
        if (events[i].kind == Event::Kind::kSent) {
          if (sent[events[i].context]) return 7;
          sent[events[i].context] = true;
          ++num_sent;
          continue;
        }
        const uint32_t index = events[i].immediate & 0xffff;
        if (events[i].immediate >> 16 != 0xabcd || index >= kWrites || arrived[index]) return 8;
        arrived[index] = true;
        ++num_arrived;
        for (size_t at = index * kBytes; at < (index + 1) * kBytes; ++at) {
          if (target[at] != static_cast<std::byte>((at * 7 + at / 251 + 1 - rank) & 0xff)) return 9;
        }
      }
      if (count == 0 && posted == kWrites) transport.Wait(absl::Milliseconds(100));
    }
    return cluster->endpoint.exchange->AllGather("done", "", absl::Seconds(10)).ok() ? 0 : 10;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}
INSTANTIATE_TEST_SUITE_P(All, Providers, ::testing::Values("net", "tcp"));

TEST(Cluster, ProviderThatIsNotThereIsAnErrorThatSaysWhatIs) {
  const absl::Status status = FindProvider("efa", "").status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()),
              ::testing::AllOf(HasSubstr("\"efa\" asked for"), HasSubstr("net"), HasSubstr("set fabric.provider")));
}

TEST(Cluster, SharedMemoryAloneIsRefusedBetweenNodes) {
  const std::string address = FreeAddress();
  const std::vector<int> codes = RunRanks(2, [&](int rank) {
    ClusterOptions options = Options(address, rank, 2);
    options.node = absl::StrCat("node ", rank);
    options.provider = "shm";
    return absl::IsFailedPrecondition(JoinCluster(options).status()) ? 0 : 1;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

TEST(Bootstrap, StrangersAreRefusedAndDoNotDisturb) {
  const std::string address = FreeAddress();
  const std::vector<int> codes = RunRanks(5, [&](int rank) {
    if (rank == 2) {  // another token
      BootstrapOptions options = Options(address, 1, 2).bootstrap;
      options.token = "another token of enough bytes";
      return absl::IsPermissionDenied(Bootstrap::Join(options).status()) ? 0 : 1;
    }
    if (rank == 3) {  // another cluster
      BootstrapOptions options = Options(address, 1, 2).bootstrap;
      options.cluster_id = "other";
      return absl::IsPermissionDenied(Bootstrap::Join(options).status()) ? 0 : 1;
    }
    if (rank == 4) {  // noise
      absl::StatusOr<FileDescriptor> socket = Connect(address, absl::Now() + absl::Seconds(10));
      return socket.ok() && write(socket->get(), "GET / HTTP/1.1\r\n\r\n", 18) == 18 ? 0 : 1;
    }
    if (rank == 1) absl::SleepFor(absl::Seconds(1));
    absl::StatusOr<std::unique_ptr<Bootstrap>> joined = Bootstrap::Join(Options(address, rank, 2).bootstrap);
    if (!joined.ok()) return Fail(joined.status());
    const auto all = (*joined)->AllGather("x", absl::StrCat("from ", rank), absl::Seconds(10));
    return all.ok() && (*all)[0] == "from 0" && (*all)[1] == "from 1" ? 0 : 1;
  });
  EXPECT_THAT(codes, ::testing::Each(0));
}

TEST(Bootstrap, MissingRanksAreNamed) {
  BootstrapOptions options = Options(FreeAddress(), 0, 3).bootstrap;
  options.timeout = absl::Milliseconds(200);
  const absl::Status status = Bootstrap::Join(options).status();
  EXPECT_TRUE(absl::IsDeadlineExceeded(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("ranks 1, 2 of 3"));
}

// Rank 1 meets `signal`; rank 0 must see it lost within a second, and say why.
int LosePeer(const std::string& address, int rank, bool apart, int signal, const char* reason_part) {
  ClusterOptions options = Options(address, rank, 2);
  if (apart) options.node = absl::StrCat("node ", rank);
  absl::StatusOr<JoinedCluster> cluster = JoinCluster(options);
  if (!cluster.ok()) return Fail(cluster.status());
  const auto pids = cluster->endpoint.exchange->AllGather("pid", absl::StrCat(getpid()), absl::Seconds(10));
  if (!pids.ok()) return Fail(pids.status());
  if (rank == 1) {
    raise(signal);
    return 0;
  }
  const absl::Time start = absl::Now();
  std::string reason;
  while (cluster->endpoint.watch->state(1, &reason) != PeerState::kLost) {
    if (absl::Now() - start > absl::Seconds(1)) return 11;
    cluster->endpoint.transport->Wait(absl::Milliseconds(100));
  }
  kill(std::stoi((*pids)[1]), SIGKILL);
  return reason.find(reason_part) != std::string::npos ? 0 : 12;
}

TEST(Detector, SeesAKilledProcessOfTheNode) {
  const std::string address = FreeAddress();
  const auto codes = RunRanks(2, [&](int rank) { return LosePeer(address, rank, false, SIGKILL, "ended"); });
  EXPECT_EQ(0, codes[0]);
}

TEST(Detector, SeesAStoppedProcessOfTheNode) {
  const std::string address = FreeAddress();
  const auto codes = RunRanks(2, [&](int rank) { return LosePeer(address, rank, false, SIGSTOP, "no heartbeat"); });
  EXPECT_EQ(0, codes[0]);
}

TEST(Detector, SeesAKilledProcessOfAnotherNode) {
  const std::string address = FreeAddress();
  const auto codes = RunRanks(2, [&](int rank) { return LosePeer(address, rank, true, SIGKILL, "no heartbeat"); });
  EXPECT_EQ(0, codes[0]);
}

}  // namespace
}  // namespace moerl::fabric
