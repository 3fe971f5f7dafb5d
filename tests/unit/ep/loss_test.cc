// A rank is killed or stopped in the middle of dispatches and combines of real processes. Every survivor must get an
// error that names it, the operation, and what was expected and received; soon, without hanging or aborting.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>

#include "absl/strings/str_cat.h"
#include "libs/ep/buffer.h"
#include "libs/fabric/cluster.h"
#include "libs/fabric/socket.h"
#include "tests/unit/ep/seeds.h"

namespace moerl::ep {
namespace {

constexpr int kRanksMax = 4;
constexpr int kHidden = 512;
constexpr int kTokens = 64;

// Shared with the children.
struct Board {
  std::atomic<int> num_running, num_ended;
  std::atomic<int64_t> lost_at_ns;
  struct Survivor {
    std::atomic<int64_t> error_at_ns;
    char message[1024];
  } survivors[kRanksMax];
};

int64_t Now() { return absl::ToInt64Nanoseconds(absl::Now() - absl::UnixEpoch()); }

struct Loss {
  const char* name;
  const char* provider;
  std::vector<int> node_of;
  int victim;
  int signal;
  absl::Duration goal;  // for 99 of 100, on a machine that is not busy
};

// Dispatches and combines until something goes wrong, reports it, and stays until all survivors have: their errors are
// to name the victim, not each other.
absl::Status RunUntilError(const Loss& loss, const std::string& address, int rank, Board* board) {
  const int num_survivors = static_cast<int>(loss.node_of.size()) - 1;
  const auto report = [&](const absl::Status& status) {
    Board::Survivor& mine = board->survivors[rank];
    std::snprintf(mine.message, sizeof(mine.message), "%s", status.ToString().c_str());
    mine.error_at_ns = Now();
    ++board->num_ended;
    for (int i = 0; i < 5000 && board->num_ended < num_survivors; ++i) absl::SleepFor(absl::Milliseconds(1));
    return status;
  };
  fabric::ClusterOptions options;
  options.bootstrap = {.address = address,
                       .rank = rank,
                       .num_ranks = static_cast<int>(loss.node_of.size()),
                       .cluster_id = "loss",
                       .token = "a token of sixteen bytes or more",
                       .timeout = absl::Seconds(30)};
  options.provider = loss.provider;
  options.node = absl::StrCat("node ", loss.node_of[rank]);
  absl::StatusOr<fabric::JoinedCluster> cluster = fabric::JoinCluster(options);
  if (!cluster.ok()) return cluster.status();
  Group group(std::move(cluster->endpoint), {});
  BufferOptions buffer_options;
  buffer_options.hidden = kHidden;
  auto buffer = Buffer::Create(&group, *ExpertMap::Aligned(group.membership(), 8), buffer_options);
  if (!buffer.ok()) return buffer.status();
  std::vector<float> x(kTokens * kHidden, 1.0f), out(x.size());
  std::vector<int32_t> ids;
  for (int t = 0; t < kTokens; ++t) ids.insert(ids.end(), {t % 8, (t + 3) % 8});
  ++board->num_running;
  while (true) {
    const auto d = (*buffer)->Dispatch({x.data(), RowType::kFp32, false, kTokens, 2, ids.data(), nullptr});
    if (!d.ok()) return report(d.status());
    CombineInput combine;
    combine.handle = d->handle;
    combine.rows = d->x;
    combine.out = out.data();
    if (absl::Status status = (*buffer)->Combine(combine); !status.ok()) return report(status);
  }
}

class Losses : public testing::TestWithParam<Loss> {};

TEST_P(Losses, AreNamedByEverySurvivor) {
  const Loss& loss = GetParam();
  std::vector<double> delays_ms;
  const SeedRange seeds = Seeds(4);
  for (uint64_t seed = seeds.first; seed < seeds.last; ++seed) {
    auto* board =
        static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    const std::string address = absl::StrCat("127.0.0.1:", *fabric::BoundPort(*fabric::Listen("127.0.0.1:0")));
    const int ranks = static_cast<int>(loss.node_of.size());
    std::vector<pid_t> children;
    for (int rank = 0; rank < ranks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) {
        const absl::Status status = RunUntilError(loss, address, rank, board);
        if (board->num_running < ranks) fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
        _exit(0);
      }
      children.push_back(pid);
    }
    const absl::Time deadline = absl::Now() + absl::Seconds(60);
    while (board->num_running < ranks && absl::Now() < deadline) absl::SleepFor(absl::Milliseconds(1));
    ASSERT_EQ(board->num_running, ranks);
    std::mt19937_64 random(seed);
    absl::SleepFor(absl::Microseconds(20000 + random() % 30000));
    board->lost_at_ns = Now();
    kill(children[loss.victim], loss.signal);
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == loss.victim) continue;
      int status = 0;
      waitpid(children[rank], &status, 0);
      const Board::Survivor& survivor = board->survivors[rank];
      const std::string message = survivor.message;
      EXPECT_EQ(status, 0) << "rank " << rank << " seed " << seed;
      EXPECT_NE(message.find("UNAVAILABLE"), std::string::npos) << message;
      EXPECT_NE(message.find(absl::StrCat("lost rank ", loss.victim)), std::string::npos) << message;
      const bool names_operation =
          message.find("dispatch ") != std::string::npos || message.find("combine ") != std::string::npos;
      EXPECT_TRUE(names_operation) << message;
      const double delay_ms = static_cast<double>(survivor.error_at_ns - board->lost_at_ns) * 1e-6;
      EXPECT_LT(delay_ms, 1000) << message;
      delays_ms.push_back(delay_ms);
      if (seed == seeds.first) std::cout << "rank " << rank << ": " << message << std::endl;
    }
    kill(children[loss.victim], SIGKILL);
    waitpid(children[loss.victim], nullptr, 0);
    munmap(board, sizeof(Board));
  }
  std::sort(delays_ms.begin(), delays_ms.end());
  std::cout << loss.name << ": " << delays_ms.size() << " errors, median " << delays_ms[delays_ms.size() / 2]
            << " ms, largest " << delays_ms.back() << " ms, goal " << loss.goal << std::endl;
}

INSTANTIATE_TEST_SUITE_P(
    Each, Losses,
    testing::Values(Loss{"KillInTheNode", "shm", {0, 0, 0}, 1, SIGKILL, absl::Milliseconds(100)},
                    Loss{"StopInTheNode", "shm", {0, 0}, 0, SIGSTOP, absl::Milliseconds(500)},
                    Loss{"KillBetweenNodes", "net", {0, 1}, 1, SIGKILL, absl::Milliseconds(500)},
                    Loss{"StopBetweenNodes", "net", {0, 0, 1, 1}, 3, SIGSTOP, absl::Milliseconds(500)}),
    [](const testing::TestParamInfo<Loss>& info) { return info.param.name; });

}  // namespace
}  // namespace moerl::ep
