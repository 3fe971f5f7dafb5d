#include "tests/integration/membership/ranks.h"

#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <iostream>
#include <memory>
#include <random>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libs/base/check.h"
#include "libs/ep/buffer.h"
#include "libs/fabric/cluster.h"
#include "libs/fabric/libfabric_transport.h"
#include "libs/fabric/socket.h"

namespace moerl {
namespace {

constexpr int kHidden = 512;
constexpr int kTokens = 64;
constexpr int kExperts = 8;
constexpr absl::Duration kNoMajorityAfter = absl::Seconds(2);

int64_t Clock(clockid_t clock) {
  timespec now = {};
  clock_gettime(clock, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

void Write(char* into, size_t bytes, const absl::Status& status) {
  std::snprintf(into, bytes, "%s", status.ToString().c_str());
}

// One rank's life. Returns the exit code.
class Life {
 public:
  Life(Board& board, Board::Rank& mine) : board_(board), mine_(mine) {}

  int Run(absl::StatusOr<fabric::JoinedCluster> joined) {
    if (!joined.ok()) return Break(joined.status());
    cluster_ = joined->cluster;
    operation_ = joined->finished;
    fabric::Endpoint endpoint = std::move(joined->endpoint);
    for (;;) {
      const absl::Status status = RunEpoch(std::move(endpoint));
      if (board_.is_over) return 0;
      if (absl::IsDataLoss(status)) return Break(status);
      absl::StatusOr<fabric::JoinedEpoch> next = cluster_->Reform(kNoMajorityAfter);
      if (board_.is_over) return 0;
      if (!next.ok()) {
        Write(mine_.reform_error, sizeof(mine_.reform_error), next.status());
        mine_.state = absl::IsFailedPrecondition(next.status()) ? RankState::kEvicted : RankState::kNoMajority;
        if (mine_.state == RankState::kEvicted) return 0;
        // Without a majority until a link is back, and then late.
        while (!board_.is_over && absl::IsUnavailable(next.status())) next = cluster_->Reform(absl::Milliseconds(300));
        if (absl::IsFailedPrecondition(next.status())) mine_.state = RankState::kEvicted;
        return 0;
      }
      operation_ = next->finished;
      endpoint = std::move(next->endpoint);
    }
  }

 private:
  int Break(const absl::Status& status) {
    if (board_.is_over) return 0;
    Write(mine_.error, sizeof(mine_.error), status);
    mine_.state = RankState::kBroken;
    std::cerr << status << std::endl;
    return 1;
  }

  absl::Status Fail(absl::Status status) {
    Write(mine_.error, sizeof(mine_.error), status);
    mine_.error_at_ns = NowNs();
    mine_.state = RankState::kFailed;
    return status;
  }

  void Halt(Phase phase) {
    if (mine_.halt_in != phase) return;
    mine_.is_halted = true;
    while (!mine_.may_go) {
    }
    mine_.halt_in = Phase::kNone;
    mine_.is_halted = mine_.may_go = false;
  }

  absl::Status RunEpoch(fabric::Endpoint endpoint) {
    ep::Group group(std::move(endpoint), {});
    ep::BufferOptions options;
    options.hidden = kHidden;
    auto buffer = ep::Buffer::Create(&group, *ep::ExpertMap::Aligned(group.membership(), kExperts), options);
    if (!buffer.ok()) return Fail(buffer.status());
    mine_.num_operations = 0;
    mine_.epoch = static_cast<int64_t>(group.membership().epoch);
    mine_.size = group.size();
    mine_.rank = group.rank();
    std::snprintf(mine_.control_addresses, sizeof(mine_.control_addresses), "%s",
                  absl::StrJoin(cluster_->control_addresses(), ",").c_str());
    for (;;) {
      if (absl::Status status = Operate(group, **buffer); !status.ok()) return Fail(std::move(status));
      cluster_->SetFinished(++operation_);
      if (++mine_.num_operations == 1) mine_.running_at_ns = NowNs();
      mine_.state = RankState::kRunning;
      if (board_.is_over || cluster_->num_joiners() > 0) return absl::OkStatus();
      while (board_.is_idle && !board_.is_over) {
        absl::SleepFor(absl::Milliseconds(100));
        mine_.cpu_ns = Clock(CLOCK_PROCESS_CPUTIME_ID);
      }
      Halt(Phase::kBetween);
    }
  }

  // Every token goes to two experts, which give it back as it is.
  absl::Status Operate(const ep::Group& group, ep::Buffer& buffer) {
    std::mt19937 random(static_cast<uint32_t>(operation_ * 31 + static_cast<uint64_t>(group.rank())));
    std::vector<float> x(kTokens * kHidden), out(x.size());
    for (float& value : x) value = static_cast<float>(random() % 1000);
    std::vector<int32_t> ids;
    for (int t = 0; t < kTokens; ++t) {
      const int first = static_cast<int>(random() % kExperts);
      ids.insert(ids.end(), {first, (first + 3) % kExperts});
    }
    Halt(Phase::kDispatch);  // the others' rows to this rank are on their way, its own never come
    auto sent = buffer.SendDispatch({x.data(), ep::RowType::kFp32, false, kTokens, 2, ids.data(), nullptr});
    if (!sent.ok()) return sent.status();
    mine_.is_in = Phase::kDispatch;
    auto d = buffer.ReceiveDispatch(*sent);
    mine_.is_in = Phase::kNone;
    if (!d.ok()) return d.status();
    ep::CombineInput combine;
    combine.handle = d->handle;
    combine.rows = d->x;
    combine.out = out.data();
    Halt(Phase::kCombine);
    sent = buffer.SendCombine(combine);
    if (!sent.ok()) return sent.status();
    mine_.is_in = Phase::kCombine;
    if (absl::Status status = buffer.ReceiveCombine(*sent); !status.ok()) return status;
    mine_.is_in = Phase::kNone;
    for (size_t i = 0; i < x.size(); ++i) {
      if (out[i] != 2 * x[i]) return absl::DataLossError(absl::StrCat("a sum of operation ", operation_ + 1));
    }
    return absl::OkStatus();
  }

  Board& board_;
  Board::Rank& mine_;
  std::shared_ptr<fabric::Cluster> cluster_;
  uint64_t operation_ = 0;  // the last finished
};

void EnterNamespace(const std::string& name) {
  const int fd = open(absl::StrCat("/run/netns/", name).c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0 || setns(fd, CLONE_NEWNET) != 0) {
    perror("setns");
    _exit(2);
  }
  close(fd);
}

}  // namespace

int64_t NowNs() { return Clock(CLOCK_MONOTONIC); }

Ranks::Ranks(Layout layout) : layout_(std::move(layout)) {
  // Namespaces have all ports to themselves.
  const int port =
      layout_.namespaces.empty() ? *fabric::BoundPort(*fabric::Listen(absl::StrCat(layout_.host, ":0"))) : 7000;
  address_ = absl::StrCat(layout_.host, ":", port);
  board_ = static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  for (size_t rank = 0; rank < layout_.node_of.size(); ++rank)
    Start(static_cast<int>(rank), layout_.node_of[rank], false, "");
}

Ranks::~Ranks() {
  board_->is_over = true;
  for (const pid_t pid : pids_) {
    if (pid <= 0) continue;
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
  munmap(board_, sizeof(Board));
}

void Ranks::Start(int slot, int node, bool is_joiner, const std::string& known) {
  const pid_t pid = fork();
  if (pid != 0) {
    pids_.push_back(pid);
    return;
  }
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (!layout_.namespaces.empty()) EnterNamespace(layout_.namespaces[node]);
  fabric::ClusterOptions options;
  options.bootstrap = {.address = address_,
                       .rank = slot,
                       .num_ranks = static_cast<int>(layout_.node_of.size()),
                       .cluster_id = "membership",
                       .token = "a token of sixteen bytes or more",
                       .timeout = absl::Seconds(30)};
  options.provider = layout_.provider;
  options.node = absl::StrCat("node ", node);
  options.name = absl::StrCat("host-", node);  // stays when the nodes are numbered anew
  const std::vector<std::string> addresses = absl::StrSplit(known, ',');
  Board::Rank& mine = board_->ranks[slot];
  Life life(*board_, mine);
  fabric::AvailableProviders();  // a start's own work, 0.1 s of processor time: no part of joining
  mine.asked_at_ns = NowNs();
  _exit(life.Run(is_joiner ? fabric::JoinRunningCluster(options, addresses) : fabric::JoinCluster(options)));
}

bool Ranks::Await(const std::function<bool()>& holds, absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  while (!holds()) {
    if (absl::Now() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(1));
  }
  return true;
}

bool Ranks::AwaitRunning(const std::vector<int>& ranks, int size, absl::Duration timeout) {
  return Await(
      [&] {
        return std::all_of(ranks.begin(), ranks.end(), [&](int rank) {
          const Board::Rank& each = board_->ranks[rank];
          return each.state == RankState::kRunning && each.size == size && each.num_operations > 0 &&
                 each.epoch == board_->ranks[ranks[0]].epoch;
        });
      },
      timeout);
}

bool Ranks::AwaitRunningAfter(int64_t epoch, const std::vector<int>& ranks, absl::Duration timeout) {
  const auto is_after = [&](int rank) { return board_->ranks[rank].epoch > epoch; };
  return Await([&] { return std::all_of(ranks.begin(), ranks.end(), is_after); }, timeout) &&
         AwaitRunning(ranks, static_cast<int>(ranks.size()), timeout);
}

bool Ranks::Halt(int rank, const std::vector<int>& members, Phase phase) {
  board_->ranks[rank].halt_in = phase;
  const auto stands = [&] {
    const auto waits = [&](int other) { return other == rank || board_->ranks[other].is_in == phase; };
    return board_->ranks[rank].is_halted && std::all_of(members.begin(), members.end(), waits);
  };
  return Await(stands, absl::Seconds(20));
}

void Ranks::Signal(int rank, int signal) { kill(pids_[rank], signal); }

int Ranks::Join(int node, int known) {
  const int slot = size();
  MOERL_CHECK(slot < Board::kRanksMax);
  Start(slot, node, true, board_->ranks[known].control_addresses);
  return slot;
}

int Ranks::Finish() {
  board_->is_over = true;
  int num_bad = 0;
  for (pid_t& pid : pids_) {
    int status = 0;
    int64_t waited = 0;
    while (waitpid(pid, &status, WNOHANG) == 0 && ++waited < 10000) absl::SleepFor(absl::Milliseconds(1));
    if (waited >= 10000) {
      kill(pid, SIGKILL);
      waitpid(pid, &status, 0);
    }
    // Those that the test killed itself do not count.
    const bool is_bad = waited >= 10000 || (WIFEXITED(status) ? WEXITSTATUS(status) != 0 : WTERMSIG(status) != SIGKILL);
    num_bad += is_bad ? 1 : 0;
    pid = 0;
  }
  return num_bad;
}

bool NamesCounts(const std::string& error) {
  const auto has = [&](const char* word) { return error.find(word) != std::string::npos; };
  return has("expected") && (has("received") || has("merged") || has("added up"));
}

}  // namespace moerl
