#ifndef MOERL_LIBS_WEIGHTS_MANIFEST_H_
#define MOERL_LIBS_WEIGHTS_MANIFEST_H_

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "libs/base/lineage.h"
#include "libs/weights/digest.h"

// What a version of the weights consists of. Format, canonical form and root: docs/weights.md.
// Value types; pure functions, any thread.

namespace moerl::v1 {
class ChunkRef;
class Manifest;
}  // namespace moerl::v1

namespace moerl::weights {

// Bounds of a manifest; what exceeds them is refused.
inline constexpr uint32_t kChunkBytesMax = 1 << 20;  // a chunk fits one message
inline constexpr uint32_t kChunkBytesMin = 4096;     // of the configured size; a tensor's last chunk may be smaller
inline constexpr size_t kTensorsMax = 1 << 20;
inline constexpr size_t kNameBytesMax = 512;
inline constexpr size_t kDimsMax = 8;

// Values are those of the wire's TensorType.
enum class ElementType : uint8_t { kF32 = 1, kBf16 = 2 };
size_t ElementBytes(ElementType type);
std::string_view ElementName(ElementType type);  // safetensors' names: "F32", "BF16"

// A tensor in memory: row-major, little-endian. Owns nothing: `data` must outlive its use.
struct TensorView {
  std::string name;  // Hugging Face parameter name
  ElementType type = ElementType::kF32;
  std::vector<uint64_t> shape;
  std::span<const std::byte> data;
};

struct ChunkRef {
  Digest sha256;
  uint32_t bytes = 0;

  friend auto operator<=>(const ChunkRef&, const ChunkRef&) = default;
};

struct TensorEntry {
  std::string name;
  ElementType type = ElementType::kF32;
  std::vector<uint64_t> shape;
  std::vector<ChunkRef> chunks;  // in order; joined they are the tensor. A chunk never spans two tensors

  uint64_t bytes() const;  // as stated by the chunks

  friend bool operator==(const TensorEntry&, const TensorEntry&) = default;
};

struct Manifest {
  VersionName version;
  std::vector<TensorEntry> tensors;  // strictly ascending by name
  Digest root;                       // MerkleRoot(tensors)
  std::string model_config_json;     // the model's Hugging Face config.json
  std::string numerics_fingerprint;

  uint64_t bytes() const;

  friend bool operator==(const Manifest&, const Manifest&) = default;
};

// "3/12": epoch 3, number 12.
std::string ToString(const VersionName& name);

// The pieces of at most `chunk_bytes` in which `data` is stored.
std::vector<std::span<const std::byte>> SplitIntoChunks(std::span<const std::byte> data, uint32_t chunk_bytes);

// Names the tensor's chunks. Errors: INVALID_ARGUMENT naming the tensor when name, type, shape and size do
// not agree or exceed a bound, or it has no element.
absl::StatusOr<TensorEntry> Describe(const TensorView& tensor, uint32_t chunk_bytes);

// The root over tensors in ascending order of name: a binary Merkle tree as in RFC 6962 section 2.1 whose
// leaves are name, type, shape and chunk digests. It does not depend on which rank put which tensor, nor on
// the version's name.
Digest MerkleRoot(std::span<const TensorEntry> tensors);

// What a rank hands to the leader for CommitVersion, as bytes to gather.
std::string EncodeShard(std::span<const TensorEntry> tensors);

// Joins all ranks' shards into the manifest of a version, sorted, with its root. Errors: INVALID_ARGUMENT for
// a shard that does not decode, a tensor that two shards have, no tensor at all.
absl::StatusOr<Manifest> JoinShards(VersionName version, std::span<const std::string> shards);

// The wire form. Parsing accepts exactly what holds all of the above: INVALID_ARGUMENT says what does not.
absl::StatusOr<Manifest> FromProto(const v1::Manifest& proto);
v1::Manifest ToProto(const Manifest& manifest);
absl::StatusOr<ChunkRef> FromProto(const v1::ChunkRef& proto);
void ToProto(const ChunkRef& ref, v1::ChunkRef* proto);
absl::StatusOr<Manifest> ParseManifest(std::string_view bytes);
std::string SerializeManifest(const Manifest& manifest);

}  // namespace moerl::weights

#endif  // MOERL_LIBS_WEIGHTS_MANIFEST_H_
