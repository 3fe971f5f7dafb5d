#include "libs/fabric/bootstrap.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>
#include <string.h>

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "libs/base/status_macros.h"

namespace moerl::fabric {
namespace {

constexpr size_t kNonceBytes = 32;
constexpr size_t kProofBytes = 32;
// A greeting is short; whoever announces more is not a rank.
constexpr size_t kGreetingBytesMax = 1024;
// A stranger that connects and says nothing holds up the others no longer than this.
constexpr absl::Duration kGreetingTimeout = absl::Seconds(2);

std::string Nonce() {
  std::string nonce(kNonceBytes, '\0');
  RAND_bytes(reinterpret_cast<unsigned char*>(nonce.data()), static_cast<int>(nonce.size()));
  return nonce;
}

std::string Prove(absl::string_view token, absl::string_view side, absl::string_view nonce_root,
                  absl::string_view nonce_rank, absl::string_view claim) {
  const std::string text = absl::StrCat(side, nonce_root, nonce_rank, claim);
  std::string proof(kProofBytes, '\0');
  unsigned int size = kProofBytes;
  HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), reinterpret_cast<unsigned char*>(proof.data()), &size);
  return proof;
}

bool Equal(absl::string_view a, absl::string_view b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

// A list of strings as one: length and bytes of each.
std::string Pack(const std::vector<std::string>& parts) {
  std::string packed;
  for (const std::string& part : parts) {
    const uint64_t size = part.size();
    packed.append(reinterpret_cast<const char*>(&size), sizeof(size));
    packed.append(part);
  }
  return packed;
}

absl::StatusOr<std::vector<std::string>> Unpack(absl::string_view packed, size_t count) {
  std::vector<std::string> parts;
  while (parts.size() < count) {
    uint64_t size = 0;
    if (packed.size() < sizeof(size)) return absl::DataLossError("fabric: control message too short");
    memcpy(&size, packed.data(), sizeof(size));
    packed.remove_prefix(sizeof(size));
    if (packed.size() < size) return absl::DataLossError("fabric: control message too short");
    parts.emplace_back(packed.substr(0, size));
    packed.remove_prefix(size);
  }
  return parts;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Bootstrap>> Bootstrap::Join(const BootstrapOptions& options) {
  if (options.num_ranks < 1 || options.rank < 0 || options.rank >= options.num_ranks) {
    return absl::InvalidArgumentError(absl::StrCat("fabric: rank ", options.rank, " of ", options.num_ranks,
                                                   "; expected 0..", options.num_ranks - 1));
  }
  std::unique_ptr<Bootstrap> bootstrap(new Bootstrap(options));
  bootstrap->connections_.resize(options.num_ranks);
  if (options.num_ranks == 1) return bootstrap;
  const absl::Time deadline = absl::Now() + options.timeout;
  MOERL_RETURN_IF_ERROR(options.rank == 0 ? bootstrap->AcceptAll(deadline) : bootstrap->ConnectToRoot(deadline));
  return bootstrap;
}

absl::Status Bootstrap::AcceptAll(absl::Time deadline) {
  FileDescriptor own;
  if (options_.listener == nullptr) {
    MOERL_ASSIGN_OR_RETURN(own, Listen(options_.address));
  }
  const FileDescriptor& listener = options_.listener != nullptr ? *options_.listener : own;
  for (;;) {
    std::vector<int> missing;
    for (int rank = 1; rank < options_.num_ranks; ++rank) {
      if (!connections_[rank].valid()) missing.push_back(rank);
    }
    if (missing.empty()) return absl::OkStatus();
    absl::StatusOr<FileDescriptor> socket = Accept(listener, deadline, cancel_fd());
    if (absl::IsDeadlineExceeded(socket.status())) {
      return absl::DeadlineExceededError(absl::StrCat("fabric: bootstrap at ", options_.address, ": ranks ",
                                                      absl::StrJoin(missing, ", "), " of ", options_.num_ranks,
                                                      " did not come within ", absl::FormatDuration(options_.timeout)));
    }
    MOERL_RETURN_IF_ERROR(socket.status());
    const absl::Status greeted = Greet(*std::move(socket), std::min(deadline, absl::Now() + kGreetingTimeout));
    // Strangers and lost connections are not this cluster's trouble; wrong ranks of this cluster are.
    if (absl::IsInvalidArgument(greeted) || absl::IsAlreadyExists(greeted)) return greeted;
  }
}

// root -> rank: nonce; rank -> root: nonce, claim "cluster/rank/num_ranks", proof; root -> rank: "" and proof, or an
// error.
absl::Status Bootstrap::Greet(FileDescriptor socket, absl::Time deadline) {
  const std::string nonce = Nonce();
  MOERL_RETURN_IF_ERROR(SendFrame(socket, nonce, deadline));
  MOERL_ASSIGN_OR_RETURN(const std::string greeting, ReceiveFrame(socket, deadline, kGreetingBytesMax, cancel_fd()));
  MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> parts, Unpack(greeting, 3));
  const std::string& claim = parts[1];
  const auto refuse = [&](absl::Status status) {
    (void)SendFrame(socket, Pack({std::string(status.message()), ""}), deadline);
    return status;
  };
  if (!Equal(parts[2], Prove(options_.token, "rank", nonce, parts[0], claim))) {
    return refuse(absl::PermissionDeniedError(
        "fabric: refused by rank 0: another token; give all ranks the same fabric.token_file"));
  }
  const std::vector<std::string> fields = absl::StrSplit(claim, '/');
  int rank = -1;
  int num_ranks = 0;
  if (fields.size() != 3 || fields[0] != options_.cluster_id) {
    return refuse(absl::PermissionDeniedError(
        absl::StrCat("fabric: refused by rank 0: it belongs to cluster \"", options_.cluster_id, "\"")));
  }
  if (!absl::SimpleAtoi(fields[1], &rank) || !absl::SimpleAtoi(fields[2], &num_ranks) ||
      num_ranks != options_.num_ranks || rank < 1 || rank >= num_ranks) {
    return refuse(
        absl::InvalidArgumentError(absl::StrCat("fabric: a peer says it is rank ", fields[1], " of ", fields[2],
                                                ", rank 0 was told ", options_.num_ranks, " ranks")));
  }
  if (connections_[rank].valid()) {
    return refuse(absl::AlreadyExistsError(
        absl::StrCat("fabric: rank ", rank, " came twice; give every process its own trainer.rank")));
  }
  MOERL_RETURN_IF_ERROR(SendFrame(socket, Pack({"", Prove(options_.token, "root", nonce, parts[0], claim)}), deadline));
  connections_[rank] = std::move(socket);
  return absl::OkStatus();
}

absl::Status Bootstrap::ConnectToRoot(absl::Time deadline) {
  for (;;) {
    MOERL_ASSIGN_OR_RETURN(FileDescriptor socket, Connect(options_.address, deadline, cancel_fd()));
    const absl::StatusOr<std::string> nonce = ReceiveFrame(socket, deadline, kGreetingBytesMax, cancel_fd());
    if (absl::IsUnavailable(nonce.status())) {
      // Rank 0 of an earlier life, going down.
      absl::SleepFor(absl::Milliseconds(50));
      continue;
    }
    MOERL_RETURN_IF_ERROR(nonce.status());
    const std::string mine = Nonce();
    const std::string claim = absl::StrCat(options_.cluster_id, "/", options_.rank, "/", options_.num_ranks);
    MOERL_RETURN_IF_ERROR(
        SendFrame(socket, Pack({mine, claim, Prove(options_.token, "rank", *nonce, mine, claim)}), deadline));
    MOERL_ASSIGN_OR_RETURN(const std::string answer, ReceiveFrame(socket, deadline, kGreetingBytesMax, cancel_fd()));
    MOERL_ASSIGN_OR_RETURN(const std::vector<std::string> parts, Unpack(answer, 2));
    if (!parts[0].empty()) return absl::PermissionDeniedError(parts[0]);
    if (!Equal(parts[1], Prove(options_.token, "root", *nonce, mine, claim))) {
      return absl::PermissionDeniedError(
          absl::StrCat("fabric: who listens at ", options_.address, " does not have this cluster's token"));
    }
    connections_[0] = std::move(socket);
    return absl::OkStatus();
  }
}

absl::StatusOr<std::vector<std::string>> Bootstrap::AllGather(std::string_view name, std::string mine,
                                                              absl::Duration timeout) {
  const absl::Time deadline = absl::Now() + timeout;
  const auto explain = [&](const absl::Status& status, int rank) {
    return absl::Status(status.code(), absl::StrCat("fabric: exchange \"", std::string(name), "\" with rank ", rank,
                                                    ": ", status.message()));
  };
  if (options_.rank != 0) {
    if (absl::Status sent = SendFrame(connections_[0], Pack({std::string(name), mine}), deadline, cancel_fd());
        !sent.ok())
      return explain(sent, 0);
    absl::StatusOr<std::string> all = ReceiveFrame(connections_[0], deadline, kFrameBytesMax, cancel_fd());
    if (!all.ok()) return explain(all.status(), 0);
    return Unpack(*all, options_.num_ranks);
  }
  std::vector<std::string> parts(options_.num_ranks);
  parts[0] = std::move(mine);
  for (int rank = 1; rank < options_.num_ranks; ++rank) {
    absl::StatusOr<std::string> part = ReceiveFrame(connections_[rank], deadline, kFrameBytesMax, cancel_fd());
    if (!part.ok()) return explain(part.status(), rank);
    MOERL_ASSIGN_OR_RETURN(std::vector<std::string> named, Unpack(*part, 2));
    if (named[0] != name) {
      return absl::FailedPreconditionError(absl::StrCat("fabric: exchange \"", std::string(name), "\": rank ", rank,
                                                        " is at \"", named[0],
                                                        "\"; all ranks set up the same things in the same order"));
    }
    parts[rank] = std::move(named[1]);
  }
  const std::string all = Pack(parts);
  for (int rank = 1; rank < options_.num_ranks; ++rank) {
    if (absl::Status sent = SendFrame(connections_[rank], all, deadline, cancel_fd()); !sent.ok())
      return explain(sent, rank);
  }
  return parts;
}

}  // namespace moerl::fabric
