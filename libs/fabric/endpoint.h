#ifndef MOERL_LIBS_FABRIC_ENDPOINT_H_
#define MOERL_LIBS_FABRIC_ENDPOINT_H_

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "libs/fabric/node_memory.h"
#include "libs/fabric/peer_watch.h"
#include "libs/fabric/transport.h"

namespace moerl::fabric {

// Exchanges small set-up data between all members of an epoch (region keys, option digests). Control path: over the
// bootstrap's connections, never over the transport. Not for data.
class Exchange {
 public:
  virtual ~Exchange() = default;

  // Collective: every member calls it with the same names in the same order. Returns what each member gave, by rank.
  // DEADLINE_EXCEEDED names the members that did not come; UNAVAILABLE a lost one.
  virtual absl::StatusOr<std::vector<std::string>> AllGather(std::string_view name, std::string mine,
                                                             absl::Duration timeout) = 0;
};

// All that one rank needs to take part in one epoch. Made by an in-process fabric or by the bootstrap; owned by the
// group built on it. `exchange` is null where set-up data is carried by hand (single-threaded tests).
struct Endpoint {
  std::unique_ptr<Transport> transport;
  std::unique_ptr<NodeMemory> node_memory;
  std::unique_ptr<Exchange> exchange;
  std::unique_ptr<PeerWatch> watch;  // null: no detector, deadlines only
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_ENDPOINT_H_
