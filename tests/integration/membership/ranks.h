#ifndef MOERL_TESTS_INTEGRATION_MEMBERSHIP_RANKS_H_
#define MOERL_TESTS_INTEGRATION_MEMBERSHIP_RANKS_H_

#include <sys/types.h>

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "absl/time/time.h"

namespace moerl {

// Where a rank stands still until it is let go.
enum class Phase : int { kNone, kDispatch, kCombine, kBetween };

enum class RankState : int { kStarting, kRunning, kFailed, kEvicted, kNoMajority, kBroken };

// What the ranks and the test tell each other, in memory that all share.
struct Board {
  static constexpr int kRanksMax = 1024;  // replacements included
  std::atomic<bool> is_over;
  std::atomic<bool> is_idle;  // ranks run no operations
  struct Rank {
    std::atomic<RankState> state;
    std::atomic<Phase> is_in;    // what it waits for
    std::atomic<Phase> halt_in;  // the test's wish
    std::atomic<bool> is_halted;
    std::atomic<bool> may_go;
    std::atomic<int64_t> epoch, size, rank;
    std::atomic<int64_t> num_operations;              // finished in this epoch
    std::atomic<int64_t> asked_at_ns;                 // to come in, as a replacement
    std::atomic<int64_t> error_at_ns, running_at_ns;  // of the last loss; first operation finished in this epoch
    std::atomic<int64_t> cpu_ns;                      // of the process, while idle
    char error[2048];                                 // the operation's
    char reform_error[2048];
    char control_addresses[1024];
  } ranks[kRanksMax];
};

int64_t NowNs();

struct Layout {
  std::string provider;
  std::vector<int> node_of;
  std::vector<std::string> namespaces;  // network namespace by node; empty: this one
  std::string host = "127.0.0.1";       // where rank 0 is
};

// Ranks as processes that dispatch and combine, check every result, and reform after a loss. What a test leaves behind
// is killed.
class Ranks {
 public:
  explicit Ranks(Layout layout);
  ~Ranks();

  Board::Rank& operator[](int rank) { return board_->ranks[rank]; }
  Board& board() { return *board_; }
  pid_t pid(int rank) const { return pids_[rank]; }
  int size() const { return static_cast<int>(pids_.size()); }

  // True once `holds`, looked at every millisecond; false after `timeout`.
  bool Await(const std::function<bool()>& holds, absl::Duration timeout);
  // All of `ranks` run in one epoch of `size` ranks and have finished an operation in it.
  bool AwaitRunning(const std::vector<int>& ranks, int size, absl::Duration timeout);
  // The same in an epoch later than `epoch`, of those ranks alone.
  bool AwaitRunningAfter(int64_t epoch, const std::vector<int>& ranks, absl::Duration timeout);
  // Brings `rank` to a stand in the middle of an operation of that kind, and the other members to waiting for it there.
  bool Halt(int rank, const std::vector<int>& members, Phase phase);
  void Signal(int rank, int signal);
  // Starts a replacement on `node` that asks the members listed by `known`; its number here.
  int Join(int node, int known);
  // Tells all ranks to end and waits for them. The number of those that did not end well.
  int Finish();

 private:
  void Start(int slot, int node, bool is_joiner, const std::string& known);

  Layout layout_;
  std::string address_;
  Board* board_;
  std::vector<pid_t> pids_;
};

// An operation's error says what was expected, and what had come.
bool NamesCounts(const std::string& error);

}  // namespace moerl

#endif  // MOERL_TESTS_INTEGRATION_MEMBERSHIP_RANKS_H_
