#include "libs/fabric/cluster.h"

#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"
#include "libs/fabric/libfabric_transport.h"
#include "libs/fabric/node_transport.h"
#include "libs/fabric/shared_page.h"

namespace moerl::fabric {
namespace {

// What a rank tells the others about itself. Fields are separated by '\n', which none of them contains; the fabric
// address is last and may contain anything.
struct Introduction {
  std::string node, name, heartbeat_address;
  SharedPageName page;
  uint64_t epoch = 0;  // rank 0's is taken
  std::string fabric_address;
};

std::string Encode(const Introduction& introduction) {
  return absl::StrCat(introduction.node, "\n", introduction.name, "\n", introduction.heartbeat_address, "\n",
                      introduction.page.pid, "\n", introduction.page.page_fd, "\n", introduction.page.bell_fd, "\n",
                      introduction.epoch, "\n", introduction.fabric_address);
}

absl::StatusOr<Introduction> Decode(const std::string& text) {
  const std::vector<std::string> fields = absl::StrSplit(text, absl::MaxSplits('\n', 7));
  Introduction introduction;
  if (fields.size() != 8 || !absl::SimpleAtoi(fields[3], &introduction.page.pid) ||
      !absl::SimpleAtoi(fields[4], &introduction.page.page_fd) ||
      !absl::SimpleAtoi(fields[5], &introduction.page.bell_fd) || !absl::SimpleAtoi(fields[6], &introduction.epoch)) {
    return absl::DataLossError("fabric: a rank introduced itself in another format; give all ranks the same build");
  }
  introduction.node = fields[0];
  introduction.name = fields[1];
  introduction.heartbeat_address = fields[2];
  introduction.fabric_address = fields[7];
  return introduction;
}

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

}  // namespace

absl::StatusOr<JoinedCluster> JoinCluster(const ClusterOptions& options) {
  MOERL_ASSIGN_OR_RETURN(std::unique_ptr<Bootstrap> bootstrap, Bootstrap::Join(options.bootstrap));
  MOERL_ASSIGN_OR_RETURN(std::shared_ptr<OwnPage> own, OwnPage::Create());
  const int self = options.bootstrap.rank;
  std::string local_address = options.local_address;
  if (local_address.empty() && options.bootstrap.num_ranks > 1) {
    MOERL_ASSIGN_OR_RETURN(local_address, LocalAddressTowards(options.bootstrap.address));
  }

  // First who is where: it decides whether a provider is needed at all.
  Introduction mine;
  mine.node = options.node.empty() ? ThisNode() : options.node;
  mine.name = options.name;
  mine.page = own->name();
  mine.epoch = FirstEpoch();
  MOERL_ASSIGN_OR_RETURN(FileDescriptor heartbeats,
                         BindDatagram(local_address.empty() ? "127.0.0.1" : local_address, &mine.heartbeat_address));
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> introductions,
                         bootstrap->AllGather("introduction", Encode(mine), options.bootstrap.timeout));

  Membership membership;
  membership.self = self;
  std::vector<std::string> nodes;
  std::vector<SharedPageName> pages(introductions.size());
  std::vector<WatchedPeer> watched(introductions.size());
  for (size_t rank = 0; rank < introductions.size(); ++rank) {
    MOERL_ASSIGN_OR_RETURN(const Introduction peer, Decode(introductions[rank]));
    if (rank == 0) membership.epoch = peer.epoch;
    const auto node = std::find(nodes.begin(), nodes.end(), peer.node);
    const int node_index = static_cast<int>(node - nodes.begin());
    if (node == nodes.end()) nodes.push_back(peer.node);
    const size_t colon = peer.heartbeat_address.rfind(':');
    const std::string where = peer.heartbeat_address.substr(0, colon);
    membership.members.push_back(
        {.node = node_index,
         .name = absl::StrCat("rank ", rank, " (", peer.name.empty() ? "" : peer.name + ", ", where, ")")});
    if (peer.node == mine.node) pages[rank] = watched[rank].page = peer.page;
    watched[rank].address = peer.heartbeat_address;
  }

  JoinedCluster joined;
  const uint64_t epoch = membership.epoch;
  if (nodes.size() == 1 && (options.provider == "auto" || options.provider == "shm")) {
    joined.provider = "shm";
    joined.endpoint.transport = std::make_unique<NodeTransport>(membership, own);
  } else if (options.provider == "shm") {
    return absl::FailedPreconditionError(absl::StrCat("fabric: provider \"shm\" asked for, but the ",
                                                      introductions.size(), " ranks are on ", nodes.size(),
                                                      " nodes; use efa, net, tcp or auto"));
  } else {
    MOERL_ASSIGN_OR_RETURN(
        Info info, ChooseProvider(options.provider, options.provider == "efa" ? "" : local_address, &joined.provider));
    MOERL_ASSIGN_OR_RETURN(std::unique_ptr<LibfabricTransport> transport,
                           LibfabricTransport::Open(std::move(info), epoch, own));
    MOERL_ASSIGN_OR_RETURN(std::string address, transport->Address());
    MOERL_ASSIGN_OR_RETURN(
        std::vector<std::string> addresses,
        bootstrap->AllGather(absl::StrCat("address ", joined.provider), address, options.bootstrap.timeout));
    for (size_t rank = 0; rank < addresses.size(); ++rank) {
      if (membership.node_of(static_cast<int>(rank)) == membership.node_of(self)) addresses[rank].clear();
    }
    MOERL_RETURN_IF_ERROR(transport->Connect(membership, addresses));
    joined.endpoint.transport = std::move(transport);
  }
  MOERL_ASSIGN_OR_RETURN(joined.endpoint.node_memory, SharedNodeMemory::Open(own, self, pages, epoch));
  joined.endpoint.exchange = std::move(bootstrap);
  MOERL_ASSIGN_OR_RETURN(joined.endpoint.watch, Detector::Start(own, self, watched, std::move(heartbeats), epoch,
                                                                options.detector, [own] { own->Ring(); }));
  return joined;
}

}  // namespace moerl::fabric
