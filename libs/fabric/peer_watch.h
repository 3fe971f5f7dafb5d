#ifndef MOERL_LIBS_FABRIC_PEER_WATCH_H_
#define MOERL_LIBS_FABRIC_PEER_WATCH_H_

#include <string>

namespace moerl::fabric {

// What the failure detector knows about a peer. Seam between the detector and whoever waits for peers.
enum class PeerState {
  kUnwatched,  // no detector: only the operation's deadline speaks
  kAlive,      // its process runs and its heartbeats come: a deadline does not expire on it, stall_timeout does
  kLost,       // `reason` says how that was seen
};

// Thread-safe and quick: called from wait loops.
class PeerWatch {
 public:
  virtual ~PeerWatch() = default;
  // `reason` may be null.
  virtual PeerState state(int rank, std::string* reason) const = 0;
  // True when the epoch has ended, whoever is lost: its operations will not finish. `reason` may be null.
  virtual bool HasEnded(std::string* reason) const {
    (void)reason;
    return false;
  }
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_PEER_WATCH_H_
