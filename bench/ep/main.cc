// moerl-bench-ep: dispatch and combine between emulated nodes, beside the raw rate of the same link and the least bytes
// that must cross. Prints JSON lines. Needs root (network namespaces).
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "bench/ep/emulated_nodes.h"
#include "bench/ep/routing.h"
#include "libs/base/check.h"
#include "libs/base/measurement.h"
#include "libs/base/status_macros.h"
#include "libs/collective/fabric_collective.h"
#include "libs/ep/all_to_all.h"
#include "libs/ep/buffer.h"
#include "libs/ep/fp8.h"
#include "libs/fabric/cluster.h"

namespace moerl::bench {
namespace {

constexpr int kRanksMax = 64;
constexpr int kRoundsMax = 64;
constexpr int kNodesMax = 16;
constexpr size_t kRawBytes = 64 << 10;

struct Settings {
  int nodes = 2, ranks_per_node = 1, tokens = 256, hidden = 7168, top_k = 8, experts = 64, rounds = 7;
  double skew = 0;  // sigma of the log-normal popularity of experts in every other round; 0: uniform in all
  std::string link = "1gbit", backend = "two_hop", provider = "net";
  bool fp8 = false, mpi = false;
  int ranks() const { return nodes * ranks_per_node; }
  double skew_of(int round) const { return round % 2 == 1 ? skew : 0; }
};

// What the ranks report, in shared memory. Times in ns of the same clock.
struct Board {
  std::atomic<int> num_failed;
  double raw_bytes_per_s[kRanksMax];
  struct Phase {
    int64_t begin_ns[kRanksMax], end_ns[kRanksMax];
    uint64_t link_bytes[kRanksMax];  // of the rank's node, by the link's own counter; one rank a node
    // The least that this rank's tokens must send to a node, or their sums from it.
    uint64_t payload_bytes[kRanksMax][kNodesMax];
    uint64_t posted_bytes[kRanksMax];  // written to the transport, our headers included
  } dispatch[kRoundsMax], combine[kRoundsMax];
};

int64_t NowNs() { return absl::GetCurrentTimeNanos(); }

// Streams 64 KiB writes to the same rank of the next node for a while, as every rank does. Gives what arrived a second.
absl::StatusOr<double> MeasureRaw(const fabric::Endpoint& endpoint, const Settings& s) {
  fabric::Transport& transport = *endpoint.transport;
  constexpr int kWindow = 16;
  const int self = transport.membership().self;
  static std::vector<std::byte> source(kRawBytes), target(kRawBytes * kWindow);  // stay registered to the end
  MOERL_ASSIGN_OR_RETURN(const fabric::Region from, transport.Register(source.data(), source.size()));
  MOERL_ASSIGN_OR_RETURN(const fabric::Region to, transport.Register(target.data(), target.size()));
  const std::string mine(reinterpret_cast<const char*>(&to.remote), sizeof(to.remote));
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> all,
                         endpoint.exchange->AllGather("raw", mine, absl::Seconds(60)));
  const int peer = (self + s.ranks_per_node) % s.ranks();
  fabric::RemoteRegion remote;
  std::memcpy(&remote, all[peer].data(), sizeof(remote));
  // Starts behind the burst that a shaped link lets through, ends with the rate it keeps.
  const absl::Time begin = absl::Now() + absl::Milliseconds(300), end = begin + absl::Milliseconds(1500);
  // The epoch byte of no buffer's slot, so that a late one is not taken for one.
  const uint32_t stranger = static_cast<uint32_t>(~transport.membership().epoch & 0xff) << 24;
  int in_flight = 0;
  uint64_t arrived = 0, next = 0;
  while (absl::Now() < end) {
    std::array<fabric::Event, 32> events;
    bool moved = false;
    if (in_flight < kWindow) {
      moved = transport.Write({.peer = peer,
                               .region = from.id,
                               .source = source.data(),
                               .to = remote,
                               .to_offset = next % kWindow * kRawBytes,
                               .bytes = kRawBytes,
                               .immediate = stranger,
                               .context = 0});
      in_flight += moved ? 1 : 0;
      next += moved ? 1 : 0;
    }
    const size_t n = transport.Poll(absl::MakeSpan(events));
    for (size_t i = 0; i < n; ++i) {
      if (events[i].kind == fabric::Event::Kind::kSent) {
        --in_flight;
      } else if (absl::Now() >= begin) {
        ++arrived;
      }
    }
    if (!moved && n == 0) transport.Wait(absl::Milliseconds(1));
  }
  // Both directions go quiet before the buffers use the transport.
  const absl::Time quiet = absl::Now() + absl::Milliseconds(700);
  while (absl::Now() < quiet || in_flight > 0) {
    std::array<fabric::Event, 32> events;
    const size_t n = transport.Poll(absl::MakeSpan(events));
    for (size_t i = 0; i < n; ++i) in_flight -= events[i].kind == fabric::Event::Kind::kSent ? 1 : 0;
    if (n == 0) transport.Wait(absl::Milliseconds(1));
  }
  MOERL_RETURN_IF_ERROR(endpoint.exchange->AllGather("raw done", "", absl::Seconds(60)).status());
  return static_cast<double>(arrived * kRawBytes) / absl::ToDoubleSeconds(end - begin);
}

class Rank {
 public:
  Rank(const Settings& s, int rank, Board* board)
      : s_(s), rank_(rank), node_(rank / s.ranks_per_node), board_(*board) {}

  absl::Status Run() {
    fabric::ClusterOptions options;
    options.bootstrap = {.address = EmulatedNodes::AddressOf(0) + ":7500",
                         .rank = rank_,
                         .num_ranks = s_.ranks(),
                         .cluster_id = "bench",
                         .token = "a token of sixteen bytes or more",
                         .timeout = absl::Seconds(60)};
    options.provider = s_.provider;
    options.node = absl::StrCat("node ", node_);
    options.local_address = EmulatedNodes::AddressOf(node_);
    options.detector.timeout = absl::Seconds(20);  // a saturated emulation is not a lost rank
    MOERL_ASSIGN_OR_RETURN(fabric::JoinedCluster cluster, fabric::JoinCluster(options));
    if (s_.nodes > 1) {
      MOERL_ASSIGN_OR_RETURN(board_.raw_bytes_per_s[rank_], MeasureRaw(cluster.endpoint, s_));
    }
    ep::Group::Options group_options;
    group_options.timeout = absl::Seconds(120);
    group_options.spin = absl::ZeroDuration();
    group_ = std::make_unique<ep::Group>(std::move(cluster.endpoint), group_options);
    MOERL_ASSIGN_OR_RETURN(collective_, collective::FabricCollective::Create(&group_->hub(), {}));
    MOERL_ASSIGN_OR_RETURN(ep::ExpertMap map, ep::ExpertMap::Aligned(group_->membership(), s_.experts));
    ep::BufferOptions buffer_options;
    buffer_options.hidden = s_.hidden;
    buffer_options.top_k_max = s_.top_k;
    MOERL_ASSIGN_OR_RETURN(buffer_, ep::Buffer::Create(group_.get(), map, buffer_options));
    plain_ = std::make_unique<ep::AllToAll>(collective_.get(), &buffer_->map(), s_.hidden);
    std::vector<uint16_t> x(static_cast<size_t>(s_.tokens) * s_.hidden, 0x3f80);
    for (int round = 0; round < s_.rounds; ++round) MOERL_RETURN_IF_ERROR(RunRound(round, x));
    MOERL_RETURN_IF_ERROR(collective_->Barrier());
    return buffer_->Close();
  }

 private:
  absl::Status RunRound(int round, const std::vector<uint16_t>& x) {
    const std::vector<int32_t> ids = DrawIds(s_.tokens, s_.top_k, s_.experts, s_.skew_of(round), rank_, round);
    const std::vector<float> weights(ids.size(), 1.0f / s_.top_k);
    const bool is_plain = s_.backend == "all_to_all";
    const ep::DispatchInput input = {x.data(), ep::RowType::kBf16, s_.fp8 && !is_plain, s_.tokens,
                                     s_.top_k, ids.data(),         weights.data()};
    const std::vector<uint64_t> crossings = NodeCrossings(ids);
    const size_t row_bytes = s_.fp8 && !is_plain ? ep::Fp8RowBytes(s_.hidden) : s_.hidden * 2;
    ep::Dispatched dispatched;
    ep::AllToAll::Dispatched plain;
    MOERL_RETURN_IF_ERROR(Measure(&board_.dispatch[round], crossings, row_bytes, [&]() -> absl::Status {
      if (is_plain) {
        MOERL_ASSIGN_OR_RETURN(plain, plain_->Dispatch(input));
      } else {
        MOERL_ASSIGN_OR_RETURN(dispatched, buffer_->Dispatch(input));
      }
      return absl::OkStatus();
    }));
    // What experts give that compute in bf16; the plain way takes fp32 only.
    const size_t y_elements = static_cast<size_t>(is_plain ? plain.num_rows : dispatched.num_rows) * s_.hidden;
    std::vector<float> y_fp32(is_plain ? y_elements : 0, 1.0f);
    std::vector<uint16_t> y(is_plain ? 0 : y_elements, 0x3f80);
    std::vector<float> out(x.size());
    // A node's share of an aligned map is a large subtree: it returns in bf16.
    const int wire_block = std::max(1, s_.experts / 8);
    return Measure(&board_.combine[round], crossings, s_.hidden * 2, [&]() -> absl::Status {
      if (is_plain) return plain_->Combine(plain, y_fp32.data(), wire_block, out.data());
      ep::CombineInput combine;
      combine.handle = dispatched.handle;
      combine.rows = y.data();
      combine.type = ep::RowType::kBf16;
      combine.wire_block = wire_block;
      combine.out = out.data();
      return buffer_->Combine(combine);
    });
  }

  template <typename Body>
  absl::Status Measure(Board::Phase* phase, const std::vector<uint64_t>& crossings, size_t row_bytes,
                       const Body& body) {
    MOERL_RETURN_IF_ERROR(collective_->Barrier());
    absl::SleepFor(absl::Milliseconds(20));  // the barrier's own traffic is over
    const uint64_t posted = Posted();
    MOERL_ASSIGN_OR_RETURN(const uint64_t sent, LinkBytes());
    MOERL_RETURN_IF_ERROR(collective_->Barrier());
    phase->begin_ns[rank_] = NowNs();
    MOERL_RETURN_IF_ERROR(body());
    phase->end_ns[rank_] = NowNs();
    MOERL_RETURN_IF_ERROR(collective_->Barrier());
    MOERL_ASSIGN_OR_RETURN(const uint64_t sent_after, LinkBytes());
    phase->link_bytes[rank_] = rank_ % s_.ranks_per_node == 0 ? sent_after - sent : 0;
    phase->posted_bytes[rank_] = Posted() - posted;
    for (int node = 0; node < s_.nodes; ++node) phase->payload_bytes[rank_][node] = crossings[node] * row_bytes;
    return absl::OkStatus();
  }

  absl::StatusOr<uint64_t> LinkBytes() const {
    if (s_.nodes == 1) return 0;
    return EmulatedNodes::BytesSent();
  }
  uint64_t Posted() {
    const ep::Buffer::Stats stats = buffer_->stats();
    return s_.backend == "all_to_all" ? collective_->bytes_posted()
                                      : stats.row_bytes + stats.partial_bytes + stats.route_bytes;
  }

  // How many tokens of this rank cross to each other node when they cross to each only once.
  std::vector<uint64_t> NodeCrossings(const std::vector<int32_t>& ids) const {
    std::vector<uint64_t> crossings(s_.nodes);
    for (int t = 0; t < s_.tokens; ++t) {
      std::vector<bool> nodes(s_.nodes);
      for (int j = 0; j < s_.top_k; ++j) nodes[buffer_->map().node(ids[t * s_.top_k + j])] = true;
      for (int node = 0; node < s_.nodes; ++node) crossings[node] += nodes[node] && node != node_;
    }
    return crossings;
  }

  const Settings& s_;
  const int rank_, node_;
  Board& board_;
  std::unique_ptr<ep::Group> group_;
  std::unique_ptr<collective::FabricCollective> collective_;
  std::unique_ptr<ep::Buffer> buffer_;
  std::unique_ptr<ep::AllToAll> plain_;
};

void Print(const std::string& name, double value, const char* unit, bool higher_is_better,
           const std::string& reference = "", std::optional<double> ratio = {}, std::optional<double> goal = {}) {
  std::puts(ToJsonLine({name, value, unit, reference, ratio, goal, higher_is_better}).c_str());
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

// One dispatch or combine of all ranks.
struct Round {
  double time_s = 0, payload = 0, posted = 0, link = 0;
  double busiest = 0;  // payload of the node and direction with most
};

Round RoundOf(const Settings& s, const Board::Phase& phase) {
  Round round;
  const int64_t begin = *std::max_element(phase.begin_ns, phase.begin_ns + s.ranks());
  const int64_t end = *std::max_element(phase.end_ns, phase.end_ns + s.ranks());
  round.time_s = static_cast<double>(end - begin) * 1e-9;
  std::vector<uint64_t> out(s.nodes), in(s.nodes);
  for (int rank = 0; rank < s.ranks(); ++rank) {
    round.posted += static_cast<double>(phase.posted_bytes[rank]);
    round.link += static_cast<double>(phase.link_bytes[rank]);
    for (int node = 0; node < s.nodes; ++node) {
      out[rank / s.ranks_per_node] += phase.payload_bytes[rank][node];
      in[node] += phase.payload_bytes[rank][node];
    }
  }
  for (const uint64_t bytes : out) round.payload += static_cast<double>(bytes);
  round.busiest =
      static_cast<double>(std::max(*std::max_element(out.begin(), out.end()), *std::max_element(in.begin(), in.end())));
  return round;
}

// The rounds with skewed popularity beside the even ones among them, by the byte on the busiest link.
void ReportSkew(const Settings& s, const Board& board, const std::string& what) {
  std::vector<double> tokens(s.experts);
  for (int rank = 0; rank < s.ranks(); ++rank) {
    for (const int32_t id : DrawIds(s.tokens, s.top_k, s.experts, s.skew, rank, 1)) ++tokens[id];
  }
  const double mean = static_cast<double>(s.ranks()) * s.tokens * s.top_k / s.experts;
  const double imbalance = *std::max_element(tokens.begin(), tokens.end()) / mean;
  Print(what + "skew.tokens", imbalance, "ratio", false, "mean tokens of an expert", imbalance);
  for (const bool is_combine : {false, true}) {
    std::vector<double> by_byte[2];
    for (int i = 1; i < s.rounds; ++i) {
      const Round round = RoundOf(s, is_combine ? board.combine[i] : board.dispatch[i]);
      by_byte[i % 2].push_back(round.time_s / round.busiest);
    }
    const double ratio = Median(by_byte[1]) / Median(by_byte[0]);
    Print(what + (is_combine ? "combine" : "dispatch") + ".skew", ratio, "ratio", false,
          "even popularity, time a byte of the busiest link", ratio, 1.10);
  }
}

// Returns the median time of a dispatch in ms.
double Report(const Settings& s, const Board& board) {
  // Every rank of a node streams at once: together they see the link.
  std::vector<double> raw(s.nodes);
  for (int rank = 0; rank < s.ranks(); ++rank) raw[rank / s.ranks_per_node] += board.raw_bytes_per_s[rank];
  const double raw_rate = *std::min_element(raw.begin(), raw.end());
  const std::string what = absl::StrCat("ep.", s.backend, ".", s.fp8 ? "fp8" : "bf16", ".", s.nodes, "x",
                                        s.ranks_per_node, ".", s.tokens, "x", s.hidden, ".", s.link, ".");
  if (s.nodes > 1) Print(what + "raw_write", raw_rate / 1e6, "MB/s", true);
  if (s.skew > 0) {
    ReportSkew(s, board, what);
    return 0;
  }
  double dispatch_ms = 0;
  for (const bool is_combine : {false, true}) {
    const std::string name = what + (is_combine ? "combine" : "dispatch");
    std::vector<double> times, goodputs, overheads, link_overheads;
    for (int i = 1; i < s.rounds; ++i) {  // the first warms up
      const Round round = RoundOf(s, is_combine ? board.combine[i] : board.dispatch[i]);
      times.push_back(round.time_s);
      if (round.payload == 0) continue;
      goodputs.push_back(round.busiest / round.time_s / raw_rate);
      overheads.push_back(round.posted / round.payload);
      link_overheads.push_back(round.link / round.payload);
    }
    Print(name + ".time", Median(times) * 1e3, "ms", false);
    if (!is_combine) dispatch_ms = Median(times) * 1e3;
    if (goodputs.empty()) continue;
    Print(name + ".goodput", Median(goodputs) * raw_rate / 1e6, "MB/s", true, "raw 64 KiB writes over the same link",
          Median(goodputs), s.tokens >= 1024 ? 0.90 : 0.80);
    Print(name + ".bytes", Median(overheads), "ratio", false, "payload of each token once a node", Median(overheads),
          1.05);
    Print(name + ".link_bytes", Median(link_overheads), "ratio", false,
          "the same, by the link's counter with TCP/IP and acknowledgements", Median(link_overheads));
  }
  return dispatch_ms;
}

// The same routing by MPI_Alltoallv between the same nodes, in the same run.
absl::Status ReportMpi(const Settings& s, const EmulatedNodes& nodes, const std::string& self, double dispatch_ms) {
  const size_t row_bytes = s.fp8 ? ep::Fp8RowBytes(s.hidden) : s.hidden * 2;
  const std::string program =
      absl::StrCat(self, "-mpi ", s.tokens, " ", row_bytes, " ", s.top_k, " ", s.experts, " ", s.skew, " ", s.rounds);
  MOERL_ASSIGN_OR_RETURN(const std::string output, nodes.RunMpi(s.ranks_per_node, program));
  std::istringstream lines(output);
  std::string form;
  double ms = 0;
  bool is_any = false;
  while (lines >> form >> ms) {
    is_any = true;
    Print(absl::StrCat("ep.over_mpi.", form, ".", s.nodes, "x", s.ranks_per_node, ".", s.tokens, "x", s.hidden, ".",
                       s.link, ".dispatch.time"),
          dispatch_ms, "ms", false, absl::StrCat("MPI_Alltoallv, ", form, ", ", ms, " ms"), dispatch_ms / ms,
          form == "rank_dedup" ? 1 / 3.0 : 1 / 4.5);
  }
  return is_any ? absl::OkStatus() : absl::InternalError("bench: mpirun printed no times: " + output);
}

int Usage(const std::string& bad) {
  std::fprintf(stderr,
               "bench: unknown argument %s; usage: moerl-bench-ep [--nodes N] [--ranks-per-node R] [--link RATE] "
               "[--tokens T] [--hidden H] [--topk K] [--experts E] [--skew S] [--rounds N] [--fp8] "
               "[--backend two_hop|all_to_all] [--provider net|tcp] [--mpi]\n",
               bad.c_str());
  return 2;
}

int Main(int argc, char** argv) {
  Settings s;
  const std::map<std::string, int*> ints = {{"--nodes", &s.nodes},   {"--ranks-per-node", &s.ranks_per_node},
                                            {"--tokens", &s.tokens}, {"--hidden", &s.hidden},
                                            {"--topk", &s.top_k},    {"--experts", &s.experts},
                                            {"--rounds", &s.rounds}};
  const std::map<std::string, std::string*> strings = {
      {"--link", &s.link}, {"--backend", &s.backend}, {"--provider", &s.provider}};
  for (int i = 1; i < argc; ++i) {
    const std::string arg = argv[i];
    if (arg == "--fp8") {
      s.fp8 = true;
    } else if (arg == "--mpi") {
      s.mpi = true;
    } else if (arg == "--json") {
      // always
    } else if (i + 1 < argc && ints.contains(arg)) {
      *ints.at(arg) = std::atoi(argv[++i]);
    } else if (i + 1 < argc && strings.contains(arg)) {
      *strings.at(arg) = argv[++i];
    } else if (i + 1 < argc && arg == "--skew") {
      s.skew = std::atof(argv[++i]);
    } else {
      return Usage(arg);
    }
  }
  if (s.nodes < 1 || s.ranks_per_node < 1 || s.nodes > kNodesMax || s.ranks() > kRanksMax || s.rounds < 3 ||
      s.rounds > kRoundsMax || s.top_k > s.experts) {
    std::fprintf(stderr, "bench: at most %d nodes, %d ranks, 3 to %d rounds, and no more choices than experts\n",
                 kNodesMax, kRanksMax, kRoundsMax);
    return 2;
  }
  EmulatedNodes nodes;
  if (const absl::Status status = nodes.Start(s.nodes, s.link); !status.ok()) {
    std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
    return 1;
  }
  auto* board =
      static_cast<Board*>(mmap(nullptr, sizeof(Board), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
  MOERL_CHECK(board != MAP_FAILED);
  std::vector<pid_t> children;
  for (int rank = 0; rank < s.ranks(); ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      absl::Status status = nodes.Enter(rank / s.ranks_per_node);
      if (status.ok()) status = Rank(s, rank, board).Run();
      if (!status.ok()) {
        std::fprintf(stderr, "rank %d: %s\n", rank, status.ToString().c_str());
        ++board->num_failed;
      }
      _exit(status.ok() ? 0 : 1);
    }
    children.push_back(pid);
  }
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status != 0) return 1;
  }
  const double dispatch_ms = Report(s, *board);
  if (!s.mpi || s.skew > 0) return 0;
  const absl::Status status = ReportMpi(s, nodes, std::filesystem::canonical("/proc/self/exe").string(), dispatch_ms);
  if (!status.ok()) std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  return status.ok() ? 0 : 1;
}

}  // namespace
}  // namespace moerl::bench

int main(int argc, char** argv) { return moerl::bench::Main(argc, argv); }
