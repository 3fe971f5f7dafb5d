#ifndef MOERL_LIBS_WEIGHTS_DIGEST_H_
#define MOERL_LIBS_WEIGHTS_DIGEST_H_

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

namespace moerl::weights {

// A SHA-256. Names a chunk, a tensor's content, a version's root.
struct Digest {
  static constexpr size_t kSize = 32;
  std::array<uint8_t, kSize> bytes{};

  friend auto operator<=>(const Digest&, const Digest&) = default;

  std::string_view view() const { return {reinterpret_cast<const char*>(bytes.data()), kSize}; }

  // 64 lower-case hexadecimal digits.
  std::string ToHex() const;
  // The first eight of them: for logs and messages.
  std::string Short() const { return ToHex().substr(0, 8); }

  // Nothing unless `raw` has exactly 32 bytes.
  static std::optional<Digest> FromBytes(std::string_view raw);
  // Nothing unless `hex` is exactly 64 lower-case hexadecimal digits.
  static std::optional<Digest> FromHex(std::string_view hex);
};

struct DigestHash {
  size_t operator()(const Digest& digest) const {
    size_t hash;
    std::memcpy(&hash, digest.bytes.data(), sizeof(hash));  // a digest is uniform already
    return hash;
  }
};

// SHA-256 over pieces. Thread-compatible.
class Hasher {
 public:
  Hasher();
  ~Hasher();
  Hasher(const Hasher&) = delete;
  Hasher& operator=(const Hasher&) = delete;

  Hasher& Add(std::string_view bytes);
  Hasher& AddU64(uint64_t value);          // eight bytes, little-endian
  Hasher& AddText(std::string_view text);  // its length as by AddU64, then its bytes
  Digest Finish();                         // afterwards it starts anew

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

Digest Sha256(std::string_view bytes);

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_DIGEST_H_
