#include "libs/rpc/waiting_connections.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <vector>

namespace moerl::rpc {
namespace {

using ::testing::ElementsAre;

std::vector<int> TakeAll(WaitingConnections& waiting) {
  std::vector<int> order;
  while (!waiting.empty()) order.push_back(*waiting.TakeNext());
  return order;
}

std::string PeerAt(int family, const char* text) {
  sockaddr_storage address = {};
  address.ss_family = static_cast<sa_family_t>(family);
  void* bytes = family == AF_INET ? static_cast<void*>(&reinterpret_cast<sockaddr_in&>(address).sin_addr)
                                  : static_cast<void*>(&reinterpret_cast<sockaddr_in6&>(address).sin6_addr);
  EXPECT_EQ(inet_pton(family, text, bytes), 1) << text;
  return PeerOf(address);
}

TEST(WaitingConnections, AFloodOfOnePeerDelaysAnotherByOneTurn) {
  WaitingConnections waiting;
  for (int i = 0; i < 10'000; ++i) waiting.Add("flood", i);
  EXPECT_EQ(waiting.TakeNext(), 0);
  waiting.Add("probe", -1);
  EXPECT_EQ(waiting.TakeNext(), 1);
  EXPECT_EQ(waiting.TakeNext(), -1);
  EXPECT_EQ(TakeAll(waiting).size(), 9'998u);
}

TEST(WaitingConnections, KeepTheirOrderWithinAPeerAndTakeTurnsBetweenPeers) {
  WaitingConnections waiting;
  for (const int i : {10, 11, 12}) waiting.Add("a", i);
  for (const int i : {20, 21}) waiting.Add("b", i);
  waiting.Add("c", 30);
  EXPECT_THAT(TakeAll(waiting), ElementsAre(10, 20, 30, 11, 21, 12));
  EXPECT_EQ(waiting.TakeNext(), std::nullopt);
  waiting.Add("a", 13);  // a line that ran empty starts again
  EXPECT_THAT(TakeAll(waiting), ElementsAre(13));
}

TEST(WaitingConnections, AHostIsOnePeerWhicheverAddressItTakes) {
  EXPECT_EQ(PeerAt(AF_INET, "10.0.0.1"), PeerAt(AF_INET6, "::ffff:10.0.0.1"));
  EXPECT_NE(PeerAt(AF_INET, "10.0.0.1"), PeerAt(AF_INET, "10.0.0.2"));
  EXPECT_NE(PeerAt(AF_INET6, "::ffff:10.0.0.1"), PeerAt(AF_INET6, "::ffff:10.0.0.2"));
  EXPECT_EQ(PeerAt(AF_INET6, "2001:db8:1:2::1"), PeerAt(AF_INET6, "2001:db8:1:2:ffff::9"));
  EXPECT_NE(PeerAt(AF_INET6, "2001:db8:1:2::1"), PeerAt(AF_INET6, "2001:db8:1:3::1"));
}

}  // namespace
}  // namespace moerl::rpc
