#include "libs/rpc/security.h"

#include <arpa/inet.h>
#include <grpc/grpc_security_constants.h>
#include <grpcpp/security/auth_metadata_processor.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/security/tls_credentials_options.h>
#include <openssl/pem.h>
#include <openssl/x509.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "libs/base/log.h"
#include "libs/base/status_macros.h"

namespace moerl::rpc {
namespace {

using grpc::experimental::FileWatcherCertificateProvider;

constexpr std::array<std::pair<Role, absl::string_view>, 5> kRoleNames = {{{Role::kClient, "client"},
                                                                           {Role::kRollout, "rollout"},
                                                                           {Role::kTrainer, "trainer"},
                                                                           {Role::kWeightSync, "weight-sync"},
                                                                           {Role::kEnvironment, "environment"}}};

// Host part of "host:port", "[v6]:port", "dns:///host:port", "ipv4:host:port".
absl::string_view HostOf(absl::string_view address) {
  absl::ConsumePrefix(&address, "dns:");
  absl::ConsumePrefix(&address, "ipv4:");
  absl::ConsumePrefix(&address, "ipv6:");
  if (absl::ConsumePrefix(&address, "//")) address.remove_prefix(std::min(address.size(), address.find('/')));
  absl::ConsumePrefix(&address, "/");
  if (absl::ConsumePrefix(&address, "[")) return address.substr(0, address.find(']'));
  return address.substr(0, address.rfind(':'));
}

using File = std::unique_ptr<FILE, int (*)(FILE*)>;

absl::StatusOr<File> OpenPem(absl::string_view field, const std::string& path) {
  File file(std::fopen(path.c_str(), "r"), std::fclose);
  if (file == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("tls.", field, ": cannot read ", path, ": ", std::strerror(errno)));
  }
  return file;
}

absl::StatusOr<std::unique_ptr<X509, void (*)(X509*)>> ReadCertificate(absl::string_view field,
                                                                       const std::string& path) {
  MOERL_ASSIGN_OR_RETURN(const File file, OpenPem(field, path));
  std::unique_ptr<X509, void (*)(X509*)> certificate(PEM_read_X509(file.get(), nullptr, nullptr, nullptr), X509_free);
  if (certificate == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("tls.", field, ": ", path, " holds no PEM certificate"));
  }
  return certificate;
}

// gRPC would report a bad file only by never completing a handshake.
absl::Status CheckFiles(const TlsFiles& files) {
  MOERL_ASSIGN_OR_RETURN(const auto certificate, ReadCertificate("certificate_file", files.certificate));
  MOERL_RETURN_IF_ERROR(ReadCertificate("ca_file", files.authority).status());
  MOERL_ASSIGN_OR_RETURN(const File file, OpenPem("key_file", files.private_key));
  const std::unique_ptr<EVP_PKEY, void (*)(EVP_PKEY*)> key(PEM_read_PrivateKey(file.get(), nullptr, nullptr, nullptr),
                                                           EVP_PKEY_free);
  if (key == nullptr) {
    return absl::InvalidArgumentError(absl::StrCat("tls.key_file: ", files.private_key, " holds no PEM private key"));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return absl::InvalidArgumentError(absl::StrCat("tls.key_file: ", files.private_key, " is not the key of ",
                                                   files.certificate, "; replace both together"));
  }
  return absl::OkStatus();
}

std::shared_ptr<FileWatcherCertificateProvider> Watch(const TlsFiles& files) {
  const auto interval_s = static_cast<unsigned>(std::max<int64_t>(1, absl::ToInt64Seconds(files.reload_interval)));
  return std::make_shared<FileWatcherCertificateProvider>(files.private_key, files.certificate, files.authority,
                                                          interval_s);
}

absl::Status CheckPlaintext(const Security& security, absl::string_view address) {
  if (security.insecure || IsLoopback(address)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "no TLS for ", address, ", which other machines can reach; set server.tls, or say server.insecure: true"));
}

// Lets a call pass when the role in the certificate may make it.
class RoleCheck final : public grpc::AuthMetadataProcessor {
 public:
  explicit RoleCheck(std::string trust_domain) : trust_domain_(std::move(trust_domain)) {}

  bool IsBlocking() const override { return false; }

  grpc::Status Process(const InputMetadata& metadata, grpc::AuthContext* context, OutputMetadata*,
                       OutputMetadata*) override {
    const auto path = metadata.find(":path");
    const std::string method = path == metadata.end() ? "" : std::string(path->second.data(), path->second.size());
    const std::string san = UriSan(*context);
    const absl::StatusOr<Role> role = RoleOfSan(san, trust_domain_);
    if (!role.ok()) return Refuse(method, san, std::string(role.status().message()));
    if (!MayCall(*role, method)) {
      return Refuse(method, san, absl::StrCat("role ", RoleName(*role), " may not call ", method));
    }
    return grpc::Status::OK;
  }

 private:
  static std::string UriSan(const grpc::AuthContext& context) {
    for (const grpc::string_ref& uri : context.FindPropertyValues(GRPC_PEER_URI_PROPERTY_NAME)) {
      if (uri.starts_with("spiffe://")) return std::string(uri.data(), uri.size());
    }
    return "";
  }

  static grpc::Status Refuse(const std::string& method, const std::string& san, const std::string& why) {
    LogWarning("call refused", {{"method", method}, {"san", san}, {"reason", why}});
    return grpc::Status(grpc::StatusCode::PERMISSION_DENIED, why);
  }

  const std::string trust_domain_;
};

}  // namespace

absl::string_view RoleName(Role role) { return kRoleNames[static_cast<size_t>(role)].second; }

absl::StatusOr<Role> RoleOfSan(absl::string_view san, absl::string_view trust_domain) {
  const std::string prefix = absl::StrCat("spiffe://", trust_domain, "/moerl/");
  absl::string_view name = san;
  if (absl::ConsumePrefix(&name, prefix)) {
    for (const auto& [role, role_name] : kRoleNames) {
      if (name == role_name) return role;
    }
  }
  return absl::PermissionDeniedError(absl::StrCat("the certificate's URI SAN ", san.empty() ? "(none)" : san,
                                                  " names no role; expected ", prefix,
                                                  "{client,rollout,trainer,weight-sync,environment}"));
}

bool IsLoopback(absl::string_view address) {
  if (absl::StartsWith(address, "unix:") || absl::StartsWith(address, "unix-abstract:")) return true;
  const std::string host(HostOf(address));
  if (host == "localhost") return true;
  in_addr v4;
  if (inet_pton(AF_INET, host.c_str(), &v4) == 1) return (ntohl(v4.s_addr) >> 24) == 127;
  in6_addr v6;
  return inet_pton(AF_INET6, host.c_str(), &v6) == 1 && IN6_IS_ADDR_LOOPBACK(&v6);
}

absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> MakeServerCredentials(const Security& security,
                                                                               absl::string_view address) {
  if (!security.tls) {
    MOERL_RETURN_IF_ERROR(CheckPlaintext(security, address));
    return grpc::InsecureServerCredentials();
  }
  MOERL_RETURN_IF_ERROR(CheckFiles(*security.tls));
  grpc::experimental::TlsServerCredentialsOptions options(Watch(*security.tls));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  options.set_cert_request_type(GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY);
  auto credentials = grpc::experimental::TlsServerCredentials(options);
  credentials->SetAuthMetadataProcessor(std::make_shared<RoleCheck>(security.trust_domain));
  return credentials;
}

absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> MakeChannelCredentials(const Security& security,
                                                                                 absl::string_view target) {
  if (!security.tls) {
    MOERL_RETURN_IF_ERROR(CheckPlaintext(security, target));
    return grpc::InsecureChannelCredentials();
  }
  MOERL_RETURN_IF_ERROR(CheckFiles(*security.tls));
  grpc::experimental::TlsChannelCredentialsOptions options;
  options.set_certificate_provider(Watch(*security.tls));
  options.watch_root_certs();
  options.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(options);
}

}  // namespace moerl::rpc
