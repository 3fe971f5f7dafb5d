#ifndef MOERL_LIBS_RPC_SECURITY_H_
#define MOERL_LIBS_RPC_SECURITY_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace grpc {
class ChannelCredentials;
class ServerCredentials;
}  // namespace grpc

// Who may speak to whom. With TLS both sides show a certificate signed by the configured authority; the
// caller's role comes from the URI SAN spiffe://<trust domain>/moerl/<role> of its certificate and is
// checked per method against the table below. Without TLS every caller has every role; that is allowed on
// loopback and, elsewhere, only when the configuration says `insecure: true`.
namespace moerl::rpc {

enum class Role { kClient, kRollout, kTrainer, kWeightSync, kEnvironment };

// "client", "rollout", "trainer", "weight-sync", "environment".
absl::string_view RoleName(Role role);

struct TlsFiles {
  std::string certificate;  // PEM chain, leaf first; URI SAN for callers, DNS or IP SAN for servers
  std::string private_key;  // PEM
  std::string authority;    // PEM bundle that signs the peers' certificates
  // How often the files are looked at. A new pair is used by connections made from then on; connections
  // that exist live on. Replace the files together (rename of their directory, or a symlink to it).
  absl::Duration reload_interval = absl::Seconds(2);
};

struct Security {
  std::optional<TlsFiles> tls = std::nullopt;
  std::string trust_domain = "moerl";
  bool insecure = false;
};

// The role named by a URI SAN. Errors: PERMISSION_DENIED naming the SAN and the trust domain expected.
absl::StatusOr<Role> RoleOfSan(absl::string_view san, absl::string_view trust_domain);

// True when `role` may call `method` ("/moerl.v1.WeightSyncService/PutChunks"). Health and reflection are
// open to every role; a method the table does not know is open to none.
bool MayCall(Role role, absl::string_view method);

// True when `address` ("127.0.0.1:7400", "[::1]:0", "localhost:7400", "unix:/path") cannot be reached from another
// machine.
bool IsLoopback(absl::string_view address);

// Credentials to serve `address` with, which check roles as above and log each refusal with its SAN.
// Errors: FAILED_PRECONDITION without TLS on an address that is not loopback, unless `insecure`;
// INVALID_ARGUMENT naming a file of `tls` that is missing, unreadable, or not PEM, or a key that does not match.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const Security& security,
                                                                               absl::string_view address);

// Credentials to reach `target` ("host:port", "dns:///host:port", "unix:/path") with. Errors as above.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(const Security& security,
                                                                                 absl::string_view target);

}  // namespace moerl::rpc

#endif  // MOERL_LIBS_RPC_SECURITY_H_
