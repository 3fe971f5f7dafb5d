#ifndef MOERL_LIBS_FABRIC_IN_PROCESS_FABRIC_H_
#define MOERL_LIBS_FABRIC_IN_PROCESS_FABRIC_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "libs/fabric/endpoint.h"

namespace moerl::fabric {

// A fabric whose ranks all live in this process: a thread each, or one thread that steps them all. A write lands at
// once and in order (ChaosTransport on top makes it as unordered as EFA). Besides tests it is what a process uses that
// runs several ranks itself.
//
// Thread-safe: endpoints of different ranks may be used from different threads at the same time.
// The fabric's state is shared by its endpoints and lives as long as the last of them.
class InProcessFabric {
 public:
  struct Options {
    uint64_t epoch = 1;
    std::vector<int> node_of;              // dense node index of each rank
    size_t completion_capacity = 1 << 16;  // see Transport::completion_capacity
  };

  explicit InProcessFabric(Options options);
  ~InProcessFabric();

  int size() const;

  // The endpoint of `rank`. At most once for each rank.
  Endpoint Open(int rank);

  // Called on every transport that Open() makes, to put a decorator (ChaosTransport) around it. Set before Open.
  using Decorator = std::function<std::unique_ptr<Transport>(int rank, std::unique_ptr<Transport>)>;
  void set_decorator(Decorator decorator);

  struct State;

 private:
  std::shared_ptr<State> state_;
  Decorator decorator_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_IN_PROCESS_FABRIC_H_
