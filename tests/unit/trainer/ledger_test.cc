#include "services/trainer/ledger.h"

#include <unistd.h>

#include <filesystem>
#include <random>

#include "gtest/gtest.h"

namespace moerl::trainer {
namespace {

constexpr int64_t kGroupSize = 3;
const LedgerIdentity kIdentity{"run", kGroupSize, "prompts"};

class LedgerTest : public testing::Test {
 protected:
  LedgerTest() : path_(testing::TempDir() + "/ledger-" + std::to_string(getpid()) + ".sqlite") { Remove(); }
  ~LedgerTest() override { Remove(); }
  void Remove() {
    for (const char* suffix : {"", "-wal", "-shm"}) std::filesystem::remove(path_ + suffix);
  }
  std::unique_ptr<SqliteLedger> OpenFile(const LedgerIdentity& identity = kIdentity) {
    auto ledger = SqliteLedger::OpenFile(path_, identity);
    EXPECT_TRUE(ledger.ok()) << ledger.status();
    return ledger.ok() ? *std::move(ledger) : nullptr;
  }
  const std::string path_;
};

TrajectoryPtr SomeTrajectory(int32_t first_id, VersionName version) {
  Trajectory trajectory;
  trajectory.tokens.ids = {first_id, first_id + 1};
  trajectory.tokens.logprobs = {-0.5f, -1.25f};
  trajectory.tokens.versions = {version, {version.epoch, version.number + 1}};
  trajectory.tokens.trainable = {1, 0};
  trajectory.tokens.routes = "abcd";
  trajectory.tokens.kept_counts = {2, 0};
  trajectory.tokens.kept_ids = {4, 9};
  trajectory.reward = 0.1 * first_id;
  trajectory.finish_reason = FinishReason::kLength;
  return std::make_shared<const Trajectory>(std::move(trajectory));
}

Lease SomeLease(LeaseId id, int64_t group) {
  Lease lease{id, group, "worker", 7, {}};
  lease.prefixes.resize(kGroupSize);
  lease.prefixes[1] = std::make_shared<const rl::TokenRun>(SomeTrajectory(3, {1, 0})->tokens);
  return lease;
}

TEST_F(LedgerTest, HoldsAfterReopeningWhatWasCommitted) {
  LedgerState expected;
  {
    auto ledger = OpenFile();
    auto state = ledger->Open(1);
    ASSERT_TRUE(state.ok());
    expected = *state;
    const auto commit = [&](std::vector<LedgerWrite> writes) {
      for (const LedgerWrite& write : writes) expected.Apply(write);
      ASSERT_TRUE(ledger->Commit(1, writes).ok());
      ASSERT_TRUE(*ledger->Load() == expected);
    };
    commit({NameCheckpoint{{0, 1}, 2}});
    for (int i = 0; i < 6; ++i) commit({AdmitGroup{i % 2}});
    commit({PutLease{SomeLease({1, 1}, 0)}, PutLease{SomeLease({1, 2}, 1)}, PutLease{SomeLease({1, 3}, 2)}});
    commit({EndLease{{1, 2}}, PutLease{SomeLease({1, 4}, 1)}});
    for (int64_t group : {0, 1}) {
      for (int64_t i = 0; i < kGroupSize; ++i) {
        commit({PutOutcome{group, i, SomeTrajectory(static_cast<int32_t>(10 * group + i), {1, 0})}});
      }
    }
    commit({DropGroup{2, DropReason::kVerifier, "it hangs"}});
    commit({RecordBatch{1, {{0, 1}, 2}}, MarkTrained{1}});
    commit({NameCheckpoint{{1, 1}, 2}, NameCheckpoint{{2, 1}, 2}});
    commit({ForgetPayloads{1}});
    commit({PutLease{SomeLease({1, 5}, 3)}, RecordBatch{2, {{4, 5}, 2}}});
    commit({AddFork{{1, 1}}, VoidBatch{2}, RewindTo{0}});
  }
  auto ledger = OpenFile();
  EXPECT_TRUE(*ledger->Load() == expected);
}

TEST_F(LedgerTest, AppliesATransactionWholeOrNotAtAll) {
  auto ledger = OpenFile();
  LedgerState state = *ledger->Open(1);
  const LedgerWrite twice = PutLease{SomeLease({1, 1}, 0)};
  const std::vector<LedgerWrite> writes = {AdmitGroup{0}, twice, twice};  // the second breaks the primary key
  EXPECT_FALSE(ledger->Commit(1, writes).ok());
  EXPECT_EQ(ledger->Load()->groups.size(), 0u);
}

TEST_F(LedgerTest, FencesEveryEarlierTrainer) {
  auto old_trainer = OpenFile();
  ASSERT_TRUE(old_trainer->Open(4).ok());
  auto new_trainer = OpenFile();
  ASSERT_TRUE(new_trainer->Open(5).ok());
  const std::vector<LedgerWrite> writes = {AdmitGroup{0}};
  EXPECT_TRUE(absl::IsAborted(old_trainer->Commit(4, writes)));
  EXPECT_TRUE(absl::IsAborted(old_trainer->Commit(4, {})));  // an idle one notices too
  EXPECT_TRUE(absl::IsAborted(old_trainer->Open(5).status()));
  EXPECT_TRUE(absl::IsAborted(old_trainer->Open(3).status()));
  EXPECT_EQ(new_trainer->Load()->groups.size(), 0u);
  EXPECT_TRUE(new_trainer->Commit(5, writes).ok());
}

TEST_F(LedgerTest, RefusesAnotherRunGroupSizeOrPrompts) {
  OpenFile();
  for (const LedgerIdentity& other :
       {LedgerIdentity{"other", kGroupSize, "prompts"}, LedgerIdentity{"run", kGroupSize + 1, "prompts"},
        LedgerIdentity{"run", kGroupSize, "other prompts"}}) {
    const absl::Status status = SqliteLedger::OpenFile(path_, other).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
  }
}

// The position of a group among the undropped ones, and back, against counting.
TEST(LedgerState, FindsPlacesAmongUndroppedGroups) {
  std::mt19937 random(5);
  LedgerState state;
  state.group_size = 1;
  std::vector<int64_t> undropped;
  for (int64_t number = 0; number < 200; ++number) {
    state.Apply(AdmitGroup{0});
    if (random() % 3 == 0) {
      state.Apply(DropGroup{number, DropReason::kVerifier, ""});
    } else {
      undropped.push_back(number);
    }
  }
  ASSERT_EQ(state.NumUndropped(), static_cast<int64_t>(undropped.size()));
  for (size_t i = 0; i < undropped.size(); ++i) {
    EXPECT_EQ(state.NumberAt(static_cast<int64_t>(i)), undropped[i]);
    EXPECT_EQ(state.PositionOf(undropped[i]), static_cast<int64_t>(i));
  }
  EXPECT_EQ(state.NumberAt(static_cast<int64_t>(undropped.size())), -1);
}

}  // namespace
}  // namespace moerl::trainer
