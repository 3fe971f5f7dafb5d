#include "libs/rpc/status.h"

#include <gmock/gmock.h>
#include <grpcpp/support/status.h>
#include <gtest/gtest.h>

namespace moerl::rpc {
namespace {

TEST(Status, KeepsEveryCodeAndMessageOnTheWire) {
  for (int code = 1; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), "why it failed");
    const grpc::Status wire = ToGrpc(status);
    EXPECT_EQ(static_cast<int>(wire.error_code()), code);
    EXPECT_EQ(FromGrpc(wire), status);
  }
  EXPECT_TRUE(ToGrpc(absl::OkStatus()).ok());
  EXPECT_TRUE(FromGrpc(grpc::Status::OK).ok());
}

TEST(Status, NamesEveryViolatedFieldInMessageAndDetails) {
  const absl::Status status =
      InvalidFields({{"num_samples", "0 is not in 1..1024"}, {"sampling.temperature", "-1 is not in 0..100"}});
  EXPECT_EQ(status.message(), "num_samples: 0 is not in 1..1024; sampling.temperature: -1 is not in 0..100");
  const auto violations = FieldViolations(FromGrpc(ToGrpc(status)));
  ASSERT_EQ(violations.size(), 2u);
  EXPECT_EQ(violations[1].field, "sampling.temperature");
  EXPECT_EQ(violations[1].description, "-1 is not in 0..100");
}

TEST(Status, CarriesRetryDelayAndReasonTogether) {
  const absl::Status status = FromGrpc(ToGrpc(WithReason(
      WithRetryDelay(absl::UnavailableError("draining"), absl::Milliseconds(1500)), {"DRAINING", {{"to", "b"}}})));
  EXPECT_EQ(RetryDelay(status), absl::Milliseconds(1500));
  ASSERT_TRUE(Reason(status).has_value());
  EXPECT_EQ(Reason(status)->reason, "DRAINING");
  EXPECT_EQ(Reason(status)->metadata.at("to"), "b");
}

TEST(Status, SaysWhichCallFailed) {
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::UNIMPLEMENTED, ""), "rollout: Generate").message(),
            "rollout: Generate: UNIMPLEMENTED");
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::NOT_FOUND, "version 7"), "weight_sync: GetManifest").message(),
            "weight_sync: GetManifest: version 7");
}

TEST(Status, StaysBelowTheMetadataLimitWhateverIsPutIn) {
  std::vector<FieldViolation> violations(1000, {std::string(1000, 'f'), std::string(1000, 'd')});
  const grpc::Status wire = ToGrpc(InvalidFields(violations));
  EXPECT_LE(wire.error_message().size(), 1024u);
  EXPECT_LE(wire.error_details().size(), 6u * 1024u);
}

TEST(Status, KeepsItsDetailsWhereTheMessageIsCutInsideACharacter) {
  const std::string message = std::string(1023, 'x') + "\u00e9 and more";
  const absl::Status status =
      FromGrpc(ToGrpc(WithRetryDelay(absl::UnavailableError(message), absl::Milliseconds(1500))));
  EXPECT_EQ(status.message(), std::string(1023, 'x'));
  EXPECT_EQ(RetryDelay(status), absl::Milliseconds(1500));
}

TEST(Status, IgnoresDetailsThatAreNotOurs) {
  EXPECT_EQ(FromGrpc(grpc::Status(grpc::StatusCode::INTERNAL, "x", "\xff\xff not a proto")).message(), "x");
}

}  // namespace
}  // namespace moerl::rpc
