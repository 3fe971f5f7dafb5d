#include "libs/fabric/cluster.h"

#include <openssl/rand.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"
#include "libs/fabric/contact.h"
#include "libs/fabric/libfabric_transport.h"
#include "libs/fabric/node_transport.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/voter.h"

namespace moerl::fabric {
namespace {

constexpr absl::Duration kMeetPause = absl::Milliseconds(10);

// Ranks share memory where they share a kernel, a host name (pods do not) and a process namespace.
std::string ThisNode() {
  std::string boot_id;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot_id);
  char host[256] = {};
  gethostname(host, sizeof(host) - 1);
  char processes[64] = {};
  if (readlink("/proc/self/ns/pid", processes, sizeof(processes) - 1) < 0) processes[0] = '\0';
  return absl::StrCat(boot_id, "/", host, "/", processes);
}

// Rises with every start of a cluster and fits into registration keys.
uint64_t FirstEpoch() { return static_cast<uint64_t>(absl::ToUnixMillis(absl::Now())) & ((uint64_t{1} << 44) - 1); }

absl::StatusOr<Info> ChooseProvider(const std::string& asked, const std::string& local_address, std::string* chosen) {
  if (asked != "auto") {
    *chosen = asked;
    return FindProvider(asked, local_address);
  }
  absl::StatusOr<Info> info = absl::NotFoundError("");
  for (const char* provider : {"efa", "net", "tcp"}) {
    *chosen = provider;
    // EFA devices are not found by an address of the host's network.
    info = FindProvider(provider, strcmp(provider, "efa") == 0 ? "" : local_address);
    if (info.ok()) return info;
  }
  return info;
}

uint64_t NewLifetime() {
  uint64_t id = 0;
  RAND_bytes(reinterpret_cast<unsigned char*>(&id), sizeof(id));
  return id;
}

// What a rank says at the first epoch's bootstrap. Rank 0's epoch is taken.
std::string EncodeIntroduction(uint64_t epoch, const Lifetime& lifetime) {
  return absl::StrCat(epoch, "\n", lifetime.id, "\n", lifetime.contact);
}

absl::Status DecodeIntroduction(const std::string& text, uint64_t* epoch, Lifetime* lifetime) {
  const std::vector<std::string> fields = absl::StrSplit(text, absl::MaxSplits('\n', 2));
  if (fields.size() != 3 || !absl::SimpleAtoi(fields[0], epoch) || !absl::SimpleAtoi(fields[1], &lifetime->id))
    return absl::DataLossError("fabric: a rank introduced itself in another format; give all ranks the same build");
  lifetime->contact = fields[2];
  return absl::OkStatus();
}

// Set-up data of one epoch. Ends with the epoch, naming the lost rank.
class EpochExchange : public Exchange {
 public:
  EpochExchange(std::unique_ptr<Bootstrap> bootstrap, std::shared_ptr<EpochState> epoch)
      : bootstrap_(std::move(bootstrap)), epoch_(std::move(epoch)) {
    bootstrap_->set_cancel(epoch_->ended());
  }

  absl::StatusOr<std::vector<std::string>> AllGather(std::string_view name, std::string mine,
                                                     absl::Duration timeout) override {
    absl::StatusOr<std::vector<std::string>> all = bootstrap_->AllGather(name, std::move(mine), timeout);
    std::string reason;
    if (all.ok() || !epoch_->HasEnded(&reason)) return all;
    return absl::UnavailableError(absl::StrCat("fabric: exchange \"", std::string(name), "\": epoch ", epoch_->number(),
                                               " has ended (", reason, ")"));
  }

 private:
  std::unique_ptr<Bootstrap> bootstrap_;
  std::shared_ptr<EpochState> epoch_;
};

// Keeps the vote going for as long as somebody uses the epoch.
class EpochWatch : public PeerWatch {
 public:
  EpochWatch(std::shared_ptr<EpochState> epoch, std::shared_ptr<Voter> voter)
      : voter_(std::move(voter)), epoch_(std::move(epoch)) {}
  PeerState state(int rank, std::string* reason) const override {
    return rank == epoch_->membership().self ? PeerState::kAlive : epoch_->state(rank, reason);
  }
  bool HasEnded(std::string* reason) const override { return epoch_->HasEnded(reason); }

 private:
  std::shared_ptr<Voter> voter_;
  std::shared_ptr<EpochState> epoch_;
};

}  // namespace

struct Cluster::Parts {
  ClusterOptions options;
  std::string local_address;
  FileDescriptor exchange_listener;
  Voter::Sockets sockets;
  Lifetime lifetime;
  std::shared_ptr<Voter> voter;
  Voter::Current epoch;  // the one that was opened last

  Voter::Options voter_options() const {
    return {.cluster_id = options.bootstrap.cluster_id, .token = options.bootstrap.token, .detector = options.detector};
  }
  absl::StatusOr<std::unique_ptr<Bootstrap>> Meet(absl::Time deadline);
};

Cluster::~Cluster() = default;

// Binds everything that this process is reached by, on the interface that leads to `towards`.
absl::StatusOr<std::shared_ptr<Cluster>> Cluster::Create(const ClusterOptions& options, const std::string& towards) {
  std::shared_ptr<Cluster> cluster(new Cluster());
  cluster->parts_ = std::make_unique<Parts>();
  Parts& parts = *cluster->parts_;
  parts.options = options;
  parts.local_address = options.local_address;
  if (parts.local_address.empty() && !towards.empty()) {
    MOERL_ASSIGN_OR_RETURN(parts.local_address, LocalAddressTowards(towards));
  }
  const std::string host = parts.local_address.empty() ? "127.0.0.1" : parts.local_address;
  const std::string bracketed = host.find(':') == std::string::npos ? host : absl::StrCat("[", host, "]");
  Contact contact;
  contact.node = options.node.empty() ? ThisNode() : options.node;
  contact.name = options.name;
  MOERL_ASSIGN_OR_RETURN(parts.sockets.page, OwnPage::Create());
  contact.page = parts.sockets.page->name();
  MOERL_ASSIGN_OR_RETURN(parts.sockets.heartbeats, BindDatagram(host, 0, &contact.heartbeat_address));
  MOERL_ASSIGN_OR_RETURN(parts.sockets.control, BindDatagram(host, options.control_port, &contact.control_address));
  MOERL_ASSIGN_OR_RETURN(parts.exchange_listener, Listen(absl::StrCat(bracketed, ":0")));
  MOERL_ASSIGN_OR_RETURN(const int port, BoundPort(parts.exchange_listener));
  contact.exchange_address = absl::StrCat(bracketed, ":", port);
  parts.lifetime = {NewLifetime(), EncodeContact(contact)};
  return cluster;
}

// Connects the members of the epoch with its rank 0 for set-up data.
absl::StatusOr<std::unique_ptr<Bootstrap>> Cluster::Parts::Meet(absl::Time deadline) {
  const Membership& membership = epoch.state->membership();
  BootstrapOptions meeting = options.bootstrap;
  meeting.cluster_id = absl::StrCat(options.bootstrap.cluster_id, "@", membership.epoch);
  meeting.address = epoch.contacts[0].exchange_address;
  meeting.rank = membership.self;
  meeting.num_ranks = membership.size();
  meeting.listener = &exchange_listener;
  meeting.cancel = epoch.state->ended();
  for (;;) {
    meeting.timeout = deadline - absl::Now();
    absl::StatusOr<std::unique_ptr<Bootstrap>> met = Bootstrap::Join(meeting);
    // Rank 0 may still be in an earlier epoch, where it refuses us.
    const bool may_retry = absl::IsPermissionDenied(met.status()) || absl::IsUnavailable(met.status());
    if (!may_retry || absl::Now() >= deadline || epoch.state->HasEnded(nullptr)) return met;
    absl::SleepFor(kMeetPause);
  }
}

// Sets this rank's part of the current epoch up. Any failure leaves the epoch to be asked for again.
absl::StatusOr<JoinedEpoch> Cluster::Open(std::unique_ptr<Bootstrap> bootstrap, absl::Duration timeout) {
  const std::shared_ptr<EpochState> state = parts_->epoch.state;
  const Membership& membership = state->membership();
  const std::string& asked = parts_->options.provider;
  auto exchange = std::make_unique<EpochExchange>(std::move(bootstrap), state);

  // New pages with every epoch: whoever was left behind writes to the old ones.
  MOERL_ASSIGN_OR_RETURN(std::shared_ptr<OwnPage> own, OwnPage::Create());
  state->set_page(own);
  const SharedPageName mine = own->name();
  MOERL_ASSIGN_OR_RETURN(
      const std::vector<std::string> names,
      exchange->AllGather("page", absl::StrCat(mine.pid, " ", mine.page_fd, " ", mine.bell_fd), timeout));
  std::vector<SharedPageName> pages(names.size());
  bool is_one_node = true;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    if (membership.node_of(static_cast<int>(rank)) != membership.node_of(membership.self)) {
      is_one_node = false;
      continue;
    }
    const std::vector<std::string> fields = absl::StrSplit(names[rank], ' ');
    if (fields.size() != 3 || !absl::SimpleAtoi(fields[0], &pages[rank].pid) ||
        !absl::SimpleAtoi(fields[1], &pages[rank].page_fd) || !absl::SimpleAtoi(fields[2], &pages[rank].bell_fd))
      return absl::DataLossError("fabric: a page's name of another format; give all ranks the same build");
  }

  JoinedEpoch joined;
  joined.finished = parts_->epoch.finished;
  if (is_one_node && (asked == "auto" || asked == "shm")) {
    joined.provider = "shm";
    joined.endpoint.transport = std::make_unique<NodeTransport>(membership, own);
  } else if (asked == "shm") {
    return absl::FailedPreconditionError(absl::StrCat("fabric: provider \"shm\" asked for, but the ", membership.size(),
                                                      " ranks are on several nodes; use efa, net, tcp or auto"));
  } else {
    MOERL_ASSIGN_OR_RETURN(Info info,
                           ChooseProvider(asked, asked == "efa" ? "" : parts_->local_address, &joined.provider));
    MOERL_ASSIGN_OR_RETURN(std::unique_ptr<LibfabricTransport> transport,
                           LibfabricTransport::Open(std::move(info), membership.epoch, own));
    MOERL_ASSIGN_OR_RETURN(std::string address, transport->Address());
    MOERL_ASSIGN_OR_RETURN(std::vector<std::string> addresses,
                           exchange->AllGather(absl::StrCat("address ", joined.provider), address, timeout));
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
      if (membership.node_of(static_cast<int>(rank)) == membership.node_of(membership.self)) addresses[rank].clear();
    }
    MOERL_RETURN_IF_ERROR(transport->Connect(membership, addresses));
    joined.endpoint.transport = std::move(transport);
  }
  MOERL_ASSIGN_OR_RETURN(joined.endpoint.node_memory,
                         SharedNodeMemory::Open(own, membership.self, pages, membership.epoch));
  joined.endpoint.exchange = std::move(exchange);
  joined.endpoint.watch = std::make_unique<EpochWatch>(state, parts_->voter);
  return joined;
}

absl::StatusOr<JoinedEpoch> Cluster::Reform(absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  for (;;) {
    const uint64_t last = parts_->epoch.state ? parts_->epoch.state->number() : 0;
    if (last != 0) parts_->voter->Wish(last);
    MOERL_ASSIGN_OR_RETURN(parts_->epoch, parts_->voter->AwaitEpochAfter(last, deadline));
    absl::StatusOr<JoinedEpoch> joined = absl::UnknownError("");
    absl::StatusOr<std::unique_ptr<Bootstrap>> met = parts_->Meet(deadline);
    if (met.ok()) {
      joined = Open(*std::move(met), deadline - absl::Now());
    } else {
      joined = met.status();
    }
    if (joined.ok()) return joined;
    // Somebody was lost on the way: the epoch after it, then. What no new epoch mends is not tried again.
    const bool may_help = absl::IsUnavailable(joined.status()) || absl::IsCancelled(joined.status());
    if (!may_help || absl::Now() >= deadline) return joined.status();
  }
}

void Cluster::SetFinished(uint64_t operation) { parts_->voter->SetFinished(operation); }
size_t Cluster::num_joiners() const { return parts_->voter->num_joiners(); }

std::vector<std::string> Cluster::control_addresses() const {
  std::vector<std::string> addresses;
  for (const Contact& contact : parts_->voter->current().contacts) addresses.push_back(contact.control_address);
  return addresses;
}

absl::StatusOr<JoinedCluster> JoinCluster(const ClusterOptions& options) {
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Bootstrap> bootstrap, Bootstrap::Join(options.bootstrap));
  MOERL_ASSIGN_OR_RETURN(
      const std::shared_ptr<Cluster> cluster,
      Cluster::Create(options, options.bootstrap.num_ranks > 1 ? options.bootstrap.address : std::string()));
  Cluster::Parts& parts = *cluster->parts_;
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> introductions,
                         bootstrap->AllGather("introduction", EncodeIntroduction(FirstEpoch(), parts.lifetime),
                                              options.bootstrap.timeout));
  uint64_t first = 0;
  std::vector<Lifetime> members(introductions.size());
  for (size_t rank = 0; rank < introductions.size(); ++rank) {
    uint64_t epoch = 0;
    MOERL_RETURN_IF_ERROR(DecodeIntroduction(introductions[rank], &epoch, &members[rank]));
    if (rank == 0) first = epoch;
  }
  MOERL_ASSIGN_OR_RETURN(parts.voter, Voter::OfMember(parts.voter_options(), std::move(parts.sockets), first,
                                                      std::move(members), options.bootstrap.rank));
  parts.epoch = parts.voter->current();
  MOERL_ASSIGN_OR_RETURN(JoinedEpoch joined, cluster->Open(std::move(bootstrap), options.bootstrap.timeout));
  return JoinedCluster{std::move(joined.endpoint), joined.provider, joined.finished, cluster};
}

absl::StatusOr<JoinedCluster> JoinRunningCluster(const ClusterOptions& options,
                                                 const std::vector<std::string>& control_addresses) {
  if (control_addresses.empty()) return absl::InvalidArgumentError("fabric: no member's address to join at");
  MOERL_ASSIGN_OR_RETURN(const std::shared_ptr<Cluster> cluster, Cluster::Create(options, control_addresses[0]));
  Cluster::Parts& parts = *cluster->parts_;
  if (const std::string& asked = options.provider; asked != "shm") {
    // Before the others wait for this process: the first look takes the provider library 0.1 to several seconds.
    std::string chosen;
    const absl::Status found = ChooseProvider(asked, asked == "efa" ? "" : parts.local_address, &chosen).status();
    if (asked != "auto") MOERL_RETURN_IF_ERROR(found);  // auto may do with shared memory
  }
  MOERL_ASSIGN_OR_RETURN(
      parts.voter, Voter::OfJoiner(parts.voter_options(), std::move(parts.sockets), parts.lifetime, control_addresses));
  MOERL_ASSIGN_OR_RETURN(JoinedEpoch joined, cluster->Reform(options.bootstrap.timeout));
  return JoinedCluster{std::move(joined.endpoint), joined.provider, joined.finished, cluster};
}

}  // namespace moerl::fabric
