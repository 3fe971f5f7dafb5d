#include "libs/weights/staging.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>

#include "libs/base/env.h"

namespace moerl::weights {
namespace {

using ::testing::SizeIs;

// A version with a tensor of several chunks, a small one, and two that are equal.
struct Source {
  std::vector<std::string> bytes;
  std::vector<TensorView> tensors;
  Manifest manifest;

  explicit Source(int64_t number) {
    Add("a.large", 5000, static_cast<int>(number));
    Add("b.small", 33, 100);
    Add("c.equal", 2000, 200);
    Add("d.equal", 2000, 200);
    std::vector<TensorEntry> entries;
    for (const TensorView& tensor : tensors) entries.push_back(Describe(tensor, kChunkBytesMin).value());
    const std::vector<std::string> shards = {EncodeShard(entries)};
    manifest = JoinShards({.epoch = 1, .number = number}, shards).value();
  }
  Source(const Source&) = delete;

  void Add(const char* name, uint64_t elements, int seed) {
    std::mt19937 random(seed);
    bytes.emplace_back(2 * elements, '\0');
    for (char& byte : bytes.back()) byte = static_cast<char>(random());
    tensors.push_back({.name = name,
                       .type = ElementType::kBf16,
                       .shape = {elements},
                       .data = std::as_bytes(std::span(bytes.back()))});
  }

  std::string Chunk(const ChunkRef& ref) const {
    for (size_t t = 0; t < tensors.size(); ++t) {
      size_t offset = 0;
      for (const ChunkRef& chunk : manifest.tensors[t].chunks) {
        if (chunk == ref) return bytes[t].substr(offset, ref.bytes);
        offset += chunk.bytes;
      }
    }
    return {};
  }
};

void ExpectEqual(const LocalVersion& version, const Source& source) {
  ASSERT_THAT(version.tensors(), SizeIs(source.tensors.size()));
  for (size_t t = 0; t < source.tensors.size(); ++t) {
    const TensorView* tensor = version.Find(source.tensors[t].name);
    ASSERT_NE(tensor, nullptr);
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(tensor->data.data()), tensor->data.size()), source.bytes[t]);
    EXPECT_EQ(tensor->shape, source.tensors[t].shape);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data.data()) % 64, 0u);
  }
  EXPECT_EQ(version.Find("e"), nullptr);
}

std::shared_ptr<const LocalVersion> Fill(std::unique_ptr<Staging> staging, const Source& source) {
  const std::vector<ChunkRef> missing = staging->Missing();
  for (const ChunkRef& ref : missing) EXPECT_TRUE(staging->Put(ref, source.Chunk(ref)).ok());
  return Staging::Finish(std::move(staging));
}

class StagingFileTest : public ::testing::Test {
 protected:
  void SetUp() override { (void)PosixEnv()->Remove(path_); }
  void TearDown() override { (void)PosixEnv()->Remove(path_); }
  const std::string path_ = testing::TempDir() + "/staging_" + std::to_string(getpid());
};

class StagingTest : public StagingFileTest, public ::testing::WithParamInterface<bool> {
 protected:
  const std::string where_ = GetParam() ? path_ : "";
};
INSTANTIATE_TEST_SUITE_P(FileAndMemory, StagingTest, ::testing::Bool());

TEST_P(StagingTest, HandsOverWhatWasPublished) {
  const Source source(1);
  auto staging = Staging::Begin(source.manifest, where_, nullptr).value();
  EXPECT_THAT(staging->Missing(), SizeIs(3 + 1 + 1)) << "equal tensors are fetched once";
  ExpectEqual(*Fill(std::move(staging), source), source);
}

TEST_P(StagingTest, RefusesBytesThatAreNotTheChunk) {
  const Source source(1);
  auto staging = Staging::Begin(source.manifest, where_, nullptr).value();
  const ChunkRef ref = staging->Missing()[0];
  std::string data = source.Chunk(ref);
  data[7] ^= 1;
  EXPECT_EQ(staging->Put(ref, data).code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(staging->Put(ref, "short").code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(staging->Put({.sha256 = Sha256("?"), .bytes = 1}, "?").code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(staging->Missing(), SizeIs(5));
  ExpectEqual(*Fill(std::move(staging), source), source);
}

TEST_P(StagingTest, TakesOverWhatDidNotChange) {
  const Source first(1), second(2);
  const auto current = Fill(Staging::Begin(first.manifest, "", nullptr).value(), first);
  auto staging = Staging::Begin(second.manifest, where_, current.get()).value();
  EXPECT_THAT(staging->Missing(), SizeIs(3)) << "only the large tensor changed";
  ExpectEqual(*Fill(std::move(staging), second), second);
}

TEST_F(StagingFileTest, GoesOnAfterAKillWithWhatItsFileHolds) {
  const Source source(1);
  {
    auto staging = Staging::Begin(source.manifest, path_, nullptr).value();
    for (const ChunkRef& ref : {staging->Missing()[0], staging->Missing()[3], staging->Missing()[4]}) {
      ASSERT_TRUE(staging->Put(ref, source.Chunk(ref)).ok());
    }
  }
  auto staging = Staging::Begin(source.manifest, path_, nullptr).value();
  EXPECT_THAT(staging->Missing(), SizeIs(2));
  ExpectEqual(*Fill(std::move(staging), source), source);

  std::fstream(path_, std::ios::in | std::ios::out).seekp(4097).put('!');
  staging = Staging::Begin(source.manifest, path_, nullptr).value();
  EXPECT_THAT(staging->Missing(), SizeIs(1)) << "a damaged chunk is fetched again";
  ExpectEqual(*Fill(std::move(staging), source), source);
}

TEST_F(StagingFileTest, SaysSoWhenTheDiskHasNoRoomAndLeavesNothingBehind) {
  const Source source(1);
  std::signal(SIGXFSZ, SIG_IGN);
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit small = {.rlim_cur = 4096, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const auto staging = Staging::Begin(source.manifest, path_, nullptr);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(staging.status().code(), absl::StatusCode::kResourceExhausted) << staging.status();
  EXPECT_FALSE(PosixEnv()->Exists(path_));
}

}  // namespace
}  // namespace moerl::weights
