// The rollout server's side of Work, against a trainer that a test scripts.
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <deque>
#include <map>
#include <thread>

#include "libs/experience/work_proto.h"
#include "libs/model/training.h"
#include "libs/rpc/channel.h"
#include "libs/rpc/server.h"
#include "libs/rpc/status.h"
#include "libs/rpc/stream.h"
#include "moerl/v1/experience.grpc.pb.h"
#include "tests/unit/rollout/rollout_fixture.h"

namespace moerl::rollout {
namespace {

constexpr absl::Duration kPatience = absl::Seconds(30);

// Keeps what workers say; answers only what a test tells it to.
class ScriptedTrainer final : public v1::ExperienceService::CallbackService {
 public:
  class Stream final : public rpc::ServerBidiStream<v1::WorkRequest, v1::WorkResponse> {
   public:
    explicit Stream(ScriptedTrainer* trainer) : ServerBidiStream(1000), trainer_(trainer) {}

   private:
    bool OnMessage(v1::WorkRequest& request) override {
      absl::MutexLock lock(&trainer_->mutex_);
      trainer_->heard_.push_back(request);
      return true;
    }
    ScriptedTrainer* const trainer_;
  };

  grpc::ServerBidiReactor<v1::WorkRequest, v1::WorkResponse>* Work(grpc::CallbackServerContext*) override {
    absl::MutexLock lock(&mutex_);
    stream_ = std::make_shared<Stream>(this);
    return rpc::Start(stream_);
  }

  // Takes the next message for which `wanted` is true, dropping others.
  template <class Wanted>
  v1::WorkRequest Next(Wanted wanted) {
    absl::MutexLock lock(&mutex_);
    const auto find = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      while (!heard_.empty() && !wanted(heard_.front())) heard_.pop_front();
      return !heard_.empty();
    };
    if (!mutex_.AwaitWithTimeout(absl::Condition(&find), kPatience)) {
      ADD_FAILURE() << "the worker did not say what was expected";
      return {};
    }
    v1::WorkRequest request = heard_.front();
    heard_.pop_front();
    return request;
  }

  v1::WorkRequest NextFinish() {
    return Next([](const auto& request) { return request.has_finish(); });
  }

  bool Hears(absl::Duration patience, bool (v1::WorkRequest::*what)() const) {
    absl::MutexLock lock(&mutex_);
    const auto find = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return std::any_of(heard_.begin(), heard_.end(), [&](const auto& request) { return (request.*what)(); });
    };
    return mutex_.AwaitWithTimeout(absl::Condition(&find), patience);
  }

  void Say(const v1::WorkResponse& response) {
    absl::MutexLock lock(&mutex_);
    stream_->Send(response);
  }

  void GiveCredit(uint64_t bytes = 1 << 30) {
    v1::WorkResponse response;
    response.mutable_credit()->set_num_bytes(bytes);
    Say(response);
  }

  // Waits for the Hello and welcomes it.
  v1::WorkHello Welcome(const std::vector<v1::LeaseDecision>& decisions = {}, bool with_credit = true,
                        bool with_routes = false) {
    const v1::WorkHello hello = Next([](const auto& request) { return request.has_hello(); }).hello();
    v1::WorkResponse response;
    response.mutable_welcome()->set_run_id("run");
    response.mutable_welcome()->set_epoch(1);
    response.mutable_welcome()->set_hello_number(hello.hello_number());
    response.mutable_welcome()->set_with_routes(with_routes);
    for (const auto& decision : decisions) *response.mutable_welcome()->add_decisions() = decision;
    Say(response);
    if (with_credit) GiveCredit();
    return hello;
  }

  void Break() {
    absl::MutexLock lock(&mutex_);
    stream_->End(absl::UnavailableError("broken by the test"));
  }

 private:
  absl::Mutex mutex_;
  std::shared_ptr<Stream> stream_ ABSL_GUARDED_BY(mutex_);
  std::deque<v1::WorkRequest> heard_ ABSL_GUARDED_BY(mutex_);
};

// "one": a turn worth 1. "two": an observation [2, 3] after the first turn, which is worth 0.25, then 0.5. "late":
// answers when allowed.
class TurnEnvironment final : public rl::Environment {
 public:
  absl::StatusOr<rl::Episode> Reset(const rl::Task&, std::string_view) override { return rl::Episode{}; }
  absl::StatusOr<rl::StepOutcome> Step(std::string_view, const rl::Task& task, uint32_t turn,
                                       std::span<const rl::Turn> transcript) override {
    if (task.name == "fails") return rl::Failure{rl::FailureReason::kVerifierError, "no idea"};
    if (task.name == "rambles") {  // letters of two bytes, the limit of 1024 in the middle of one
      std::string detail = "a";
      for (int i = 0; i < 600; ++i) detail += "\xc3\xa9";
      return rl::Failure{rl::FailureReason::kVerifierError, detail};
    }
    if (task.name == "two" && turn == 0) return rl::Judgement{{2, 3}, 0.25, false};
    last_transcript.assign(transcript.begin(), transcript.end());
    return rl::Judgement{{}, task.name == "two" ? 0.5 : 1.0, true};
  }
  std::vector<rl::Turn> last_transcript;
};

v1::WorkResponse LeaseOf(uint64_t counter, const std::string& task, uint32_t num_samples, uint32_t max_new_tokens) {
  v1::WorkResponse response;
  v1::Lease& lease = *response.mutable_lease();
  lease.mutable_lease_id()->set_epoch(1);
  lease.mutable_lease_id()->set_counter(counter);
  lease.set_group_id(100 + counter);
  lease.set_duration_ms(60'000);
  for (const uint32_t id : {2, 3, 4}) lease.add_prompt_token_ids(id);
  lease.mutable_task()->set_name(task);
  lease.mutable_sampling()->set_max_new_tokens(max_new_tokens);
  lease.set_run_seed(9);
  lease.set_min_version_number(1);
  for (uint32_t i = 0; i < num_samples; ++i) lease.add_samples()->set_sample_index(i);
  return response;
}

v1::WorkResponse AckOf(const v1::WorkFinish& finish) {
  v1::WorkResponse response;
  *response.mutable_ack()->mutable_lease_id() = finish.lease_id();
  response.mutable_ack()->set_sample_index(finish.sample_index());
  response.mutable_ack()->set_verdict(v1::ACK_VERDICT_RECORDED);
  return response;
}

class LeaseRunnerTest : public testing::Test {
 protected:
  void SetUp() override {
    server_ = rpc::Server::Start({.address = "127.0.0.1:0"}, {&trainer_}).value();
    channel_ = rpc::MakeChannel(server_->address(), {}).value();
    SchedulerOptions options = SmallScheduler();
    options.leases.turns_max = 3;
    options.work_stub = [this] { return v1::ExperienceService::NewStub(channel_); };
    scheduler_ = std::make_unique<Scheduler>(options, &judge_, [](const absl::Status&) {});
    scheduler_->OnWeights({{}, {1, 1}, RandomWeights(1)});
  }

  void TearDown() override {
    scheduler_.reset();
    server_->Shutdown(absl::Now());
  }

  // What the engine samples for a lease when nothing interferes.
  std::vector<int32_t> Undisturbed(const v1::Lease& lease, uint32_t sample_index) {
    class Sink final : public SampleSink {
     public:
      void OnSample(const model::SampleOutput& output) override {
        tokens.insert(tokens.end(), output.tokens.begin(), output.tokens.end());
      }
      void OnPrompt(const model::PromptOutput&) override {}
      std::vector<int32_t> tokens;
    } sink;
    Engine engine(SmallScheduler().engine);
    EXPECT_TRUE(engine.SetWeights(RandomWeights(1), {1, 1}).ok());
    model::Request request;
    request.prompt.assign(lease.prompt_token_ids().begin(), lease.prompt_token_ids().end());
    request.samples = {{sample_index, {}}};
    request.sampling = SamplingFromProto(lease.sampling());
    request.run_seed = lease.run_seed();
    request.group_id = lease.group_id();
    EXPECT_TRUE(engine.Add(request, &sink).ok());
    while (!engine.idle()) EXPECT_TRUE(engine.Step().ok());
    return sink.tokens;
  }

  ScriptedTrainer trainer_;
  std::unique_ptr<rpc::Server> server_;
  std::shared_ptr<grpc::Channel> channel_;
  std::shared_ptr<TurnEnvironment> environment_ = std::make_shared<TurnEnvironment>();
  Judge judge_{environment_, 1};
  std::unique_ptr<Scheduler> scheduler_;
};

TEST_F(LeaseRunnerTest, SaysWhoItIsThenWhatItWants) {
  const v1::WorkHello hello = trainer_.Welcome();
  EXPECT_EQ(hello.worker(), "worker");
  EXPECT_EQ(hello.hello_number(), 1u);
  EXPECT_EQ(hello.num_slots(), 16u);
  EXPECT_EQ(hello.weight_version().number(), 1u);
  EXPECT_FALSE(hello.numerics_fingerprint().empty());
  const auto demand = trainer_.Next([](const auto& request) { return request.has_demand(); }).demand();
  EXPECT_EQ(demand.num_samples(), 16u);
}

TEST_F(LeaseRunnerTest, DeliversEverySampleWithRewardAndDigest) {
  trainer_.Welcome();
  const v1::WorkResponse lease = LeaseOf(1, "one", 3, 5);
  trainer_.Say(lease);
  std::map<uint32_t, v1::WorkFinish> finishes;
  while (finishes.size() < 3 && !HasFailure()) {
    const v1::WorkFinish finish = trainer_.NextFinish().finish();
    finishes[finish.sample_index()] = finish;
    trainer_.Say(AckOf(finish));
  }
  for (const auto& [index, finish] : finishes) {
    const rl::TokenRun tokens = TokensFromProto(finish.tokens()).value();
    EXPECT_EQ(tokens.ids, Undisturbed(lease.lease(), index));
    EXPECT_EQ(finish.num_tokens(), 5u);
    EXPECT_EQ(finish.digest(), tokens.IdsDigest());
    EXPECT_EQ(finish.reward(), 1.0f);
    EXPECT_EQ(finish.finish_reason(), v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(tokens.versions, std::vector<VersionName>(5, {1, 1}));
  }
}

TEST_F(LeaseRunnerTest, TracesASequenceOnTheWeightsInUseAndOnNoOthers) {
  trainer_.Welcome();
  const auto trace = [&](uint64_t number) {
    v1::WorkResponse question;
    question.mutable_trace()->set_trace_id(number);
    question.mutable_trace()->mutable_weight_version()->set_epoch(1);
    question.mutable_trace()->mutable_weight_version()->set_number(number);
    for (uint32_t id : {3, 1, 2}) question.mutable_trace()->add_token_ids(id);
    trainer_.Say(question);
    return trainer_.Next([](const auto& request) { return request.has_trace_report(); }).trace_report();
  };
  const v1::WorkTraceReport report = trace(1);
  EXPECT_EQ(report.trace_id(), 1u);
  model::PackedBatch batch;
  batch.tokens = {3, 1, 2};
  batch.offsets = {0, 3};
  std::vector<uint64_t> digests;
  model::ScoreOptions options;
  options.stage_digests = &digests;
  ASSERT_TRUE(model::Score(*RandomWeights(1), batch, options).ok());
  EXPECT_EQ(std::vector<uint64_t>(report.stage_digests().begin(), report.stage_digests().end()), digests);
  const v1::WorkTraceReport other = trace(2);
  EXPECT_EQ(other.weight_version().number(), 1u);
  EXPECT_EQ(other.stage_digests_size(), 0);
}

TEST_F(LeaseRunnerTest, ReportsProgressOfALongSample) {
  trainer_.Welcome();
  trainer_.Say(LeaseOf(1, "one", 1, 100));
  std::vector<int32_t> tokens;
  while (!HasFailure()) {
    const v1::WorkRequest request = trainer_.Next([](const auto& r) { return r.has_progress() || r.has_finish(); });
    const uint32_t offset = request.has_progress() ? request.progress().offset() : request.finish().offset();
    const auto& part = request.has_progress() ? request.progress().tokens() : request.finish().tokens();
    EXPECT_EQ(offset, tokens.size());
    tokens.insert(tokens.end(), part.token_ids().begin(), part.token_ids().end());
    if (request.has_finish()) break;
    EXPECT_GE(part.token_ids_size(), 8);
  }
  EXPECT_EQ(tokens, Undisturbed(LeaseOf(1, "one", 1, 100).lease(), 0));
}

TEST_F(LeaseRunnerTest, ContinuesASampleThatAnotherServerBegan) {
  trainer_.Welcome();
  v1::WorkResponse lease = LeaseOf(1, "one", 1, 40);
  const std::vector<int32_t> whole = Undisturbed(lease.lease(), 0);
  v1::TokenSpan& prefix = *lease.mutable_lease()->mutable_samples(0)->mutable_prefix();
  for (int i = 0; i < 15; ++i) {
    prefix.add_token_ids(static_cast<uint32_t>(whole[i]));
    prefix.add_logprobs(-1);
  }
  v1::VersionRun& run = *prefix.add_versions();
  run.mutable_version()->set_epoch(1);
  run.mutable_version()->set_number(1);
  run.set_num_tokens(15);
  trainer_.Say(lease);
  std::vector<int32_t> tokens(whole.begin(), whole.begin() + 15);
  while (!HasFailure()) {
    const v1::WorkRequest request = trainer_.Next([](const auto& r) { return r.has_progress() || r.has_finish(); });
    const auto& part = request.has_progress() ? request.progress().tokens() : request.finish().tokens();
    tokens.insert(tokens.end(), part.token_ids().begin(), part.token_ids().end());
    if (!request.has_finish()) continue;
    EXPECT_EQ(request.finish().num_tokens(), 40u);
    break;
  }
  EXPECT_EQ(tokens, whole);
}

TEST_F(LeaseRunnerTest, TakesTurnsWithTheEnvironmentAndAddsUpTheirRewards) {
  trainer_.Welcome();
  v1::WorkResponse lease = LeaseOf(1, "two", 1, 400);
  for (uint32_t id = 0; id < 12; ++id) lease.mutable_lease()->mutable_sampling()->add_stop_token_ids(id + 10);
  lease.mutable_lease()->mutable_sampling()->add_stop_token_ids(3);  // the observation ends with it; that ends no turn
  trainer_.Say(lease);
  std::vector<uint8_t> trainable;
  std::vector<uint32_t> ids;
  v1::WorkFinish finish;
  while (!HasFailure() && !finish.has_lease_id()) {
    const v1::WorkRequest request = trainer_.Next([](const auto& r) { return r.has_progress() || r.has_finish(); });
    const auto& part = request.has_progress() ? request.progress().tokens() : request.finish().tokens();
    const rl::TokenRun run = TokensFromProto(part).value();
    trainable.insert(trainable.end(), run.trainable.begin(), run.trainable.end());
    ids.insert(ids.end(), run.ids.begin(), run.ids.end());
    if (request.has_finish()) finish = request.finish();
  }
  EXPECT_FLOAT_EQ(finish.reward(), 0.75f);
  ASSERT_EQ(std::count(trainable.begin(), trainable.end(), 0), 2);
  const size_t observation = std::find(trainable.begin(), trainable.end(), 0) - trainable.begin();
  EXPECT_EQ(ids[observation], 2u);
  EXPECT_EQ(ids[observation + 1], 3u);
  ASSERT_EQ(environment_->last_transcript.size(), 4u);
  EXPECT_EQ(environment_->last_transcript[1].token_ids.size(), observation);
}

TEST_F(LeaseRunnerTest, ReportsRoutesWhenAsked) {
  trainer_.Welcome({}, /*with_credit=*/true, /*with_routes=*/true);
  trainer_.Say(LeaseOf(1, "one", 1, 3));
  const v1::WorkFinish finish = trainer_.NextFinish().finish();
  EXPECT_EQ(finish.tokens().route_bytes(), 1u);
  ASSERT_EQ(finish.tokens().routes().size(), 3u * 2 * 2) << "tokens x MoE layers x top-k";
  for (const char expert : finish.tokens().routes()) EXPECT_LT(expert, 4);
}

TEST_F(LeaseRunnerTest, ReportsAFailedVerifierAsAFailure) {
  trainer_.Welcome();
  trainer_.Say(LeaseOf(1, "fails", 1, 3));
  const v1::WorkFinish finish = trainer_.NextFinish().finish();
  EXPECT_EQ(finish.failure().reason(), v1::FAILURE_REASON_VERIFIER_ERROR);
  EXPECT_EQ(finish.failure().detail(), "no idea");
}

TEST_F(LeaseRunnerTest, CutsALongReasonBetweenTwoLetters) {
  trainer_.Welcome();
  trainer_.Say(LeaseOf(1, "rambles", 1, 3));
  const v1::WorkFinish finish = trainer_.NextFinish().finish();
  EXPECT_EQ(finish.failure().detail().size(), 1023u);
  EXPECT_EQ(finish.failure().detail().substr(1021), "\xc3\xa9");
}

TEST_F(LeaseRunnerTest, ReportsAPromptItCannotGenerateFrom) {
  trainer_.Welcome();
  v1::WorkResponse lease = LeaseOf(1, "one", 1, 3);
  lease.mutable_lease()->set_prompt_token_ids(0, 1000);
  trainer_.Say(lease);
  EXPECT_EQ(trainer_.NextFinish().finish().failure().reason(), v1::FAILURE_REASON_BAD_PROMPT);
}

TEST_F(LeaseRunnerTest, SendsNoTokensWithoutCredit) {
  trainer_.Welcome({}, /*with_credit=*/false);
  trainer_.Say(LeaseOf(1, "one", 1, 3));
  EXPECT_FALSE(trainer_.Hears(absl::Milliseconds(300), &v1::WorkRequest::has_finish));
  trainer_.GiveCredit();
  EXPECT_TRUE(trainer_.Hears(kPatience, &v1::WorkRequest::has_finish));
}

TEST_F(LeaseRunnerTest, WaitsForWeightsItMaySampleFrom) {
  trainer_.Welcome();
  v1::WorkResponse lease = LeaseOf(1, "one", 1, 3);
  lease.mutable_lease()->set_min_version_number(2);
  trainer_.Say(lease);
  EXPECT_FALSE(trainer_.Hears(absl::Milliseconds(300), &v1::WorkRequest::has_finish));
  scheduler_->OnWeights({{}, {1, 2}, RandomWeights(2)});
  const rl::TokenRun tokens = TokensFromProto(trainer_.NextFinish().finish().tokens()).value();
  EXPECT_EQ(tokens.versions, std::vector<VersionName>(3, {1, 2}));
}

TEST_F(LeaseRunnerTest, ComesBackAfterABrokenStreamWithAllItHolds) {
  trainer_.Welcome({}, /*with_credit=*/false);  // its result cannot be delivered on this stream
  trainer_.Say(LeaseOf(1, "one", 1, 3));
  absl::SleepFor(absl::Milliseconds(300));
  trainer_.Break();
  v1::LeaseDecision decision;
  decision.mutable_lease_id()->set_epoch(1);
  decision.mutable_lease_id()->set_counter(1);
  decision.set_is_adopted(true);
  decision.set_duration_ms(60'000);
  decision.add_lengths(0);
  decision.add_are_final(false);
  const v1::WorkHello hello = trainer_.Welcome({decision});
  EXPECT_EQ(hello.hello_number(), 2u);
  EXPECT_EQ(hello.leases_held_size() + hello.unacknowledged_size(), 2);
  const v1::WorkFinish finish = trainer_.NextFinish().finish();
  EXPECT_EQ(finish.num_tokens(), 3u);
  EXPECT_EQ(finish.tokens().token_ids_size(), 3);
}

TEST_F(LeaseRunnerTest, HandsItsLeasesBackWhenItDrains) {
  trainer_.Welcome();
  trainer_.Say(LeaseOf(1, "one", 2, 4000));
  trainer_.Next([](const auto& request) { return request.has_progress(); });
  scheduler_->BeginDrain();
  scheduler_->WaitDrained(absl::Now() + kPatience);
  EXPECT_EQ(scheduler_->snapshot().load.running_samples, 0);
  scheduler_->Stop();  // what it said last still arrives
  const auto hand_back = trainer_.Next([](const auto& request) { return request.has_hand_back(); }).hand_back();
  EXPECT_EQ(hand_back.lease_id().counter(), 1u);
}

TEST_F(LeaseRunnerTest, StopsARevokedLease) {
  trainer_.Welcome();
  trainer_.Say(LeaseOf(1, "one", 2, 4000));
  trainer_.Next([](const auto& request) { return request.has_progress(); });
  v1::WorkResponse revocation;
  revocation.mutable_revocation()->mutable_lease_id()->set_epoch(1);
  revocation.mutable_revocation()->mutable_lease_id()->set_counter(1);
  trainer_.Say(revocation);
  for (int i = 0; i < 500 && scheduler_->snapshot().load.pages_used > 0; ++i) absl::SleepFor(absl::Milliseconds(10));
  EXPECT_EQ(scheduler_->snapshot().load.pages_used, 0);
}

TEST_F(LeaseRunnerTest, SamplesNothingFromAVersionThatAForkLeftBehind) {
  trainer_.Welcome();
  scheduler_->OnWeights({{{2, 0}}, {}, nullptr});  // epoch 2 resumed from step 0: version (1, 1) is retired
  trainer_.Say(LeaseOf(1, "one", 1, 3));
  EXPECT_FALSE(trainer_.Hears(absl::Milliseconds(300), &v1::WorkRequest::has_finish));
  v1::WorkResponse lease = LeaseOf(2, "one", 1, 3);
  lease.mutable_lease()->set_min_version_number(0);
  trainer_.Say(lease);
  scheduler_->OnWeights({{{2, 0}}, {1, 0}, RandomWeights(3)});
  const rl::TokenRun tokens = TokensFromProto(trainer_.NextFinish().finish().tokens()).value();
  EXPECT_EQ(tokens.versions, std::vector<VersionName>(3, {1, 0}));
}

}  // namespace
}  // namespace moerl::rollout
