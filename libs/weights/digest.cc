#include "libs/weights/digest.h"

#include <openssl/evp.h>

#include "absl/strings/escaping.h"
#include "libs/base/check.h"

namespace moerl::weights {

std::string Digest::ToHex() const { return absl::BytesToHexString(absl::string_view(view().data(), view().size())); }

std::optional<Digest> Digest::FromBytes(std::string_view raw) {
  if (raw.size() != kSize) return std::nullopt;
  Digest digest;
  std::memcpy(digest.bytes.data(), raw.data(), kSize);
  return digest;
}

std::optional<Digest> Digest::FromHex(std::string_view hex) {
  if (hex.size() != 2 * kSize) return std::nullopt;
  if (hex.find_first_not_of("0123456789abcdef") != std::string_view::npos) return std::nullopt;
  return FromBytes(absl::HexStringToBytes(absl::string_view(hex.data(), hex.size())));
}

struct Hasher::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }

  void Start() { MOERL_CHECK(evp != nullptr && EVP_DigestInit_ex(evp, EVP_sha256(), nullptr) == 1); }
};

Hasher::Hasher() : context_(std::make_unique<Context>()) { context_->Start(); }
Hasher::~Hasher() = default;

Hasher& Hasher::Add(std::string_view bytes) {
  MOERL_CHECK(EVP_DigestUpdate(context_->evp, bytes.data(), bytes.size()) == 1);
  return *this;
}

Hasher& Hasher::AddU64(uint64_t value) {
  char little[8];
  for (int i = 0; i < 8; ++i) little[i] = static_cast<char>(value >> (8 * i));
  return Add({little, sizeof(little)});
}

Hasher& Hasher::AddText(std::string_view text) { return AddU64(text.size()).Add(text); }

Digest Hasher::Finish() {
  Digest digest;
  unsigned size = 0;
  MOERL_CHECK(EVP_DigestFinal_ex(context_->evp, digest.bytes.data(), &size) == 1 && size == Digest::kSize);
  context_->Start();
  return digest;
}

Digest Sha256(std::string_view bytes) { return Hasher().Add(bytes).Finish(); }

}  // namespace moerl::weights
