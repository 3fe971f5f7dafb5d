#include "libs/weights/manifest.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <gtest/gtest.h>

#include <functional>
#include <random>

#include "moerl/v1/weight_sync.pb.h"

namespace moerl::weights {
namespace {

using ::testing::HasSubstr;

std::vector<std::byte> Bytes(size_t size, int seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  return bytes;
}

// A few tensors that own their bytes.
struct Model {
  std::vector<std::vector<std::byte>> bytes;
  std::vector<TensorView> tensors;

  void Add(std::string name, ElementType type, std::vector<uint64_t> shape) {
    uint64_t size = ElementBytes(type);
    for (uint64_t dim : shape) size *= dim;
    bytes.push_back(Bytes(size, static_cast<int>(bytes.size())));
    tensors.push_back({.name = std::move(name), .type = type, .shape = std::move(shape), .data = bytes.back()});
  }
};

Model SmallModel() {
  Model model;
  model.Add("model.embed_tokens.weight", ElementType::kBf16, {100, 64});
  model.Add("model.norm.weight", ElementType::kF32, {64});
  model.Add("lm_head.weight", ElementType::kF32, {300, 64});
  model.Add("scale", ElementType::kF32, {});
  return model;
}

std::vector<TensorEntry> DescribeAll(const Model& model, uint32_t chunk_bytes = kChunkBytesMin) {
  std::vector<TensorEntry> entries;
  for (const TensorView& tensor : model.tensors) entries.push_back(Describe(tensor, chunk_bytes).value());
  return entries;
}

Manifest SmallManifest() {
  const std::string shard = EncodeShard(DescribeAll(SmallModel()));
  Manifest manifest = JoinShards({.epoch = 2, .number = 7}, {{shard}}).value();
  manifest.model_config_json = "{}";
  manifest.numerics_fingerprint = "cpu-bf16";
  return manifest;
}

TEST(Manifest, CutsATensorIntoChunksThatJoinToIt) {
  const std::vector<std::byte> data = Bytes(10'000, 1);
  const auto chunks = SplitIntoChunks(data, kChunkBytesMin);
  ASSERT_EQ(chunks.size(), 3u);
  std::vector<std::byte> joined;
  for (const auto& chunk : chunks) joined.insert(joined.end(), chunk.begin(), chunk.end());
  EXPECT_EQ(joined, data);
  EXPECT_TRUE(SplitIntoChunks({}, kChunkBytesMin).empty());
}

TEST(Manifest, ReadsBackWhatItWrites) {
  const Manifest manifest = SmallManifest();
  const auto parsed = ParseManifest(SerializeManifest(manifest));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(*parsed, manifest);
  EXPECT_EQ(manifest.bytes(), 100u * 64 * 2 + 64 * 4 + 300 * 64 * 4 + 4);
}

TEST(Manifest, HasTheSameRootHoweverRanksShareTheTensors) {
  const std::vector<TensorEntry> entries = DescribeAll(SmallModel());
  const Digest whole = SmallManifest().root;
  for (size_t cut = 0; cut <= entries.size(); ++cut) {
    const std::span<const TensorEntry> all(entries);
    const std::vector<std::string> shards = {EncodeShard(all.subspan(cut)), EncodeShard(all.first(cut))};
    const auto manifest = JoinShards({}, shards);
    ASSERT_TRUE(manifest.ok()) << manifest.status();
    EXPECT_EQ(manifest->root, whole);
  }
}

TEST(Manifest, HasAnotherRootForAnyOtherTensors) {
  const Digest root = SmallManifest().root;
  const auto changed = [&](const std::function<void(std::vector<TensorEntry>&)>& change) {
    std::vector<TensorEntry> tensors = SmallManifest().tensors;
    change(tensors);
    return MerkleRoot(tensors);
  };
  EXPECT_NE(root, changed([](auto& t) { t[0].name = "a"; }));
  EXPECT_NE(root, changed([](auto& t) { t[0].type = ElementType::kBf16; }));
  EXPECT_NE(root, changed([](auto& t) { std::swap(t[0].shape[0], t[0].shape[1]); }));
  EXPECT_NE(root, changed([](auto& t) { std::swap(t[0].chunks[0], t[0].chunks[1]); }));
  EXPECT_NE(root, changed([](auto& t) { t.pop_back(); }));
  EXPECT_NE(root, changed([](auto& t) { t.back().chunks[0].sha256.bytes[31] ^= 1; }));
}

TEST(Manifest, RootIsTheTreeOfRfc6962) {
  std::vector<TensorEntry> tensors;
  std::vector<Digest> leaves;
  for (int i = 0; i < 7; ++i) {
    tensors.push_back({.name = std::string(1, static_cast<char>('a' + i)), .shape = {1}, .chunks = {{Sha256("x"), 4}}});
    leaves.push_back(MerkleRoot({&tensors.back(), 1}));
  }
  const auto join = [](const Digest& a, const Digest& b) {
    return Hasher().Add("\1").Add(a.view()).Add(b.view()).Finish();
  };
  const Digest d0123 = join(join(leaves[0], leaves[1]), join(leaves[2], leaves[3]));
  EXPECT_EQ(MerkleRoot(tensors), join(d0123, join(join(leaves[4], leaves[5]), leaves[6])));
  EXPECT_EQ(MerkleRoot(std::span(tensors).first(3)), join(join(leaves[0], leaves[1]), leaves[2]));
}

TEST(Manifest, RefusesATensorThatTwoRanksPut) {
  const std::string shard = EncodeShard(DescribeAll(SmallModel()));
  EXPECT_THAT(JoinShards({}, {{shard, shard}}).status().message(), HasSubstr("tensor 'lm_head.weight' is there twice"));
  EXPECT_FALSE(JoinShards({}, {{std::string("\xff\xff")}}).ok());
  EXPECT_FALSE(JoinShards({}, {}).ok());
}

TEST(Manifest, RefusesATensorWhoseShapeAndBytesDisagree) {
  Model model = SmallModel();
  model.tensors[0].shape = {100, 63};
  EXPECT_THAT(Describe(model.tensors[0], kChunkBytesMin).status().message(),
              HasSubstr("needs 12600 bytes, it has 12800"));
  model.tensors[0].shape = {1ull << 33, 1ull << 33};
  EXPECT_THAT(Describe(model.tensors[0], kChunkBytesMin).status().message(), HasSubstr("overflows"));
  EXPECT_THAT(Describe({.name = "empty", .type = ElementType::kF32, .shape = {0, 4}, .data = {}}, kChunkBytesMin)
                  .status()
                  .message(),
              HasSubstr("no element"));
}

TEST(Manifest, RefusesEveryBrokenField) {
  const std::vector<std::pair<std::function<void(v1::Manifest&)>, std::string>> cases = {
      {[](auto& m) { m.clear_tensors(); }, "0 tensors"},
      {[](auto& m) { m.mutable_tensors()->SwapElements(0, 1); }, "out of order"},
      {[](auto& m) { *m.add_tensors() = m.tensors(3); }, "is there twice"},
      {[](auto& m) { m.mutable_tensors(0)->set_name(""); }, "name has 0 bytes"},
      {[](auto& m) { m.mutable_tensors(0)->set_name(std::string(513, 'x')); }, "name has 513 bytes"},
      {[](auto& m) { m.mutable_tensors(0)->set_type(v1::TENSOR_TYPE_UNSPECIFIED); }, "element type 0"},
      {[](auto& m) { m.mutable_tensors(0)->set_type(static_cast<v1::TensorType>(77)); }, "element type 77"},
      {[](auto& m) { m.mutable_tensors(0)->add_shape(2); }, "its shape needs"},
      {[](auto& m) {
         for (int i = 0; i < 9; ++i) m.mutable_tensors(0)->add_shape(1);
       },
       "11 dimensions"},
      {[](auto& m) { m.mutable_tensors(0)->mutable_chunks()->RemoveLast(); }, "its shape needs"},
      {[](auto& m) { m.mutable_tensors(0)->mutable_chunks(0)->set_sha256("short"); }, "sha256 has 5 bytes"},
      {[](auto& m) { m.mutable_tensors(0)->mutable_chunks(0)->set_num_bytes(0); }, "has 0 bytes"},
      {[](auto& m) { m.mutable_tensors(0)->mutable_chunks(0)->set_num_bytes(kChunkBytesMax + 1); }, "legal"},
      {[](auto& m) { (*m.mutable_tensors(0)->mutable_chunks(0)->mutable_sha256())[0] ^= 1; }, "give root"},
      {[](auto& m) { *m.mutable_tensors(2)->mutable_chunks(0)->mutable_sha256() = m.tensors(0).chunks(0).sha256(); },
       "bytes in one place"},
      {[](auto& m) { (*m.mutable_root())[0] ^= 1; }, "it states another"},
      {[](auto& m) { m.mutable_base()->set_number(1); }, "delta"},
      {[](auto& m) { m.mutable_version()->set_number(~0ull); }, "above 2^63"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    v1::Manifest proto = ToProto(SmallManifest());
    cases[i].first(proto);
    const auto parsed = FromProto(proto);
    EXPECT_EQ(parsed.status().code(), absl::StatusCode::kInvalidArgument) << i;
    EXPECT_THAT(std::string(parsed.status().message()), HasSubstr(cases[i].second)) << i;
  }
}

TEST(Manifest, NoFlippedBitGoesUnnoticed) {
  const google::protobuf::LogSilencer silencer;  // it reports every invalid UTF-8
  const Manifest manifest = SmallManifest();
  const std::string bytes = SerializeManifest(manifest);
  for (size_t i = 0; i < bytes.size(); ++i) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string flipped = bytes;
      flipped[i] = static_cast<char>(flipped[i] ^ (1 << bit));
      const auto parsed = ParseManifest(flipped);
      if (!parsed.ok())
        continue;  // a flip in the version's name, the configuration or the fingerprint is another matter
      EXPECT_EQ(parsed->tensors, manifest.tensors) << "byte " << i << " bit " << bit;
    }
  }
}

}  // namespace
}  // namespace moerl::weights
