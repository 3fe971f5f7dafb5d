#include "services/trainer/admission.h"

#include "gtest/gtest.h"

namespace moerl::trainer {
namespace {

LedgerState WithGroups(int64_t count, int64_t staleness) {
  LedgerState state;
  state.group_size = 1;
  for (int64_t i = 0; i < count; ++i) state.Apply(AdmitGroup{staleness});
  return state;
}

void FinishGroup(LedgerState& state, int64_t number) {
  state.Apply(PutOutcome{number, 0, std::make_shared<const Trajectory>()});
}

TEST(Admission, StopsAtTheStalenessBound) {
  const LedgerState state = WithGroups(4, 0);
  EXPECT_EQ(NumAdmissible(state, 100, 0, 0, 10, 4), 0);  // batch 1 is full, version 0 is the last READY
  EXPECT_EQ(NumAdmissible(state, 100, 0, 1, 10, 4), 4);
  EXPECT_EQ(NumAdmissible(state, 100, 2, 0, 10, 4), 8);
  EXPECT_EQ(NumAdmissible(state, 3, 2, 0, 10, 4), 3);
}

TEST(Admission, StopsAtTheEndOfTheRun) { EXPECT_EQ(NumAdmissible(WithGroups(6, 4), 100, 4, 1, 2, 4), 2); }

TEST(Admission, ReplacesDroppedGroups) {
  LedgerState state = WithGroups(4, 0);
  state.Apply(DropGroup{1, DropReason::kVerifier, ""});
  EXPECT_EQ(NumAdmissible(state, 100, 0, 0, 10, 4), 1);
}

TEST(Admission, LowersAGroupsLowestVersionWhenEarlierGroupsAreDropped) {
  LedgerState state = WithGroups(9, 1);
  EXPECT_EQ(MinimumVersion(state, state.groups[8], 4), 1);
  state.Apply(DropGroup{0, DropReason::kVerifier, ""});
  EXPECT_EQ(MinimumVersion(state, state.groups[8], 4), 0);
}

TEST(Admission, TakesBatchesInNumberOrderAndWaitsForThem) {
  LedgerState state = WithGroups(5, 0);
  state.Apply(DropGroup{1, DropReason::kVerifier, ""});
  FinishGroup(state, 2);
  EXPECT_TRUE(NextBatch(state, 1, 2).empty());
  FinishGroup(state, 0);
  EXPECT_EQ(NextBatch(state, 1, 2), (std::vector<int64_t>{0, 2}));
  EXPECT_TRUE(NextBatch(state, 2, 2).empty());
}

}  // namespace
}  // namespace moerl::trainer
