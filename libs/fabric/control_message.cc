#include "libs/fabric/control_message.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <string.h>

#include <vector>

#include "absl/strings/str_cat.h"

namespace moerl::fabric {
namespace {

constexpr uint64_t kFormat = 0x31626d6c72656f6d;  // "moerlmb1"
constexpr size_t kProofBytes = 32;

std::string Prove(absl::string_view cluster_id, absl::string_view token, absl::string_view bytes) {
  const std::string text = absl::StrCat(cluster_id, "/", bytes);
  std::string proof(kProofBytes, '\0');
  unsigned int size = kProofBytes;
  HMAC(EVP_sha256(), token.data(), static_cast<int>(token.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), reinterpret_cast<unsigned char*>(proof.data()), &size);
  return proof;
}

// The two directions share one description of the fields, so that they cannot drift apart.
class Writer {
 public:
  template <typename Number>
  void Field(Number& number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
  }
  void Field(std::string& text) {
    uint32_t size = static_cast<uint32_t>(text.size());
    Field(size);
    bytes_.append(text);
  }
  template <typename Element>
  uint32_t Count(std::vector<Element>& list) {
    uint32_t count = static_cast<uint32_t>(list.size());
    Field(count);
    return count;
  }
  std::string Take() { return std::move(bytes_); }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(absl::string_view bytes) : left_(bytes) {}

  template <typename Number>
  void Field(Number& number) {
    if (left_.size() < sizeof(number)) return Break();
    memcpy(&number, left_.data(), sizeof(number));
    left_.remove_prefix(sizeof(number));
  }
  void Field(std::string& text) {
    uint32_t size = 0;
    Field(size);
    if (left_.size() < size) return Break();
    text.assign(left_.data(), size);
    left_.remove_prefix(size);
  }
  // Elements take two bytes or more.
  template <typename Element>
  uint32_t Count(std::vector<Element>& list) {
    uint32_t count = 0;
    Field(count);
    if (left_.size() / 2 < count) {
      Break();
      return 0;
    }
    list.resize(count);
    return count;
  }
  bool is_whole() const { return !is_broken_ && left_.empty(); }

 private:
  void Break() {
    is_broken_ = true;
    left_ = {};
  }
  absl::string_view left_;
  bool is_broken_ = false;
};

template <typename Codec>
void Code(Codec& codec, Ballot& ballot) {
  codec.Field(ballot.round);
  codec.Field(ballot.proposer);
}

template <typename Codec>
void Code(Codec& codec, std::vector<Lifetime>& lifetimes) {
  codec.Count(lifetimes);
  for (Lifetime& lifetime : lifetimes) {
    codec.Field(lifetime.id);
    codec.Field(lifetime.contact);
  }
}

template <typename Codec>
void Code(Codec& codec, MembershipMessage& message) {
  uint64_t format = kFormat;
  codec.Field(format);
  codec.Field(message.kind);
  codec.Field(message.epoch);
  codec.Field(message.from);
  Code(codec, message.ballot);
  codec.Count(message.accusations);
  for (Accusation& accusation : message.accusations) {
    codec.Field(accusation.by);
    codec.Field(accusation.of);
  }
  codec.Field(message.wants_epoch);
  codec.Field(message.finished);
  Code(codec, message.lifetimes);
  Code(codec, message.accepted);
  codec.Count(message.decision.survivors);
  for (uint16_t& survivor : message.decision.survivors) codec.Field(survivor);
  Code(codec, message.decision.joiners);
  codec.Field(message.decision.finished);
}

}  // namespace

absl::StatusOr<std::string> EncodeControl(const MembershipMessage& message, absl::string_view cluster_id,
                                          absl::string_view token) {
  Writer writer;
  MembershipMessage copy = message;
  Code(writer, copy);
  std::string bytes = writer.Take();
  if (bytes.size() + kProofBytes > kControlBytesMax) {
    return absl::ResourceExhaustedError(absl::StrCat("fabric: membership message of ", bytes.size(), " bytes, at most ",
                                                     kControlBytesMax - kProofBytes,
                                                     "; use fewer ranks in one cluster"));
  }
  bytes.append(Prove(cluster_id, token, bytes));
  return bytes;
}

absl::StatusOr<MembershipMessage> DecodeControl(absl::string_view datagram, absl::string_view cluster_id,
                                                absl::string_view token) {
  if (datagram.size() < kProofBytes) return absl::PermissionDeniedError("fabric: a datagram without a proof");
  const absl::string_view bytes = datagram.substr(0, datagram.size() - kProofBytes);
  const std::string proof = Prove(cluster_id, token, bytes);
  if (CRYPTO_memcmp(proof.data(), datagram.data() + bytes.size(), kProofBytes) != 0)
    return absl::PermissionDeniedError("fabric: a datagram of another cluster or token");
  MembershipMessage message;
  Reader reader(bytes);
  Code(reader, message);
  uint64_t format = 0;
  memcpy(&format, bytes.data(), std::min(bytes.size(), sizeof(format)));
  if (!reader.is_whole() || format != kFormat || message.kind > MembershipMessage::Kind::kEvicted)
    return absl::DataLossError("fabric: a membership message of another format; give all ranks the same build");
  return message;
}

}  // namespace moerl::fabric
