#include "services/trainer/experience.h"

#include <cmath>
#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace moerl::trainer {
namespace {

using testing::HasSubstr;

constexpr ConnectionId kConnection = 1;

// One worker with room for one group of two samples; version 1 is READY, at staleness 0 group 0 needs version 0.
class ExperienceTest : public testing::Test {
 protected:
  ExperienceTest() : experience_(Options(), State(), 1, 1, 0) {
    Hello hello;
    hello.worker = "worker";
    hello.incarnation = 1;
    hello.hello_number = 1;
    hello.num_slots = 2;
    experience_.OnHello(kConnection, hello, 0);
    experience_.Advance(0);
    for (const Outgoing& outgoing : experience_.TakeMessages()) {
      if (const auto* grant = std::get_if<Grant>(&outgoing.message)) grant_ = *grant;
    }
    EXPECT_EQ(grant_.samples.size(), 2u);
  }

  static ExperienceOptions Options() {
    ExperienceOptions options;
    options.epoch = 2;
    options.batch_groups = 1;
    options.num_steps = 4;
    options.lease_duration_ms = 1000;
    options.max_new_tokens = 4;
    options.vocab_size = 10;
    options.token_routes = {.num_tokens = 1, .num_layers = 1, .top_k = 2, .num_experts = 128};
    return options;
  }

  static LedgerState State() {
    LedgerState state;
    state.group_size = 2;
    state.epoch = 2;
    return state;
  }

  Finish GoodFinish() const {
    Finish finish;
    finish.lease_id = grant_.lease_id;
    finish.tokens.ids = {3, 4};
    finish.tokens.logprobs = {-0.5f, -0.25f};
    finish.tokens.versions = {{1, 0}, {1, 1}};
    finish.tokens.trainable = {1, 1};
    finish.tokens.routes = "abcd";
    finish.num_tokens = 2;
    finish.digest = finish.tokens.IdsDigest();
    finish.outcome = 1.0;
    return finish;
  }

  // The answer to `finish`.
  Ack Answer(const Finish& finish) {
    experience_.OnFinish(kConnection, finish, 0);
    Ack answer;
    for (const Outgoing& outgoing : experience_.TakeMessages()) {
      if (const auto* ack = std::get_if<Ack>(&outgoing.message)) answer = *ack;
    }
    return answer;
  }

  void ExpectRefused(const Finish& finish, const std::string& why) {
    const Ack answer = Answer(finish);
    EXPECT_EQ(answer.verdict, Verdict::kRefused);
    EXPECT_THAT(answer.reason, HasSubstr(why));
    EXPECT_FALSE(experience_.state().groups[0].finished[0]);
    int64_t refused = 0;
    for (const auto& [rule, count] : experience_.counters().refused) refused += count;
    EXPECT_EQ(refused, 1);
  }

  Experience experience_;
  Grant grant_;
};

TEST_F(ExperienceTest, RecordsAGoodTrajectory) {
  EXPECT_EQ(Answer(GoodFinish()).verdict, Verdict::kRecorded);
  EXPECT_TRUE(experience_.state().groups[0].finished[0]);
}

TEST_F(ExperienceTest, IgnoresASecondOutcome) {
  EXPECT_EQ(Answer(GoodFinish()).verdict, Verdict::kRecorded);
  Finish other = GoodFinish();
  other.outcome = Failure{FailureReason::kVerifierError, "late"};
  EXPECT_EQ(Answer(other).verdict, Verdict::kSuperseded);
  EXPECT_EQ(experience_.state().groups[0].state, GroupState::kOpen);
}

TEST_F(ExperienceTest, RefusesAnotherLengthThanAnnounced) {
  Finish finish = GoodFinish();
  finish.num_tokens = 3;
  ExpectRefused(finish, "wrong length: 3 tokens announced, 2 reported");
}

TEST_F(ExperienceTest, RefusesListsOfUnequalLength) {
  Finish finish = GoodFinish();
  finish.tokens.logprobs.pop_back();
  ExpectRefused(finish, "logprobs has 1 entries");
}

TEST_F(ExperienceTest, RefusesOtherTokensThanAnnounced) {
  Finish finish = GoodFinish();
  finish.digest ^= 1;
  ExpectRefused(finish, "wrong digest");
}

TEST_F(ExperienceTest, RefusesALeaseThatWasNeverGranted) {
  Finish finish = GoodFinish();
  finish.lease_id.counter = 99;
  ExpectRefused(finish, "lease 2.99 was never granted");
}

TEST_F(ExperienceTest, RefusesASampleOutsideTheGroup) {
  Finish finish = GoodFinish();
  finish.sample = 2;
  ExpectRefused(finish, "sample index 2 is outside the group of 2");
}

TEST_F(ExperienceTest, RefusesLogProbabilitiesThatAreNone) {
  Finish finish = GoodFinish();
  finish.tokens.logprobs[1] = std::numeric_limits<float>::quiet_NaN();
  ExpectRefused(finish, "log-probability nan");
}

TEST_F(ExperienceTest, RefusesARewardThatIsNone) {
  Finish finish = GoodFinish();
  finish.outcome = std::nan("");
  ExpectRefused(finish, "reward is not a finite number");
}

TEST_F(ExperienceTest, RefusesTokensOutsideTheVocabulary) {
  Finish finish = GoodFinish();
  finish.tokens.ids[0] = 10;
  finish.digest = finish.tokens.IdsDigest();
  ExpectRefused(finish, "token id 10 is outside [0, 10)");
}

TEST_F(ExperienceTest, RefusesRoutesOfAnotherShape) {
  Finish finish = GoodFinish();
  finish.tokens.routes = "abc";
  ExpectRefused(finish, "routes have 3 bytes, 2 tokens of 2 bytes need 4");
}

TEST_F(ExperienceTest, RefusesRoutesThatNoRouterTakes) {
  Finish finish = GoodFinish();
  finish.tokens.routes = "abcc";
  ExpectRefused(finish, "token 1 layer 0 names expert 99 twice");
}

TEST_F(ExperienceTest, RefusesRoutesToExpertsThatAreNone) {
  Finish finish = GoodFinish();
  finish.tokens.routes = "abc\x80";
  ExpectRefused(finish, "token 1 layer 0 names expert 128, there are 128");
}

TEST_F(ExperienceTest, RefusesKeptIdsThatCannotBeATokens) {
  for (const std::vector<int32_t>& kept :
       {std::vector<int32_t>{3, 5, 4, 10}, {3, 5, 5, 4}, {3, 5, 5, 6}, {3, 5, 4, 4}}) {
    Finish finish = GoodFinish();
    finish.tokens.kept_counts = {2, 2};
    finish.tokens.kept_ids = kept;
    EXPECT_THAT(Answer(finish).reason,
                HasSubstr("kept_ids of token 1: expected ascending ids in [0, 10) with the token's own, 4"));
  }
  EXPECT_FALSE(experience_.state().groups[0].finished[0]);
  Finish finish = GoodFinish();
  finish.tokens.kept_counts = {2, 0};
  finish.tokens.kept_ids = {3, 5};
  EXPECT_EQ(Answer(finish).verdict, Verdict::kRecorded);
}

TEST_F(ExperienceTest, RefusesVersionsFromTheFuture) {
  Finish finish = GoodFinish();
  finish.tokens.versions[1] = {1, 2};
  ExpectRefused(finish, "future version: version 2 of epoch 1, the newest is 1");
}

TEST_F(ExperienceTest, RefusesMoreTokensThanTheBudget) {
  Finish finish = GoodFinish();
  finish.offset = 0;
  finish.tokens.ids.assign(5, 3);
  finish.tokens.logprobs.assign(5, -1.0f);
  finish.tokens.versions.assign(5, {1, 1});
  finish.tokens.trainable.assign(5, 1);
  finish.tokens.routes = "ababababab";
  finish.num_tokens = 5;
  ExpectRefused(finish, "5 tokens, the budget is 4");
}

TEST_F(ExperienceTest, EndsTheLeaseOfARefusedTrajectoryAndGrantsItAnew) {
  Finish finish = GoodFinish();
  finish.digest ^= 1;
  Answer(finish);
  EXPECT_FALSE(experience_.leases().IsLive(grant_.lease_id));
  experience_.OnDemand(kConnection, {2, {}});
  experience_.Advance(1);
  EXPECT_EQ(experience_.leases().deadlines().size(), 1u);
}

TEST_F(ExperienceTest, DropsTheGroupOfAFailedVerifierWholeAndSaysWhy) {
  Finish finish = GoodFinish();
  finish.outcome = Failure{FailureReason::kVerifierTimeout, "no answer in 10 s"};
  EXPECT_EQ(Answer(finish).verdict, Verdict::kRecorded);
  EXPECT_EQ(experience_.state().groups[0].state, GroupState::kDropped);
  EXPECT_EQ(experience_.state().groups[0].reason, DropReason::kVerifier);
  EXPECT_EQ(experience_.state().groups[0].detail, "no answer in 10 s");
}

TEST_F(ExperienceTest, SaysRecordedOnlyTogetherWithTheWriteThatRecords) {
  experience_.TakeWrites();
  experience_.OnFinish(kConnection, GoodFinish(), 0);
  const std::vector<LedgerWrite> writes = experience_.TakeWrites();
  ASSERT_EQ(writes.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<PutOutcome>(writes[0]));
}

TEST_F(ExperienceTest, KeepsALeaseThroughABrokenStreamUntilItExpires) {
  experience_.OnBreak(kConnection);
  experience_.Advance(999);
  EXPECT_TRUE(experience_.leases().IsLive(grant_.lease_id));
  experience_.Advance(1000);
  EXPECT_FALSE(experience_.leases().IsLive(grant_.lease_id));
}

// Groups of one sample each: all rewards of a group are equal, and two a step may be replaced.
TEST(DynamicSampling, ReplacesGroupsWithoutSignalUpToItsBound) {
  LedgerState state;
  state.group_size = 1;
  for (int64_t number = 0; number < 4; ++number) {
    state.Apply(AdmitGroup{0});
    state.Apply(PutOutcome{number, 0, std::make_shared<const Trajectory>()});
  }
  ExperienceOptions options;
  options.batch_groups = 2;
  options.num_steps = 1;
  options.dynamic_sampling = {.enabled = true, .max_refill = 1.0};
  Experience experience(options, state, 0, 0, 0);
  EXPECT_EQ(experience.ComposeBatch(1), (std::vector<int64_t>{2, 3}));
  EXPECT_EQ(experience.state().groups[1].reason, DropReason::kNoSignal);
  EXPECT_EQ(experience.state().dropped, (std::vector<int64_t>{0, 1}));
}

}  // namespace
}  // namespace moerl::trainer
