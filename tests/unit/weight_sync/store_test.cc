#include "services/weight_sync/store.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <random>
#include <set>

#include "absl/strings/str_cat.h"
#include "libs/base/failpoint.h"
#include "libs/base/fault_injection_env.h"
#include "libs/base/log.h"
#include "libs/base/metrics.h"

namespace moerl {
namespace {

using ::testing::HasSubstr;
using ::testing::SizeIs;
using weights::ElementType;
using weights::Manifest;

constexpr uint32_t kChunkBytes = 68 << 10;

// The policy after `number` steps: three tensors, of which one never changes (two chunks, each in a file), one has
// three chunks in files and a smaller one in the catalogue, and one is small.
struct Policy {
  std::vector<std::string> bytes;
  std::vector<weights::TensorView> tensors;
  Manifest manifest;

  explicit Policy(int64_t number, int salt = 0) {
    Add("embed", {34, 1024}, 7);
    Add("experts", {52, 1024}, static_cast<int>(1000 + 10 * number + salt));
    Add("norm", {32}, static_cast<int>(2000 + 10 * number + salt));
    std::vector<weights::TensorEntry> entries;
    for (const auto& tensor : tensors) entries.push_back(weights::Describe(tensor, kChunkBytes).value());
    const std::vector<std::string> shards = {weights::EncodeShard(entries)};
    manifest = weights::JoinShards({.epoch = 0, .number = number}, shards).value();
  }
  Policy(const Policy&) = delete;

  void Add(const char* name, std::vector<uint64_t> shape, int seed) {
    std::mt19937_64 random(seed);
    uint64_t size = 4;
    for (uint64_t dim : shape) size *= dim;
    bytes.emplace_back(size, '\0');
    for (size_t at = 0; at < size; at += sizeof(uint64_t)) {
      const uint64_t word = random();
      std::memcpy(bytes.back().data() + at, &word, sizeof(word));
    }
    tensors.push_back({.name = name,
                       .type = ElementType::kF32,
                       .shape = std::move(shape),
                       .data = std::as_bytes(std::span(bytes.back()))});
  }

  std::vector<ChunkBytes> Chunks() const {
    std::vector<ChunkBytes> chunks;
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto pieces = weights::SplitIntoChunks(std::as_bytes(std::span(bytes[i])), kChunkBytes);
      for (size_t k = 0; k < pieces.size(); ++k) {
        chunks.push_back({.ref = manifest.tensors[i].chunks[k],
                          .data = {reinterpret_cast<const char*>(pieces[k].data()), pieces[k].size()}});
      }
    }
    return chunks;
  }
};

std::vector<weights::ChunkRef> Refs(std::span<const ChunkBytes> chunks) {
  std::vector<weights::ChunkRef> refs;
  for (const ChunkBytes& chunk : chunks) refs.push_back(chunk.ref);
  return refs;
}

absl::Status Put(Store& store, int64_t epoch, const Policy& policy) {
  const std::vector<ChunkBytes> chunks = policy.Chunks();
  const auto wanted = store.Offer(epoch, policy.manifest.version.number, 0, Refs(chunks));
  if (!wanted.ok()) return wanted.status();
  std::vector<ChunkBytes> sent;
  for (size_t i = 0; i < chunks.size(); ++i) {
    if ((*wanted)[i]) sent.push_back(chunks[i]);
  }
  return store.Put(epoch, policy.manifest.version.number, sent);
}

absl::StatusOr<Store::Committed> Publish(Store& store, int64_t epoch, const Policy& policy) {
  const auto begun = store.Begin(epoch, policy.manifest.version.number, 1, policy.manifest.bytes(), {});
  if (!begun.ok()) return begun.status();
  if (absl::Status status = Put(store, epoch, policy); !status.ok()) return status;
  return store.Commit(epoch, policy.manifest, {});
}

// Everything a reader can get of a version: its tensors' bytes, by name, checked against the manifest.
absl::StatusOr<std::map<std::string, std::string>> Fetch(Store& store, const VersionName& name) {
  const auto serialized = store.GetManifest(name);
  if (!serialized.ok()) return serialized.status();
  const auto manifest = weights::ParseManifest(*serialized);
  if (!manifest.ok()) return manifest.status();
  std::map<std::string, std::string> tensors;
  for (const auto& tensor : manifest->tensors) {
    for (const auto& ref : tensor.chunks) {
      const auto data = store.ReadChunk(name, ref);
      if (!data.ok()) return data.status();
      tensors[tensor.name] += *data;
    }
  }
  return tensors;
}

void ExpectHolds(Store& store, const VersionName& name, const Policy& policy) {
  const auto tensors = Fetch(store, name);
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  for (size_t i = 0; i < policy.tensors.size(); ++i) {
    EXPECT_EQ(tensors->at(policy.tensors[i].name), policy.bytes[i])
        << weights::ToString(name) << " " << policy.tensors[i].name;
  }
}

RequestKey Key(const std::string& id, const std::string& body) { return {.id = id, .body = weights::Sha256(body)}; }

class StoreTest : public ::testing::Test {
 protected:
  void SetUp() override {
    InitLogging({.level = LogLevel::kError});
    (void)PosixEnv()->RemoveTree(options_.directory);
  }
  void TearDown() override {
    DisarmFailpoints();
    store_.reset();
    (void)PosixEnv()->RemoveTree(options_.directory);
  }
  Store& Open() {
    store_.reset();
    auto store = Store::Open(options_, PosixEnv(), &clock_);
    EXPECT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    return *store_;
  }
  std::vector<std::string> Files() { return PosixEnv()->List(options_.directory + "/chunks").value(); }

  FakeClock clock_;
  StoreOptions options_ = {.directory = testing::TempDir() + "/store_" + std::to_string(getpid()),
                           .bytes_max = 10 << 20,
                           .versions_kept = 2};
  std::unique_ptr<Store> store_;
};

TEST_F(StoreTest, GivesBackWhatWasPublishedAlsoAfterARestart) {
  const Policy policy(0);
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const auto committed = Publish(*store_, epoch, policy);
  ASSERT_TRUE(committed.ok()) << committed.status();
  ExpectHolds(*store_, committed->name, policy);
  Open();
  EXPECT_EQ(store_->Now().latest, committed->name);
  EXPECT_EQ(store_->Now().root, policy.manifest.root);
  EXPECT_EQ(store_->epoch(), epoch);
  ExpectHolds(*store_, committed->name, policy);
}

TEST_F(StoreTest, AsksOnlyForChunksItLacks) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  ASSERT_TRUE(Publish(*store_, epoch, Policy(0)).ok());
  const Policy next(1);
  ASSERT_TRUE(store_->Begin(epoch, 1, 1, next.manifest.bytes(), {}).ok());
  const auto wanted = store_->Offer(epoch, 1, 0, Refs(next.Chunks())).value();
  EXPECT_EQ(std::count(wanted.begin(), wanted.end(), false), 2) << "the embedding's two chunks did not change";
  EXPECT_FALSE(wanted[0] || wanted[1]);
}

TEST_F(StoreTest, CommitsOnlyWhenEveryChunkIsThere) {
  const Policy policy(0);
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  ASSERT_TRUE(store_->Begin(epoch, 0, 1, policy.manifest.bytes(), {}).ok());
  std::vector<ChunkBytes> chunks = policy.Chunks();
  ASSERT_TRUE(store_->Offer(epoch, 0, 0, Refs(chunks)).ok());
  chunks.pop_back();
  ASSERT_TRUE(store_->Put(epoch, 0, chunks).ok());
  const auto committed = store_->Commit(epoch, policy.manifest, {});
  EXPECT_EQ(committed.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(committed.status().message(), HasSubstr("1 chunks of its manifest were not put"));
  EXPECT_FALSE(store_->Now().latest);
}

TEST_F(StoreTest, RefusesBytesThatChangedOnTheWayAndChunksNotOffered) {
  const Policy policy(0);
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  ASSERT_TRUE(store_->Begin(epoch, 0, 1, policy.manifest.bytes(), {}).ok());
  std::vector<ChunkBytes> chunks = policy.Chunks();
  EXPECT_EQ(store_->Put(epoch, 0, chunks).code(), absl::StatusCode::kInvalidArgument);
  ASSERT_TRUE(store_->Offer(epoch, 0, 0, Refs(chunks)).ok());
  std::string other(chunks[1].data);
  other[17] ^= 1;
  chunks[1].data = other;
  EXPECT_EQ(store_->Put(epoch, 0, chunks).code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(Files(), SizeIs(0));
  EXPECT_EQ(store_->Offer(epoch, 0, 1, Refs(chunks)).status().code(), absl::StatusCode::kInvalidArgument) << "shard";
}

TEST_F(StoreTest, AFencedPublisherPutsNothing) {
  const Policy policy(0);
  const int64_t old_epoch = Open().AcquirePublisher("run", {}).value();
  ASSERT_TRUE(store_->Begin(old_epoch, 0, 1, policy.manifest.bytes(), {}).ok());
  const auto chunks = policy.Chunks();
  ASSERT_TRUE(store_->Offer(old_epoch, 0, 0, Refs(chunks)).ok());
  ASSERT_TRUE(store_->AcquirePublisher("run", {}).ok());
  EXPECT_EQ(store_->Put(old_epoch, 0, chunks).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->Commit(old_epoch, policy.manifest, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(store_->RecordForks(old_epoch, {}).code(), absl::StatusCode::kFailedPrecondition);
}

TEST_F(StoreTest, ARepeatedRequestGetsItsFirstAnswerAlsoAfterARestart) {
  const int64_t epoch = Open().AcquirePublisher("run", Key("a", "run")).value();
  EXPECT_EQ(store_->AcquirePublisher("run", Key("a", "run")).value(), epoch);
  EXPECT_EQ(Open().AcquirePublisher("run", Key("a", "run")).value(), epoch);
  EXPECT_EQ(store_->epoch(), epoch);
  EXPECT_EQ(store_->AcquirePublisher("run", Key("a", "other")).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(store_->AcquirePublisher("run", Key("b", "run")).value(), epoch + 1);

  ASSERT_TRUE(store_->Tick().ok());  // the first tick forgets too, with nothing to forget
  clock_.Advance(absl::Hours(23));
  ASSERT_TRUE(store_->Tick().ok());
  EXPECT_EQ(store_->AcquirePublisher("run", Key("b", "run")).value(), epoch + 1);
  clock_.Advance(absl::Hours(2));
  ASSERT_TRUE(store_->Tick().ok());
  EXPECT_EQ(store_->AcquirePublisher("run", Key("b", "run")).value(), epoch + 2);
}

TEST_F(StoreTest, CollectsWhatIsRetiredButNotWhatIsLeased) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy first(0);
  const VersionName name = Publish(*store_, epoch, first)->name;
  const int64_t lease = store_->AcquireLease(name, "rollout-0", absl::Seconds(60), {}).value();
  for (int64_t number = 1; number < 5; ++number) ASSERT_TRUE(Publish(*store_, epoch, Policy(number)).ok());
  ASSERT_TRUE(store_->Tick().ok());
  ExpectHolds(*store_, name, first);
  EXPECT_EQ(Fetch(*store_, {epoch, 1}).status().code(), absl::StatusCode::kFailedPrecondition);
  const size_t num_leased = Files().size();

  ASSERT_TRUE(store_->ReleaseLease(lease).ok());
  ASSERT_TRUE(store_->ReleaseLease(lease).ok()) << "twice is no error";
  ASSERT_TRUE(store_->Tick().ok());
  EXPECT_EQ(Fetch(*store_, name).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_LT(Files().size(), num_leased);
  ExpectHolds(*store_, {epoch, 3}, Policy(3));
  ExpectHolds(*store_, {epoch, 4}, Policy(4));
  EXPECT_EQ(Files().size(), 2u + 2 * 3) << "the shared embedding and what is their own";
  EXPECT_EQ(Fetch(*store_, {epoch, 9}).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(StoreTest, ALeaseStartsItsFullDurationAgainAfterARestart) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const VersionName name = Publish(*store_, epoch, Policy(0))->name;
  ASSERT_TRUE(store_->AcquireLease(name, "rollout-0", absl::Seconds(60), {}).ok());
  for (int64_t number = 1; number < 4; ++number) ASSERT_TRUE(Publish(*store_, epoch, Policy(number)).ok());
  clock_.Advance(absl::Seconds(59));
  Open();
  clock_.Advance(absl::Seconds(59));
  ASSERT_TRUE(store_->Tick().ok());
  ExpectHolds(*store_, name, Policy(0));
  clock_.Advance(absl::Seconds(1));
  ASSERT_TRUE(store_->Tick().ok());
  EXPECT_FALSE(Fetch(*store_, name).ok());
  EXPECT_EQ(store_->AcquireLease(name, "x", absl::Seconds(60), {}).status().code(),
            absl::StatusCode::kFailedPrecondition);
}

TEST_F(StoreTest, WhatWasOfferedIsNotCollectedThoughItsVersionsAreRetired) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy first(0);
  ASSERT_TRUE(Publish(*store_, epoch, first).ok());
  ASSERT_TRUE(Publish(*store_, epoch, Policy(1)).ok());
  ASSERT_TRUE(Publish(*store_, epoch, Policy(2)).ok());  // retires 0; its bytes are still there
  // The first version's weights again, as number 3: nothing is sent, so nothing may vanish before the commit.
  const Policy again(0);
  Manifest manifest = again.manifest;
  manifest.version.number = 3;
  ASSERT_TRUE(store_->Begin(epoch, 3, 1, manifest.bytes(), {}).ok());
  const auto wanted = store_->Offer(epoch, 3, 0, Refs(again.Chunks())).value();
  EXPECT_EQ(std::count(wanted.begin(), wanted.end(), true), 0);
  ASSERT_TRUE(store_->Tick().ok());
  ASSERT_TRUE(store_->Commit(epoch, manifest, {}).ok());
  ASSERT_TRUE(store_->Tick().ok());
  ExpectHolds(*store_, {epoch, 3}, first);
}

TEST_F(StoreTest, AGivenUpVersionLeavesNothingBehind) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy policy(0);
  ASSERT_TRUE(store_->Begin(epoch, 0, 1, policy.manifest.bytes(), {}).ok());
  ASSERT_TRUE(Put(*store_, epoch, policy).ok());
  EXPECT_THAT(Files(), SizeIs(5));
  ASSERT_TRUE(store_->AcquirePublisher("run", {}).ok());
  ASSERT_TRUE(store_->Tick().ok());
  EXPECT_THAT(Files(), SizeIs(0));
  EXPECT_EQ(store_->Use().chunk_bytes, 0u);
}

TEST_F(StoreTest, ABudgetThatIsTooSmallIsRefusedAtTheStartAndAtBegin) {
  const uint64_t bytes = Policy(0).manifest.bytes();
  options_.bytes_max = 4 * bytes;
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  for (int64_t number = 0; number < 3; ++number) ASSERT_TRUE(Publish(*store_, epoch, Policy(number)).ok());
  EXPECT_EQ(store_->Begin(epoch, 3, 1, 3 * bytes, {}).status().code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(store_->Now().latest, (VersionName{epoch, 2}));
  store_.reset();
  options_.bytes_max = 4 * bytes - 1;
  const auto refused = Store::Open(options_, PosixEnv(), &clock_);
  EXPECT_THAT(refused.status().message(), HasSubstr(absl::StrCat("give at least ", 4 * bytes)));
  options_.bytes_max = 4 * bytes;
  ExpectHolds(Open(), {epoch, 2}, Policy(2));
}

TEST_F(StoreTest, TwoProcessesDoNotShareAStore) {
  Open();
  EXPECT_EQ(Store::Open(options_, PosixEnv(), &clock_).status().code(), absl::StatusCode::kFailedPrecondition);
}

double VerifyFailures() { return GetCounter("moerl_weight_sync_verify_failures_total", "").Value(); }

TEST_F(StoreTest, ADamagedChunkIsRefusedAndAskedForAgain) {
  const double before = VerifyFailures();
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy policy(0);
  const VersionName name = Publish(*store_, epoch, policy)->name;
  for (const std::string& file : Files()) {
    std::fstream(options_.directory + "/chunks/" + file, std::ios::in | std::ios::out).seekp(5).put('!');
  }
  EXPECT_EQ(Fetch(*store_, name).status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(Fetch(*store_, name).status().code(), absl::StatusCode::kDataLoss) << "and it stays refused";
  EXPECT_GT(VerifyFailures(), before);
  ASSERT_TRUE(Publish(*store_, store_->AcquirePublisher("run", {}).value(), policy).ok());
  ExpectHolds(*store_, name, policy);
}

TEST_F(StoreTest, AReaderThatMistakesAChunksSizeDoesTheChunkNoHarm) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy policy(0);
  const VersionName name = Publish(*store_, epoch, policy)->name;
  for (weights::ChunkRef ref : Refs(policy.Chunks())) {
    ref.bytes = ref.bytes == kChunkBytes ? 5 : kChunkBytes;
    const absl::Status status = store_->ReadChunk(name, ref).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(status.message(), HasSubstr("ask as the manifest says"));
  }
  ExpectHolds(*store_, name, policy);
}

TEST_F(StoreTest, AMissingOrShortFileIsNoticedAtTheStart) {
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  const Policy policy(0);
  const VersionName name = Publish(*store_, epoch, policy)->name;
  const std::vector<std::string> files = Files();
  store_.reset();
  ASSERT_EQ(truncate((options_.directory + "/chunks/" + files[0]).c_str(), 10), 0);
  ASSERT_TRUE(PosixEnv()->Remove(options_.directory + "/chunks/" + files[1]).ok());
  const double before = VerifyFailures();
  Open();
  EXPECT_EQ(VerifyFailures() - before, 2);
  EXPECT_EQ(Fetch(*store_, name).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(StoreTest, NoFlippedBitInAnyFileIsEverServed) {
  const std::string golden = options_.directory + ".golden";
  const Policy policies[] = {Policy(0), Policy(1)};
  const int64_t epoch = Open().AcquirePublisher("run", {}).value();
  for (const Policy& policy : policies) ASSERT_TRUE(Publish(*store_, epoch, policy).ok());
  ASSERT_TRUE(store_->RecordForks(epoch, {{epoch, 5}}).ok());
  store_.reset();
  (void)PosixEnv()->RemoveTree(golden);
  ASSERT_TRUE(PosixEnv()->Rename(options_.directory, golden).ok());

  std::vector<std::string> paths = {"/catalogue.sqlite"};
  const std::vector<std::string> names = PosixEnv()->List(golden + "/chunks").value();
  for (const std::string& name : names) paths.push_back("/chunks/" + name);
  std::mt19937 random(20);
  int num_refused = 0;
  for (int round = 0; round < 150; ++round) {
    ASSERT_EQ(
        system(absl::StrCat("rm -rf ", options_.directory, " && cp -r ", golden, " ", options_.directory).c_str()), 0);
    const std::string path = options_.directory + paths[round % 2 == 0 ? 0 : random() % paths.size()];
    std::string bytes = PosixEnv()->ReadFile(path).value();
    const size_t at = random() % bytes.size();
    bytes[at] = static_cast<char>(bytes[at] ^ (1 << random() % 8));
    ASSERT_TRUE(PosixEnv()->WriteFileDurably(path, bytes).ok());
    auto store = Store::Open(options_, PosixEnv(), &clock_);
    if (!store.ok()) {
      ++num_refused;
      continue;
    }
    for (const Policy& policy : policies) {
      const auto tensors = Fetch(**store, {epoch, policy.manifest.version.number});
      if (!tensors.ok()) ++num_refused;
      if (!tensors.ok()) continue;
      for (size_t i = 0; i < policy.tensors.size(); ++i) {
        ASSERT_EQ(tensors->at(policy.tensors[i].name), policy.bytes[i]) << path << " byte " << at;
      }
    }
  }
  EXPECT_GT(num_refused, 30);
  (void)PosixEnv()->RemoveTree(golden);
}

// ------------------------------------------------------------------------------------ a failing disk
// The chunk files are on a disk that forgets, fills up and fails; the catalogue is on the real one. What the catalogue
// says is READY must be in the files.
class FailingDiskTest : public StoreTest {
 protected:
  absl::Status OpenAgain() {
    store_.reset();
    if (absl::Status status = PosixEnv()->CreateDirs(options_.directory); !status.ok()) return status;
    auto store = Store::Open(options_, &*env_, &clock_);
    if (store.ok()) store_ = *std::move(store);
    return store.status();
  }
  // Empty: a new disk and a new catalogue.
  absl::Status OpenEmpty() {
    store_.reset();
    env_.emplace();
    (void)PosixEnv()->RemoveTree(options_.directory);
    return OpenAgain();
  }
  void ExpectReadyVersionsAreWhole() {
    for (const VersionInfo& info : store_->List()) {
      if (info.row.state == VersionState::kReady) ExpectHolds(*store_, info.row.name, Policy(info.row.name.number));
    }
  }
  std::optional<FaultInjectionEnv> env_;  // outlives the store, which TearDown closes
};

TEST_F(FailingDiskTest, APowerCutAfterAnyOperationLosesNothingThatIsReady) {
  for (int64_t operations = 0;; ++operations) {
    SCOPED_TRACE(operations);
    ASSERT_TRUE(OpenEmpty().ok());
    const int64_t epoch = store_->AcquirePublisher("run", {}).value();
    env_->FailAfter(operations);
    bool is_through = true;
    int64_t last_committed = -1;
    for (int64_t number = 0; number < 4 && is_through; ++number) {
      is_through = Publish(*store_, epoch, Policy(number)).ok();
      if (is_through) last_committed = number;
      is_through = is_through && store_->Tick().ok();
    }
    store_.reset();
    if (operations % 2 == 0) {
      env_->Crash();
    } else {
      env_->CrashRandomly(static_cast<uint64_t>(operations));
    }
    ASSERT_TRUE(OpenAgain().ok());
    EXPECT_EQ(store_->Now().latest.value_or(VersionName{.number = -1}).number, last_committed);
    ExpectReadyVersionsAreWhole();
    ASSERT_TRUE(Publish(*store_, epoch, Policy(9)).ok());
    ExpectReadyVersionsAreWhole();
    if (is_through) break;
    ASSERT_LT(operations, 1000);
  }
}

TEST_F(FailingDiskTest, AFullDiskRefusesTheNextVersionAndKeepsTheLast) {
  ASSERT_TRUE(OpenEmpty().ok());
  const int64_t epoch = store_->AcquirePublisher("run", {}).value();
  ASSERT_TRUE(Publish(*store_, epoch, Policy(0)).ok());
  env_->SetCapacityBytes(Policy(0).manifest.bytes() + 200'000);
  const auto full = Publish(*store_, epoch, Policy(1));
  EXPECT_EQ(full.status().code(), absl::StatusCode::kResourceExhausted) << full.status();
  EXPECT_EQ(store_->Now().latest, (VersionName{epoch, 0}));
  ExpectReadyVersionsAreWhole();
  env_->SetCapacityBytes(100 << 20);
  ASSERT_TRUE(Publish(*store_, epoch, Policy(1)).ok());
  ExpectReadyVersionsAreWhole();
}

TEST_F(FailingDiskTest, ADiskThatDoesNotReadIsAnErrorNotOtherWeights) {
  ASSERT_TRUE(OpenEmpty().ok());
  const int64_t epoch = store_->AcquirePublisher("run", {}).value();
  ASSERT_TRUE(Publish(*store_, epoch, Policy(0)).ok());
  env_->FailPath("/chunks/", absl::UnavailableError("input/output error"));
  EXPECT_EQ(Fetch(*store_, {epoch, 0}).status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(FailingDiskTest, AFileThatCannotBeRemovedIsNotTakenForStored) {
  ASSERT_TRUE(OpenEmpty().ok());
  const int64_t epoch = store_->AcquirePublisher("run", {}).value();
  for (int64_t number = 0; number < 3; ++number) ASSERT_TRUE(Publish(*store_, epoch, Policy(number)).ok());
  env_->FailPath("/chunks/", absl::UnavailableError("input/output error"));
  EXPECT_EQ(store_->Tick().code(), absl::StatusCode::kUnavailable);
  env_->FailPath("/chunks/", absl::OkStatus());
  const Policy again(5, -50);  // with the bytes of policy 0, which was being collected
  ASSERT_EQ(again.bytes, Policy(0).bytes);
  ASSERT_TRUE(Publish(*store_, epoch, again).ok());
  ASSERT_TRUE(OpenAgain().ok());
  ExpectHolds(*store_, {epoch, 5}, again);
}

// ------------------------------------------------------------------------------------ crashes
// A child publishes until it is killed at a failpoint. What it was told to be READY must be there afterwards, whole,
// and the next publisher can go on.
TEST_F(StoreTest, SurvivesAKillAtEveryFailpoint) {
#ifndef MOERL_FAILPOINTS
  GTEST_SKIP() << "built without failpoints";
#endif
  const std::string journal = options_.directory + ".journal";
  for (const char* point :
       {"chunks_written", "chunks_synced", "chunks_renamed", "before_commit", "after_commit", "garbage_forgotten"}) {
    for (int hit : {1, 2, 3, 5, 8, 13, 21}) {
      const std::string armed = absl::StrCat("weight_sync.", point, "=crash@", hit);
      SCOPED_TRACE(armed);
      (void)PosixEnv()->RemoveTree(options_.directory);
      (void)PosixEnv()->Remove(journal);
      const pid_t child = fork();
      if (child == 0) {
        auto store = Store::Open(options_, PosixEnv(), &clock_);
        if (!store.ok() || !ArmFailpoints(armed).ok()) _exit(2);
        std::ofstream log(journal);
        for (int round = 0; round < 3; ++round) {
          const int64_t epoch = (*store)->AcquirePublisher("run", {}).value();
          for (int64_t number = 3 * round; number < 3 * round + 4; ++number) {
            const auto committed = Publish(**store, epoch, Policy(number));
            if (!committed.ok()) _exit(3);
            log << committed->name.epoch << " " << committed->name.number << std::endl;
            if (!(*store)->Tick().ok()) _exit(4);
          }
        }
        _exit(0);
      }
      int status = 0;
      ASSERT_EQ(waitpid(child, &status, 0), child);
      ASSERT_TRUE(WIFSIGNALED(status) || WEXITSTATUS(status) == 0) << WEXITSTATUS(status);

      Store& store = Open();
      std::ifstream log(journal);
      VersionName last{.epoch = 0, .number = -1}, name;
      while (log >> name.epoch >> name.number) last = name;
      if (last.number >= 0) {
        ASSERT_TRUE(store.Now().latest);
        EXPECT_GE(store.Now().latest->number, last.number) << "an answered commit is gone";
      }
      int num_ready = 0;
      for (const VersionInfo& info : store.List()) {
        if (info.row.state != VersionState::kReady) continue;
        ++num_ready;
        ExpectHolds(store, info.row.name, Policy(info.row.name.number));
      }
      EXPECT_LE(num_ready, 2);
      const int64_t epoch = store.AcquirePublisher("run", {}).value();
      const Policy next(last.number + 5);
      ASSERT_TRUE(Publish(store, epoch, next).ok());
      ExpectHolds(store, {epoch, last.number + 5}, next);
      ASSERT_TRUE(store.Tick().ok());
      std::set<weights::Digest> referred;  // by the versions that are READY now
      for (const VersionInfo& info : store.List()) {
        if (info.row.state != VersionState::kReady) continue;
        const Policy policy(info.row.name.number);
        for (const ChunkBytes& chunk : policy.Chunks()) referred.insert(chunk.ref.sha256);
      }
      for (const std::string& file : Files()) EXPECT_TRUE(referred.contains(*weights::Digest::FromHex(file))) << file;
    }
  }
  (void)PosixEnv()->Remove(journal);
}

}  // namespace
}  // namespace moerl
