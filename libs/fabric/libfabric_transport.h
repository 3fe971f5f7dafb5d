#ifndef MOERL_LIBS_FABRIC_LIBFABRIC_TRANSPORT_H_
#define MOERL_LIBS_FABRIC_LIBFABRIC_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/transport.h"

struct fi_info;

namespace moerl::fabric {

// What moerl asks of a provider and what of it is there. Written to the 1.17 API; asks for nothing that EFA lacks
// (no ordering, no FI_RMA_EVENT, no atomics, no tagged messages, 4 bytes of immediate data, one-element writes).
struct FreeInfo {
  void operator()(fi_info* info) const;
};
using Info = std::unique_ptr<fi_info, FreeInfo>;

// The provider's endpoint at `local_address` ("10.0.0.7"; empty: any). NOT_FOUND lists the providers that are there and
// says what to do.
absl::StatusOr<Info> FindProvider(absl::string_view provider, const std::string& local_address);

// Names of the providers that would serve moerl here, best first, without duplicates.
std::vector<std::string> AvailableProviders();

// One reliable-datagram endpoint of a libfabric provider.
class LibfabricTransport : public Transport {
 public:
  // `own` is slept on, so that ranks of the node can wake this one. Registration keys contain `epoch`, so that they are
  // never used twice.
  static absl::StatusOr<std::unique_ptr<LibfabricTransport>> Open(Info info, uint64_t epoch,
                                                                  std::shared_ptr<OwnPage> own);
  ~LibfabricTransport() override;

  // This endpoint's address, to be given to Connect of the others.
  absl::StatusOr<std::string> Address() const;
  // Once, before any Write. `addresses` by rank; empty for ranks that are never written to (those of this node).
  absl::Status Connect(Membership membership, const std::vector<std::string>& addresses);

  const Membership& membership() const override { return membership_; }
  absl::StatusOr<Region> Register(std::byte* base, size_t bytes) override;
  bool Write(const WriteRequest& request) override;
  size_t Poll(absl::Span<Event> events) override;
  size_t completion_capacity() const override;
  void Wait(absl::Duration timeout) override;
  void Wake() override;
  absl::Status status() const override { return status_; }
  void Close() override;

 private:
  struct Objects;  // libfabric's handles
  struct Operation;

  LibfabricTransport();
  void PollErrors();
  void FreeOperation(Operation* operation);

  Membership membership_;
  uint64_t epoch_ = 0;
  std::shared_ptr<OwnPage> own_;
  std::unique_ptr<Objects> objects_;
  std::vector<Operation> operations_;
  std::vector<Operation*> free_operations_;
  std::atomic<int> num_empty_wakes_ = 0;  // since the last event or Wake
  absl::Status status_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_LIBFABRIC_TRANSPORT_H_
