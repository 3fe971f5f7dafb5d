#include "libs/rpc/security.h"

#include <grpcpp/security/server_credentials.h>
#include <gtest/gtest.h>

#include <fstream>

namespace moerl::rpc {
namespace {

TEST(Security, TakesTheRoleFromTheSan) {
  EXPECT_EQ(RoleOfSan("spiffe://prod.example/moerl/weight-sync", "prod.example").value(), Role::kWeightSync);
  for (const char* bad :
       {"", "spiffe://prod.example/moerl/", "spiffe://prod.example/moerl/root", "spiffe://other/moerl/client",
        "spiffe://prod.example/moerl/client/x", "https://prod.example/moerl/client"}) {
    const auto role = RoleOfSan(bad, "prod.example");
    EXPECT_EQ(role.status().code(), absl::StatusCode::kPermissionDenied) << bad;
    EXPECT_NE(role.status().message().find(bad), absl::string_view::npos);
  }
}

TEST(Security, KnowsWhichAddressesOnlyThisMachineReaches) {
  for (const char* local : {"127.0.0.1:7400", "127.8.8.8:1", "localhost:7400", "[::1]:7400", "unix:/run/moerl",
                            "dns:///localhost:1", "ipv4:127.0.0.1:80"}) {
    EXPECT_TRUE(IsLoopback(local)) << local;
  }
  for (const char* open : {"0.0.0.0:7400", "[::]:7400", "10.0.0.1:7400", "trainer:7100", "dns:///trainer:7100", "",
                           "localhost.evil:1", "127.0.0.1.evil.example:1"}) {
    EXPECT_FALSE(IsLoopback(open)) << open;
  }
}

TEST(Security, RefusesPlaintextOffLoopbackUnlessSaidOutLoud) {
  Security security;
  const auto refused = MakeServerCredentials(security, "0.0.0.0:7400");
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_NE(refused.status().message().find("insecure: true"), absl::string_view::npos);
  EXPECT_EQ(MakeChannelCredentials(security, "trainer:7100").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(MakeServerCredentials(security, "127.0.0.1:7400").ok());
  security.insecure = true;
  EXPECT_TRUE(MakeServerCredentials(security, "0.0.0.0:7400").ok());
}

TEST(Security, NamesTheFileThatIsMissingOrNotPem) {
  const std::string path = testing::TempDir() + "/not_pem";
  std::ofstream(path) << "not a certificate";
  Security security;
  security.tls = TlsFiles{.certificate = "/no/such/file", .private_key = path, .authority = path};
  auto status = MakeServerCredentials(security, "127.0.0.1:0").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("tls.certificate_file: cannot read /no/such/file"), absl::string_view::npos);
  security.tls->certificate = path;
  status = MakeChannelCredentials(security, "127.0.0.1:1").status();
  EXPECT_NE(status.message().find("holds no PEM certificate"), absl::string_view::npos);
}

}  // namespace
}  // namespace moerl::rpc
