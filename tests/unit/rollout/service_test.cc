#include "services/rollout/service.h"

#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <map>
#include <thread>

#include "libs/rpc/channel.h"
#include "libs/rpc/server.h"
#include "libs/rpc/status.h"
#include "tests/unit/rollout/rollout_fixture.h"

namespace moerl::rollout {
namespace {

struct Sampled {
  std::vector<uint32_t> ids;
  std::vector<float> logprobs;
  std::vector<uint64_t> versions;  // number of each token's
  std::string routes;
  int num_kept = 0;
  v1::GenerateComplete complete;
  int num_completes = 0;
};

struct Answer {
  std::map<uint32_t, Sampled> samples;
  std::vector<float> prompt_logprobs;
  absl::Status status;
};

void Take(const v1::GenerateResponse& response, Answer& answer) {
  Sampled& sample = answer.samples[response.sample_index()];
  if (response.has_complete()) {
    sample.complete = response.complete();
    ++sample.num_completes;
    return;
  }
  const v1::TokenSpan& span = response.chunk().tokens();
  sample.ids.insert(sample.ids.end(), span.token_ids().begin(), span.token_ids().end());
  sample.logprobs.insert(sample.logprobs.end(), span.logprobs().begin(), span.logprobs().end());
  sample.routes += span.routes();
  for (const uint32_t count : span.kept_counts()) sample.num_kept += static_cast<int>(count);
  EXPECT_EQ(span.kept_ids_size() > 0, span.kept_counts_size() > 0);
  for (const auto& run : span.versions()) {
    sample.versions.insert(sample.versions.end(), run.num_tokens(), run.version().number());
  }
  const auto& prompt = response.chunk().prompt_logprobs();
  answer.prompt_logprobs.insert(answer.prompt_logprobs.end(), prompt.begin(), prompt.end());
}

v1::GenerateRequest RequestOf(uint32_t num_samples, uint32_t max_new_tokens, uint64_t seed) {
  v1::GenerateRequest request;
  for (const uint32_t id : {2, 3, 4, 5}) request.add_prompt_token_ids(id);
  request.set_num_samples(num_samples);
  request.set_seed(seed);
  request.mutable_sampling()->set_max_new_tokens(max_new_tokens);
  return request;
}

class ServiceTest : public testing::Test {
 protected:
  void Serve(SchedulerOptions options = SmallScheduler(), bool with_weights = true) {
    scheduler_ = std::make_unique<Scheduler>(std::move(options), nullptr, [](const absl::Status&) {});
    service_ = std::make_unique<Service>(scheduler_.get());
    server_ = rpc::Server::Start({.address = "127.0.0.1:0"}, {service_.get()}).value();
    service_->SetServer(server_.get());
    stub_ = v1::RolloutService::NewStub(rpc::MakeChannel(server_->address(), {.attempts_max = 1}).value());
    if (with_weights) Load(1, 1);
  }

  void Load(uint64_t seed, int64_t number) {
    scheduler_->OnWeights({{}, {1, number}, RandomWeights(seed)});
    while (!scheduler_->snapshot().has_weights || scheduler_->snapshot().version.number != number) {
      absl::SleepFor(absl::Milliseconds(2));
    }
  }

  void TearDown() override {
    if (server_ != nullptr) server_->Shutdown(absl::Now());
    scheduler_.reset();
  }

  Answer Generate(const v1::GenerateRequest& request, absl::Duration timeout = absl::Seconds(60)) {
    const auto context = rpc::CallContext(timeout);
    Answer answer;
    auto reader = stub_->Generate(context.get(), request);
    v1::GenerateResponse response;
    while (reader->Read(&response)) Take(response, answer);
    answer.status = rpc::FromGrpc(reader->Finish());
    return answer;
  }

  v1::GetLoadResponse Load() {
    v1::GetLoadResponse response;
    stub_->GetLoad(rpc::CallContext(absl::Seconds(5)).get(), {}, &response);
    return response;
  }

  void ExpectIdle() {
    for (int i = 0; i < 500 && (Load().num_running() > 0 || Load().kv_pages_used() > 0); ++i) {
      absl::SleepFor(absl::Milliseconds(10));
    }
    EXPECT_EQ(Load().num_running(), 0u);
    EXPECT_EQ(Load().kv_pages_used(), 0u);
  }

  std::unique_ptr<Scheduler> scheduler_;
  std::unique_ptr<Service> service_;
  std::unique_ptr<rpc::Server> server_;
  std::unique_ptr<v1::RolloutService::Stub> stub_;
};

TEST_F(ServiceTest, AnswersUnavailableBeforeTheFirstWeights) {
  Serve(SmallScheduler(), /*with_weights=*/false);
  const Answer answer = Generate(RequestOf(1, 4, 1));
  EXPECT_EQ(answer.status.code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(rpc::RetryDelay(answer.status).has_value());
}

TEST_F(ServiceTest, StreamsEverySampleWithLogProbabilitiesAndVersions) {
  Serve();
  v1::GenerateRequest request = RequestOf(3, 20, 7);
  request.set_with_prompt_logprobs(true);
  request.set_request_id("mine");
  const Answer answer = Generate(request);
  ASSERT_TRUE(answer.status.ok()) << answer.status;
  ASSERT_EQ(answer.samples.size(), 3u);
  EXPECT_EQ(answer.prompt_logprobs.size(), 3u);
  for (const auto& [index, sample] : answer.samples) {
    EXPECT_EQ(sample.num_completes, 1);
    EXPECT_EQ(sample.complete.request_id(), "mine");
    EXPECT_EQ(sample.complete.finish_reason(), v1::FINISH_REASON_LENGTH);
    EXPECT_EQ(sample.complete.num_tokens(), 20u);
    EXPECT_EQ(sample.ids.size(), 20u);
    EXPECT_EQ(sample.logprobs.size(), 20u);
    EXPECT_EQ(sample.versions, std::vector<uint64_t>(20, 1));
    for (const float logprob : sample.logprobs) EXPECT_LE(logprob, 0.0f);
  }
  EXPECT_NE(answer.samples.at(0).ids, answer.samples.at(1).ids);
  ExpectIdle();
}

TEST_F(ServiceTest, GivesTheSameTokensForTheSameSeedWhateverElseRuns) {
  Serve();
  const Answer alone = Generate(RequestOf(2, 30, 11));
  std::vector<std::thread> others;
  for (uint64_t i = 0; i < 4; ++i) others.emplace_back([this, i] { Generate(RequestOf(3, 40, 100 + i)); });
  const Answer crowded = Generate(RequestOf(2, 30, 11));
  for (std::thread& other : others) other.join();
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(alone.samples.at(i).ids, crowded.samples.at(i).ids);
    EXPECT_EQ(alone.samples.at(i).logprobs, crowded.samples.at(i).logprobs);
  }
}

TEST_F(ServiceTest, StopsAtAStopTokenAndNamesIt) {
  Serve();
  v1::GenerateRequest request = RequestOf(1, 2000, 5);
  request.mutable_sampling()->add_stop_token_ids(6);
  const Sampled sample = Generate(request).samples.at(0);
  EXPECT_EQ(sample.complete.finish_reason(), v1::FINISH_REASON_STOP);
  EXPECT_EQ(sample.complete.stop_token_id(), 6u);
  EXPECT_EQ(sample.ids.back(), 6u);
  EXPECT_EQ(std::count(sample.ids.begin(), sample.ids.end(), 6u), 1);
}

TEST_F(ServiceTest, ReportsRoutesAndKeptIdsOnRequest) {
  Serve();
  v1::GenerateRequest request = RequestOf(2, 20, 5);
  request.mutable_sampling()->set_top_k(3);
  const Answer without = Generate(request);
  EXPECT_TRUE(without.samples.at(0).routes.empty());
  EXPECT_EQ(without.samples.at(0).num_kept, 0);
  request.set_with_routes(true);
  request.set_with_kept_ids(true);
  const Answer with = Generate(request);
  for (uint32_t i = 0; i < 2; ++i) {
    EXPECT_EQ(with.samples.at(i).ids, without.samples.at(i).ids);
    EXPECT_EQ(with.samples.at(i).routes.size(), 20u * 2 * 2) << "tokens x MoE layers x top-k";
    EXPECT_EQ(with.samples.at(i).num_kept, 20 * 3);
  }
}

TEST_F(ServiceTest, NamesTheFieldOfABadRequest) {
  Serve();
  const auto field_of = [this](const std::function<void(v1::GenerateRequest&)>& spoil) {
    v1::GenerateRequest request = RequestOf(1, 4, 1);
    spoil(request);
    const absl::Status status = Generate(request).status;
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const auto violations = rpc::FieldViolations(status);
    return violations.empty() ? "nothing" : violations[0].field;
  };
  EXPECT_EQ(field_of([](auto& r) { r.clear_prompt_token_ids(); }), "prompt_token_ids");
  EXPECT_EQ(field_of([](auto& r) { r.set_prompt_token_ids(2, 37); }), "prompt_token_ids[2]");
  EXPECT_EQ(field_of([](auto& r) { r.set_num_samples(0); }), "num_samples");
  EXPECT_EQ(field_of([](auto& r) { r.set_num_samples(5000); }), "num_samples");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->set_temperature(-1); }), "sampling.temperature");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->set_top_p(0); }), "sampling.top_p");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->set_max_new_tokens(0); }), "sampling.max_new_tokens");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->set_max_new_tokens(10'000'000); }), "sampling.max_new_tokens");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->set_max_new_tokens(4093); }), "sampling.max_new_tokens");
  EXPECT_EQ(field_of([](auto& r) { r.mutable_sampling()->add_stop_token_ids(1000); }), "sampling.stop_token_ids[0]");
  EXPECT_EQ(field_of([](auto& r) { r.clear_sampling(); }), "sampling.max_new_tokens");
  EXPECT_EQ(field_of([](auto& r) {
              for (int i = 0; i < 5000; ++i) r.add_prompt_token_ids(1);
            }),
            "prompt_token_ids");
}

TEST_F(ServiceTest, AbortsByRequestId) {
  Serve();
  v1::GenerateRequest request = RequestOf(2, 4000, 1);
  request.set_request_id("long");
  Answer answer;
  std::thread caller([&] { answer = Generate(request); });
  while (Load().num_running() == 0) absl::SleepFor(absl::Milliseconds(2));
  v1::AbortRequest abort;
  abort.set_request_id("long");
  v1::AbortResponse response;
  EXPECT_TRUE(stub_->Abort(rpc::CallContext(absl::Seconds(5)).get(), abort, &response).ok());
  EXPECT_EQ(response.num_samples_aborted(), 2u);
  caller.join();
  EXPECT_TRUE(answer.status.ok());
  EXPECT_EQ(answer.samples.at(0).complete.finish_reason(), v1::FINISH_REASON_ABORT);
  EXPECT_EQ(answer.samples.at(1).complete.finish_reason(), v1::FINISH_REASON_ABORT);
  ExpectIdle();
  EXPECT_EQ(stub_->Abort(rpc::CallContext(absl::Seconds(5)).get(), abort, &response).error_code(),
            grpc::StatusCode::NOT_FOUND);
}

TEST_F(ServiceTest, EndsSamplesShortlyBeforeTheDeadlineOfTheirCall) {
  Serve();
  const Answer answer = Generate(RequestOf(1, 4000, 1), absl::Milliseconds(400));
  EXPECT_TRUE(answer.status.ok()) << answer.status;
  EXPECT_EQ(answer.samples.at(0).complete.finish_reason(), v1::FINISH_REASON_ABORT);
  EXPECT_GT(answer.samples.at(0).ids.size(), 0u);
  ExpectIdle();
}

TEST_F(ServiceTest, FreesEverythingOfAThousandCancelledCalls) {
  Serve();
  for (int i = 0; i < 1000; ++i) {
    grpc::ClientContext context;
    v1::GenerateRequest request = RequestOf(2, 4000, static_cast<uint64_t>(i));
    auto reader = stub_->Generate(&context, request);
    if (i % 3 == 0) {
      v1::GenerateResponse response;
      reader->Read(&response);
    }
    context.TryCancel();
    reader->Finish();
  }
  ExpectIdle();
  EXPECT_TRUE(Generate(RequestOf(1, 4, 1)).status.ok());
}

TEST_F(ServiceTest, RefusesWhatItsQueueCannotHold) {
  SchedulerOptions options = SmallScheduler();
  options.generate_queue_max = 2;
  options.engine.running_samples_max = 1;
  Serve(options);
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<grpc::ClientReader<v1::GenerateResponse>>> readers;
  for (int i = 0; i < 3; ++i) {
    contexts.push_back(rpc::CallContext(absl::Seconds(60)));
    readers.push_back(stub_->Generate(contexts.back().get(), RequestOf(1, 4000, 1)));
    if (i > 0) continue;
    v1::GenerateResponse response;
    ASSERT_TRUE(readers[0]->Read(&response));  // it runs; the next two wait
  }
  while (Load().num_waiting() < 2) absl::SleepFor(absl::Milliseconds(2));
  const absl::Status status = Generate(RequestOf(1, 1, 1)).status;
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_TRUE(rpc::RetryDelay(status).has_value());
  for (auto& context : contexts) context->TryCancel();
  for (auto& reader : readers) reader->Finish();
  ExpectIdle();
}

TEST_F(ServiceTest, FinishesRunningCallsWhileItDrains) {
  Serve();
  Answer answer;
  std::thread caller([&] { answer = Generate(RequestOf(1, 3000, 1)); });
  while (Load().num_running() == 0) absl::SleepFor(absl::Milliseconds(2));
  v1::DrainResponse response;
  EXPECT_TRUE(stub_->Drain(rpc::CallContext(absl::Seconds(5)).get(), {}, &response).ok());
  EXPECT_EQ(response.num_running(), 1u);
  EXPECT_TRUE(Load().is_draining());
  EXPECT_EQ(Generate(RequestOf(1, 4, 1)).status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(server_->Shutdown(absl::Now() + absl::Seconds(60)), 0);
  caller.join();
  EXPECT_TRUE(answer.status.ok());
  EXPECT_EQ(answer.samples.at(0).ids.size(), 3000u);
}

TEST_F(ServiceTest, ChangesWeightsBetweenTwoTokensOfARunningSample) {
  Serve();
  Answer answer;
  std::thread caller([&] { answer = Generate(RequestOf(1, 3000, 1)); });
  while (Load().num_running() == 0) absl::SleepFor(absl::Milliseconds(2));
  Load(2, 2);
  caller.join();
  const std::vector<uint64_t>& versions = answer.samples.at(0).versions;
  ASSERT_EQ(versions.size(), 3000u);
  EXPECT_EQ(versions.front(), 1u);
  EXPECT_EQ(versions.back(), 2u);
  EXPECT_TRUE(std::is_sorted(versions.begin(), versions.end()));
}

TEST_F(ServiceTest, TellsWhatModelItRuns) {
  Serve();
  v1::GetModelInfoResponse info;
  ASSERT_TRUE(stub_->GetModelInfo(rpc::CallContext(absl::Seconds(5)).get(), {}, &info).ok());
  EXPECT_EQ(info.architecture(), "Qwen3MoeForCausalLM");
  EXPECT_EQ(info.vocab_size(), static_cast<uint32_t>(rl::CharTokenizer::kVocabSize));
  EXPECT_EQ(info.context_length(), 4096u);
  EXPECT_EQ(info.num_moe_layers(), 2u);
  EXPECT_EQ(info.num_experts_per_token(), 2u);
  EXPECT_EQ(info.weight_version().number(), 1u);
  EXPECT_FALSE(info.numerics_fingerprint().empty());
}

}  // namespace
}  // namespace moerl::rollout
