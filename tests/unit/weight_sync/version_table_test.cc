#include "services/weight_sync/version_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <map>
#include <random>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

namespace moerl {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using weights::Digest;
using weights::Sha256;
using weights::ToString;

constexpr Retention kKeepTwo = {.versions_max = 2, .bytes_max = 1'000'000};

int64_t Acquire(VersionTable& table) {
  const auto change = table.Acquire("run");
  EXPECT_TRUE(change.ok()) << change.status();
  table.Apply(*change);
  return table.epoch();
}

absl::Status Begin(VersionTable& table, int64_t epoch, int64_t number) {
  const auto change = table.Begin(epoch, number, 1, 100);
  if (change.ok()) table.Apply(*change);
  return change.status();
}

absl::StatusOr<VersionTable::Committed> Commit(VersionTable& table, int64_t epoch, int64_t number,
                                               std::string_view weights, const Retention& retention = kKeepTwo) {
  auto committed = table.Commit(epoch, number, Sha256(weights), 100, retention);
  if (committed.ok()) table.Apply(committed->change);
  return committed;
}

void Publish(VersionTable& table, int64_t epoch, int64_t number, std::string_view weights) {
  ASSERT_TRUE(Begin(table, epoch, number).ok());
  const auto committed = Commit(table, epoch, number, weights);
  ASSERT_TRUE(committed.ok()) << committed.status();
}

void DeclareForks(VersionTable& table, int64_t epoch, const std::vector<Fork>& forks) {
  const auto change = table.DeclareForks(epoch, forks);
  ASSERT_TRUE(change.ok()) << change.status();
  table.Apply(*change);
}

TEST(VersionTable, ANewPublisherFencesTheOldOneAndDropsItsStaging) {
  VersionTable table;
  const int64_t old_epoch = Acquire(table);
  ASSERT_TRUE(Begin(table, old_epoch, 0).ok());
  const int64_t epoch = Acquire(table);
  EXPECT_GT(epoch, old_epoch);
  EXPECT_EQ(table.Staging(0), nullptr);
  EXPECT_EQ(Begin(table, old_epoch, 0).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.DeclareForks(old_epoch, {}).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Commit(table, old_epoch, 0, "w").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(VersionTable, RefusesAPublisherOfAnotherRun) {
  VersionTable table;
  Acquire(table);
  EXPECT_THAT(table.Acquire("other").status().message(), HasSubstr("of run 'run', not of 'other'"));
}

TEST(VersionTable, IsEmptyUntilTheFirstCommit) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  ASSERT_TRUE(Begin(table, epoch, 0).ok());
  EXPECT_EQ(table.Head(), nullptr);
  ASSERT_TRUE(Commit(table, epoch, 0, "w").ok());
  ASSERT_NE(table.Head(), nullptr);
  EXPECT_EQ(table.Head()->name, (VersionName{epoch, 0}));
}

TEST(VersionTable, RefusesToCommitWhatWasNotBegun) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  EXPECT_EQ(Commit(table, epoch, 0, "w").status().code(), absl::StatusCode::kFailedPrecondition);
}

TEST(VersionTable, BeginningAnotherNumberGivesUpTheFirst) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  ASSERT_TRUE(Begin(table, epoch, 0).ok());
  ASSERT_TRUE(Begin(table, epoch, 1).ok());
  EXPECT_EQ(table.Staging(0), nullptr);
  EXPECT_NE(table.Staging(1), nullptr);
}

TEST(VersionTable, BeginningTwiceKeepsWhatWasPut) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  ASSERT_TRUE(Begin(table, epoch, 0).ok());
  const int64_t id = table.Staging(0)->id;
  const auto again = table.Begin(epoch, 0, 1, 100);
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->empty());
  EXPECT_EQ(table.Staging(0)->id, id);
}

TEST(VersionTable, TheSameRootAgainIsANoOpUnderTheFirstName) {
  VersionTable table;
  const int64_t first = Acquire(table);
  Publish(table, first, 3, "w3");
  const int64_t second = Acquire(table);
  ASSERT_TRUE(Begin(table, second, 3).ok());
  const auto committed = Commit(table, second, 3, "w3");
  ASSERT_TRUE(committed.ok());
  EXPECT_TRUE(committed->was_ready);
  EXPECT_EQ(committed->name, (VersionName{first, 3}));
  EXPECT_EQ(table.rows().size(), 1u);
}

TEST(VersionTable, AnotherRootIsRefusedAndChangesNothing) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  Publish(table, epoch, 3, "w3");
  ASSERT_TRUE(Begin(table, epoch, 3).ok());
  EXPECT_EQ(Commit(table, epoch, 3, "different").status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(table.Head()->root, Sha256("w3"));
}

TEST(VersionTable, KeepsTheNewestByCountAndTheRowsOfTheRest) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  for (int64_t number = 0; number < 5; ++number) Publish(table, epoch, number, absl::StrCat("w", number));
  for (int64_t number = 0; number < 5; ++number) {
    const VersionRow* row = table.Find({epoch, number});
    ASSERT_NE(row, nullptr);
    EXPECT_EQ(row->state, number >= 3 ? VersionState::kReady : VersionState::kRetiredByCount) << number;
  }
}

TEST(VersionTable, KeepsFewerWhenBytesAreShortButNeverNone) {
  // Versions of 100 bytes: of a budget, 200 are set aside and the rest is for what is kept.
  const std::vector<std::pair<uint64_t, size_t>> kept_by_budget = {{10, 1},  {350, 1}, {400, 2},
                                                                   {499, 2}, {500, 3}, {900, 3}};
  for (const auto& [bytes_max, num_kept] : kept_by_budget) {
    VersionTable table;
    const int64_t epoch = Acquire(table);
    for (int64_t number = 0; number < 6; ++number) {
      ASSERT_TRUE(Begin(table, epoch, number).ok());
      ASSERT_TRUE(Commit(table, epoch, number, "w", {.versions_max = 3, .bytes_max = bytes_max}).ok());
    }
    EXPECT_EQ(table.ReadyBytes(), num_kept * 100) << bytes_max;
    EXPECT_EQ(table.Head()->name.number, 5);
  }
}

TEST(VersionTable, RetiredByCountComesBackWithTheSameRoot) {
  VersionTable table;
  const int64_t epoch = Acquire(table);
  for (int64_t number = 0; number < 3; ++number) Publish(table, epoch, number, absl::StrCat("w", number));
  ASSERT_EQ(table.Find({epoch, 0})->state, VersionState::kRetiredByCount);
  const int64_t second = Acquire(table);
  ASSERT_TRUE(Begin(table, second, 0).ok());
  const int64_t put_anew = table.Staging(0)->id;
  const auto committed = Commit(table, second, 0, "w0", {.versions_max = 3, .bytes_max = 1'000'000});
  ASSERT_TRUE(committed.ok()) << committed.status();
  EXPECT_EQ(committed->name, (VersionName{epoch, 0}));
  EXPECT_FALSE(committed->was_ready);
  EXPECT_EQ(table.Find({epoch, 0})->state, VersionState::kReady);
  EXPECT_EQ(table.Find({epoch, 0})->id, put_anew) << "it must hold the bytes that were put now";
}

TEST(VersionTable, AForkRetiresWhatItLeavesBehindAndTheHeadMovesDown) {
  VersionTable table;
  const int64_t first = Acquire(table);
  for (int64_t number = 4; number < 7; ++number) Publish(table, first, number, absl::StrCat("w", number));
  const int64_t second = Acquire(table);
  DeclareForks(table, second, {{second, 5}});
  EXPECT_EQ(table.Find({first, 4})->state, VersionState::kRetiredByCount);
  EXPECT_EQ(table.Find({first, 5})->state, VersionState::kReady);
  EXPECT_EQ(table.Find({first, 6})->state, VersionState::kRetiredByLineage);
  EXPECT_EQ(table.Head()->name, (VersionName{first, 5}));
}

TEST(VersionTable, RetiredByLineageStaysSoAndTheSameRootMakesANewRow) {
  VersionTable table;
  const int64_t first = Acquire(table);
  Publish(table, first, 5, "w5");
  Publish(table, first, 6, "w6");
  const int64_t second = Acquire(table);
  DeclareForks(table, second, {{second, 5}});
  Publish(table, second, 6, "w6");
  EXPECT_EQ(table.Find({first, 6})->state, VersionState::kRetiredByLineage);
  EXPECT_EQ(table.Find({second, 6})->state, VersionState::kReady);
  EXPECT_EQ(table.Head()->name, (VersionName{second, 6}));
}

TEST(VersionTable, RepeatingTheForksChangesNothingAndForgettingOneIsRefused) {
  VersionTable table;
  const int64_t first = Acquire(table);
  const int64_t second = Acquire(table);
  DeclareForks(table, second, {{first, 1}, {second, 5}});
  const auto again = table.DeclareForks(second, {{second, 5}, {first, 1}});
  ASSERT_TRUE(again.ok());
  EXPECT_TRUE(again->empty());
  EXPECT_THAT(table.DeclareForks(second, {{second, 5}}).status().message(), HasSubstr("(epoch 1, step 1) is known"));
  EXPECT_EQ(table.DeclareForks(second, {{first, 1}, {second, 5}, {second + 1, 7}}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

// ------------------------------------------------------------------------------------ the simulated world
// Trainers that are killed at any moment, zombies, forks and a reader, against the rules of the protocol.
// A mutant replaces one rule; the world must then find a violation.
enum class Mutant { kNone, kUnfenced, kNoopIfRetired, kRetireOnce };

struct Ledger {  // the trainer's durable state, as far as versions go
  int64_t epoch = 0;
  int64_t checkpoint = 0;
  std::vector<Fork> forks;
  std::map<int64_t, int> batches = {};  // what was trained on at each step; replayed after a kill

  std::string Weights(int64_t number) const {
    std::string weights = "w0";
    for (int64_t step = 1; step <= number; ++step) weights += absl::StrCat(",", batches.at(step));
    return weights;
  }
};

class World {
 public:
  World(int seed, Mutant mutant) : random_(seed), mutant_(mutant) {}

  std::vector<std::string> Run() {
    for (int incarnation = 0; incarnation < 12 && violations_.empty(); ++incarnation) RunTrainer();
    return violations_;
  }

 private:
  bool Chance(double p) { return std::bernoulli_distribution(p)(random_); }
  void Expect(bool ok, const std::string& text) {
    if (!ok) violations_.push_back(text);
  }

  // One incarnation of the trainer: it may be killed at any `if (Killed())`.
  bool Killed() { return Chance(0.06); }
  void RunTrainer() {
    const int64_t epoch = Acquire(table_);
    if (Killed()) return;
    ledger_.epoch = epoch;
    int64_t number = ledger_.checkpoint;
    const bool forks_now = Chance(0.3);
    if (forks_now) {
      ledger_.forks.push_back({epoch, number});
      // Half of the forks come out the same: another number of ranks need not mean other bytes.
      for (auto& [step, batch] : ledger_.batches) {
        if (step > number && Chance(0.5)) batch = static_cast<int>(random_() % 1000);
      }
    }
    if (Killed()) return;
    if (forks_now || mutant_ != Mutant::kRetireOnce) DeclareForks(table_, epoch, ledger_.forks);
    if (Killed() || !PublishStep(epoch, number)) return;
    while (number < 9) {
      Zombie();
      ledger_.batches.try_emplace(number + 1, static_cast<int>(random_() % 1000));
      if (Killed() || !PublishStep(epoch, ++number)) return;
      Look(number);
      if (Killed()) return;
      if (number % 2 == 0) ledger_.checkpoint = number;
    }
  }

  bool PublishStep(int64_t epoch, int64_t number) {
    Expect(Begin(table_, epoch, number).ok(), "begin refused");
    if (Killed()) return false;
    const Digest root = Sha256(ledger_.Weights(number));
    if (mutant_ == Mutant::kNoopIfRetired) {
      for (const auto& [id, row] : table_.rows()) {
        if (row.state == VersionState::kRetiredByLineage && row.name.number == number && row.root == root) return true;
      }
    }
    const auto committed = Commit(table_, epoch, number, ledger_.Weights(number));
    Expect(committed.ok(), absl::StrCat("an honest commit was refused: ", committed.status().ToString()));
    return committed.ok() && !Killed();
  }

  // A fenced trainer goes on as if nothing had happened.
  void Zombie() {
    if (ledger_.epoch < 2 || !Chance(0.2)) return;
    const int64_t epoch = mutant_ == Mutant::kUnfenced ? table_.epoch() : ledger_.epoch - 1;
    const auto rows = table_.rows();
    const int64_t number = static_cast<int64_t>(random_() % 10);
    (void)Begin(table_, epoch, number);
    (void)Commit(table_, epoch, number, "zombie");
    Expect(rows == table_.rows(), "a fenced publisher changed something");
  }

  // The reader, once the trainer has published: what it would run is the ledger's lineage, whole.
  void Look(int64_t number) {
    const VersionRow* head = table_.Head();
    Expect(head != nullptr && head->name.number >= number, absl::StrCat("version ", number, " is not to be had"));
    if (head == nullptr) return;
    Expect(!IsRetired(head->name, ledger_.forks), absl::StrCat("the head ", ToString(head->name), " is retired"));
    if (head->name.number == number) {
      Expect(head->root == Sha256(ledger_.Weights(number)), "the head has other weights");
    }
    for (const auto& [id, row] : table_.rows()) {
      if (row.state == VersionState::kStaging) continue;
      Expect(roots_.try_emplace(row.name, row.root).first->second == row.root, "a committed version changed its root");
    }
  }

  std::mt19937 random_;
  Mutant mutant_;
  VersionTable table_;
  Ledger ledger_;
  std::map<VersionName, Digest> roots_;
  std::vector<std::string> violations_;
};

TEST(VersionTable, HoldsItsPromisesInTenThousandWorldsOfKillsForksAndZombies) {
  for (int seed = 0; seed < 10'000; ++seed) {
    EXPECT_THAT(World(seed, Mutant::kNone).Run(), IsEmpty()) << "seed " << seed;
    if (HasFailure()) break;
  }
}

TEST(VersionTable, EveryBrokenRuleIsCaught) {
  for (Mutant mutant : {Mutant::kUnfenced, Mutant::kNoopIfRetired, Mutant::kRetireOnce}) {
    int num_caught = 0;
    for (int seed = 0; seed < 300; ++seed) num_caught += !World(seed, mutant).Run().empty();
    EXPECT_GT(num_caught, 0) << "mutant " << static_cast<int>(mutant);
  }
}

}  // namespace
}  // namespace moerl
