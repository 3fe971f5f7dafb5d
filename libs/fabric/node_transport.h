#ifndef MOERL_LIBS_FABRIC_NODE_TRANSPORT_H_
#define MOERL_LIBS_FABRIC_NODE_TRANSPORT_H_

#include <memory>
#include <utility>

#include "libs/base/check.h"
#include "libs/fabric/shared_page.h"
#include "libs/fabric/transport.h"

namespace moerl::fabric {

// The transport of a group whose members all share one node: nothing crosses a network, so there is nobody to write to.
// It only sleeps and is woken by the node's bells.
class NodeTransport : public Transport {
 public:
  NodeTransport(Membership membership, std::shared_ptr<OwnPage> own)
      : membership_(std::move(membership)), own_(std::move(own)) {}

  const Membership& membership() const override { return membership_; }
  absl::StatusOr<Region> Register(std::byte* base, size_t bytes) override {
    return Region{.id = 0, .base = base, .bytes = bytes, .remote = {.address = 0, .key = 0, .bytes = bytes}};
  }
  bool Write(const WriteRequest&) override {
    MOERL_CHECK(false);
    return false;
  }
  size_t Poll(absl::Span<Event>) override { return 0; }
  size_t completion_capacity() const override { return size_t{1} << 24; }
  void Wait(absl::Duration timeout) override { own_->Sleep(timeout, {}); }
  void Wake() override { own_->Ring(); }
  absl::Status status() const override { return absl::OkStatus(); }
  void Close() override {}

 private:
  Membership membership_;
  std::shared_ptr<OwnPage> own_;
};

}  // namespace moerl::fabric

#endif  // MOERL_LIBS_FABRIC_NODE_TRANSPORT_H_
