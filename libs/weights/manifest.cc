#include "libs/weights/manifest.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "libs/base/check.h"
#include "libs/base/status_macros.h"
#include "moerl/v1/weight_sync.pb.h"

namespace moerl::weights {
namespace {

template <typename... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("manifest: ", parts...));
}

std::string Quoted(const std::string& name) { return absl::StrCat("tensor '", name.substr(0, kNameBytesMax), "'"); }

// Name, type, shape: `bytes` is what the elements take.
absl::Status CheckTensor(const std::string& name, ElementType type, std::span<const uint64_t> shape, uint64_t bytes) {
  if (name.empty() || name.size() > kNameBytesMax) {
    return Invalid("a tensor's name has ", name.size(), " bytes, 1 to ", kNameBytesMax, " are legal");
  }
  if (shape.size() > kDimsMax) return Invalid(Quoted(name), " has ", shape.size(), " dimensions, at most ", kDimsMax);
  uint64_t expected = ElementBytes(type);
  for (uint64_t dim : shape) {
    if (__builtin_mul_overflow(expected, dim, &expected)) return Invalid(Quoted(name), ": its shape overflows");
  }
  if (expected == 0) return Invalid(Quoted(name), " has no element");
  if (expected != bytes) {
    return Invalid(Quoted(name), ": its shape needs ", expected, " bytes, it has ", bytes);
  }
  return absl::OkStatus();
}

absl::StatusOr<TensorEntry> EntryFromProto(const v1::TensorEntry& proto) {
  TensorEntry entry{.name = proto.name(), .shape = {proto.shape().begin(), proto.shape().end()}, .chunks = {}};
  if (proto.type() != v1::TENSOR_TYPE_F32 && proto.type() != v1::TENSOR_TYPE_BF16) {
    return Invalid(Quoted(entry.name), ": element type ", static_cast<int>(proto.type()), " is unknown");
  }
  entry.type = static_cast<ElementType>(proto.type());
  entry.chunks.reserve(proto.chunks_size());
  for (const v1::ChunkRef& ref : proto.chunks()) {
    MOERL_ASSIGN_OR_RETURN(const ChunkRef chunk, FromProto(ref));
    entry.chunks.push_back(chunk);
  }
  MOERL_RETURN_IF_ERROR(CheckTensor(entry.name, entry.type, entry.shape, entry.bytes()));
  return entry;
}

void EntryToProto(const TensorEntry& entry, v1::TensorEntry* proto) {
  proto->set_name(entry.name);
  proto->set_type(static_cast<v1::TensorType>(entry.type));
  for (uint64_t dim : entry.shape) proto->add_shape(dim);
  for (const ChunkRef& chunk : entry.chunks) ToProto(chunk, proto->add_chunks());
}

// What holds of all tensors together.
absl::Status CheckTensors(std::span<const TensorEntry> tensors) {
  if (tensors.empty() || tensors.size() > kTensorsMax) {
    return Invalid(tensors.size(), " tensors, 1 to ", kTensorsMax, " are legal");
  }
  for (size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i - 1].name == tensors[i].name) return Invalid(Quoted(tensors[i].name), " is there twice");
    if (tensors[i - 1].name > tensors[i].name) return Invalid(Quoted(tensors[i].name), " is out of order");
  }
  std::unordered_map<Digest, uint32_t, DigestHash> sizes;
  for (const TensorEntry& tensor : tensors) {
    for (const ChunkRef& chunk : tensor.chunks) {
      const uint32_t bytes = sizes.try_emplace(chunk.sha256, chunk.bytes).first->second;
      if (bytes == chunk.bytes) continue;
      return Invalid("chunk ", chunk.sha256.Short(), " has ", bytes, " bytes in one place, ", chunk.bytes,
                     " in another");
    }
  }
  return absl::OkStatus();
}

Digest Leaf(const TensorEntry& tensor) {
  Hasher hasher;
  hasher.Add(std::string_view("\0", 1)).AddText(tensor.name).AddText(ElementName(tensor.type));
  hasher.AddU64(tensor.shape.size());
  for (uint64_t dim : tensor.shape) hasher.AddU64(dim);
  hasher.AddU64(tensor.chunks.size());
  for (const ChunkRef& chunk : tensor.chunks) hasher.Add(chunk.sha256.view()).AddU64(chunk.bytes);
  return hasher.Finish();
}

Digest Subtree(std::span<const Digest> leaves) {
  if (leaves.size() == 1) return leaves[0];
  size_t split = 1;
  while (2 * split < leaves.size()) split *= 2;  // the largest power of two below the size
  const Digest left = Subtree(leaves.first(split)), right = Subtree(leaves.subspan(split));
  return Hasher().Add("\1").Add(left.view()).Add(right.view()).Finish();
}

}  // namespace

size_t ElementBytes(ElementType type) { return type == ElementType::kF32 ? 4 : 2; }

std::string_view ElementName(ElementType type) { return type == ElementType::kF32 ? "F32" : "BF16"; }

uint64_t TensorEntry::bytes() const {
  uint64_t sum = 0;
  for (const ChunkRef& chunk : chunks) sum += chunk.bytes;
  return sum;
}

uint64_t Manifest::bytes() const {
  uint64_t sum = 0;
  for (const TensorEntry& tensor : tensors) sum += tensor.bytes();
  return sum;
}

std::string ToString(const VersionName& name) { return absl::StrCat(name.epoch, "/", name.number); }

std::vector<std::span<const std::byte>> SplitIntoChunks(std::span<const std::byte> data, uint32_t chunk_bytes) {
  MOERL_CHECK(chunk_bytes >= kChunkBytesMin && chunk_bytes <= kChunkBytesMax);
  std::vector<std::span<const std::byte>> chunks;
  chunks.reserve(data.size() / chunk_bytes + 1);
  while (!data.empty()) {
    const size_t size = std::min<size_t>(chunk_bytes, data.size());
    chunks.push_back(data.first(size));
    data = data.subspan(size);
  }
  return chunks;
}

absl::StatusOr<TensorEntry> Describe(const TensorView& tensor, uint32_t chunk_bytes) {
  MOERL_RETURN_IF_ERROR(CheckTensor(tensor.name, tensor.type, tensor.shape, tensor.data.size()));
  TensorEntry entry{.name = tensor.name, .type = tensor.type, .shape = tensor.shape, .chunks = {}};
  for (std::span<const std::byte> chunk : SplitIntoChunks(tensor.data, chunk_bytes)) {
    entry.chunks.push_back({.sha256 = Sha256({reinterpret_cast<const char*>(chunk.data()), chunk.size()}),
                            .bytes = static_cast<uint32_t>(chunk.size())});
  }
  return entry;
}

Digest MerkleRoot(std::span<const TensorEntry> tensors) {
  MOERL_CHECK(!tensors.empty());
  std::vector<Digest> leaves;
  leaves.reserve(tensors.size());
  for (const TensorEntry& tensor : tensors) leaves.push_back(Leaf(tensor));
  return Subtree(leaves);
}

std::string EncodeShard(std::span<const TensorEntry> tensors) {
  v1::Manifest proto;
  for (const TensorEntry& tensor : tensors) EntryToProto(tensor, proto.add_tensors());
  return proto.SerializeAsString();
}

absl::StatusOr<Manifest> JoinShards(VersionName version, std::span<const std::string> shards) {
  Manifest manifest{.version = version, .tensors = {}, .root = {}, .model_config_json = {}, .numerics_fingerprint = {}};
  for (size_t shard = 0; shard < shards.size(); ++shard) {
    v1::Manifest proto;
    if (!proto.ParseFromString(shards[shard])) return Invalid("shard ", shard, " does not decode");
    for (const v1::TensorEntry& tensor : proto.tensors()) {
      MOERL_ASSIGN_OR_RETURN(TensorEntry entry, EntryFromProto(tensor));
      manifest.tensors.push_back(std::move(entry));
    }
  }
  std::sort(manifest.tensors.begin(), manifest.tensors.end(),
            [](const TensorEntry& a, const TensorEntry& b) { return a.name < b.name; });
  MOERL_RETURN_IF_ERROR(CheckTensors(manifest.tensors));
  manifest.root = MerkleRoot(manifest.tensors);
  return manifest;
}

absl::StatusOr<ChunkRef> FromProto(const v1::ChunkRef& proto) {
  const std::optional<Digest> digest = Digest::FromBytes(proto.sha256());
  if (!digest) return Invalid("a chunk's sha256 has ", proto.sha256().size(), " bytes, ", Digest::kSize, " are legal");
  if (proto.num_bytes() < 1 || proto.num_bytes() > kChunkBytesMax) {
    return Invalid("chunk ", digest->Short(), " has ", proto.num_bytes(), " bytes, 1 to ", kChunkBytesMax,
                   " are legal");
  }
  return ChunkRef{.sha256 = *digest, .bytes = proto.num_bytes()};
}

void ToProto(const ChunkRef& ref, v1::ChunkRef* proto) {
  proto->set_sha256(std::string(ref.sha256.view()));
  proto->set_num_bytes(ref.bytes);
}

absl::StatusOr<Manifest> FromProto(const v1::Manifest& proto) {
  if (proto.has_base()) return Invalid("version is a delta of another, which this release does not read");
  Manifest manifest{.version = {.epoch = static_cast<int64_t>(proto.version().epoch()),
                                .number = static_cast<int64_t>(proto.version().number())},
                    .tensors = {},
                    .root = {},
                    .model_config_json = proto.model_config_json(),
                    .numerics_fingerprint = proto.numerics_fingerprint()};
  if (manifest.version.epoch < 0 || manifest.version.number < 0) return Invalid("version is above 2^63 - 1");
  manifest.tensors.reserve(proto.tensors_size());
  for (const v1::TensorEntry& tensor : proto.tensors()) {
    MOERL_ASSIGN_OR_RETURN(TensorEntry entry, EntryFromProto(tensor));
    manifest.tensors.push_back(std::move(entry));
  }
  MOERL_RETURN_IF_ERROR(CheckTensors(manifest.tensors));
  manifest.root = MerkleRoot(manifest.tensors);
  if (manifest.root.view() != proto.root()) {
    return Invalid("its tensors give root ", manifest.root.ToHex(), ", it states another");
  }
  return manifest;
}

v1::Manifest ToProto(const Manifest& manifest) {
  v1::Manifest proto;
  proto.mutable_version()->set_epoch(static_cast<uint64_t>(manifest.version.epoch));
  proto.mutable_version()->set_number(static_cast<uint64_t>(manifest.version.number));
  for (const TensorEntry& tensor : manifest.tensors) EntryToProto(tensor, proto.add_tensors());
  proto.set_root(std::string(manifest.root.view()));
  proto.set_model_config_json(manifest.model_config_json);
  proto.set_numerics_fingerprint(manifest.numerics_fingerprint);
  return proto;
}

absl::StatusOr<Manifest> ParseManifest(std::string_view bytes) {
  v1::Manifest proto;
  if (!proto.ParseFromArray(bytes.data(), static_cast<int>(bytes.size()))) return Invalid("it does not decode");
  return FromProto(proto);
}

std::string SerializeManifest(const Manifest& manifest) { return ToProto(manifest).SerializeAsString(); }

}  // namespace moerl::weights
