#include "libs/fabric/control_message.h"

#include <gtest/gtest.h>

#include <random>

namespace moerl::fabric {
namespace {

constexpr const char* kCluster = "run 7";
constexpr const char* kToken = "a token of sixteen bytes or more";

MembershipMessage Promise() {
  MembershipMessage message;
  message.kind = MembershipMessage::Kind::kPromise;
  message.epoch = uint64_t{1} << 43;
  message.from = 0xfedcba9876543210;
  message.ballot = {7, 3};
  message.accusations = {{0, 65535}, {1, 2}};
  message.wants_epoch = true;
  message.finished = 99;
  message.lifetimes = {{5, "a contact\nwith lines"}, {6, ""}};
  message.accepted = {6, 1};
  message.decision = {.survivors = {0, 2, 3}, .joiners = {{8, "new"}}, .finished = 98};
  return message;
}

TEST(ControlMessage, ComesBackAsItWas) {
  const MembershipMessage message = Promise();
  const absl::StatusOr<std::string> bytes = EncodeControl(message, kCluster, kToken);
  ASSERT_TRUE(bytes.ok());
  const absl::StatusOr<MembershipMessage> back = DecodeControl(*bytes, kCluster, kToken);
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(back->kind, message.kind);
  EXPECT_EQ(back->epoch, message.epoch);
  EXPECT_EQ(back->from, message.from);
  EXPECT_EQ(back->ballot, message.ballot);
  EXPECT_EQ(back->accusations, message.accusations);
  EXPECT_EQ(back->wants_epoch, message.wants_epoch);
  EXPECT_EQ(back->finished, message.finished);
  EXPECT_EQ(back->lifetimes, message.lifetimes);
  EXPECT_EQ(back->accepted, message.accepted);
  EXPECT_EQ(back->decision, message.decision);
}

TEST(ControlMessage, OfStrangersOrChangedOnTheWayIsNotHeard) {
  const std::string bytes = *EncodeControl(Promise(), kCluster, kToken);
  EXPECT_TRUE(absl::IsPermissionDenied(DecodeControl(bytes, "run 8", kToken).status()));
  EXPECT_TRUE(absl::IsPermissionDenied(DecodeControl(bytes, kCluster, "another token of enough bytes").status()));
  std::mt19937 random(1);
  for (int round = 0; round < 1000; ++round) {
    std::string changed = bytes;
    if (round % 2 == 0) {
      changed[random() % changed.size()] ^= static_cast<char>(1 + random() % 255);
    } else {
      changed.resize(random() % bytes.size());
    }
    EXPECT_TRUE(absl::IsPermissionDenied(DecodeControl(changed, kCluster, kToken).status()));
  }
}

TEST(ControlMessage, TooLargeForADatagramIsAnError) {
  MembershipMessage message = Promise();
  message.lifetimes.assign(1000, {1, std::string(100, 'x')});
  EXPECT_TRUE(absl::IsResourceExhausted(EncodeControl(message, kCluster, kToken).status()));
}

}  // namespace
}  // namespace moerl::fabric
